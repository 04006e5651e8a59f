"""What h2 is spared must make no difference."""

from __future__ import annotations

from hpack.hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from picker.rpc.http2 import server_side

names = st.sampled_from([b":path", b"content-type", b"x-a", b"x-b", b"te"])
values = st.sampled_from([b"", b"/method", b"application/grpc", b"a" * 40, b"b" * 40])
blocks = st.lists(st.tuples(names, values), max_size=5)


@given(
    blocks=st.lists(
        st.tuples(blocks, st.booleans(), st.sampled_from([None, None, 0, 64, 128, 4096])), max_size=12
    ),
    repeats=st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_headers_mean_what_they_mean_to_hpack(
    blocks: list[tuple[list[tuple[bytes, bytes]], bool, int | None]], repeats: list[int]
) -> None:
    """Whatever the blocks, however often each comes, and whatever happens to the table in between."""
    encoder, plain, ours = Encoder(), Decoder(), server_side(65_535).decoder
    for (headers, huffman, table), again in zip(blocks, repeats, strict=False):
        if table is not None:
            encoder.header_table_size = table
        for _ in range(1 + again):
            block = encoder.encode(headers, huffman)
            assert list(ours.decode(block, raw=True)) == list(plain.decode(block, raw=True)) == headers


def test_the_same_block_is_the_same_object_only_while_the_table_is_the_same() -> None:
    encoder, decoder = Encoder(), server_side(65_535).decoder
    encoder.encode([(b"x-a", b"1")])
    decoder.decode(encoder.encode([(b"x-b", b"2")]), raw=True)
    block = b"\xbe"  # the newest entry
    first = decoder.decode(block, raw=True)
    assert decoder.decode(block, raw=True) is first
    decoder.decode(b"\x40\x01c\x013", raw=True)
    assert list(decoder.decode(block, raw=True)) == [(b"c", b"3")]
