"""What in the chart must agree with something else; needs no binary."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from charts.generate import chart_values, readme
from picker.policy import load_policy
from picker.telemetry.catalogue import CATALOGUE, Kind
from tests.kube.chart import CHART

VALUES = (CHART / "values.yaml").read_text()


def test_the_readme_has_the_current_values() -> None:
    page = (CHART / "README.md").read_text()
    assert page == readme(page, VALUES), "run python -m charts.generate"


def test_every_value_says_what_it_does() -> None:
    documented = {value.key for value in chart_values(VALUES)}
    assert {key for key in _leaf_keys(yaml.safe_load(VALUES)) if not _inside(key, documented)} == set()


def test_the_schema_names_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    # Helm itself adds `global`.
    assert set(_schema_keys(schema)) - {"global"} == set(_leaf_keys(yaml.safe_load(VALUES)))


def test_the_example_policy_is_a_policy() -> None:
    policy = yaml.safe_load((CHART / "examples" / "policy.yaml").read_text())["policy"]
    classes = load_policy(yaml.safe_dump(policy)).profile("any-model").classes
    quanta = dict.fromkeys(("interactive", "batch"), 0)
    for entry in classes:
        assert entry.policy_family
        quanta[entry.policy_family] += entry.quantum
    assert quanta["interactive"] == 3 * quanta["batch"]  # as its comment says


EXPORTED = {
    name
    for metric in CATALOGUE
    for name in (
        [f"{metric.name}_{part}" for part in ("bucket", "sum", "count")]
        if metric.kind is Kind.HISTOGRAM
        else [metric.name]
    )
}
LABELS = {metric.name: set(metric.labels) for metric in CATALOGUE}


@pytest.mark.parametrize("file", ["alerts.yaml", "dashboard.json"])
def test_expressions_name_metrics_that_exist(file: str) -> None:
    text = " ".join(_expressions(yaml.safe_load((CHART / "files" / file).read_text())))
    named = set(re.findall(r"\bpicker_\w+", text))
    assert len(named) > 10
    assert named - EXPORTED == set()


def test_the_dashboard_shows_labels_that_exist() -> None:
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
    target_labels = {"pod", "namespace", "job"}  # from the scrape
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            known = set(target_labels)
            for name in re.findall(r"\bpicker_\w+", target["expr"]):
                known |= LABELS[re.sub(r"_(bucket|sum|count)$", "", name) if name not in LABELS else name]
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown <= known, panel["title"]


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    groups = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def _expressions(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "query") and isinstance(value, str):
                yield value
            else:
                yield from _expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from _expressions(value)


def _leaf_keys(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys; a mapping whose keys the user chooses is a leaf."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    for key, value in values.items():
        here = f"{prefix}{key}"
        if isinstance(value, dict) and "properties" in _schema_of(schema, here):
            yield from _leaf_keys(value, f"{here}.")
        else:
            yield here


def _schema_of(schema: dict[str, Any], key: str) -> dict[str, Any]:
    for part in key.split("."):
        schema = schema.get("properties", {}).get(part, {})
    return schema


def _schema_keys(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in schema["properties"].items():
        if "properties" in value:
            yield from _schema_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _inside(key: str, documented: set[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in documented)
