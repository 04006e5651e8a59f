"""Many large prompts at once: no turn of the event loop has more than one of them to read or to hash."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

from picker.extproc import preparation
from picker.extproc.handler import Arrival, Refused
from picker.extproc.preparation import Preparation
from picker.selection.prompt_keys import PromptKeys
from picker.tokens import Tokenizers


class Pool:
    def block_sizes(self) -> Iterable[int]:
        return [16]

    def adapters(self) -> Collection[str]:
        return ()


class Turns:
    """Counts what is done in each turn of the running loop."""

    def __init__(self) -> None:
        self.turn = 0
        self.done: Counter[tuple[str, int]] = Counter()
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self.turn += 1
        asyncio.get_running_loop().call_soon(self._next)

    def counted(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any) -> Any:
            self.done[name, self.turn] += 1
            return work(*args)

        return counting

    def most(self, name: str) -> int:
        return max(count for (done, _), count in self.done.items() if done == name)


def arrival(body: bytes) -> Arrival:
    return Arrival("POST", "/v1/completions", "x", [], body, True, {}, 0.0, True)


@pytest.fixture
async def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    turns = Turns()
    monkeypatch.setattr(preparation, "parse_request", turns.counted("read", preparation.parse_request))
    monkeypatch.setattr(PromptKeys, "blocks", turns.counted("hash", PromptKeys.blocks))
    return turns


def prompt(tokens: int) -> bytes:
    """Ids, which need no tokenizer."""
    return json.dumps({"prompt": [7] * tokens}).encode()


async def prepare(*bodies: bytes) -> list[Any]:
    reading = Preparation(Tokenizers({}), Pool())
    return await asyncio.gather(*(reading.prepare(arrival(body)) for body in bodies))


async def test_large_prompts_are_read_and_hashed_one_in_a_turn(turns: Turns) -> None:
    prepared = await prepare(*[prompt(30_000)] * 20)
    assert {each.demand.raw_tokens for each in prepared} == {30_000}
    assert sum(turns.done.values()) == 40
    assert (turns.most("read"), turns.most("hash")) == (1, 1)


async def test_large_bodies_that_are_refused_take_their_turns_too(turns: Turns) -> None:
    refused = await prepare(*[b"[" * 100_000] * 5)
    assert all(isinstance(each, Refused) for each in refused)
    assert turns.most("read") == 1


async def test_small_ones_are_read_at_once_whatever_waits(turns: Turns) -> None:
    await prepare(*[prompt(30_000)] * 3, *[prompt(10)] * 20)
    assert turns.most("read") == 21
