"""The depth of JSON, found without parsing it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.requests.json_body import json_depth


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


_TEXT = st.text(alphabet='"\\[]{}a\n\u00e9', max_size=8)
_VALUES = st.recursive(
    st.none() | st.integers() | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
)


@given(value=_VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_it_is_that_of_the_parsed_value(value: Any, ascii_only: bool, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert json_depth(body) == depth(value)


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
        (b"[]" * 100_000, 1),
    ],
)
def test_brackets_in_strings_do_not_count(body: bytes, expected: int) -> None:
    assert json_depth(body) == expected
