"""Writes what follows from the chart: the table of values in its README, and ../manifests.

Run `python -m charts.generate`, with helm on PATH or named by --helm. Tests keep both equal to what this would write.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

CHART = Path(__file__).parent / "picker"
MANIFESTS = CHART.parents[1] / "manifests"

BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"

# Directory below manifests/ -> the example values that it is rendered with.
RENDERINGS: Mapping[str, tuple[str, ...]] = {
    "gateway": ("manifests-gateway", "policy"),
    "standalone": ("standalone", "policy"),
}


# The table of values


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the chart. `about` is the comment above it."""

    key: str
    default: str
    about: str


def chart_values(text: str) -> Iterator[Value]:
    """Every value that has a comment above it, in the order of the file."""
    lines = text.splitlines()
    for path, key_line, node in _leaves(yaml.compose(text), ()):
        about = _comment_above(lines, key_line)
        if about:
            yield Value(".".join(path), _one_line(node), about)


def _leaves(
    node: yaml.Node | None, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], int, yaml.Node]]:
    """(path, line, value) of every mapping entry, parents before their children."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, key.value)
            yield here, key.start_mark.line, value
            yield from _leaves(value, here)


def _comment_above(lines: list[str], line: int) -> str:
    first = line
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join(text.strip().removeprefix("#").strip() for text in lines[first:line])


def _one_line(node: yaml.Node) -> str:
    data = yaml.safe_load(yaml.serialize(node))
    return yaml.safe_dump(data, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()


def values_table(text: str) -> str:
    """The table of README.md, between its markers."""
    rows = ["| value | default | |", "| --- | --- | --- |"]
    for value in chart_values(text):
        about = value.about.replace("|", "\\|")
        rows.append(f"| `{value.key}` | `{value.default}` | {about} |")
    return "\n".join(rows)


def readme(current: str, values: str) -> str:
    """README.md with a fresh table."""
    before, rest = current.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{values_table(values)}\n{END}{after}"


# Plain manifests

HEADER = "# Written by `python -m charts.generate` from charts/picker. Change the chart instead.\n"


def manifests(helm: str) -> dict[Path, str]:
    """Every generated file below manifests/, by its path there."""
    files: dict[Path, str] = {}
    for directory, examples in RENDERINGS.items():
        documents = _by_template(_render(helm, examples))
        for name, text in documents.items():
            files[Path(directory, name)] = HEADER + text
        files[Path(directory, "kustomization.yaml")] = HEADER + yaml.safe_dump(
            {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "namespace": "inference",
                "resources": sorted(documents),
            },
            sort_keys=False,
        )
    return files


def _render(helm: str, examples: tuple[str, ...]) -> str:
    files = [f"--values={CHART / 'examples' / example}.yaml" for example in examples]
    command = [
        helm,
        "template",
        "picker",
        str(CHART),
        "--namespace=inference",
        "--kube-version=1.34.0",
        *files,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _by_template(rendered: str) -> dict[str, str]:
    """Documents by the template they come from, without what only Helm needs."""
    files: dict[str, list[str]] = {}
    for document in re.split(r"^---\n", rendered, flags=re.MULTILINE):
        if source := re.match(r"# Source: picker/templates/(\S+)\n", document):
            files.setdefault(source[1], []).append(_without_helm(document[source.end() :]))
    return {name: "---\n".join(documents) for name, documents in sorted(files.items())}


def _without_helm(document: str) -> str:
    for pattern in (
        r"^ +helm\.sh/chart: .*\n",
        r"^ +app\.kubernetes\.io/managed-by: Helm\n",
        # Nothing computes these anew when a file is edited by hand.
        r"^ +annotations:\n( +# Settings are read once.*\n)( +checksum/.*\n)+",
    ):
        document = re.sub(pattern, "", document, flags=re.MULTILINE)
    return document.strip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=textwrap.dedent(__doc__ or ""))
    parser.add_argument("--helm", default="helm", help="path of helm")
    helm = parser.parse_args().helm
    page = CHART / "README.md"
    page.write_text(readme(page.read_text(), (CHART / "values.yaml").read_text()))
    for path, text in manifests(helm).items():
        target = MANIFESTS / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


if __name__ == "__main__":
    main()
