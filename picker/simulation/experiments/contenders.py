"""Who can route in a simulation, by name: Picker's own core, the same core without fairness, and the peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from math import inf

from picker.policy import Policy
from picker.policy.model import ClassSettings, PolicyClass, Profile, QueuePolicy
from picker.simulation.core_picker import CorePicker
from picker.simulation.reference_policies import CHOOSERS, reference_picker
from picker.simulation.replay import Picker, Pod

CORE = "picker"
WITHOUT_FAIRNESS = "picker-fcfs"
CONTENDERS = (CORE, WITHOUT_FAIRNESS, *CHOOSERS)


def contender(name: str, pods: Sequence[Pod], policy: Policy, seed: int = 0) -> Picker:
    """The picker of this name; the peers have no use for the policy. Raises ValueError that lists the names."""
    if name == CORE:
        return CorePicker(policy, pods, seed=seed)
    if name == WITHOUT_FAIRNESS:
        return CorePicker(without_fairness(policy), pods, seed=seed)
    if name not in CHOOSERS:
        raise ValueError(f"no policy {name!r}; there are {', '.join(CONTENDERS)}")
    return reference_picker(name, pods, seed)


def without_fairness(policy: Policy) -> Policy:
    """One queue in order of arrival for everybody, behind the widest gate that any class has."""
    widest = max(policy.classes(), key=lambda each: _or_inf(each.prefill_busy_threshold))
    settings = {entry.name: getattr(widest, entry.name) for entry in fields(ClassSettings)}
    settings |= {
        "name": "everybody",
        "policy_family": None,
        "cache_bucket": None,
        "queue_policy": QueuePolicy.FCFS,
        "fair_tenants": False,
    }
    root = Profile("", (PolicyClass(**settings),), selection=widest.selection)
    return replace(Policy.default(), root=root)


def weights_of(policy: Policy) -> dict[str, int]:
    """What each class that a request can name is owed: its quantum; a family's is the sum of its classes'."""
    owed: dict[str, int] = {}
    for each in policy.root.classes:
        name = each.policy_family or each.name
        owed[name] = owed.get(name, 0) + each.quantum
    return owed


def _or_inf(value: float | None) -> float:
    return inf if value is None else value
