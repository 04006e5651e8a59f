"""Reading event payloads of every engine version, and of none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from picker.kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from tests.kvcache.wire import as_map, as_row, payload, removed, stored, tokens

EVENT = stored(tokens(3))
GOOD = [EVENT, removed(EVENT.block_hashes[:1]), AllBlocksCleared()]


def fields(event: object) -> dict[str, Any]:
    """An event without regard to the layout that it came in."""
    return {name: getattr(event, name) for name in BlockStored.__struct_fields__ if hasattr(event, name)}


def with_hashes(convert: Any) -> dict[str, Any]:
    event = as_map(EVENT)
    return event | {"block_hashes": [convert(value) for value in event["block_hashes"]]}


def test_a_batch_has_its_time_rank_and_events() -> None:
    batch = decode_batch(payload(*GOOD, timestamp=12.5, rank=3))
    assert (batch.timestamp, batch.rank, batch.unknown, batch.malformed) == (12.5, 3, 0, 0)
    assert [type(event).__name__ for event in batch.events] == [
        "BlockStored",
        "BlockRemoved",
        "AllBlocksCleared",
    ]
    assert fields(batch.events[0]) == fields(EVENT)
    assert fields(batch.events[1]) == fields(GOOD[1])


def test_a_batch_without_a_rank_and_one_with_more_fields() -> None:
    assert decode_batch(msgspec.msgpack.encode([1, [as_map(EVENT)]])).rank is None
    longer = decode_batch(msgspec.msgpack.encode([1, [as_map(EVENT)], 2, "new", {"a": 1}]))
    assert (longer.rank, len(longer.events)) == (2, 1)


@pytest.mark.parametrize("length", [5, 6, 7, 8, 9, 10, 11])
def test_rows_of_every_length_that_engines_have_sent(length: int) -> None:
    (event,) = decode_batch(payload(as_row(EVENT, length))).events
    assert isinstance(event, BlockStored)
    assert fields(event) == fields(EVENT)


def test_a_row_longer_than_we_know() -> None:
    (event,) = decode_batch(payload([*as_row(EVENT), "local", None, 7])).events
    assert fields(event) == fields(EVENT)


def test_a_map_with_fields_that_we_do_not_know_or_without_optional_ones() -> None:
    short = {
        name: as_map(EVENT)[name]
        for name in ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size")
    }
    for event in (as_map(EVENT) | {"locality": "x", "ownership": [1, {"y": 2}]}, short):
        (read,) = decode_batch(payload(event)).events
        assert fields(read) == fields(EVENT)


def test_hashes_in_every_form() -> None:
    """Integers of either sign as they are; digests by their last 8 bytes, as vLLM itself shortens them."""
    assert min(EVENT.block_hashes) < 2**63 < max(EVENT.block_hashes)
    as_signed = decode_batch(payload(with_hashes(lambda value: value - 2**63))).events[0]
    assert isinstance(as_signed, BlockStored)
    assert as_signed.block_hashes == [value - 2**63 for value in EVENT.block_hashes]
    digest = with_hashes(lambda value: b"\x01" * 24 + value.to_bytes(8, "big"))
    for event in (digest, [digest["type"], *as_row(msgspec.convert(as_map(EVENT), BlockStored))[1:]]):
        (read,) = decode_batch(payload(event)).events
        assert fields(read) == fields(EVENT)


def test_parents_and_removals_may_be_digests_too() -> None:
    parent = (7).to_bytes(32, "big")
    batch = decode_batch(
        payload(
            as_map(EVENT) | {"parent_block_hash": parent}, {"type": "BlockRemoved", "block_hashes": [parent]}
        )
    )
    assert [event.parent_block_hash for event in batch.events if isinstance(event, BlockStored)] == [7]
    assert [event.block_hashes for event in batch.events if isinstance(event, BlockRemoved)] == [[7]]


def test_pairs_of_tokens_stand_for_their_first() -> None:
    pairs = [[token, token + 1] for token in EVENT.token_ids]
    (event,) = decode_batch(payload(as_map(EVENT) | {"token_ids": pairs})).events
    assert fields(event) == fields(EVENT)


def test_optional_fields_of_an_odd_type_are_taken_for_absent() -> None:
    odd = as_map(EVENT) | {
        "medium": 3,
        "group_idx": "zero",
        "lora_id": "x",
        "kv_cache_spec_sliding_window": [1],
    }
    (event,) = decode_batch(payload(odd)).events
    assert fields(event) == fields(EVENT)


@pytest.mark.parametrize(
    "bad",
    [
        as_map(EVENT) | {"token_ids": ["<image>"] * len(EVENT.token_ids)},
        as_map(EVENT) | {"block_hashes": [1.5]},
        as_map(EVENT) | {"block_hashes": 5},
        as_map(EVENT) | {"block_hashes": [b""]},
        as_map(EVENT) | {"parent_block_hash": "x"},
        {"type": "BlockStored"},
        {"type": 5},
        {},
        {"block_hashes": [1]},
        ["BlockStored"],
        [],
        [["BlockStored"]],
        None,
        "BlockStored",
        7,
    ],
    ids=repr,
)
def test_one_bad_event_costs_nothing_but_itself(bad: Any) -> None:
    for batch in (
        decode_batch(payload(EVENT, bad, GOOD[1])),
        decode_batch(payload(bad, as_row(EVENT), as_row(GOOD[1]))),
    ):
        assert [fields(event) for event in batch.events] == [fields(EVENT), fields(GOOD[1])]
        assert (batch.malformed, batch.unknown) == (1, 0)


@pytest.mark.parametrize("new", [{"type": "BlockMoved", "to": 5}, ["BlockMoved", [1, 2]]], ids=repr)
def test_an_event_of_a_new_type_is_counted_and_skipped(new: Any) -> None:
    batch = decode_batch(payload(EVENT, new, GOOD[1]))
    assert [fields(event) for event in batch.events] == [fields(EVENT), fields(GOOD[1])]
    assert (batch.malformed, batch.unknown) == (0, 1)


def test_layouts_may_be_mixed_in_a_batch() -> None:
    batch = decode_batch(payload(EVENT, as_row(GOOD[1]), as_row(GOOD[2]), GOOD[2]))
    assert len(batch.events) == 4


@given(st.binary(max_size=200))
@example(b"\x91" * 5000)
@example(payload(EVENT)[:-20])
@example(msgspec.msgpack.encode([1.0, [{b"type": 1}], 0]))
def test_random_bytes_never_raise(data: bytes) -> None:
    decode_batch(data)


MSGPACK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NEARLY = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])},
    optional=dict.fromkeys(BlockStored.__struct_fields__, MSGPACK),
)


@settings(max_examples=40)
@given(st.lists(NEARLY | NEARLY.map(lambda event: list(event.values())) | MSGPACK, max_size=5))
def test_every_event_is_either_read_or_counted(events: list[Any]) -> None:
    batch = decode_batch(payload(*events))
    assert len(batch.events) + batch.unknown + batch.malformed == len(events)
    for event in batch.events:
        if isinstance(event, BlockStored):
            assert all(type(value) is int for value in event.block_hashes + event.token_ids)


def test_what_is_no_batch_is_one_malformed_event() -> None:
    for data in (b"", b"\xc1", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode([1, 2, 3])):
        batch = decode_batch(data)
        assert (batch.events, batch.malformed) == ([], 1)
