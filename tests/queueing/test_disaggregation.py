"""Prefill on one endpoint, decode on another: who is chosen, what is booked where, and what a request waits for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.extproc.exchange import Exchanges
from picker.policy.model import DisaggregationSettings, Policy, PolicyClass, Profile
from picker.pool.calibration import Calibration
from picker.queueing.work import DropReason, Released, Work, WorkState
from picker.selection.constraints import Constraints
from picker.selection.disaggregation import Prefilled
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand
from tests.queueing.fleet import Fleet, spec
from tests.selection.test_endpoint_share import Caches

RULE = DisaggregationSettings(min_uncached_tokens=500)
ROLE = RULE.role_label


class SplitFleet(Fleet):
    """`p1`, `p2` prefill and `d1`, `d2` decode; blocks of a prefix that all prompts share, by endpoint."""

    def __init__(
        self, roles: Mapping[str, str | None], cached: Mapping[str, int] | None = None, **options: Any
    ) -> None:
        classes = [PolicyClass(**{"name": "only", "quantum": 512, **options})]
        labels = {name: {"labels": {ROLE: role} if role is not None else {}} for name, role in roles.items()}
        super().__init__(classes, [spec(name, **label) for name, label in labels.items()])
        self.queue.reload(Policy(Profile("", tuple(classes), disaggregation=RULE)), 0.0)
        slots = {self.engine(name).slot: blocks for name, blocks in (cached or {}).items()}
        self.selector.index = Caches(slots)

    def send(self, tokens: int, **constraints: Any) -> Work:
        prompt = PromptKeys([tokens], lambda block_size: (range(tokens // block_size),))
        asked = Constraints(**constraints)
        narrowed = self.queue.disaggregation.narrowed(Demand(tokens, prompt, asked), asked, RULE)
        return self.submit("only", tokens, prompt=prompt, constraints=narrowed)

    def load(self, name: str) -> tuple[int, int]:
        load = self.ledger.load(self.engine(name).slot)
        return load.prefill_tokens, load.running

    @property
    def counted(self) -> dict[str, int]:
        return dict(self.queue.disaggregation.stats.requests)


def split(**options: Any) -> SplitFleet:
    return SplitFleet({"p1": "prefill", "d1": "decode"}, **options)


def went(released: Released) -> tuple[str | None, str]:
    prefill = released.prefill.decision.endpoint.spec.name if released.prefill else None
    return prefill, released.decision.endpoint.spec.name


def test_the_prefill_is_booked_where_it_is_done_and_the_request_where_it_runs() -> None:
    fleet = split()
    fleet.send(1000)
    (released,) = fleet.released
    assert went(released) == ("p1", "d1")
    assert (fleet.load("p1"), fleet.load("d1")) == ((1000, 1), (0, 1))
    assert fleet.counted == {Prefilled.APART: 1}


def test_a_short_prompt_is_read_where_it_is_decoded() -> None:
    fleet = SplitFleet({"p1": "prefill", "d1": "decode"}, {"d1": 40})
    fleet.send(499)
    fleet.send(640 + 499)
    assert [went(each) for each in fleet.released] == [(None, "d1")] * 2
    assert (fleet.load("p1"), fleet.load("d1")) == ((0, 0), (3 + 499, 2))
    assert fleet.counted == {Prefilled.SHORT: 2}
    fleet.send(640 + 500)
    assert went(fleet.released[-1]) == ("p1", "d1")


def test_who_prefills_has_the_prefix_or_the_least_to_do() -> None:
    fleet = SplitFleet({"p1": "prefill", "p2": "prefill", "d1": "decode"}, {"p2": 50})
    fleet.send(1000)
    assert went(fleet.released[-1]) == ("p2", "d1")
    assert fleet.load("p2") == (200, 1)
    fleet.selector.index = Caches({})
    fleet.send(1000)
    assert went(fleet.released[-1]) == ("p1", "d1")


@pytest.mark.parametrize("role", ["decode", "both", "prefill-decode", None])
def test_with_nobody_to_prefill_it_is_done_by_who_decodes_and_counted(role: str | None) -> None:
    fleet = SplitFleet({"d1": role})
    fleet.send(1000)
    assert went(fleet.released[-1]) == (None, "d1")
    assert fleet.load("d1") == (1000, 1)
    assert fleet.counted == {Prefilled.NO_ENDPOINT: 1}


def test_a_fleet_that_only_prefills_can_take_nothing() -> None:
    fleet = SplitFleet({"p1": "prefill"})
    fleet.send(1000)
    assert [each.reason for each in fleet.dropped] == [DropReason.NO_ENDPOINT]


def test_a_pin_names_who_decodes() -> None:
    fleet = SplitFleet({"p1": "prefill", "d1": "decode", "d2": "decode"})
    for name in ("d2", "d1", "d2"):
        fleet.send(1000, pin=name)
        assert went(fleet.released[-1]) == ("p1", name)


class TestWaiting:
    def test_a_long_prompt_waits_for_who_prefills_and_a_short_one_does_not_wait_behind_it(self) -> None:
        fleet = split(prefill_busy_threshold=500)
        fleet.send(1000)
        waits = fleet.send(1000)
        assert waits.state is WorkState.WAITING
        fleet.send(100)
        assert [went(each) for each in fleet.released] == [("p1", "d1"), (None, "d1")]
        booking = fleet.released[0].prefill
        assert booking is not None
        fleet.ledger.release(booking.booking)
        fleet.poll()
        assert fleet.released[-1].work is waits

    def test_it_waits_for_who_decodes_too(self) -> None:
        fleet = split(max_running_per_worker=1)
        fleet.send(1000)
        waits = fleet.send(1000)
        prefill = fleet.released[0].prefill
        assert prefill is not None
        fleet.ledger.release(prefill.booking)
        fleet.poll()
        assert waits.state is WorkState.WAITING, "p1 is free, d1 is not"
        fleet.finish(fleet.released[0])
        assert fleet.released[-1].work is waits

    def test_when_the_last_that_prefills_leaves_it_goes_to_who_decodes(self) -> None:
        fleet = split(prefill_busy_threshold=500)
        fleet.send(1000)
        waits = fleet.send(1000)
        fleet.set_engines(spec("d1", labels={ROLE: "decode"}))
        fleet.poll()
        assert fleet.released[-1].work is waits
        assert went(fleet.released[-1]) == (None, "d1")
        assert fleet.counted == {Prefilled.APART: 1, Prefilled.NO_ENDPOINT: 1}

    def test_a_newcomer_to_busy_prefill_counts_against_the_limits(self) -> None:
        fleet = split(prefill_busy_threshold=500, request_queue_limit_per_worker=0)
        fleet.send(1000)
        fleet.send(1000)
        assert [each.reason for each in fleet.dropped] == [DropReason.QUEUE_FULL_REQUESTS]


class TestEnds:
    def test_a_dispatch_that_fails_frees_both_and_goes_again(self) -> None:
        fleet = split()
        fleet.send(1000)
        fleet.take(fleet.queue.give_back(fleet.released[0], fleet.now))
        assert [went(each) for each in fleet.released] == [("p1", "d1")] * 2
        assert (fleet.load("p1"), fleet.load("d1")) == ((1000, 1), (0, 1))

    def test_a_client_that_leaves_frees_both(self) -> None:
        fleet = split()
        fleet.send(1000)
        fleet.queue.withdraw(fleet.released[0])
        assert (fleet.load("p1"), fleet.load("d1")) == ((0, 0), (0, 0))

    def follow(self, fleet: SplitFleet, calibration: Calibration | None = None) -> tuple[Exchanges, Any]:
        exchanges = Exchanges(
            fleet.pool, fleet.ledger, calibration or Calibration(), lambda: fleet.now, lambda: None
        )
        released = fleet.released[-1]
        return exchanges, exchanges.begin(released, observes_response=True, last_block=7)

    def test_the_last_block_stored_there_ends_the_prefill_and_times_who_did_it(self) -> None:
        fleet = split()
        fleet.send(1000)
        calibration = Calibration(min_samples=1)
        exchanges, exchange = self.follow(fleet, calibration)
        fleet.now += 2.0
        exchanges.block_stored(fleet.engine("d1").slot, 7)
        assert fleet.load("p1") == (1000, 1)
        exchanges.block_stored(fleet.engine("p1").slot, 7)
        assert (fleet.load("p1"), fleet.load("d1")) == ((0, 0), (0, 1))
        assert calibration.rates.known == {fleet.engine("p1").slot: 500.0}
        account = exchanges.accounts.of(fleet.engine("p1"))
        assert account.prompt_tokens == 1000
        exchange.finished(delivered=True, usage=None)
        assert (fleet.load("p1"), fleet.load("d1")) == ((0, 0), (0, 0))

    def test_the_first_byte_ends_it_too_and_so_does_the_end(self) -> None:
        for end in ("answered", "finished"):
            fleet = split()
            fleet.send(1000)
            _, exchange = self.follow(fleet)
            if end == "answered":
                exchange.answered(True)
                assert (fleet.load("p1"), fleet.load("d1")) == ((0, 0), (0, 1))
            exchange.finished(delivered=True, usage=None)
            assert (fleet.load("p1"), fleet.load("d1")) == ((0, 0), (0, 0))


@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "read", "end", "give back", "leave"]), st.integers(0, 2000)),
        max_size=40,
    )
)
@settings(deadline=None, max_examples=60)
def test_every_booking_is_released_and_decoding_endpoints_carry_only_what_they_read(
    steps: list[tuple[str, int]],
) -> None:
    fleet = SplitFleet(
        {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": None}, prefill_busy_threshold=3000
    )
    for what, number in steps:
        running = [each for each in fleet.released if each.booking.open]
        chosen = running[number % len(running)] if running else None
        match what:
            case "send":
                fleet.send(1 + number)
            case "read" if chosen and chosen.prefill:
                fleet.ledger.release(chosen.prefill.booking)
                fleet.poll()
            case "end" if chosen:
                if chosen.prefill:
                    fleet.ledger.release(chosen.prefill.booking)
                fleet.finish(chosen)
            case "give back" if chosen:
                fleet.take(fleet.queue.give_back(chosen, fleet.now))
            case "leave" if chosen:
                fleet.queue.withdraw(chosen)
                fleet.poll()
        for released in fleet.released:
            assert (released.prefill is None) or released.booking.prefill_tokens == 0
            assert released.decision.endpoint.spec.name in ("d1", "d2")
    for _ in range(len(fleet.released) + len(fleet.queue)):
        for released in [each for each in fleet.released if each.booking.open]:
            if released.prefill:
                fleet.ledger.release(released.prefill.booking)
            fleet.finish(released)
    assert not len(fleet.queue)
    assert [fleet.load(name) for name in ("p1", "p2", "d1", "d2")] == [(0, 0)] * 4
