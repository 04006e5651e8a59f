"""Classes by themselves: identity, busy thresholds, immutability; taints and selectors as text."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from picker.policy import PolicyClass, load_policy
from picker.policy.constraints import LabelSelector, Taint, TaintEffect, Toleration
from tests.policy.policies import sample


def test_labels_tell_profiles_apart() -> None:
    root, model = PolicyClass(name="a", quantum=1), PolicyClass(name="a", quantum=1, profile="org/m")
    assert (root.key, root.label) == (("", "a"), "a")
    assert (model.key, model.label) == (("org/m", "a"), "org/m/a")
    assert root != model


def test_equal_policies_are_equal_and_hash_alike() -> None:
    first, second = (load_policy(sample("dynamo_sample.yaml")) for _ in range(2))
    assert first == second
    assert {*first.classes()} == {*second.classes()}


def test_a_class_cannot_be_changed_or_be_wrong() -> None:
    entry = PolicyClass(name="a", quantum=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.quantum = 2  # type: ignore[misc]
    with pytest.raises(ValidationError):
        PolicyClass(name="a", quantum=0)


@pytest.mark.parametrize(
    ("absolute", "fraction", "batch", "limit"),
    [
        (None, None, 8192, None),
        (10, None, None, 10),
        (None, 0.5, 10, 5),
        (None, 0.5, None, None),
        (10, 0.5, None, 10),
        # Either form makes an endpoint busy, so the lower one counts.
        (10, 0.5, 10_000_000, 10),
        (10, 0.5, 10, 5),
        (None, 16.0, 8192, 131072),
        (None, 0.0, 8192, 0),
        (0, 1.0, 8192, 0),
    ],
)
def test_prefill_limit(
    absolute: int | None, fraction: float | None, batch: int | None, limit: float | None
) -> None:
    entry = PolicyClass(
        name="a", quantum=1, prefill_busy_threshold=absolute, prefill_busy_threshold_frac=fraction
    )
    assert entry.prefill_limit(batch) == limit


@pytest.mark.parametrize(
    ("thresholds", "can_queue"),
    [
        ({}, False),
        ({"request_queue_limit_per_worker": 5, "max_queue_wait": 3.0}, False),
        ({"prefill_busy_threshold": 0}, True),
        ({"prefill_busy_threshold_frac": 0.0}, True),
        ({"max_running_per_worker": 1}, True),
        ({"kv_usage_busy_threshold": 0.0}, True),
    ],
)
def test_only_a_busy_threshold_lets_a_class_queue(thresholds: dict[str, Any], can_queue: bool) -> None:
    assert PolicyClass(name="a", quantum=1, **thresholds).can_queue is can_queue


tolerations = st.one_of(
    st.just(Toleration()),
    st.builds(
        Toleration,
        key=st.sampled_from(["gpu", "example.com/spot", "a_b"]),
        value=st.none() | st.sampled_from(["", "x", "v1.0"]),
        effect=st.none() | st.sampled_from(TaintEffect),
    ),
)


@given(tolerations)
def test_a_toleration_reads_back_as_it_is_written(toleration: Toleration) -> None:
    assert Toleration.parse(str(toleration)) == toleration


@pytest.mark.parametrize(
    ("text", "taint", "tolerated"),
    [
        ("gpu", "gpu=a:NoSchedule", True),
        ("gpu=a", "gpu=a:NoExecute", True),
        ("gpu=a", "gpu=b:NoSchedule", False),
        ("gpu=", "gpu:NoSchedule", True),
        ("gpu:NoSchedule", "gpu:NoExecute", False),
        ("*", "anything=x:NoExecute", True),
        ("other", "gpu:NoSchedule", False),
    ],
)
def test_what_is_tolerated(text: str, taint: str, tolerated: bool) -> None:
    assert Toleration.parse(text).tolerates(Taint.parse(taint)) is tolerated


@pytest.mark.parametrize(
    "text", ["", "gpu", "gpu:", "gpu:Never", ":NoSchedule", "g u:NoSchedule", "a=b=c:NoSchedule"]
)
def test_a_taint_that_is_none_says_why(text: str) -> None:
    with pytest.raises(ValueError, match="taint"):
        Taint.parse(text)


@pytest.mark.parametrize("text", ["", "gpu:", "gpu:Never", "g u", "=a", "**"])
def test_a_toleration_that_is_none_says_why(text: str) -> None:
    with pytest.raises(ValueError, match="toleration"):
        Toleration.parse(text)


def test_a_selector_wants_all_its_labels() -> None:
    selector = LabelSelector.of({"zone": "a", "gpu": "h100"})
    assert str(selector) == "gpu=h100,zone=a"
    assert selector.matches({"gpu": "h100", "zone": "a", "more": "x"})
    assert not selector.matches({"gpu": "h100"})
    assert LabelSelector.of({}).matches({})
