"""Which endpoints a request may use: every combination against a plain model, and how endpoints are named."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from picker.policy.constraints import LabelIn, LabelSelector, Taint, TaintEffect, Toleration
from picker.pool.endpoint import Endpoint, EndpointSpec, EngineReport
from picker.selection.constraints import Constraints, Ineligible


def endpoint(**changes: Any) -> Endpoint:
    fenced = changes.pop("fenced", False)
    report = changes.pop("report", None)
    made = Endpoint(
        0, EndpointSpec(**{"uid": "u", "name": "pod-a", "address": "10.0.0.1", "port": 8000, **changes})
    )
    made.fenced, made.report = fenced, report
    return made


def refuse(constraints: Constraints, **changes: Any) -> Ineligible | None:
    return constraints.refuse(endpoint(**changes))


# Each dimension: what it is called, then (constraints, endpoint, which reasons that gives to a newcomer, and to a
# request that waits for the endpoint that it is pinned to).
Dimension = list[tuple[str, dict[str, Any], dict[str, Any], set[Ineligible], set[Ineligible]]]

DECODE = LabelIn("role", frozenset({"decode", "both"}), or_absent=True)
OTHERS = frozenset({"10.9.9.9", "pod-b"})
OURS = frozenset({"10.0.0.1:8000", "pod-b"})
SPOT = "spot=yes"
REPELLED, NOTHING = {Ineligible.TAINT}, set[Ineligible]()


def taints(*texts: str) -> dict[str, Any]:
    return {"taints": tuple(Taint.parse(text) for text in texts)}


def both(
    name: str, asked: dict[str, Any], found: dict[str, Any], reason: Ineligible | None
) -> tuple[str, dict[str, Any], dict[str, Any], set[Ineligible], set[Ineligible]]:
    reasons = {reason} if reason else NOTHING
    return name, asked, found, reasons, reasons


ALLOW: Dimension = [
    both("no list", {}, {}, None),
    both("listed", {"allow": (OURS,)}, {}, None),
    both("listed in one of two", {"allow": (OURS, OTHERS)}, {}, Ineligible.NOT_ALLOWED),
    both("empty list", {"allow": (frozenset(),)}, {}, Ineligible.NOT_ALLOWED),
]
PIN: Dimension = [
    both("no pin", {}, {}, None),
    both("pinned here", {"pin": "pod-a"}, {}, None),
    both("pinned elsewhere", {"pin": "pod-b"}, {}, Ineligible.NOT_PINNED),
]
SELECTOR: Dimension = [
    both("selected", {"selector": LabelSelector.of({"zone": "west"})}, {"labels": {"zone": "west"}}, None),
    both("not selected", {"selector": LabelSelector.of({"zone": "west"})}, {}, Ineligible.NOT_SELECTED),
    both("of another role", {"role": DECODE}, {"labels": {"role": "prefill"}}, Ineligible.NOT_SELECTED),
]
READY: Dimension = [
    both("ready", {}, {}, None),
    both("not ready", {}, {"ready": False}, Ineligible.NOT_READY),
]
FENCE: Dimension = [
    both("open", {}, {}, None),
    both("fenced", {}, {"fenced": True}, Ineligible.FENCED),
    ("cordoned", {}, {"cordoned": True}, {Ineligible.FENCED}, NOTHING),
    both("both", {}, {"cordoned": True, "fenced": True}, Ineligible.FENCED),
]
RANK: Dimension = [
    both("any rank", {}, {"rank": 1}, None),
    both("this rank", {"rank": 1}, {"rank": 1}, None),
    both("rank 0 is a rank", {"rank": 0}, {"rank": 1}, Ineligible.RANK),
]
TAINTS: Dimension = [
    both("untainted", {}, {}, None),
    ("NoSchedule", {}, taints(f"{SPOT}:NoSchedule"), REPELLED, NOTHING),
    ("NoExecute", {}, taints(f"{SPOT}:NoExecute"), REPELLED, REPELLED),
    ("PreferNoSchedule", {}, taints(f"{SPOT}:PreferNoSchedule"), NOTHING, NOTHING),
    ("two", {}, taints("a:NoSchedule", f"{SPOT}:NoExecute"), REPELLED, REPELLED),
    (
        "tolerated",
        {"tolerations": (Toleration.parse("spot"),)},
        taints(f"{SPOT}:NoExecute", f"{SPOT}:NoSchedule"),
        NOTHING,
        NOTHING,
    ),
    (
        "one of two tolerated",
        {"tolerations": (Toleration.parse("spot:NoSchedule"),)},
        taints(f"{SPOT}:NoExecute", f"{SPOT}:NoSchedule"),
        REPELLED,
        REPELLED,
    ),
    (
        "another value tolerated",
        {"tolerations": (Toleration.parse("spot=no"),)},
        taints(f"{SPOT}:NoSchedule"),
        REPELLED,
        NOTHING,
    ),
    (
        "required, thus tolerated",
        {"required_taints": frozenset({SPOT})},
        taints(f"{SPOT}:NoExecute"),
        NOTHING,
        NOTHING,
    ),
    both("required and absent", {"required_taints": frozenset({SPOT})}, {}, Ineligible.REQUIRED_TAINT),
    (
        "one required is absent, another repels",
        {"required_taints": frozenset({"gpu"})},
        taints(f"{SPOT}:NoSchedule"),
        {Ineligible.TAINT, Ineligible.REQUIRED_TAINT},
        {Ineligible.REQUIRED_TAINT},
    ),
]


def adapters(*loaded: str, room: int | None) -> dict[str, Any]:
    return {"report": EngineReport(at=0.0, adapters=frozenset(loaded), max_adapters=room)}


ADAPTER: Dimension = [
    both("none asked", {}, {}, None),
    both("declared", {"adapter": "lora"}, {"models": frozenset({"lora"})}, None),
    both("loaded", {"adapter": "lora"}, adapters("lora", "x", room=2), None),
    both("room for it", {"adapter": "lora"}, adapters("x", room=2), None),
    both("a place in time", {"adapter": "lora"}, adapters("x", "y", room=2), None),
    both("no places at all", {"adapter": "lora"}, adapters(room=None), Ineligible.ADAPTER),
    both("no report", {"adapter": "lora"}, {}, Ineligible.ADAPTER),
]

# The order in which reasons are told, first things first.
PRECEDENCE = [
    Ineligible.NOT_ALLOWED,
    Ineligible.NOT_PINNED,
    Ineligible.NOT_SELECTED,
    Ineligible.NOT_READY,
    Ineligible.FENCED,
    Ineligible.RANK,
    Ineligible.TAINT,
    Ineligible.REQUIRED_TAINT,
    Ineligible.ADAPTER,
]


def test_every_combination_is_refused_for_the_first_of_its_reasons() -> None:
    tried = 0
    for row in product(ALLOW, PIN, SELECTOR, READY, FENCE, RANK, TAINTS, ADAPTER):
        asked: dict[str, Any] = {}
        found: dict[str, Any] = {}
        for _, wanted, given, _, _ in row:
            asked |= wanted
            found |= given
        constraints, candidate = Constraints(**asked), endpoint(**found)
        scheduled = constraints.pin is not None
        for waiting in (False, True):
            column = 4 if waiting and scheduled else 3
            reasons = set[Ineligible]().union(*(cell[column] for cell in row))
            expected = min(reasons, key=PRECEDENCE.index, default=None)
            assert constraints.refuse(candidate, waiting=waiting) is expected, [cell[0] for cell in row]
            tried += 1
    assert tried == 2 * 4 * 3 * 3 * 2 * 4 * 3 * 11 * 7


def test_every_reason_and_every_effect_has_been_tried() -> None:
    of_the_fleet = {"stale", "overloaded", "adapter_full"}
    assert set(Ineligible) - set(PRECEDENCE) <= of_the_fleet, "a reason that no combination gives"
    tried = {taint.effect for _, _, found, _, _ in TAINTS for taint in found.get("taints", ())}
    assert tried == set(TaintEffect)


@pytest.mark.parametrize("form", ["10.0.0.1:8000", "10.0.0.1", "pod-a"])
def test_an_endpoint_is_named_by_authority_by_address_or_by_name(form: str) -> None:
    assert refuse(Constraints(pin=form)) is None
    assert refuse(Constraints(allow=(frozenset({form, "junk"}),))) is None


def test_a_bare_address_means_every_port_and_one_with_a_port_only_that() -> None:
    bare, exact = (Constraints(allow=(frozenset({entry}),)) for entry in ("10.0.0.1", "10.0.0.1:8000"))
    for port in (8000, 8001):
        assert refuse(bare, port=port, name=f"p{port}") is None
    assert refuse(exact, port=8001) is Ineligible.NOT_ALLOWED


def test_an_ipv6_authority_has_brackets_and_a_bare_address_has_none() -> None:
    v6 = {"address": "fd00::1", "port": 8000}
    assert endpoint(**v6).spec.authority == "[fd00::1]:8000"
    for form in ("[fd00::1]:8000", "fd00::1"):
        assert refuse(Constraints(pin=form), **v6) is None
        assert refuse(Constraints(allow=(frozenset({form}),)), **v6) is None
    for form in ("fd00::1:8000", "[fd00::1]:8001", "[fd00::2]:8000"):
        assert refuse(Constraints(pin=form), **v6) is Ineligible.NOT_PINNED


@pytest.mark.parametrize("form", ["", "10.0.0", "10.0.0.1:", "10.0.0.10", "POD-A", "10.0.0.1:80000"])
def test_what_only_looks_like_a_name_names_nobody(form: str) -> None:
    assert refuse(Constraints(allow=(frozenset({form}),))) is Ineligible.NOT_ALLOWED


@pytest.mark.parametrize(
    ("labels", "decodes", "prefills"),
    [
        ({"role": "decode"}, True, False),
        ({"role": "both"}, True, False),
        ({"role": "prefill"}, False, True),
        ({}, True, False),
        ({"role": ""}, False, False),
        ({"other": "prefill"}, True, False),
    ],
)
def test_a_role_is_a_label_with_one_of_some_values(
    labels: dict[str, str], decodes: bool, prefills: bool
) -> None:
    prefill = LabelIn("role", frozenset({"prefill"}))
    assert (refuse(Constraints(role=DECODE), labels=labels) is None) == decodes
    assert (refuse(Constraints(role=prefill), labels=labels) is None) == prefills


def test_constraints_say_in_words_what_they_ask() -> None:
    assert str(Constraints()) == "any"
    everything = Constraints(
        allow=(frozenset({"a", "b"}), frozenset()),
        selector=LabelSelector.of({"zone": "west"}),
        tolerations=(Toleration.parse("spot:NoSchedule"), Toleration.parse("*")),
        required_taints=frozenset({"gpu", "fast"}),
        pin="pod-a",
        rank=0,
        adapter="lora",
        role=DECODE,
        prefill=Constraints(),
    )
    assert str(everything) == (
        "in 2 named; in 0 named; pin pod-a; rank 0; zone=west; tolerates spot:NoSchedule, *;"
        " requires fast, gpu; adapter lora; decodes; prefill apart"
    )
    assert len(str(Constraints(required_taints=frozenset(f"t{n}" for n in range(999))))) == 400


def test_equal_constraints_are_one_key() -> None:
    def made() -> Constraints:
        return Constraints(
            allow=(frozenset({"a", "b"}),), tolerations=(Toleration.parse("x"),), pin="a", rank=1
        )

    assert made() == made()
    assert hash(made()) == hash(made())
    assert len({made(), made(), Constraints(), Constraints(pin="a")}) == 3
