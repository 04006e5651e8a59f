"""Reading YAML: scalars, lines, bounds."""

from __future__ import annotations

import math

import pytest

from picker.policy.document import MAX_NODES, read_document
from picker.policy.errors import PolicyError


def refused(text: str) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        read_document(text, "file.yaml")
    return caught.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("no", "no"),
        ("true", True),
        ("'true'", "true"),
        ("12:30", "12:30"),
        ("2024-01-31", "2024-01-31"),
        ("12", 12),
        ("-12", -12),
        ("0x1f", 31),
        ("0o17", 15),
        ("1_000", "1_000"),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("~", None),
        ("", None),
        ("'12'", "12"),
        ("!!str 12", "12"),
        ("<<", "<<"),
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text: str, value: object) -> None:
    data = read_document(f"key: {text}", "file.yaml").data
    assert isinstance(data, dict)
    assert data["key"] == value
    assert type(data["key"]) is type(value)


def test_not_a_number_is_read() -> None:
    data = read_document("[.nan]", "file.yaml").data
    assert isinstance(data, list)
    assert isinstance(data[0], float)
    assert math.isnan(data[0])


def test_an_error_is_placed_at_the_nearest_present_parent() -> None:
    document = read_document("a:\n  - b: 1\n    c: 2\n", "file.yaml")
    assert document.error(("a", 0, "c"), "wrong").line == 3
    assert document.error(("a", 0, "missing"), "wrong").line == 2
    assert document.error(("nowhere",), "wrong").line == 1
    assert str(document.error(("a", 0, "c"), "wrong")) == "file.yaml:3: a[0].c: wrong"


def test_an_alias_stands_for_its_anchor() -> None:
    data = read_document("a: &x {q: 1}\nb: *x\n", "file.yaml").data
    assert data == {"a": {"q": 1}, "b": {"q": 1}}


def test_a_repeated_key_names_both_lines() -> None:
    error = refused("a: 1\nb: 2\na: 3\n")
    assert (error.line, error.key) == (3, "a")
    assert "line 1" in str(error)


def test_aliases_are_counted_in_full() -> None:
    levels = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 9)]
    error = refused("\n".join(levels))
    assert f"more than {MAX_NODES:,} values" in str(error)
    assert error.line is not None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 20, "nested deeper than 16"),
        ("[" * 5000, "nest"),  # the C scanner has a bound of its own
        ("{a: " * 20, "nested deeper than 16"),
        ("- " * 5000, "nested deeper than 16"),
        ("a: *unknown", "*unknown has no &unknown before it"),
        ("&a [*a]", "*a has no &a before it"),
        ("a: 1\n---\nb: 2\n", "only one YAML document"),
        ("a: !!python/object/apply:os.system [ls]", "has no meaning here"),
        ("a: !custom 1", "has no meaning here"),
        ("a: !!int 1", "has no meaning here"),
        ("? [a]\n: b", "a key must be plain text"),
        ("? {a: b}\n: b", "a key must be plain text"),
        ("a: " + "9" * 5000, "more than 64 digits"),
        ("a: b: c", "not valid YAML"),
        ("a: [1, 2", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
        ("a: \ud800", "not valid"),
        ("a: '\t\n  b: \"", "not valid YAML"),
    ],
)
def test_refused(text: str, problem: str) -> None:
    assert problem in str(refused(text))


def test_nothing_is_read_as_nothing() -> None:
    assert read_document("", "file.yaml").data is None
    assert read_document("# only a comment\n", "file.yaml").data is None


def test_a_byte_order_mark_is_skipped() -> None:
    assert read_document("\ufeffa: 1", "file.yaml").data == {"a": 1}
