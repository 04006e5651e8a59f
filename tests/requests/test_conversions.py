"""Chat, Responses and Messages bodies as the conversations that the engine renders."""

from __future__ import annotations

import json
from typing import Any

import pytest

from picker.requests import BadRequest, BodyLimits, ChatPrompt, parse_request

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def prompt_of(path: str, body: dict[str, Any]) -> ChatPrompt:
    request = parse_request("POST", path, [], json.dumps(body).encode(), BodyLimits())
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt


def chat(**body: Any) -> ChatPrompt:
    return prompt_of("/v1/chat/completions", {"messages": [USER], **body})


def responses(**body: Any) -> ChatPrompt:
    return prompt_of("/v1/responses", body)


def messages(*given: dict[str, Any], **body: Any) -> ChatPrompt:
    return prompt_of("/v1/messages", {"messages": list(given), **body})


class TestChat:
    def test_defaults(self) -> None:
        assert chat() == ChatPrompt((USER,))

    def test_messages_are_kept_as_sent(self) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        given = [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "text", "text": "x"}]},
        ]
        assert list(chat(messages=given).messages) == given

    def test_reasoning_goes_by_its_old_name_too(self) -> None:
        said = {"role": "assistant", "content": "a"}
        (old,) = chat(messages=[{**said, "reasoning_content": "hm"}]).messages
        assert old["reasoning"] == "hm"
        (both,) = chat(messages=[{**said, "reasoning_content": "hm", "reasoning": "new"}]).messages
        assert both["reasoning"] == "new"

    def test_tools_have_the_fields_the_engine_declares(self) -> None:
        tools = [
            {"type": "function", "function": {"parameters": SCHEMA, "name": "f", "extra": 1}, "x": 2},
            {"type": "function", "function": {"name": "g", "description": "d", "strict": True}},
        ]
        first, second = chat(tools=tools).tools or ()
        assert first == {
            "type": "function",
            "function": {"name": "f", "description": None, "parameters": SCHEMA},
        }
        assert list(first["function"]) == ["name", "description", "parameters"]
        assert second["function"] == {"name": "g", "description": "d", "parameters": None, "strict": True}

    def test_no_tools_and_an_empty_list_of_tools_differ(self) -> None:
        assert chat().tools is None
        assert chat(tools=[]).tools == ()

    def test_options(self) -> None:
        continued = chat(add_generation_prompt=False, continue_final_message=True, add_special_tokens=True)
        assert not continued.add_generation_prompt
        assert continued.continue_final_message
        assert continued.add_special_tokens
        assert chat(chat_template="{{ messages }}").own_template

    def test_what_a_request_adds_for_the_template(self) -> None:
        asked = chat(
            chat_template_kwargs={"a": 1, "documents": [1]}, documents=[{"text": "d"}], reasoning_effort="low"
        )
        assert asked.template_kwargs == {
            "a": 1,
            "documents": [{"text": "d"}],
            "enable_thinking": True,
            "reasoning_effort": "low",
        }
        assert chat(reasoning_effort="none").template_kwargs["enable_thinking"] is False
        kept = chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
        assert kept.template_kwargs["enable_thinking"] is True

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"messages": []}, "messages"),
            ({"messages": "hi"}, "messages"),
            ({"messages": [5]}, "messages[0]"),
            ({"messages": [{"content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": 5}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content"),
            ({"tools": {}}, "tools"),
            ({"tools": [5]}, "tools"),
            ({"tools": [{}]}, "tools[0].function"),
            ({"tools": [{"function": {}}]}, "tools[0].function.name"),
            ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
            ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ],
    )
    def test_refusals_name_the_field(self, body: dict[str, Any], param: str) -> None:
        with pytest.raises(BadRequest) as caught:
            chat(**body)
        assert (caught.value.status, caught.value.param) == (400, param)


class TestResponses:
    def test_text_and_instructions(self) -> None:
        prompt = responses(input="hi", instructions="be brief")
        assert prompt.messages == ({"role": "system", "content": "be brief"}, USER)
        assert prompt.tools is None
        assert prompt.add_generation_prompt

    def test_the_tokenizer_adds_special_tokens_to_what_the_template_wrote(self) -> None:
        """As the engine does on this route alone: a template that writes BOS gives two (seen on vLLM 0.32)."""
        assert responses(input="hi").add_special_tokens
        assert not chat().add_special_tokens

    def test_calls_join_the_assistants_message(self) -> None:
        prompt = responses(
            input=[
                {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "let me see"}],
                },
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "one"},
                {"role": "assistant", "content": "done"},
            ]
        )
        user, assistant, tool, last = prompt.messages
        assert user["content"] == [{"type": "input_text", "text": "q"}]
        assert (assistant["reasoning"], assistant["content"]) == ("hm", "let me see")
        assert [call["function"]["name"] for call in assistant["tool_calls"]] == ["f", "g"]
        assert tool == {"role": "tool", "content": "one", "tool_call_id": "1"}
        assert last == {"role": "assistant", "content": "done"}

    def test_a_call_without_a_message_makes_one(self) -> None:
        prompt = responses(
            input=[USER, {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "caf\u00e9"}]
        )
        (call,) = prompt.messages[1]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"input": "caf\u00e9"}'}

    def test_a_second_text_of_the_assistant_is_a_message_of_its_own(self) -> None:
        said = {"role": "assistant", "content": "one"}
        assert len(responses(input=[USER, said, {**said, "content": "two"}]).messages) == 3

    def test_an_unfinished_message_is_continued(self) -> None:
        said = {"type": "message", "role": "assistant", "status": "incomplete", "content": "so far"}
        prompt = responses(input=[USER, said])
        assert prompt.continue_final_message
        assert not prompt.add_generation_prompt

    def test_function_tools_are_reshaped(self) -> None:
        tool = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}
        (shown,) = responses(input="hi", tools=[tool]).tools or ()
        assert shown["function"] == {"name": "f", "description": None, "parameters": SCHEMA, "strict": True}

    def test_what_only_the_engine_knows(self) -> None:
        for body in ({"previous_response_id": "r"}, {"tools": [{"type": "web_search"}]}):
            raw = json.dumps({"input": "hi", **body}).encode()
            assert parse_request("POST", "/v1/responses", [], raw, BodyLimits()).prompt is None

    def test_the_effort_reaches_the_template(self) -> None:
        assert (
            responses(input="hi", reasoning={"effort": "high"}).template_kwargs["reasoning_effort"] == "high"
        )

    @pytest.mark.parametrize(
        ("given", "param"),
        [
            (5, "input"),
            ([], "input"),
            ([5], "input[0]"),
            ([{"type": "mystery"}], "input[0]"),
            ([{}], "input[0]"),
        ],
    )
    def test_refusals_name_the_item(self, given: Any, param: str) -> None:
        with pytest.raises(BadRequest) as caught:
            responses(input=given)
        assert (caught.value.status, caught.value.param) == (400, param)


class TestMessages:
    def test_the_system_prompt_stands_first_without_the_billing_block(self) -> None:
        blocks = [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
            {"type": "text", "text": "one "},
            {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}},
        ]
        prompt = messages(USER, system=blocks)
        assert prompt.messages == ({"role": "system", "content": "one two"}, USER)
        assert prompt.messages_api

    def test_blocks_become_parts(self) -> None:
        image = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
        prompt = messages({"role": "user", "content": [{"type": "text", "text": "a"}, image]})
        assert [part["type"] for part in prompt.messages[0]["content"]] == ["text", "image_url"]
        alone = messages({"role": "user", "content": [{"type": "text", "text": "a"}]})
        assert alone.messages == ({"role": "user", "content": "a"},)

    def test_tool_use_and_results(self) -> None:
        use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"b": 1, "a": "\u00e9"}}
        result = {
            "type": "tool_result",
            "tool_use_id": "t1",
            "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
        }
        thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
        prompt = messages(
            USER,
            {"role": "assistant", "content": [thought, {"type": "text", "text": "ok"}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
        )
        _, assistant, tool, user = prompt.messages
        assert (assistant["reasoning"], assistant["content"]) == ("hm", "ok")
        assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {"b": 1, "a": "\u00e9"}}
        assert tool == {"role": "tool", "tool_call_id": "t1", "content": "x\ny"}
        assert user == {"role": "user", "content": "go on"}

    def test_a_message_of_results_alone_leaves_none_of_its_own(self) -> None:
        result = {"type": "tool_result", "tool_use_id": "t1", "content": "x"}
        assert [m["role"] for m in messages({"role": "user", "content": [result]}).messages] == ["tool"]

    def test_images_in_results_follow_as_the_users(self) -> None:
        image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        reference = {"type": "tool_reference", "tool_name": "f"}
        result = {"type": "tool_result", "tool_use_id": "t1", "content": [image, reference]}
        roles = [m["role"] for m in messages({"role": "user", "content": [result]}).messages]
        assert roles == ["tool", "user", "tool"]

    def test_system_messages_further_down_stay_there(self) -> None:
        prompt = messages(USER, {"role": "system", "content": "note"}, {"role": "system", "content": ""})
        assert prompt.messages == (USER, {"role": "system", "content": "note"})

    def test_tools(self) -> None:
        tool = {"name": "f", "description": "d", "input_schema": {"properties": {}}}
        (shown,) = messages(USER, tools=[tool]).tools or ()
        assert shown["function"]["parameters"] == {"properties": {}, "type": "object"}

    def test_tools_added_and_removed_on_the_way(self) -> None:
        tools = [{"name": name, "input_schema": SCHEMA} for name in ("f", "g")]
        added = {"type": "tool_definition", "definition": {"name": "h", "input_schema": SCHEMA}}
        changes = [
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
            {"type": "tool_addition", "tool": added},
        ]
        prompt = messages(USER, {"role": "system", "content": changes}, tools=tools)
        assert [tool["function"]["name"] for tool in prompt.tools or ()] == ["g", "h"]

    def test_thinking_and_effort(self) -> None:
        assert messages(USER, thinking={"type": "disabled"}).template_kwargs["reasoning_effort"] == "none"
        assert messages(USER, output_config={"effort": "max"}).template_kwargs["reasoning_effort"] == "max"
        assert messages(USER, thinking={"type": "enabled", "budget_tokens": 2000}).template_kwargs == {}

    @pytest.mark.parametrize("tool", [{"input_schema": {}}, {"name": "f"}, {"name": "f", "input_schema": 5}])
    def test_refusals(self, tool: dict[str, Any]) -> None:
        with pytest.raises(BadRequest) as caught:
            messages(USER, tools=[tool])
        assert (caught.value.status, caught.value.param) == (400, "tools")
