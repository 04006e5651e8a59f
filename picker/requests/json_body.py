"""JSON bodies: checked for depth, decoded into the few fields that matter, every fault a BadRequest."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import NoReturn, TypeVar

import msgspec

from picker.requests.errors import BadRequest

T = TypeVar("T", bound=msgspec.Struct)

# Both kinds of bracket become square ones; everything that is neither a bracket nor a quote goes.
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOISE = bytes(byte for byte in range(256) if byte not in b'"[]{}')
# Read as signed bytes: an opening bracket is one level down, a closing one up.
_TO_STEP = bytes.maketrans(b"[]", b"\x01\xff")


def json_depth(body: bytes) -> int:
    """The deepest nesting of arrays and objects, by a linear scan that skips strings.

    On malformed JSON it is right up to the first fault, which is as far as a parser gets. 2 MB of text take
    about 2 ms, the worst cases tens of ms.
    """
    if b"\\" in body:
        # Escaped backslashes first, from the left, so that every quote left over opens or closes a string.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Taking out an adjacent pair of quotes never changes whether a bracket stands inside a string.
    marks = body.translate(_TO_SQUARE, _NOISE).replace(b'""', b"")
    outside = b"".join(marks.split(b'"')[::2])
    return max(0, max(accumulate(memoryview(outside.translate(_TO_STEP)).cast("b")), default=0))


def decode_json(body: bytes, decoder: msgspec.json.Decoder[T], max_depth: int) -> T:
    """Decode an object body into the decoder's struct; fields it does not name are skipped. Raises BadRequest.

    Duplicate keys: the last one counts, as in the engines. Lone surrogate escapes are kept, as Python's own parser
    keeps them: such a body is valid JSON and the engine has to judge it.
    """
    if not body.isascii():
        try:
            body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _malformed(f"invalid UTF-8 at byte {error.start}") from None
    # Cheap first: brackets inside strings only make this estimate too high.
    if body.count(b"[") + body.count(b"{") > max_depth and json_depth(body) > max_depth:
        raise BadRequest(f"the body is nested deeper than {max_depth} levels", code="json_too_deep")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the body does not fit: {_first_line(error)}", code="invalid_type") from None
    except msgspec.DecodeError as error:
        if b"\\u" not in body:
            raise _malformed(_first_line(error)) from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply", code="json_too_deep") from None
    return _decode_slowly(body, decoder)


def _decode_slowly(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Python's parser, for the lone surrogates that the fast one refuses."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        converted: T = msgspec.convert(value, decoder.type)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the body does not fit: {_first_line(error)}", code="invalid_type") from None
    except (ValueError, RecursionError) as error:
        raise _malformed(_first_line(error)) from None
    return converted


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _malformed(reason: str) -> BadRequest:
    return BadRequest(f"the body is not valid JSON: {reason}", code="invalid_json")


def _first_line(error: BaseException) -> str:
    return ascii(str(error).partition("\n")[0][:200])[1:-1]
