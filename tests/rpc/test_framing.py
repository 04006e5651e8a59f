"""gRPC messages cut into pieces anywhere come out whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.rpc.framing import CompressedMessage, MessageReader, MessageTooLarge, framed


@given(
    messages=st.lists(st.binary(max_size=40), max_size=6),
    cuts=st.lists(st.integers(0, 300), max_size=8),
)
def test_however_the_bytes_are_cut_the_messages_are_the_same(messages: list[bytes], cuts: list[int]) -> None:
    data = b"".join(map(framed, messages))
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    reader = MessageReader(limit=40)
    got = [message for a, b in pairwise(edges) for message in reader.read(data[a:b])]
    assert got == messages


def test_a_message_over_the_limit_is_refused_by_its_prefix() -> None:
    reader = MessageReader(limit=10)
    assert reader.read(framed(b"x" * 10)) == [b"x" * 10]
    with pytest.raises(MessageTooLarge, match="11 bytes; at most 10"):
        reader.read(framed(b"x" * 11)[:5])


def test_what_was_compressed_is_refused() -> None:
    with pytest.raises(CompressedMessage):
        MessageReader(limit=10).read(b"\1" + framed(b"x")[1:])
