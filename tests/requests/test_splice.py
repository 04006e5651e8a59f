"""Another model in a body: exactly its value changes, wherever and however it is written."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from picker.requests import splice


def with_model(body: bytes, model: str) -> bytes:
    return splice.with_model(body, model, splice.model_values(body))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"model":"a"}', b'{"model":"NEW"}'),
        (b' \r\n\t{ "model" : "a" , "n": 1 } \n', b' \r\n\t{ "model" : "NEW" , "n": 1 } \n'),
        (b'{"x":{"model":"a"},"model":"b"}', b'{"x":{"model":"a"},"model":"NEW"}'),
        (b'{"x":[{"model":"a"}],"model":"b"}', b'{"x":[{"model":"a"}],"model":"NEW"}'),
        (b'{"model":"b","x":{"model":{"model":"a"}}}', b'{"model":"NEW","x":{"model":{"model":"a"}}}'),
        (b'{"x":"\\"model\\":\\"a\\"","model":"b"}', b'{"x":"\\"model\\":\\"a\\"","model":"NEW"}'),
        (b'{"x":"}]\\\\","model":"b"}', b'{"x":"}]\\\\","model":"NEW"}'),
        (b'{"mod\\u0065l":"b"}', b'{"mod\\u0065l":"NEW"}'),
        (b'{"\\u006d\\u006F\\u0064\\u0065\\u006c":"b"}', b'{"\\u006d\\u006F\\u0064\\u0065\\u006c":"NEW"}'),
        (b'{"mod\\\\u0065l":"b"}', b'{"mod\\\\u0065l":"b"}'),
        (b'{"model":"a\\"b\\\\"}', b'{"model":"NEW"}'),
        (b'{"model":"\\u00e9\xc3\xa9"}', b'{"model":"NEW"}'),
        (b'{"model":"a","model":"b"}', b'{"model":"NEW","model":"NEW"}'),
        (
            b'{"model":null,"model":[1,{"model":2}],"model":-1.5e3}',
            b'{"model":"NEW","model":"NEW","model":"NEW"}',
        ),
        (b'{"Model":"a","models":"b","mode":"c"}', b'{"Model":"a","models":"b","mode":"c"}'),
        (b'{"a":true,"model":"b","c":[]}', b'{"a":true,"model":"NEW","c":[]}'),
        (b'{"a":1.0,"model":"b"}', b'{"a":1.0,"model":"NEW"}'),
        (b"{}", b"{}"),
        (b" { } ", b" { } "),
    ],
)
def test_exactly_the_value_changes(before: bytes, after: bytes) -> None:
    assert with_model(before, "NEW") == after


keys = st.sampled_from(["model", "models", "mode", "", "x", '"model"', "mod\\el"]) | st.text(max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | keys,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
pairs = st.lists(st.tuples(keys, values), max_size=6)


def as_pairs(body: bytes) -> list[tuple[str, Any]]:
    """The outermost object with its repeated keys; what is inside as it would be read."""
    depth: list[list[tuple[str, Any]]] = []

    def hook(found: list[tuple[str, Any]]) -> dict[str, Any]:
        depth.append(found)
        return dict(found)

    json.loads(body, object_pairs_hook=hook)
    return depth[-1]


@given(
    pairs,
    st.text(min_size=1, max_size=20),
    st.booleans(),
    st.sampled_from([None, 0, 3, "\t", "\r\n"]),
    st.data(),
)
@example([("model", "a"), ("model", {"model": 1})], 'é\ud800"\\', False, None, None)
def test_it_reads_as_before_but_for_the_model(
    content: list[tuple[str, Any]], model: str, ascii_only: bool, indent: int | str | None, data: Any
) -> None:
    def written(value: Any) -> str:
        text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
        return text if ascii_only or not any(0xD800 <= ord(c) < 0xE000 for c in text) else json.dumps(value)

    space = "" if data is None else data.draw(st.sampled_from(["", " ", "\n\t"]))
    fields = (f"{space}{written(key)}{space}:{space}{written(value)}{space}" for key, value in content)
    body = f"{space}{{{','.join(fields)}{space}}}{space}".encode()
    spliced = with_model(body, model)
    assert as_pairs(spliced) == [(key, model if key == "model" else value) for key, value in as_pairs(body)]
    if all(key != "model" for key, _ in content):
        assert spliced == body
    once = [key for key, _ in content].count("model") == 1
    if once:
        # Between what is the same before and after, there is the value and nothing else.
        new = json.dumps(model).encode()
        assert any(
            spliced == body[:at] + new + body[len(body) - (len(spliced) - at - len(new)) :]
            for at in range(len(body))
            if spliced[at : at + len(new)] == new
        )


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\\\ abmodel01', max_size=40).map(str.encode))
def test_every_object_can_be_read_and_what_is_none_does_no_harm(body: bytes) -> None:
    try:
        parsed = json.loads(body.decode())
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        with_model(body, "NEW")
    else:
        with contextlib.suppress(ValueError):
            with_model(body, "NEW")


def test_large_bodies_take_no_stack_and_little_time() -> None:
    deep = b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b',"model":"a"}'
    assert with_model(deep, "NEW").endswith(b',"model":"NEW"}')
    long = b'{"prompt":"' + b'\\\\\\"x' * 500_000 + b'","model":"a"}'
    assert with_model(long, "NEW") == long[: -len(b'"a"}')] + b'"NEW"}'
