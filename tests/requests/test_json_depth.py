"""The depth and the size of JSON, found without parsing it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.requests.json_body import Shape, json_shape

MANY = 10**9


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


def values(value: Any) -> int:
    """Arrays, objects and strings, keys among them."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(values, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(values, value))
    return int(isinstance(value, str))


_TEXT = st.text(alphabet='"\\[]{}a\n\u00e9', max_size=8)
_VALUES = st.recursive(
    st.none() | st.integers() | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
)


@given(value=_VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_they_are_those_of_the_parsed_value(value: Any, ascii_only: bool, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert json_shape(body, MANY) == Shape(values(value), depth(value))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", 0),
        (b"[[[", 3),
        (b"]]]", 0),
        (b'"[[[', 0),
        (b'["\\\\"]', 1),
        (b'["\\\\\\"[["]', 1),
        (b'["a""[["]', 1),
        (b'[["",""],["["]]', 2),
        (b"[" * 100_000, 100_000),
        (b"[" * 10 + b"]" * 100_000, 10),
        (b"]" * 100_000 + b"[" * 10, 0),
        (b"[]" * 100_000, 1),
    ],
)
def test_brackets_in_strings_do_not_count(body: bytes, expected: int) -> None:
    assert json_shape(body, MANY).depth == expected


@pytest.mark.parametrize(
    ("body", "values"),
    [(b"[" * 11, 11), (b'"",' * 11, 11), (b'"[",' * 11, 11), (b'["a",{}]' * 4, 12), (b"{}" * 10**6, 10**6)],
)
def test_of_too_many_values_no_depth_is_looked_for(body: bytes, values: int) -> None:
    assert json_shape(body, 10) == Shape(values, None)
