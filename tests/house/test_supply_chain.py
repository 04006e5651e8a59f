"""The SBOM and the licences are those of the lock, and none of them asks for what we do not give."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from supply_chain.documents import LICENCES, SBOM, documents
from supply_chain.inventory import locked

from .files import ROOT

# Each lets Picker be used, changed and passed on under its own licence.
ALLOWED = {
    *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "CNRI-Python", "ISC"),
    *("MIT", "MIT-0", "MPL-2.0", "PSF-2.0", "Zlib"),
}


def components() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(SBOM.read_text(encoding="utf-8"))["components"]
    return found


def test_the_sbom_covers_the_lock() -> None:
    pairs = locked((ROOT / "requirements.lock").read_text(encoding="utf-8"))
    assert [(each["name"], each["version"]) for each in components()] == pairs, "run make sbom"
    assert len(pairs) > 80


def test_every_licence_is_known_and_allowed() -> None:
    for component in components():
        (licence,) = component["licenses"]
        names = set(re.split(r" (?:AND|OR|WITH) ", licence["expression"]))
        assert names <= ALLOWED, component["name"]


def test_the_licences_are_listed() -> None:
    text = LICENCES.read_text(encoding="utf-8")
    for component in components():
        assert f"| {component['name']} | {component['version']} |" in text


def test_what_picker_runs_with_is_told_from_its_tools() -> None:
    shipped = {each["name"] for each in components() if each["scope"] == "required"}
    assert {"grpcio", "msgspec", "jinja2", "yarl", "opentelemetry-sdk"} <= shipped
    assert not {"pytest", "ruff", "mypy", "hypothesis"} & shipped


def test_dependencies_refer_to_components() -> None:
    bom = json.loads(SBOM.read_text(encoding="utf-8"))
    refs = {each["bom-ref"] for each in bom["components"]}
    assert {each["ref"] for each in bom["dependencies"]} == refs
    assert all(ref in refs for each in bom["dependencies"] for ref in each["dependsOn"])


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="metadata of the packages for Python 3.11")
def test_they_are_what_would_be_written_now() -> None:
    for path, text in documents().items():
        assert path.read_text(encoding="utf-8") == text, "run make sbom"
