"""The chart as tests see it: rendered objects, found by kind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "charts" / "picker"
MANIFESTS = CHART.parents[1] / "manifests"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))

Object = dict[str, Any]


class BadValues(Exception):
    """Helm would not render; the text is its error."""


def value_flags(
    *sets: str, examples: Iterable[str] = (), values: Mapping[str, Any] | None = None
) -> list[str]:
    """Flags for helm: `sets` as for --set, names of example files, and values as a mapping."""
    flags = [f"--values={CHART / 'examples' / name}.yaml" for name in examples]
    flags += [part for text in sets for part in ("--set", text)]
    if values is not None:
        flags.append("--values=-")
    return flags


class Renderer:
    """`helm template` with a fixed release `demo` in namespace `serving`."""

    def __init__(self, helm: Path) -> None:
        self._helm = helm

    def text(self, *sets: str, examples: Iterable[str] = (), values: Mapping[str, Any] | None = None) -> str:
        command = [
            str(self._helm),
            "template",
            "demo",
            str(CHART),
            "--namespace=serving",
            "--kube-version=1.36.0",
        ]
        done = subprocess.run(
            [*command, *value_flags(*sets, examples=examples, values=values)],
            input=yaml.safe_dump(dict(values)) if values is not None else None,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise BadValues(done.stderr)
        return done.stdout

    def __call__(
        self, *sets: str, examples: Iterable[str] = (), values: Mapping[str, Any] | None = None
    ) -> Rendered:
        text = self.text(*sets, examples=examples, values=values)
        return Rendered(document for document in yaml.safe_load_all(text) if document)


class Rendered(list[Object]):
    """The objects of one rendering."""

    def kinds(self) -> set[str]:
        return {document["kind"] for document in self}

    def all(self, kind: str) -> list[Object]:
        return [document for document in self if document["kind"] == kind]

    def one(self, kind: str, suffix: str = "") -> Object:
        """The only object of its kind, or the only one whose name ends so."""
        found: Object
        [found] = [document for document in self.all(kind) if document["metadata"]["name"].endswith(suffix)]
        return found

    @property
    def pod(self) -> Object:
        """The pod template of the Deployment."""
        template: Object = self.one("Deployment")["spec"]["template"]
        return template

    def container(self, name: str) -> Object:
        found: Object
        [found] = [entry for entry in self.pod["spec"]["containers"] if entry["name"] == name]
        return found

    @property
    def settings(self) -> str:
        text: str = self.one("ConfigMap", "-settings")["data"]["settings.yaml"]
        return text

    @property
    def envoy(self) -> Object:
        """Envoy's configuration in standalone mode."""
        config: Object = yaml.safe_load(self.one("ConfigMap", "-envoy")["data"]["envoy.yaml"])
        return config
