"""CASES.md names a test for every case, and the tests exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from .files import ROOT

NUMBERS = (
    *(1, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 18, 21, 22, 23, 24, 26, 27, 28, 29, 30),
    *(31, 32, 35, 37, 38, 39, 40, 42, 43, 44, 45, 47, 49, 50, 51, 53),
)


@cache
def rows() -> dict[str, list[str]]:
    """Case -> its tests."""
    text = (ROOT / "tests/CASES.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| (C\d+) \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    return {case: re.findall(r"`([^`]+)`", tests) for case, tests in found}


@cache
def names_in(path: Path) -> frozenset[str]:
    return frozenset(_names(ast.parse(path.read_text(encoding="utf-8")), ""))


def _names(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    """Test functions, and the test cases of state machines, which are assigned."""
    for child in node.body:
        match child:
            case ast.ClassDef():
                yield from _names(child, f"{prefix}{child.name}::")
            case ast.FunctionDef() | ast.AsyncFunctionDef() if child.name.startswith("test"):
                yield prefix + child.name
            case ast.Assign(targets=[ast.Name(id=name)]) if name.startswith("Test"):
                yield prefix + name


def test_every_case_has_a_row() -> None:
    assert list(rows()) == [f"C{number:02}" for number in NUMBERS]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_names_in_a_case_exist(number: int) -> None:
    tests = rows()[f"C{number:02}"]
    assert tests
    for test in tests:
        path, _, name = test.partition("::")
        assert name in names_in(ROOT / "tests" / path), test
