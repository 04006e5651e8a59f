"""Request heads and bodies: which are read, what is found in them, and how the others are refused."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.requests import (
    BadRequest,
    BodyLimits,
    ChatPrompt,
    InferenceRequest,
    OverLimit,
    Route,
    TextPrompts,
    TokenPrompts,
    Truncation,
    parse_request,
)

LIMITS = BodyLimits()
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def read(path: str, body: Any, limits: BodyLimits = LIMITS) -> InferenceRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request("POST", path, [], raw, limits)


def refusal(path: str, body: Any, limits: BodyLimits = LIMITS) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(path, body, limits)
    return caught.value


def attempt(path: str, body: Any) -> BadRequest | None:
    """The refusal, if it is one; anything else that goes wrong is an error of the test."""
    try:
        read(path, body)
    except BadRequest as error:
        return error
    return None


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/completions", Route.COMPLETIONS),
        ("/v1/chat/completions", Route.CHAT),
        ("/v1/chat/completions?x=1", Route.CHAT),
        ("/v1/chat/completions/", Route.CHAT),
        ("/tenant/a/v1/chat/completions/?api-version=2#top", Route.CHAT),
        ("/v1/responses", Route.RESPONSES),
        ("/v1/messages", Route.MESSAGES),
        ("/v1/embeddings", Route.EMBEDDINGS),
        ("/v1/chat%2Fcompletions", Route.CHAT),
        ("/v1/%63ompletions", Route.COMPLETIONS),
    ],
)
def test_the_suffix_of_a_path_decides_the_route(path: str, route: Route) -> None:
    bodies = {
        Route.COMPLETIONS: {"prompt": "a"},
        Route.RESPONSES: {"input": "a"},
        Route.EMBEDDINGS: {"input": "a"},
    }
    assert read(path, bodies.get(route, {"messages": [{"role": "user", "content": "a"}]})).route is route


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", CHAT),
        ("OPTIONS", CHAT),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/chat/completions/render"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/V1/CHAT/COMPLETIONS"),
        ("POST", ""),
    ],
)
def test_everything_else_is_passed_on_unread(method: str, path: str) -> None:
    request = parse_request(method, path, [("content-encoding", "br")], b"\xff not json", LIMITS)
    assert (request.route, request.prompt, request.model) == (Route.OTHER, None, None)


@pytest.mark.parametrize("path", ["/invocations", "/generate", "/inference/v1/generate", "/%69nvocations"])
def test_what_generates_in_a_format_of_its_own_is_charged_by_its_size(path: str) -> None:
    request = parse_request("POST", path, [], b"\xff not json", LIMITS)
    assert (request.route, request.prompt, request.size_bytes) == (Route.OPAQUE, None, 10)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", "/v1/embeddings"])
def test_an_inference_request_needs_a_body(path: str) -> None:
    assert (refusal(path, b"").status, refusal(path, b"").code) == (400, "missing_body")


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("1,2,3", ("1,2,3",)), (["1,2,3"], ("1,2,3",)), (["a", "b"], ("a", "b")), ("", ("",))],
)
def test_text_prompts(prompt: Any, texts: tuple[str, ...]) -> None:
    assert read(COMPLETIONS, {"prompt": prompt}).prompt == TextPrompts(texts)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [([1, 2, 3], [[1, 2, 3]]), ([[1, 2], [3]], [[1, 2], [3]]), ([0, 2**32 - 1], [[0, 2**32 - 1]])],
)
def test_prompts_of_token_ids(prompt: Any, ids: list[list[int]]) -> None:
    found = read(COMPLETIONS, {"prompt": prompt}).prompt
    assert found == TokenPrompts(tuple(array("I", row) for row in ids))


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [1, "a"],
        ["a", 1],
        [-1],
        [2**32],
        [1.5],
        [None],
        5,
        None,
        True,
        {},
        [[]],
        [[1], []],
        [[1], "a"],
        [["a"]],
        ["a", ["b"]],
    ],
)
def test_prompts_of_no_legal_shape(prompt: Any) -> None:
    error = refusal(COMPLETIONS, {"prompt": prompt})
    assert (error.status, error.param) == (400, "prompt")


def test_a_missing_prompt() -> None:
    assert refusal(COMPLETIONS, {}).param == "prompt"
    assert refusal("/v1/embeddings", {}).param == "input"
    assert refusal("/v1/responses", {}).param == "input"
    assert refusal(CHAT, {}).param == "messages"
    assert refusal("/v1/messages", {}).param == "messages"


def test_prompts_that_only_the_engine_knows() -> None:
    assert read(COMPLETIONS, {"prompt_embeds": "AAAA"}).prompt is None
    assert read(COMPLETIONS, {"prompt": "def f(", "suffix": "return"}).prompt is None
    assert refusal(COMPLETIONS, {"suffix": "return"}).param == "prompt"


def test_embeddings_take_the_shapes_of_completions_or_messages() -> None:
    assert read("/v1/embeddings", {"input": ["a", "b"]}).prompt == TextPrompts(("a", "b"))
    assert isinstance(read("/v1/embeddings", {"input": [1, 2]}).prompt, TokenPrompts)
    chat = read("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]}).prompt
    assert isinstance(chat, ChatPrompt)
    assert not chat.add_generation_prompt


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'"str"',
        b"5",
        b"null",
        b"{",
        b"{} x",
        b'{"prompt": NaN}',
        b'{"other": Infinity, "prompt": "a"}',
        b'{"prompt": "\xff"}',
        b'{"other": "\xff", "prompt": "a"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"prompt": "\x01"}',
        b'{"prompt": "\\ud83d", "x": NaN}',
        b'{"prompt": "\\u12"}',
        b'{"prompt": 1' + b"1" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"other": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
    ],
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    error = refusal(COMPLETIONS, body)
    assert error.status == 400
    assert error.message.isprintable()
    assert len(error.message) < 400


def test_unusual_but_valid_json_is_read() -> None:
    body = b'{"seed": 12345678901234567890, "prompt": "one", "x": 1e999, "prompt": "\\ud83d\\u00e9", "a": [{}]}\n'
    assert read(COMPLETIONS, body).prompt == TextPrompts(("\ud83d\u00e9",))
    assert read(COMPLETIONS, b'{"prompt": "one", "prompt": "two"}').prompt == TextPrompts(("two",))


def test_fields_that_routing_needs() -> None:
    request = read(
        COMPLETIONS,
        {"model": "m", "prompt": "a", "stream": True, "max_tokens": 7, "cache_salt": "s", "priority": -3},
    )
    assert request == InferenceRequest(
        Route.COMPLETIONS, "m", TextPrompts(("a",)), True, 7, "s", -3, size_bytes=request.size_bytes
    )
    messages = [{"role": "user", "content": "a"}]
    assert read(CHAT, {"messages": messages, "max_completion_tokens": 3, "max_tokens": 9}).max_tokens == 3
    assert read("/v1/responses", {"input": "a", "max_output_tokens": 4}).max_tokens == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 5),
        ("model", "m" * 300),
        ("cache_salt", ""),
        ("cache_salt", 5),
        ("cache_salt", "s" * 2000),
        ("priority", "high"),
        ("priority", 1.5),
        ("max_tokens", "many"),
        ("max_tokens", True),
    ],
)
def test_fields_of_the_wrong_kind(field: str, value: Any) -> None:
    error = refusal(COMPLETIONS, {"prompt": "a", field: value})
    assert (error.status, error.param) == (400, field)


def test_absurd_numbers_are_clamped() -> None:
    request = read(COMPLETIONS, {"prompt": "a", "priority": 10**30, "max_tokens": -5})
    assert request.priority == 2**53
    assert request.max_tokens == 0


def test_sizes_are_limited() -> None:
    small = BodyLimits(
        max_body_bytes=100, max_prompts=2, max_prompt_tokens=3, max_messages=1, max_tools=1, max_json_depth=4
    )
    message = {"role": "user", "content": "a"}
    assert refusal(COMPLETIONS, {"prompt": "a" * 100}, small).status == 413
    for path, body, param in [
        (COMPLETIONS, {"prompt": ["a"] * 3}, "prompt"),
        (COMPLETIONS, {"prompt": [1] * 4}, "prompt"),
        (COMPLETIONS, {"prompt": [[1, 2], [3, 4]]}, "prompt"),
        (CHAT, {"messages": [message] * 2}, "messages"),
        ("/v1/responses", {"input": [message] * 2}, "input"),
        (CHAT, {"messages": [message], "tools": [{}] * 2}, "tools"),
    ]:
        error = refusal(path, body, small)
        assert (error.status, error.param) == (400, param)
    assert refusal(COMPLETIONS, {"prompt": [[[[]]]]}, small).code == "json_too_deep"


TOOL = {"type": "function", "function": {"name": "f"}}
OVER = [
    ("max_body_bytes", 30, COMPLETIONS, {"prompt": "a" * 30}),
    ("max_json_depth", 3, COMPLETIONS, {"prompt": "a", "x": [[[1]]]}),
    ("max_json_values", 5, CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    ("max_json_values", 3, COMPLETIONS, {"prompt": ["", "", ""]}),
    ("max_model_length", 3, COMPLETIONS, {"prompt": "a", "model": "abcd"}),
    ("max_prompts", 2, COMPLETIONS, {"prompt": ["a"] * 3}),
    ("max_prompt_tokens", 3, COMPLETIONS, {"prompt": [[1, 2], [3, 4]]}),
    ("max_messages", 1, CHAT, {"messages": [{"role": "user"}] * 2}),
    ("max_tools", 1, CHAT, {"messages": [{"role": "user"}], "tools": [TOOL] * 2}),
    ("max_cache_salt_length", 3, COMPLETIONS, {"prompt": "a", "cache_salt": "abcd"}),
]


@pytest.mark.parametrize(("limit", "value", "path", "body"), OVER)
def test_a_refusal_over_a_limit_names_it(limit: str, value: int, path: str, body: dict[str, Any]) -> None:
    error = refusal(path, body, BodyLimits.model_validate({limit: value}))
    assert isinstance(error, OverLimit)
    assert error.limit == limit
    read(path, body, BodyLimits.model_validate({limit: value + 100}))


def test_no_limit_of_bodies_is_untried() -> None:
    """That of what is compressed is in test_codings.py."""
    assert {limit for limit, *_ in OVER} | {"max_expanded_bytes"} == set(BodyLimits.model_fields)


def test_truncation_is_noted() -> None:
    last = read(COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 5}).prompt
    first = read(
        COMPLETIONS, {"prompt": [1, 2], "truncate_prompt_tokens": 1, "truncation_side": "right"}
    ).prompt
    assert last == TextPrompts(("a",), truncation=Truncation(5))
    assert first == TokenPrompts((array("I", [1, 2]),), Truncation(1, right=True, keeps_frame=False))
    left = read(COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 5, "truncation_side": "left"}).prompt
    assert left == TextPrompts(("a",), truncation=Truncation(5, keeps_frame=False))
    assert read(COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": -1}).prompt == TextPrompts(("a",))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=6,
)
_FIELDS = st.sampled_from(
    [
        "model",
        "prompt",
        "messages",
        "input",
        "instructions",
        "system",
        "tools",
        "reasoning",
        "thinking",
        "output_config",
        "chat_template_kwargs",
        "documents",
        "stream",
        "max_tokens",
        "priority",
        "cache_salt",
        "truncate_prompt_tokens",
        "role",
        "content",
        "type",
        "text",
        "name",
        "function",
        "tool_calls",
    ]
)
_REQUEST_LIKE = st.recursive(
    _JSON,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_FIELDS, inner, max_size=6),
    max_leaves=12,
)
_PATHS = st.sampled_from([COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", "/v1/embeddings"])


@settings(max_examples=60)
@given(path=_PATHS, body=st.dictionaries(_FIELDS, _REQUEST_LIKE, max_size=8))
def test_any_json_object_is_read_or_refused(path: str, body: dict[str, Any]) -> None:
    refused = attempt(path, body)
    assert refused is None or (refused.status == 400 and refused.message.isprintable())


@given(path=_PATHS, body=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(path: str, body: bytes) -> None:
    refused = attempt(path, body)
    assert refused is None or (refused.status == 400 and refused.message.isprintable())
