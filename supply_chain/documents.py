"""The inventory as documents: an SBOM in CycloneDX's JSON, and a list of licences to read."""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from supply_chain.inventory import ROOT, Package, inventory

SBOM = ROOT / "supply_chain" / "sbom.cdx.json"
LICENCES = ROOT / "supply_chain" / "LICENCES.md"


def documents() -> dict[Path, str]:
    """Each generated file and its text."""
    packages = inventory()
    return {SBOM: sbom(packages), LICENCES: licences(packages)}


def sbom(packages: Sequence[Package]) -> str:
    """Without a time and a serial number, so that equal locks give equal files. Hashes are in the lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    picker = {
        "type": "application",
        "bom-ref": "picker",
        "name": project["name"],
        "version": project["version"],
        "licenses": [{"expression": project["license"]}],
    }
    by_name: dict[str, list[str]] = defaultdict(list)
    for package in packages:
        by_name[package.name].append(_purl(package))
    return _json(
        {
            "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {"component": picker},
            "components": [_component(package) for package in packages],
            "dependencies": [
                {"ref": _purl(package), "dependsOn": _refs(package.needs, by_name)} for package in packages
            ],
        }
    )


def _component(package: Package) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": _purl(package),
        "name": package.name,
        "version": package.version,
        "purl": _purl(package),
        "scope": "required" if package.ships else "excluded",
        "licenses": [{"expression": package.licence}],
    }


def _purl(package: Package) -> str:
    return f"pkg:pypi/{package.name}@{package.version}"


def _refs(names: Iterable[str], by_name: dict[str, list[str]]) -> list[str]:
    return [ref for name in names for ref in by_name[name]]


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


_LICENCES = """# Licences

Of every package in `requirements.lock`, as its metadata says. Written by `make sbom`, together with `sbom.cdx.json`.

## What Picker runs with

{0}

## What it is built and tested with

{1}
"""


def licences(packages: Sequence[Package]) -> str:
    return _LICENCES.format(
        *(_table(each for each in packages if each.ships is ships) for ships in (True, False))
    )


def _table(packages: Iterable[Package]) -> str:
    rows = [f"| {each.name} | {each.version} | {each.licence} |" for each in packages]
    return "\n".join(["| package | version | licence |", "| --- | --- | --- |", *rows])
