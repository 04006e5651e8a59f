"""Content codings, undone for reading only: the original bytes are what is forwarded."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import zstandard

from picker.requests.errors import BadRequest, OverLimit

_PIECE = 64 * 1024
_MAX_CODINGS = 3

# Decodes one coding piecewise; raises ValueError on damaged input.
_Decoder = Callable[[bytes], Iterator[bytes]]


def decode_content(body: bytes, content_encoding: str, max_expanded_bytes: int) -> bytes:
    """Undo `content_encoding` (a header value, codings in the order they were applied).

    Raises BadRequest: 415 for a coding that is not gzip, deflate, zstd or identity, 413 as soon as the result
    passes `max_expanded_bytes` (memory stays near that bound), 400 for damaged data.
    """
    codings = [name for part in content_encoding.split(",") if (name := part.strip().lower())]
    for coding in reversed(codings):
        if coding == "identity":
            continue
        decoder = _DECODERS.get(coding)
        if decoder is None or len(codings) > _MAX_CODINGS:
            raise BadRequest(
                "unsupported content coding; use gzip, deflate, zstd or identity",
                param="content-encoding",
                code="unsupported_content_encoding",
                status=415,
            )
        body = _collect(decoder(body), coding, max_expanded_bytes)
    return body


def _collect(pieces: Iterator[bytes], coding: str, limit: int) -> bytes:
    decoded = bytearray()
    try:
        for piece in pieces:
            if len(decoded) + len(piece) > limit:
                raise OverLimit(
                    f"the decoded body is larger than {limit} bytes",
                    "max_expanded_bytes",
                    code="body_too_large",
                    status=413,
                )
            decoded += piece
    except (ValueError, zlib.error, zstandard.ZstdError):
        raise BadRequest(f"the body is not valid {coding} data", code="invalid_encoding") from None
    return bytes(decoded)


def _inflate(body: bytes, wbits: int) -> Iterator[bytes]:
    """Decode zlib data of one or, for gzip, several members; in and out in pieces of bounded size."""
    stream = zlib.decompressobj(wbits)
    for start in range(0, len(body), _PIECE):
        data = body[start : start + _PIECE]
        while data:
            if stream.eof:
                if wbits != _GZIP:
                    raise ValueError("data after the end of the stream")
                stream = zlib.decompressobj(wbits)
            yield stream.decompress(data, _PIECE)
            data = stream.unused_data if stream.eof else stream.unconsumed_tail
    yield stream.flush()
    if not stream.eof:
        raise ValueError("the stream ends early")


_GZIP = 16 + zlib.MAX_WBITS


def _gzip(body: bytes) -> Iterator[bytes]:
    return _inflate(body, _GZIP)


def _deflate(body: bytes) -> Iterator[bytes]:
    """`deflate` means the zlib format; some clients send the raw stream, as browsers also accept."""
    has_zlib_header = body[:1] in _ZLIB_FIRST_BYTES and int.from_bytes(body[:2], "big") % 31 == 0
    return _inflate(body, zlib.MAX_WBITS if has_zlib_header else -zlib.MAX_WBITS)


# Compression method 8 with a window of 256 bytes to 32 KiB.
_ZLIB_FIRST_BYTES = frozenset(bytes([window << 4 | 8]) for window in range(8))


def _zstd(body: bytes) -> Iterator[bytes]:
    # A frame cut short ends quietly here; the JSON in it then ends too early, which is refused.
    reader = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW).stream_reader(
        body, read_across_frames=True
    )
    while piece := reader.read(_PIECE):
        yield piece


# 8 MiB, what RFC 9659 allows for the content coding: a frame cannot make us allocate more.
_MAX_ZSTD_WINDOW = 8 << 20

_DECODERS: dict[str, _Decoder] = {"gzip": _gzip, "x-gzip": _gzip, "deflate": _deflate, "zstd": _zstd}
