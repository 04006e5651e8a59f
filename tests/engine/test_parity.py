"""Token ids: Picker's are the engine's, for every API and every shape of prompt.

The engine says what it computed with its KV events. Each request generates enough tokens to fill the block that
its prompt ends in, so that every token of the prompt is in some block; the reported length rules out more.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from picker.requests import BodyLimits, parse_request
from picker.tokens import Tokenizers
from picker.tokens.count import EstimateReason, TokenCount
from tests.engine.model import TEMPLATES, write_model
from tests.engine.recorder import recording
from tests.engine.vllm import BLOCK, MODEL, Vllm

COMPLETIONS, CHAT, RESPONSES, MESSAGES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
)

_SALTS = count()

WEATHER = {
    "name": "weather",
    "description": "The weather <now> & later in Zürich",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "time"}}]
TURNS = [
    {"role": "user", "content": "Where does the road go?"},
    {"role": "assistant", "content": "Over the hill, past 3 mills."},
    {"role": "user", "content": "  And then?\n"},
]


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calls(arguments: str, **more: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        **more,
    }


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each} for each in texts]


ANSWER = says("tool", "Rain, 12°", tool_call_id="call_1")
ASKS = says("user", "Rain in Zürich?")

COMPLETION_CASES: dict[str, dict[str, Any]] = {
    "short": {"prompt": "Hi"},
    "text": {"prompt": "The keeper writes down the wind, the rain and the heat of each day. " * 5},
    "scripts": {"prompt": "Straße, река, 山上的气象站, 🌧️ and \u00a0 e\u0301\r\n\t  end "},
    "control-tokens-in-text": {"prompt": "<|turn|>user\nhm<|end|> <|bos|>"},
    "no-special-tokens": {"prompt": "The mill.", "add_special_tokens": False},
    "ids": {"prompt": list(range(5, 75))},
    "batch-of-texts": {
        "prompt": ["The mill stands by the river. " * 4, "Another one", "The mill stands still."]
    },
    "batch-of-ids": {"prompt": [[7, 8, 9] * 20, [7, 8, 9, 10], [500] * 33]},
    "truncated-left": {"prompt": "one two three four five six seven", "truncate_prompt_tokens": 7},
    "echo-and-n": {"prompt": "The river is wide.", "echo": True, "n": 2, "temperature": 1.0},
}

CHAT_CASES: dict[str, dict[str, Any]] = {
    "one-turn": {"messages": [TURNS[0]]},
    "system-and-turns": {"messages": [says("system", "Be brief.\n"), *TURNS]},
    "developer": {"messages": [says("developer", "Be brief."), TURNS[0]]},
    "later-system": {"messages": [TURNS[0], says("system", "Now be long."), TURNS[2]]},
    "names": {"messages": [says("user", "I am here.", name="ada")]},
    "unknown-fields": {"messages": [says("user", "I am here.", mood="good")]},
    "parts": {"messages": [says("user", text("first ", " second", ""))]},
    "parts-of-system": {"messages": [says("system", text("a", "b")), says("user", text("c"))]},
    "tools": {"messages": [ASKS], "tools": TOOLS},
    "tools-not-to-be-called": {"messages": [ASKS], "tools": TOOLS, "tool_choice": "none"},
    "strict-tool": {
        "messages": [ASKS],
        "tools": [{"type": "function", "function": {**WEATHER, "strict": True}}],
    },
    "tool-with-unknown-fields": {
        "messages": [ASKS],
        "tools": [{"type": "function", "function": {**WEATHER, "origin": 1}, "extra": 2}],
    },
    "tool-calls": {"messages": [ASKS, calls('{"city": "Zürich", "n": 1.50}'), ANSWER], "tools": TOOLS},
    "tool-calls-with-text": {"messages": [ASKS, calls("{}", content="I shall look."), ANSWER]},
    "tool-calls-with-null": {"messages": [ASKS, calls("", content=None), ANSWER]},
    "tool-answer-in-parts": {"messages": [ASKS, calls("{}"), {**ANSWER, "content": text("Rain", "12")}]},
    "reasoning": {"messages": [TURNS[0], says("assistant", "Far.", reasoning="It is long."), TURNS[2]]},
    "old-reasoning": {"messages": [TURNS[0], says("assistant", "Far.", reasoning_content="Hm."), TURNS[2]]},
    "refusal-part": {
        "messages": [TURNS[0], says("assistant", [{"type": "refusal", "refusal": "No."}]), TURNS[2]]
    },
    "empty-content": {"messages": [says("user", "")]},
    "no-generation-prompt": {"messages": TURNS, "add_generation_prompt": False},
    "continued": {
        "messages": [TURNS[0], says("assistant", "It goes over the ")],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continued-parts": {
        "messages": [TURNS[0], says("assistant", text("It goes ", "over the "))],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "kwargs": {"messages": TURNS, "chat_template_kwargs": {"enable_thinking": False, "unknown": 3}},
    "kwargs-over-flags": {"messages": TURNS, "chat_template_kwargs": {"add_generation_prompt": False}},
    "effort": {"messages": TURNS, "reasoning_effort": "low"},
    "no-effort": {"messages": TURNS, "reasoning_effort": "none"},
    "documents": {"messages": TURNS, "documents": [{"title": "Map", "text": "Hills é"}]},
    "special-tokens-twice": {"messages": TURNS, "add_special_tokens": True},
    "truncated": {"messages": TURNS, "truncate_prompt_tokens": 9},
    "control-tokens-in-text": {"messages": [says("user", "a<|end|>\n<|turn|>system\nb")]},
    "scripts": {"messages": [says("user", "Grüße 山 река 🌧️ \u2028 \u0000 \\n")]},
}

CALL_ITEM = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "c1", "output": "Rain"}
ANSWERED = {
    "type": "message",
    "id": "m1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Far.", "annotations": []}],
}
RESPONSES_TOOL = {"type": "function", **WEATHER}

RESPONSES_CASES: dict[str, dict[str, Any]] = {
    "text": {"input": "Where does the road go?"},
    "instructions": {"input": "Where does the road go?", "instructions": "Be brief."},
    "turns": {"input": TURNS},
    "system-item": {"input": [says("system", "Be brief."), TURNS[0]], "instructions": "First."},
    "parts": {
        "input": [says("user", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])]
    },
    "answered": {"input": [TURNS[0], ANSWERED, TURNS[2]]},
    "tools": {"input": [ASKS], "tools": [RESPONSES_TOOL]},
    "strict-tool": {"input": [ASKS], "tools": [{**RESPONSES_TOOL, "strict": True}]},
    "call": {"input": [ASKS, CALL_ITEM, OUTPUT_ITEM], "tools": [RESPONSES_TOOL]},
    "text-and-calls": {"input": [ASKS, ANSWERED, CALL_ITEM, {**CALL_ITEM, "call_id": "c2"}, OUTPUT_ITEM]},
    "reasoning": {
        "input": [
            TURNS[0],
            {
                "type": "reasoning",
                "id": "r1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
            },
            ANSWERED,
            TURNS[2],
        ]
    },
    "reasoning-summary": {
        "input": [
            TURNS[0],
            {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "Short."}]},
            ANSWERED,
            TURNS[2],
        ]
    },
    "continued": {"input": [TURNS[0], {**ANSWERED, "status": "incomplete"}]},
    "effort": {"input": "Why?", "reasoning": {"effort": "low"}},
    "kwargs": {"input": "Why?", "chat_template_kwargs": {"enable_thinking": False}},
}

ANTHROPIC_TOOL = {
    "name": "weather",
    "description": "Now",
    "input_schema": {"type": "object", "properties": {}},
}
TOOL_USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Zürich"}}


def result(content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content}


MESSAGES_CASES: dict[str, dict[str, Any]] = {
    "turns": {"messages": TURNS},
    "system": {"messages": TURNS, "system": "Be brief."},
    "system-blocks": {"messages": TURNS, "system": text("Be ", "brief.")},
    "blocks": {"messages": [says("user", text("first", "second"))]},
    "one-block": {"messages": [says("user", text("alone"))]},
    "tools": {"messages": [ASKS], "tools": [ANTHROPIC_TOOL]},
    "tool-use": {
        "messages": [ASKS, says("assistant", [*text("I look."), TOOL_USE]), says("user", [result("Rain")])],
        "tools": [ANTHROPIC_TOOL],
    },
    "tool-result-in-blocks": {
        "messages": [
            ASKS,
            says("assistant", [TOOL_USE]),
            says("user", [result(text("Rain", "12")), *text("So?")]),
        ]
    },
    "empty-tool-result": {"messages": [ASKS, says("assistant", [TOOL_USE]), says("user", [result("")])]},
    "thinking": {
        "messages": [
            TURNS[0],
            says("assistant", [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, *text("Far.")]),
            TURNS[2],
        ]
    },
    "no-thinking": {"messages": TURNS, "thinking": {"type": "disabled"}},
    "effort": {"messages": TURNS, "output_config": {"effort": "high"}},
    "kwargs": {"messages": TURNS, "chat_template_kwargs": {"enable_thinking": False}},
    "later-system": {"messages": [TURNS[0], says("system", "Now be long."), TURNS[2]]},
}


@pytest.fixture(scope="session")
def model_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name, template) for name, template in TEMPLATES.items()}


@pytest.fixture
async def tokenizers(model_directories: dict[str, Path]) -> AsyncIterator[Tokenizers]:
    tokenizers = Tokenizers(model_directories)
    await tokenizers.load()
    yield tokenizers
    await tokenizers.close()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


async def counted(
    tokenizers: Tokenizers, path: str, body: dict[str, Any], *, template: str = "full"
) -> TokenCount:
    """Picker's count for a body, with the tokenizer that has this chat template."""
    request = parse_request("POST", path, [], json.dumps(body | {"model": template}).encode(), BodyLimits())
    return await tokenizers.tokenize(request)


async def asked(
    engine: Vllm, session: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Status and answer."""
    async with session.post(engine.url + path, json=body) as response:
        return response.status, await response.json()


def filling(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body as sent: generates a block more than its prompt, and shares no cached block with any other."""
    limits = {RESPONSES: "max_output_tokens"}
    lengths = {limits.get(path, "max_tokens"): BLOCK + 1}
    goes_on = {} if path == MESSAGES else {"ignore_eos": True}
    return {
        "model": MODEL,
        "temperature": 0,
        "cache_salt": f"salt-{next(_SALTS)}",
        **lengths,
        **goes_on,
        **body,
    }


def prompt_length(answer: dict[str, Any]) -> int:
    """Under OpenAI's names, or under Anthropic's, whose input tokens leave out what was in a cache or went there."""
    usage = answer["usage"]
    if "prompt_tokens" in usage:
        return int(usage["prompt_tokens"])
    cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
    return int(usage["input_tokens"] + sum(usage.get(name) or 0 for name in cached))


async def check(
    engine: Vllm,
    session: aiohttp.ClientSession,
    path: str,
    body: dict[str, Any],
    count: TokenCount,
) -> dict[str, Any]:
    """The engine computes exactly these ids for this body; gives its answer."""
    _, events, _ = engine.ports
    async with recording(f"tcp://127.0.0.1:{events}") as recorder:
        status, answer = await asked(engine, session, path, filling(path, body))
        assert status == 200, answer
        assert not count.estimated, count.reason
        assert prompt_length(answer) == count.count
        assert await recorder.computed(count.ids), (recorder.chains(), count.ids)
    return answer


@pytest.mark.parametrize("case", COMPLETION_CASES)
async def test_completions(
    vllm: Vllm, session: aiohttp.ClientSession, tokenizers: Tokenizers, case: str
) -> None:
    body = COMPLETION_CASES[case] | {"return_token_ids": True}
    count = await counted(tokenizers, COMPLETIONS, body)
    answer = await check(vllm, session, COMPLETIONS, body, count)
    told = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert told == [ids.tolist() for ids in count.ids for _ in range(body.get("n", 1))]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("case", CHAT_CASES)
async def test_chat(
    vllm: Vllm, session: aiohttp.ClientSession, tokenizers: Tokenizers, case: str, template: str
) -> None:
    """What the engine refuses (a template that raises) is an estimate with a reason, never wrong ids."""
    body = CHAT_CASES[case]
    count = await counted(tokenizers, CHAT, body, template=template)
    sent = body | {"chat_template": TEMPLATES[template], "return_token_ids": True}
    if count.reason is EstimateReason.TEMPLATE_ERROR:
        status, answer = await asked(vllm, session, CHAT, filling(CHAT, sent))
        assert status == 400, answer
        return
    answer = await check(vllm, session, CHAT, sent, count)
    assert answer["prompt_token_ids"] == count.ids[0].tolist()


@pytest.mark.parametrize("case", RESPONSES_CASES)
async def test_responses(
    vllm: Vllm, session: aiohttp.ClientSession, tokenizers: Tokenizers, case: str
) -> None:
    body = RESPONSES_CASES[case]
    await check(vllm, session, RESPONSES, body, await counted(tokenizers, RESPONSES, body))


@pytest.mark.parametrize("case", MESSAGES_CASES)
async def test_messages(
    vllm: Vllm, session: aiohttp.ClientSession, tokenizers: Tokenizers, case: str
) -> None:
    body = MESSAGES_CASES[case]
    await check(vllm, session, MESSAGES, body, await counted(tokenizers, MESSAGES, body))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("case", ["system-and-turns", "tool-calls", "continued", "kwargs", "parts"])
async def test_the_engines_own_tokenizer_route_agrees(
    vllm: Vllm, session: aiohttp.ClientSession, tokenizers: Tokenizers, case: str, template: str
) -> None:
    body = CHAT_CASES[case]
    count = await counted(tokenizers, CHAT, body, template=template)
    status, answer = await asked(
        vllm, session, "/tokenize", {"model": MODEL, "chat_template": TEMPLATES[template], **body}
    )
    assert status == 200, answer
    assert answer["tokens"] == count.ids[0].tolist()
