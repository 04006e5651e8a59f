"""The Responses API: input items and instructions, turned into chat messages as vLLM turns them."""

from __future__ import annotations

import json
from typing import Any

from msgspec import UNSET, Struct

from picker.requests.chat import function_tool, messages_of, template_kwargs, tool_list
from picker.requests.errors import BadRequest, OverLimit, excerpt
from picker.requests.limits import BodyLimits
from picker.requests.prompts import ChatPrompt


class ResponsesBody(Struct):
    """The fields of a Responses body that decide its prompt and its routing."""

    model: Any = None
    input: Any = UNSET
    instructions: Any = None
    previous_response_id: Any = None
    tools: Any = None
    reasoning: Any = None
    stream: Any = False
    max_output_tokens: Any = None
    cache_salt: Any = None
    priority: Any = None
    chat_template_kwargs: Any = None


def responses_prompt(body: ResponsesBody, limits: BodyLimits) -> ChatPrompt | None:
    """The prompt of a Responses body; None where the engine adds what is not in it. Raises BadRequest."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    elif isinstance(body.input, list):
        if not body.input:
            raise BadRequest("input must not be empty", param="input")
        if len(body.input) > limits.max_messages:
            raise OverLimit(
                f"input holds more than {limits.max_messages} items", "max_messages", param="input"
            )
        for index, item in enumerate(body.input):
            _add_item(messages, item, f"input[{index}]")
    else:
        raise BadRequest("input must be a string or a list of items", param="input")
    checked = messages_of(messages, "input", limits)
    tools = tool_list(body.tools or [], limits)
    if body.previous_response_id is not None or any(tool.get("type") != "function" for tool in tools):
        # A stored conversation, or tools that the engine words itself.
        return None
    effort = body.reasoning.get("effort") if isinstance(body.reasoning, dict) else None
    unfinished = _continues(body.input)
    return ChatPrompt(
        messages=checked,
        tools=tuple(function_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)) or None,
        add_generation_prompt=not unfinished,
        continue_final_message=unfinished,
        # Unlike the other chat routes (vLLM 0.32): a template that writes BOS gives two of them.
        add_special_tokens=True,
        template_kwargs=template_kwargs(body.chat_template_kwargs, reasoning_effort=effort),
    )


def _continues(items: Any) -> bool:
    """Whether the last item is an assistant's unfinished message, which the model then goes on with."""
    last = items[-1] if isinstance(items, list) else None
    return (
        isinstance(last, dict)
        and last.get("type", "message") in ("message", "reasoning")
        and last.get("status") in ("in_progress", "incomplete")
    )


def _add_item(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """Append an input item as a message, or join it to the assistant's message that stands last."""
    if not isinstance(item, dict):
        raise BadRequest(f"{where} must be an object", param=where)
    assistant = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    match item.get("type"):
        case "function_call" | "custom_tool_call" as kind:
            call = _tool_call(item, kind)
            if assistant is None:
                messages.append({"role": "assistant", "tool_calls": [call]})
            else:
                assistant.setdefault("tool_calls", []).append(call)
        case "reasoning":
            _join(messages, assistant, "reasoning", _reasoning_text(item))
        case "function_call_output" | "custom_tool_call_output":
            messages.append(
                {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
            )
        case _ if not isinstance(item.get("role"), str):
            raise BadRequest(f"{where}: unsupported item type {excerpt(item.get('type'))}", param=where)
        case _ if item["role"] == "assistant" and (text := _assistant_text(item)) is not None:
            _join(messages, assistant, "content", text)
        case _:
            messages.append(item)


def _join(messages: list[dict[str, Any]], assistant: dict[str, Any] | None, key: str, text: str) -> None:
    if assistant is not None and assistant.get(key) is None:
        assistant[key] = text
    else:
        messages.append({"role": "assistant", key: text})


def _tool_call(item: dict[str, Any], kind: str) -> dict[str, Any]:
    arguments: Any
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    else:
        arguments = item.get("arguments")
    function = {"name": item.get("name"), "arguments": arguments}
    return {"id": item.get("call_id"), "function": function, "type": "function"}


def _reasoning_text(item: dict[str, Any]) -> str:
    for key in ("content", "summary"):
        parts = item.get(key)
        if isinstance(parts, list) and parts and isinstance(parts[0], dict):
            text = parts[0].get("text")
            return text if isinstance(text, str) else ""
    return ""


def _assistant_text(item: dict[str, Any]) -> str | None:
    """The text of an assistant's message: its first part, as the engine reads it."""
    content = item.get("content")
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0].get("text")
    return content if isinstance(content, str) else None
