"""JSON bodies: checked for depth and size, decoded into the few fields that matter, every fault a BadRequest."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn, TypeVar

import msgspec

from picker.requests.errors import BadRequest, OverLimit
from picker.requests.limits import BodyLimits

T = TypeVar("T", bound=msgspec.Struct)

# Both kinds of bracket become square ones; everything that is neither a bracket nor a quote goes.
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOISE = bytes(byte for byte in range(256) if byte not in b'"[]{}')
# Read as signed bytes: an opening bracket is one level down, a closing one up.
_TO_STEP = bytes.maketrans(b"[]", b"\x01\xff")

# A body with fewer brackets than this leaves nothing that the collector would look at for long.
_FEW_BRACKETS = 1000

# The slow parser takes 50 ns a byte; engines do not serve what needs it.
_SLOW_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """What the brackets and quotes of a JSON text say of it: arrays, objects and strings, keys among them, and the
    deepest nesting. `depth` is None where there were too many values to look for it.
    """

    values: int
    depth: int | None


def json_shape(body: bytes, max_values: int) -> Shape:
    """Look at a JSON text without parsing it, in linear time that is bounded by `max_values` where that matters.

    On malformed JSON the depth is right up to the first fault, which is as far as a parser gets.
    """
    if b"\\" in body:
        # Escaped backslashes first, from the left, so that every quote left over opens or closes a string.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = body.translate(_TO_SQUARE, _NOISE)
    strings = marks.count(b'"') // 2
    if strings > max_values:
        return Shape(strings, None)
    # Taking out an adjacent pair of quotes never changes whether a bracket stands inside a string.
    outside = b"".join(marks.replace(b'""', b"").split(b'"')[::2])
    containers = outside.count(b"[")
    if strings + containers > max_values:
        return Shape(strings + containers, None)
    # What closes more than was opened is a fault.
    steps = outside[: 2 * containers].translate(_TO_STEP)
    depth = max(0, max(accumulate(memoryview(steps).cast("b")), default=0))
    return Shape(strings + containers, depth)


def decode_json(body: bytes, decoder: msgspec.json.Decoder[T], limits: BodyLimits) -> T:
    """Decode an object body into the decoder's struct; fields it does not name are skipped. Raises BadRequest.

    Duplicate keys: the last one counts, as in the engines. Lone surrogate escapes are kept, as Python's own parser
    keeps them: such a body is valid JSON and the engine has to judge it, unless it is very large.
    """
    if not body.isascii():
        try:
            body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _malformed(f"invalid UTF-8 at byte {error.start}") from None
    brackets = body.count(b"[") + body.count(b"{")
    _check_shape(body, brackets, limits)
    with _collector_paused() if brackets > _FEW_BRACKETS else nullcontext():
        return _decode(body, decoder)


def _check_shape(body: bytes, brackets: int, limits: BodyLimits) -> None:
    # Cheap first: what stands inside strings only makes these estimates too high.
    if brackets <= limits.max_json_depth and brackets + body.count(b'"') // 2 <= limits.max_json_values:
        return
    shape = json_shape(body, limits.max_json_values)
    if shape.values > limits.max_json_values:
        raise OverLimit(
            f"the body holds more than {limits.max_json_values} arrays, objects and strings",
            "max_json_values",
            code="json_too_large",
        )
    if shape.depth is not None and shape.depth > limits.max_json_depth:
        raise OverLimit(
            f"the body is nested deeper than {limits.max_json_depth} levels",
            "max_json_depth",
            code="json_too_deep",
        )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """What is decoded has no cycles; looking for them again and again while it grows takes ten times the decoding."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the body does not fit: {_first_line(error)}", code="invalid_type") from None
    except msgspec.DecodeError as error:
        if b"\\u" not in body or len(body) > _SLOW_BYTES:
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
