"""Another model in a request's body: its bytes and no others.

The one change that Picker ever makes to a body. Nothing is serialised again, so spaces, the order and the spelling
of everything else stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice

_SPACE = re.compile(rb"[ \t\n\r]*+")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[^ \t\n\r,}\]]++")
# What matters for finding the end of an array or an object.
_STRING_OR_BRACKET = re.compile(_STRING.pattern + rb"|[\[\]{}]", re.DOTALL)

_KEY = b'"model"'


# Nobody repeats a key so often in earnest.
_MAX_REPEATED = 16


def model_values(body: bytes) -> tuple[tuple[int, int], ...]:
    """Where the values of the key `model` of a JSON object begin and end; several, where the key is repeated.

    `body` has been parsed before; ValueError if it is no object after all, or the key is repeated too often.
    """
    found = tuple(islice(_model_values(body), _MAX_REPEATED + 1))
    if len(found) > _MAX_REPEATED:
        raise ValueError(f"the key `model` is repeated more than {_MAX_REPEATED} times")
    return found


def with_model(body: bytes, model: str, places: Iterable[tuple[int, int]]) -> bytes:
    """The same body, naming another model in all the places: which of several counts is up to the engine's parser."""
    value = json.dumps(model).encode()
    pieces = []
    copied = 0
    for start, end in places:
        pieces += [body[copied:start], value]
        copied = end
    pieces.append(body[copied:])
    return b"".join(pieces)


def _model_values(body: bytes) -> Iterator[tuple[int, int]]:
    at = _expect(body, _space(body, 0), b"{")
    if body[(at := _space(body, at)) : at + 1] == b"}":
        return
    while True:
        key = _STRING.match(body, _space(body, at))
        if key is None:
            raise ValueError("the body is not a JSON object")
        start = _space(body, _expect(body, _space(body, key.end()), b":"))
        end = _end_of_value(body, start)
        if key[0] == _KEY or (b"\\" in key[0] and json.loads(key[0]) == "model"):
            yield start, end
        at = _space(body, end)
        if body[at : at + 1] == b"}":
            return
        at = _expect(body, at, b",")


def _end_of_value(body: bytes, start: int) -> int:
    first = body[start : start + 1]
    if first in (b"{", b"["):
        depth = 0
        for mark in _STRING_OR_BRACKET.finditer(body, start):
            found = mark[0]
            if found in (b"{", b"["):
                depth += 1
            elif found in (b"}", b"]"):
                depth -= 1
                if not depth:
                    return mark.end()
        raise ValueError("the body ends inside a value")
    value = (_STRING if first == b'"' else _SCALAR).match(body, start)
    if value is None:
        raise ValueError("the body lacks a value")
    return value.end()


def _space(body: bytes, at: int) -> int:
    """The first place from there on that is no space."""
    found = _SPACE.match(body, at)
    assert found is not None
    return found.end()


def _expect(body: bytes, at: int, mark: bytes) -> int:
    if body[at : at + 1] != mark:
        raise ValueError(f"the body lacks a {mark.decode()} at byte {at}")
    return at + 1
