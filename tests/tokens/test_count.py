"""Estimates: from bytes of text and the number of media, never zero."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from picker.requests import ChatPrompt, InferenceRequest, Prompt, Route, TextPrompts, TokenPrompts
from picker.tokens import TOKENS_PER_MEDIA, EstimateReason, estimate


def estimated(prompt: Prompt | None, route: Route = Route.CHAT, size_bytes: int = 0) -> int:
    count = estimate(InferenceRequest(route, "m", prompt, size_bytes=size_bytes), EstimateReason.TIMEOUT)
    assert (count.ids, count.estimated, count.reason) == ((), True, EstimateReason.TIMEOUT)
    return count.count


def says(content: Any, **more: Any) -> ChatPrompt:
    return ChatPrompt(({"role": "user", "content": content, **more},))


IMAGE = {"type": "image_url", "image_url": {"url": "data:" + "A" * 100_000}}


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        (TextPrompts(("x" * 400,)), 100),
        (TextPrompts(("x" * 400, "\u00e9" * 200)), 200),
        (TextPrompts(("",)), 1),
        (TextPrompts(("\ud83d" * 4,)), 3),
        (TokenPrompts((array("I", [1, 2]), array("I", [3]))), 3),
        (says("x" * 400), 100),
        (says([{"type": "text", "text": "x" * 400}]), 100),
        (says(None), 1),
        (says([IMAGE, IMAGE]), 2 * TOKENS_PER_MEDIA),
        (says("", tool_calls=[{"function": {"arguments": "x" * 383}}]), 100),
        (ChatPrompt(({"role": "user", "content": "x" * 392},), tools=({"function": ""},)), 100),
        (ChatPrompt(({"role": "user"},), template_kwargs={"documents": ["x" * 391]}), 100),
    ],
)
def test_sizes(prompt: Prompt, tokens: int) -> None:
    assert estimated(prompt) == tokens


def test_where_only_the_engine_knows_the_prompt_the_body_counts() -> None:
    assert estimated(None, Route.COMPLETIONS, size_bytes=4000) == 1000
    assert estimated(None, Route.OTHER, size_bytes=4000) == 1
