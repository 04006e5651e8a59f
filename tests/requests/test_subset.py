"""The subset hint: absent, present and empty are three different things."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.requests import subset_hint

NAMESPACE = "envoy.lb.subset_hint"
KEY = "x-gateway-destination-endpoint-subset"


@pytest.mark.parametrize("metadata", [{}, {"envoy.lb": {KEY: ["a"]}}, {NAMESPACE: {}}, {NAMESPACE: "text"}])
def test_absent(metadata: dict[str, Any]) -> None:
    assert subset_hint(metadata) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["10.0.0.1:80"], ("10.0.0.1:80",)),
        ([], ()),
        ("", ()),
        (None, ()),
        (7.0, ()),
        ({"a": "b"}, ()),
        ("10.0.0.1:80, 10.0.0.2 ,", ("10.0.0.1:80", "10.0.0.2")),
        (["", "x", 7.0, None, ["y"], " [fd00::5]:8000 "], ("x", "[fd00::5]:8000")),
        (["a", "a"], ("a",)),
        (["a" * 1000], ()),
    ],
)
def test_present(value: Any, expected: tuple[str, ...]) -> None:
    assert subset_hint({NAMESPACE: {KEY: value}}) == expected


_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(_VALUES)
def test_any_value_admits_something_or_nothing(value: Any) -> None:
    assert isinstance(subset_hint({NAMESPACE: {KEY: value}}), tuple)
