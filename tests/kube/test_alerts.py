"""The alerts in Prometheus's own rule tester, and as the Prometheus Operator gets them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.kube.binaries import Binaries
from tests.kube.chart import CHART, Renderer

pytestmark = pytest.mark.kube

ALERTS = CHART / "files" / "alerts.yaml"
SCENARIOS = Path(__file__).with_name("alerts_test.yaml")


def test_alerts_fire_when_they_should(promtool: Path) -> None:
    done = subprocess.run([promtool, "test", "rules", SCENARIOS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tried() -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    scenarios = yaml.safe_load(SCENARIOS.read_text())["tests"]
    tried = {
        case["alertname"]
        for scenario in scenarios
        for case in scenario["alert_rule_test"]
        if "exp_alerts" in case
    }
    assert tried == {rule["alert"] for rule in rules}


def test_the_operator_gets_the_same_rules(binaries: Binaries) -> None:
    """Their braces belong to Prometheus, and Helm must leave them alone."""
    rule = Renderer(binaries.helm)("alerts.enabled=true").one("PrometheusRule")
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())
