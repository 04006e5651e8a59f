"""C44: nothing that a client sends holds the event loop for long. Measured in the processor's time of the loop's own
thread, turn by turn, so that a busy machine changes nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import Stack, gateway
from tests.support.upstream import upstream

pytestmark = pytest.mark.e2e

SIZE = 2_000_000
LONGEST = 0.5  # seconds


def prose() -> bytes:
    dice = random.Random(3)
    words = [bytes(dice.choices(b"etaoinshrdlu", k=dice.randint(1, 9))) for _ in range(5000)]
    text = b" ".join(dice.choices(words, k=SIZE // 6))
    return b'{"model":"tiny","max_tokens":1,"prompt":"%s"}' % text


def bodies(size: int) -> Iterator[tuple[str, bytes]]:
    """Of about that many bytes, each as slow to read as can be in its way."""

    def filled(start: bytes, piece: bytes, end: bytes) -> bytes:
        return start + piece * (size // len(piece)) + end

    yield "brackets", b"[" * size
    yield "pairs", filled(b'{"prompt":["",', b"[],", b"0]}")
    yield "towers", filled(b'{"prompt":"x","y":[', b"[" * 100 + b"]" * 100 + b",", b"0]}")
    yield "strings", filled(b'{"prompt":["",', b'"a",', b'""]}')
    yield "quotes", filled(b'{"prompt":"', rb"\"", b'"}')
    yield "lone surrogate", filled(rb'{"prompt":"\ud83d","y":[', b"1,", b"0]}")
    yield "ids", filled(b'{"prompt":[', b"7,", b"8]}")
    yield "fractions", filled(b'{"prompt":[', b"1.5,", b"8]}")
    keys = b",".join(b'"%d":1' % number for number in range(size // 12))
    yield "keys", b'{"messages":[{"role":"user","content":"x"}],"tools":[{%s}]}' % keys


@contextmanager
def longest_turn() -> Iterator[list[float]]:
    """The longest that one callback of the loop took, in seconds of its thread's processor time."""
    longest = [0.0]
    run = asyncio.events.Handle._run

    def timed(handle: asyncio.events.Handle) -> Any:
        before = time.thread_time()
        result = run(handle)
        longest[0] = max(longest[0], time.thread_time() - before)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.events.Handle, "_run", timed)
        yield longest


async def post(stack: Stack, body: bytes) -> int:
    path = "/v1/chat/completions" if b"messages" in body[:20] else "/v1/completions"
    async with stack.session.post(stack.url + path, data=body) as response:
        await response.read()
        return response.status


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Stack]:
    async with upstream() as pod:
        entry = {"name": "pod", "address": pod.address, "metrics": False}
        async with gateway(directory, [entry]) as stack:
            assert await post(stack, b'{"model":"tiny","prompt":"warm"}') == 200
            yield stack


async def test_no_turn_of_the_loop_is_long(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        large = prose()
        with longest_turn() as longest:
            assert set(await asyncio.gather(*(post(stack, large) for _ in range(4)))) == {200}
            assert longest[0] < LONGEST, "large prompts"
            for name, body in bodies(SIZE):
                assert await post(stack, body) in (200, 400), name
                assert longest[0] < LONGEST, name
        await stack.settled()


@pytest.mark.slow
async def test_nor_with_bodies_of_nearly_the_largest_size(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        for name, body in bodies(15_000_000):
            with longest_turn() as longest:
                assert await post(stack, body) in (200, 400), name
            assert longest[0] < LONGEST, name
