"""Compressed bodies: read under a cap, or refused."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from picker.requests import BadRequest, BodyLimits, TextPrompts, parse_request
from picker.requests.codings import decode_content


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


ENCODERS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("zstd", zstandard.compress),
    ("identity", bytes),
]


@pytest.mark.parametrize(("coding", "encode"), ENCODERS)
@given(data=st.binary(max_size=300), repeat=st.sampled_from([1, 1000]))
def test_decoding_undoes_encoding(
    coding: str, encode: Callable[[bytes], bytes], data: bytes, repeat: int
) -> None:
    assert decode_content(encode(data * repeat), coding, 1 << 20) == data * repeat


def test_codings_are_undone_from_the_last() -> None:
    body = gzip.compress(zlib.compress(b"hello"))
    assert decode_content(body, " deflate , GZIP ", 100) == b"hello"


def test_members_of_gzip_and_frames_of_zstd_follow_each_other() -> None:
    assert decode_content(gzip.compress(b"a") + gzip.compress(b"b"), "gzip", 100) == b"ab"
    assert decode_content(zstandard.compress(b"a") + zstandard.compress(b"b"), "zstd", 100) == b"ab"


@pytest.mark.parametrize("coding", ["br", "compress", "snappy", "gzip, br", "gzip" + ",gzip" * 5, "\n"])
def test_other_codings_are_unsupported(coding: str) -> None:
    if not coding.strip():
        assert decode_content(b"a", coding, 100) == b"a"
        return
    with pytest.raises(BadRequest) as caught:
        decode_content(gzip.compress(b"a"), coding, 100)
    assert caught.value.status == 415


@pytest.mark.parametrize(("coding", "encode"), ENCODERS[:5])
def test_a_bomb_is_refused_without_swelling(coding: str, encode: Callable[[bytes], bytes]) -> None:
    bomb = encode(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest) as caught:
            decode_content(bomb, coding, 8 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.status == 413
    assert peak < 32 << 20


@pytest.mark.parametrize(("coding", "encode"), ENCODERS[:4])
def test_damaged_data_is_malformed(coding: str, encode: Callable[[bytes], bytes]) -> None:
    whole = encode(b"some text that is long enough to be cut" * 10)
    for damaged in (whole[:-3], whole[: len(whole) // 2], b""):
        with pytest.raises(BadRequest) as caught:
            decode_content(damaged, coding, 1000)
        assert caught.value.status == 400


@given(coding=st.sampled_from(["gzip", "deflate", "zstd"]), data=st.binary(max_size=100))
def test_any_bytes_decode_or_are_refused(coding: str, data: bytes) -> None:
    with suppress(BadRequest):
        decode_content(data, coding, 1000)


def test_bodies_of_inference_requests_are_decoded_for_reading() -> None:
    body = zstandard.compress(json.dumps({"prompt": "hello"}).encode())
    headers = [("content-encoding", "zstd")]
    limits = BodyLimits()
    assert parse_request("POST", "/v1/completions", headers, body, limits).prompt == TextPrompts(("hello",))
    with pytest.raises(BadRequest) as caught:
        parse_request("POST", "/v1/completions", headers, body[:-4], limits)
    assert caught.value.status == 400
