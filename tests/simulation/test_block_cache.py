"""The block cache against a recording of a real vLLM, and its laws on random histories."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.simulation.block_cache import BlockCache, BlockTable
from picker.simulation.token_blocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    EventRecorder,
    TokenTable,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-0.32"


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GOLDEN / name).read_text().splitlines()]


def serve(
    cache: BlockCache, recorder: EventRecorder, request: dict[str, Any]
) -> tuple[int, list[tuple[CacheEvent, ...]]]:
    """Run one recorded request alone, step by step. Returns its cached tokens and its event batches."""
    prompt, output = request["prompt_token_ids"], request["output_token_ids"]
    table = TokenTable(prompt + output, cache.block_size, request["body"].get("cache_salt"))
    matched = cache.reusable(table.keys, len(prompt))
    assert cache.start(table, matched, len(prompt))
    batches = [recorder.take()]
    for generated in range(1, len(output)):
        assert cache.grow(table, len(prompt) + generated)
        batches.append(recorder.take())
    cache.release(table)
    return matched * cache.block_size, [batch for batch in batches if batch]


def plain(event: CacheEvent) -> dict[str, Any]:
    match event:
        case BlockStored():
            return {
                "type": "BlockStored",
                "block_hashes": list(event.block_hashes),
                "parent_block_hash": event.parent_block_hash,
                "token_ids": list(event.token_ids),
                "block_size": event.block_size,
                "lora_name": event.lora_name,
                "extra_keys": [None if extra is None else list(extra) for extra in event.extra_keys],
            }
        case BlockRemoved():
            return {"type": "BlockRemoved", "block_hashes": [event.block_hash]}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def same_fields(ours: dict[str, Any], real: dict[str, Any]) -> bool:
    return all(real.get(name) == value for name, value in ours.items())


def test_one_request_at_a_time_gives_the_events_and_cached_tokens_of_a_real_server() -> None:
    records = recorded("recording.jsonl")
    requests = [r for r in records if r["kind"] == "request"]
    events = [r["decoded"][1] for r in records if r["kind"] == "event"]
    recorder = EventRecorder()
    cache = BlockCache(80, 32, recorder)
    batches: list[tuple[CacheEvent, ...]] = []
    for request in requests:
        if request["id"].startswith("busy"):
            break
        cached, new = serve(cache, recorder, request)
        assert cached == request["cached_tokens"], request["id"]
        batches += new
    assert len(batches) == 26
    for ours, real in zip(batches, events, strict=False):
        assert [event["type"] for event in real] == [plain(event)["type"] for event in ours]
        assert all(same_fields(plain(event), other) for event, other in zip(ours, real, strict=True))


def test_a_reset_is_told_with_the_next_batch_as_a_real_server_does() -> None:
    records = recorded("recording.jsonl")
    by_id = {r["id"]: r for r in records if r["kind"] == "request"}
    last = next(r["decoded"][1] for r in records if r["kind"] == "event" and r["seq"] == 343)
    recorder = EventRecorder()
    cache = BlockCache(80, 32, recorder)
    serve(cache, recorder, by_id["before-reset"])
    assert cache.reset()
    cached, batches = serve(cache, recorder, by_id["after-reset"])
    assert cached == 0
    assert all(same_fields(plain(event), real) for event, real in zip(batches[0], last, strict=True))


def test_reset_is_refused_while_a_request_holds_blocks() -> None:
    recorder = EventRecorder()
    cache = BlockCache(8, 4, recorder)
    table = TokenTable(list(range(8)), 4)
    assert cache.start(table, 0, 8)
    assert not cache.reset()
    cache.release(table)
    assert cache.reset()
    assert cache.resident == 0


def test_a_start_that_does_not_fit_changes_nothing() -> None:
    cache = BlockCache(4, 4)
    holder = BlockTable([1, 2])
    assert cache.start(holder, 0, 8)
    assert not cache.start(BlockTable([1, 2, 3, 4]), 2, 16)
    assert cache.free_blocks == 1
    assert cache.usage == pytest.approx(2 / 3)


def test_the_last_block_of_a_fully_cached_prompt_is_computed_and_stored_again() -> None:
    recorder = EventRecorder()
    cache = BlockCache(16, 4, recorder)
    for expected in (0, 1):
        table = TokenTable(list(range(8)), 4)
        matched = cache.reusable(table.keys, 8)
        assert matched == expected
        assert cache.start(table, matched, 8)
        cache.release(table)
    first, second = recorder.take()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert second.block_hashes == first.block_hashes[1:]
    assert second.parent_block_hash == first.block_hashes[0]


class Mirror:
    """A listener that counts copies of each key, as a consumer of the events must."""

    def __init__(self) -> None:
        self.copies: Counter[int] = Counter()

    def stored(self, table: BlockTable, first: int, last: int) -> None:
        self.copies.update(table.keys[first:last])

    def removed(self, key: int) -> None:
        self.copies[key] -= 1
        assert self.copies[key] >= 0

    def cleared(self) -> None:
        self.copies.clear()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["start", "grow", "release", "reset"]), st.integers(0, 5), st.integers(1, 40)
        ),
        max_size=60,
    )
)
def test_events_always_tell_exactly_what_can_be_found(history: list[tuple[str, int, int]]) -> None:
    mirror = Mirror()
    cache = BlockCache(12, 4, mirror)
    running: list[tuple[BlockTable, int]] = []
    for action, family, size in history:
        if action == "start":
            # Families share a prefix of two blocks, then differ.
            keys = [1, 2] + [100 * family + i for i in range(20)]
            table = BlockTable(keys[: size // 4])
            if cache.start(table, cache.reusable(table.keys, size), size):
                running.append((table, size))
        elif action == "grow" and running:
            table, tokens = running[family % len(running)]
            cache.grow(table, tokens + 1)
        elif action == "release" and running:
            table, _ = running.pop(family % len(running))
            cache.release(table)
        elif action == "reset":
            assert cache.reset() == (not running)
        live = {key for key, copies in mirror.copies.items() if copies}
        assert len(live) == cache.resident
        assert all(cache.match([key], 1) == 1 for key in live)
        assert sum(mirror.copies.values()) <= 11
    for table, _ in running:
        cache.release(table)
    assert cache.usage == 0.0
