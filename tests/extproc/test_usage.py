"""Usage as engines report it, in every API's shape, split anywhere."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.extproc.usage import Usage, UsageReader


def read(*pieces: bytes) -> Usage | None:
    reader = UsageReader()
    for piece in pieces:
        reader.feed(piece)
    return reader.usage()


CHAT = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}},
}
RESPONSES = {"usage": {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 8}}}
ANTHROPIC = (
    b'event: message_start\ndata: {"message": {"usage": {"input_tokens": 9, "cache_read_input_tokens": 8}}}\n\n'
    + b"data: {}\n\n" * 5000
    + b'data: {"type": "message_delta", "usage": {"output_tokens": 4}}\n\n'
)


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(CHAT).encode(),
        b'data: {"choices": [{"text": "x"}]}\n\n' * 3000
        + b"data: "
        + json.dumps(CHAT).encode()
        + b"\n\ndata: [DONE]\n\n",
        json.dumps(RESPONSES).encode(),
        ANTHROPIC,
    ],
    ids=["json", "stream", "responses", "anthropic"],
)
def test_every_shape_gives_the_same_figures(body: bytes) -> None:
    assert read(body) == Usage(prompt_tokens=9, cached_tokens=8, output_tokens=4)


@given(st.lists(st.integers(0, 400), max_size=6))
def test_where_the_pieces_are_cut_does_not_matter(cuts: list[int]) -> None:
    body = b"data: {}\n\n" * 20 + json.dumps(CHAT).encode()
    edges = [0, *sorted(cuts), len(body)]
    assert read(*(body[start:end] for start, end in itertools.pairwise(edges))) == read(body)


def test_what_was_not_reported_is_none() -> None:
    assert read(b'{"usage": {"prompt_tokens": 3, "prompt_tokens_details": null}}') == Usage(prompt_tokens=3)
    assert read(b'{"usage": null}') is None
    assert read() is None


@given(st.binary(max_size=300))
def test_rubbish_is_no_usage_and_no_error(rubbish: bytes) -> None:
    read(b'{"usage": {' + rubbish)
    assert (
        read(b'{"usage": {"prompt_tokens": -1, "completion_tokens": true, "prompt_tokens_details": 7}}')
        is None
    )


def test_a_long_response_is_not_kept() -> None:
    reader = UsageReader()
    for _ in range(1000):
        reader.feed(b"x" * 10_000)
    assert len(reader._head) + len(reader._tail) <= 50_000
