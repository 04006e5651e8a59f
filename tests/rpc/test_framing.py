"""gRPC messages cut into pieces anywhere come out whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.rpc import ByteBudget
from picker.rpc.framing import SPARE_BYTES, CompressedMessage, MessageReader, MessageTooLarge, NoRoom, framed


@given(
    messages=st.lists(st.binary(max_size=40), max_size=6),
    cuts=st.lists(st.integers(0, 300), max_size=8),
)
def test_however_the_bytes_are_cut_the_messages_are_the_same(messages: list[bytes], cuts: list[int]) -> None:
    data = b"".join(map(framed, messages))
    budget = ByteBudget(0)
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    reader = MessageReader(limit=40, budget=budget)
    got = [message for a, b in pairwise(edges) for message in reader.read(data[a:b])]
    assert got == messages


def test_a_message_over_the_limit_is_refused_by_its_prefix() -> None:
    reader = MessageReader(limit=10, budget=ByteBudget(1 << 20))
    assert reader.read(framed(b"x" * 10)) == [b"x" * 10]
    with pytest.raises(MessageTooLarge, match="11 bytes; at most 10"):
        reader.read(framed(b"x" * 11)[:5])


def test_what_was_compressed_is_refused() -> None:
    with pytest.raises(CompressedMessage):
        MessageReader(limit=10, budget=ByteBudget(1 << 20)).read(b"\1" + framed(b"x")[1:])


def test_long_messages_that_are_not_whole_are_held_within_the_budget() -> None:
    budget = ByteBudget(1000)
    long = framed(b"x" * (SPARE_BYTES + 800))
    first, second, third = (MessageReader(limit=1 << 20, budget=budget) for _ in range(3))
    assert first.read(long[:-1]) == []
    assert budget.stats.held_bytes == 800 + 5 - 1
    with pytest.raises(NoRoom):
        second.read(long[:-1])
    assert second.read(long) == [], "it reads nothing after an error"
    assert third.read(long[:SPARE_BYTES]) == [], "what is short is held all the same"
    assert first.read(long[-1:]) == [long[5:]]
    assert budget.stats.held_bytes == 0
    assert third.read(long[SPARE_BYTES:-1]) == []
    third.close()
    third.close()
    assert budget.stats.held_bytes == 0


@given(
    sizes=st.lists(st.integers(0, 3 * SPARE_BYTES), max_size=4),
    cuts=st.lists(st.integers(0, 10 * SPARE_BYTES), max_size=6),
)
def test_the_budget_is_charged_for_what_is_held_and_no_more(sizes: list[int], cuts: list[int]) -> None:
    data = b"".join(framed(bytes(size)) for size in sizes)
    budget = ByteBudget(1 << 30)
    reader = MessageReader(limit=1 << 20, budget=budget)
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    whole = 0
    for start, end in pairwise(edges):
        whole += sum(len(message) + 5 for message in reader.read(data[start:end]))
        assert budget.stats.held_bytes == max(0, end - whole - SPARE_BYTES)
