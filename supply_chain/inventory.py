"""What Picker is made of: the locked packages, their licences and what needs what.

Versions come from requirements.lock; licences and requirements from the metadata of what is installed, which must be
what is locked. A package of the lock that this machine has no use for, and so has not installed, is in `_ELSEWHERE`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]

# Licences of packages for other systems, by hand, from their metadata.
_ELSEWHERE = {"colorama": "BSD-3-Clause", "httpx2-jsfetch": "BSD-3-Clause"}

# What metadata says in words that are no SPDX expression.
_SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
_EXPRESSION = re.compile(r"[A-Za-z0-9.+-]+(?: (?:AND|OR|WITH) [A-Za-z0-9.+-]+)*")


class InventoryError(Exception):
    """What is installed does not fit the lock, or a licence is unknown."""


@dataclass(frozen=True, slots=True)
class Package:
    """`needs`: names of other packages of the lock, extras and markers aside. `ships`: Picker runs with it."""

    name: str
    version: str
    licence: str
    needs: tuple[str, ...]
    ships: bool


def locked(text: str) -> list[tuple[str, str]]:
    """(name, version) of each line of a lock; a name may be there twice, for different Pythons."""
    lines = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^ \\;]+)", text, re.MULTILINE)
    return [(canonicalize_name(name), version) for name, version in lines]


def inventory() -> list[Package]:
    """Every package of the lock. Raises InventoryError."""
    pairs = locked((ROOT / "requirements.lock").read_text(encoding="utf-8"))
    names = {name for name, _ in pairs}
    installed = {canonicalize_name(found.metadata["Name"]): found for found in distributions()}
    _check_versions(pairs, installed)
    needs = {name: _needs(installed[name], names) if name in installed else () for name in names}
    shipped = _closure(_roots(), needs)
    return [
        Package(name, version, _licence(name, installed.get(name)), needs[name], name in shipped)
        for name, version in pairs
    ]


def _check_versions(pairs: list[tuple[str, str]], installed: dict[str, Distribution]) -> None:
    for name in {name for name, _ in pairs} & set(installed):
        if (name, installed[name].version) not in pairs:
            raise InventoryError(f"{name} {installed[name].version} is installed, but not locked: run make")


def _needs(found: Distribution, names: set[str]) -> tuple[str, ...]:
    requirements = [Requirement(text) for text in found.requires or ()]
    needed = {canonicalize_name(each.name) for each in requirements if "extra" not in str(each.marker or "")}
    return tuple(sorted(needed & names))


def _roots() -> Iterator[str]:
    """What the image installs: Picker's own requirements, and those for traces."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for text in (*project["dependencies"], *project["optional-dependencies"]["otel"]):
        yield canonicalize_name(Requirement(text).name)


def _closure(roots: Iterable[str], needs: dict[str, tuple[str, ...]]) -> set[str]:
    found: set[str] = set()
    open_ends = list(roots)
    while open_ends:
        name = open_ends.pop()
        if name not in found:
            found.add(name)
            open_ends += needs.get(name, ())
    return found


def _licence(name: str, found: Distribution | None) -> str:
    if found is None:
        if name not in _ELSEWHERE:
            raise InventoryError(f"{name} is not installed here: look its licence up, for _ELSEWHERE")
        return _ELSEWHERE[name]
    metadata = found.metadata
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = [text for text in metadata.get_all("Classifier") or () if text.startswith("License ::")]
    said = [metadata.get("License") or "", *(text.rpartition(" :: ")[2] for text in classifiers)]
    for text in said:
        if text in _SPDX:
            return _SPDX[text]
        if _EXPRESSION.fullmatch(text):
            return text
    raise InventoryError(f"{name}: no licence in {said!r}")
