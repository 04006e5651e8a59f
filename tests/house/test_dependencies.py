"""What Picker imports, it asks for: where it is deployed, nothing is there that only the tests bring."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest

from .files import ROOT
from .test_imports import imports, modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


ASKED = {normal(re.split(r"[\[<>=!~; ]", each, maxsplit=1)[0]) for each in PROJECT["dependencies"]}


def foreign() -> dict[str, str]:
    """Top-level modules from outside the standard library, each with a file that imports it."""
    found = {
        name.split(".")[0]: str(path.relative_to(ROOT))
        for _, path in modules()
        for name in imports(path, for_types=False)
    }
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names | {"picker"}}


@pytest.mark.parametrize(("module", "path"), sorted(foreign().items()))
def test_what_is_imported_is_asked_for(module: str, path: str) -> None:
    brought_by = {normal(each) for each in packages_distributions().get(module, [module])}
    assert brought_by & ASKED, f"{path} imports {module}, which pyproject.toml does not ask for"
