"""LIMITS.md: every bound is a setting with that default, and is counted in a metric that exists."""

from __future__ import annotations

import re
from functools import cache

import pytest

from picker.requests import BodyLimits
from picker.settings import Setting, all_settings
from picker.telemetry.catalogue import CATALOGUE

from .files import ROOT

# Bounds of our own politeness, not of what others can make us do.
NO_LIMITS = {"pool.kubernetes.watch.max_backoff", "pool.kubernetes.pods.max_num_batched_tokens"}


@cache
def rows() -> dict[str, tuple[str, str]]:
    """Setting -> (default, metric)."""
    text = (ROOT / "picker/settings/LIMITS.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `([a-z_.]+)` \| `([^`]*)` \|[^|]*\| `([^`]+)` \|$", text, re.MULTILINE)
    return {setting: (default, metric) for setting, default, metric in found}


def test_no_limit_is_left_out() -> None:
    bounds = {
        setting.key
        for setting in all_settings()
        if setting.path[-1].startswith("max_") or setting.path[-1].endswith("_limit")
    }
    assert bounds - NO_LIMITS <= set(rows())


@pytest.mark.parametrize("setting", list(all_settings()), ids=lambda setting: setting.key)
def test_defaults_are_those_of_the_settings(setting: Setting) -> None:
    row = rows().get(setting.key)
    assert row is None or row[0] == setting.default


def test_settings_and_metrics_exist() -> None:
    assert set(rows()) <= {setting.key for setting in all_settings()}
    metrics = {metric.name: metric for metric in CATALOGUE}
    for _, counted in rows().values():
        name, _, label = counted.partition("{")
        assert name in metrics
        assert not label or label.partition("=")[0] in metrics[name].labels


def test_a_refused_body_is_counted_under_its_limits_name() -> None:
    for name in BodyLimits.model_fields:
        _, metric = rows()[f"requests.{name}"]
        assert metric.endswith((f'reason="{name}"}}', 'reason="body_too_large"}'))
