"""The choice: lowest cost, ties spread, and a decision that explains itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, tanh
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from picker.kvcache.matching import PrefixMatch
from picker.policy.constraints import Taint, Toleration
from picker.policy.model import CostWeights
from picker.pool.calibration import Calibration
from picker.pool.endpoint import EndpointSpec, EngineReport
from picker.pool.ledger import Ledger
from picker.pool.pool import Pool
from picker.selection.constraints import Constraints, Ineligible
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Decision, Demand, Selector
from picker.selection.weighing import Candidate

EVERYBODY = -1
BLOCK = 16


class Caches:
    """Matches by slot, whatever is asked."""

    def __init__(self, matches: Mapping[int, PrefixMatch]) -> None:
        self.matches = matches

    def find_matches(self, keys: Sequence[int], mask: int) -> Mapping[int, PrefixMatch]:
        return {slot: match for slot, match in self.matches.items() if mask >> slot & 1}


class Bench:
    """Endpoints `e0`, `e1`, ... with given caches."""

    def __init__(self, endpoints: int = 3, matches: Mapping[int, PrefixMatch] | None = None) -> None:
        self.pool = Pool()
        self.ledger = Ledger()
        self.pool.subscribe(self.ledger.pool_changed)
        self.specs = [EndpointSpec(f"e{n}", f"e{n}", f"10.0.0.{n}", 8000) for n in range(endpoints)]
        self.pool.replace(self.specs)
        self.calibration = Calibration(min_samples=1, min_tokens=1, tolerance=0.0)
        self.selector = Selector(self.pool, self.ledger, Caches(matches or {}), self.calibration, Random(11))

    def change(self, number: int, **changes: Any) -> None:
        self.specs[number] = replace(self.specs[number], **changes)
        self.pool.replace(self.specs)

    def book(self, number: int, tokens: int) -> None:
        endpoint = self.pool.get(f"e{number}")
        assert endpoint is not None
        self.ledger.book(endpoint, tokens, 0.0)

    def learn(self, rates: Mapping[int, int]) -> None:
        """Each has prefilled 1,000 tokens at its rate, and once more when all are known."""
        for _ in range(2):
            for slot, rate in rates.items():
                self.calibration.observe(slot, 1000, 1000 / rate)

    def decode(self, gaps: Mapping[int, float]) -> None:
        """Each has reported so many seconds between two tokens, often enough to be believed."""
        for report in range(20):
            for slot, gap in gaps.items():
                tokens = 100.0 * report
                told = EngineReport(at=0.0, inter_token_seconds=gap * tokens, inter_tokens=tokens)
                self.calibration.inter_token.observe(slot, told)

    def choose(self, demand: Demand, mask: int = EVERYBODY, **weights: float) -> Decision:
        return self.selector.choose(
            demand, mask, CostWeights(**{"crowding": 0.0, "cold_turn": 0.0, **weights})
        )


def demand(tokens: int = 1000, **changes: Any) -> Demand:
    prompt = PromptKeys([tokens], lambda block_size: (range(tokens // block_size),))
    return Demand(tokens, prompt, **changes)


def costs(decision: Decision) -> dict[str, float]:
    return {each.endpoint.spec.name: each.cost for each in decision.candidates}


def name(decision: Decision) -> str:
    return decision.endpoint.spec.name


class TestCost:
    def test_the_endpoint_with_the_most_cached_wins_when_all_are_idle(self) -> None:
        bench = Bench(matches={1: PrefixMatch(20), 2: PrefixMatch(40)})
        decision = bench.choose(demand(1000))
        assert name(decision) == "e2"
        assert costs(decision) == {"e0": 1000, "e1": 1000 - 320, "e2": 1000 - 640}

    def test_the_warm_one_gives_way_when_its_queue_costs_more_than_its_cache_saves(self) -> None:
        bench = Bench(2, {0: PrefixMatch(40)})
        bench.book(0, 600 - 64)
        assert name(bench.choose(demand(1000))) == "e0"
        bench.book(0, 100)
        assert name(bench.choose(demand(1000))) == "e1"

    def test_slower_tiers_count_for_less_and_the_policy_says_how_much(self) -> None:
        bench = Bench(matches={0: PrefixMatch(8), 1: PrefixMatch(0, host=8), 2: PrefixMatch(0, disk=8)})
        decision = bench.choose(demand(1000))
        assert costs(decision) == {"e0": 1000 - 128, "e1": 1000 - 96, "e2": 1000 - 32}
        decision = bench.choose(demand(1000), host_tier=0.5, disk_tier=0.0)
        assert costs(decision) == {"e0": 1000 - 128, "e1": 1000 - 64, "e2": 1000}

    @pytest.mark.parametrize("weights", [{}, {"host_tier": 0.5, "disk_tier": 0.0}])
    def test_an_engine_is_expected_to_report_whole_blocks_of_whatever_tier(
        self, weights: dict[str, float]
    ) -> None:
        for match in (PrefixMatch(8), PrefixMatch(2, host=5, disk=1), PrefixMatch(0, disk=8)):
            decision = Bench(1, {0: match}).choose(demand(1000), **weights)
            assert decision.held_tokens == 8 * BLOCK
        assert Bench(1).choose(demand(1000), **weights).held_tokens == 0
        assert Bench(1, {0: PrefixMatch(1, host=3)}).choose(demand(64), **weights).held_tokens == 48

    def test_the_last_token_is_always_computed(self) -> None:
        """An exact repeat of 64 tokens has 48 cached, not 64 (seen on a real engine with blocks of 16)."""
        bench = Bench(1, {0: PrefixMatch(4)})
        assert bench.choose(demand(64)).chosen.uncached_tokens == 16
        assert bench.choose(demand(65)).chosen.uncached_tokens == 1

    def test_every_prompt_of_a_batch_counts(self) -> None:
        bench = Bench(1, {0: PrefixMatch(2)})
        prompt = PromptKeys([40, 100, 10], lambda block_size: (range(2), range(6), ()))
        assert bench.choose(Demand(150, prompt)).chosen.cached_tokens == 64
        slower = Bench(1, {0: PrefixMatch(0, host=2)})
        assert slower.choose(Demand(150, prompt)).chosen.cached_tokens == 48
        assert slower.choose(Demand(150, prompt)).held_tokens == 64

    def test_running_requests_and_used_memory_cost(self) -> None:
        bench = Bench(2)
        bench.book(0, 0)
        bench.pool.report("e1", EngineReport(at=0.0, kv_usage=0.5))
        assert costs(bench.choose(demand(100), running_tokens=7.0, kv_usage_tokens=10.0)) == {
            "e0": 107,
            "e1": 105,
        }

    def test_a_running_request_costs_the_prefill_of_its_inter_token_times(self) -> None:
        bench = Bench(3)
        for slot in (0, 0, 1, 2):
            bench.book(slot, 0)
        bench.learn(dict.fromkeys(range(3), 10_000))
        bench.decode({0: 0.02, 1: 0.05})
        decision = bench.choose(demand(100), decode_interference=0.5, running_tokens=7.0)
        assert costs(decision) == pytest.approx({"e0": 100 + 200, "e1": 100 + 250, "e2": 107})
        terms = {each.endpoint.slot: each.interference for each in decision.candidates}
        assert terms == pytest.approx({0: 200, 1: 250, 2: 0}), "nobody knows how fast the last one decodes"

    def test_inter_token_times_say_nothing_in_tokens_without_a_prefill_rate(self) -> None:
        bench = Bench(1)
        bench.book(0, 0)
        bench.decode({0: 0.02})
        assert costs(bench.choose(demand(100), decode_interference=0.5, running_tokens=7.0)) == {"e0": 107}

    def test_by_default_the_inter_token_time_is_left_out(self) -> None:
        bench = Bench(1)
        bench.book(0, 0)
        bench.learn({0: 10_000})
        bench.decode({0: 0.02})
        assert costs(bench.choose(demand(100))) == {"e0": 164}

    def test_foreign_requests_cost_like_our_own(self) -> None:
        bench = Bench(2)
        endpoint = bench.pool.get("e0")
        assert endpoint is not None
        bench.ledger.correct(endpoint, EngineReport(at=0.0, running=4))
        assert name(bench.choose(demand(100))) == "e1"

    def test_a_faster_engine_pays_less_for_the_same_tokens(self) -> None:
        bench = Bench(3)
        bench.learn({0: 500, 1: 1000, 2: 2000})
        bench.book(2, 400)
        assert costs(bench.choose(demand(1000), running_tokens=0.0)) == {"e0": 2000, "e1": 1000, "e2": 700}

    def test_decisions_in_one_tick_see_each_other(self) -> None:
        bench = Bench(4)
        chosen = Counter[str]()
        for _ in range(40):
            decision = bench.choose(demand(500))
            bench.ledger.book(decision.endpoint, decision.chosen.uncached_tokens, 0.0)
            chosen[name(decision)] += 1
        assert set(chosen.values()) == {10}


class TestTaints:
    def test_prefer_no_schedule_costs_unless_tolerated(self) -> None:
        bench = Bench(2)
        bench.change(0, taints=(Taint.parse("old:PreferNoSchedule"), Taint.parse("x=1:PreferNoSchedule")))
        assert costs(bench.choose(demand(100))) == {"e0": 100 + 2 * 8192, "e1": 100}
        tolerating = demand(100, constraints=Constraints(tolerations=(Toleration.parse("old"),)))
        assert costs(bench.choose(tolerating)) == {"e0": 100 + 8192, "e1": 100}
        assert name(bench.choose(demand(100), mask=0b01)) == "e0", "it is a preference, not a refusal"

    def test_preferred_taints_scale_the_cost(self) -> None:
        bench = Bench(3)
        bench.change(0, taints=(Taint.parse("gpu=h100:PreferNoSchedule"),))
        liking = demand(
            1000,
            constraints=Constraints(tolerations=(Toleration.parse("*"),)),
            preferred_taints=(("gpu=h100", 0.5), ("gpu", 0.25), ("elsewhere", 9.0)),
        )
        assert costs(bench.choose(liking))["e0"] == pytest.approx(1000 * exp(-tanh(0.75)))
        repelled = structs.replace(liking, preferred_taints=(("gpu", -9.0),))
        assert costs(bench.choose(repelled))["e0"] == pytest.approx(1000 * exp(1), rel=1e-3)


class TestDraw:
    def test_ties_spread(self) -> None:
        bench = Bench(4, {3: PrefixMatch(1)})
        chosen = Counter(name(bench.choose(demand(100), mask=0b0111)) for _ in range(900))
        assert set(chosen) == {"e0", "e1", "e2"}
        assert min(chosen.values()) > 240

    def test_a_temperature_spreads_over_near_ones(self) -> None:
        bench = Bench(3, {0: PrefixMatch(6), 1: PrefixMatch(3)})
        cold = Counter(name(bench.choose(demand(1000))) for _ in range(50))
        warm = Counter(name(bench.choose(demand(1000), temperature=1.0)) for _ in range(3000))
        assert cold == {"e0": 50}
        assert warm["e1"] / warm["e0"] == pytest.approx(exp(-0.5), abs=0.1)
        assert warm["e2"] / warm["e0"] == pytest.approx(exp(-1.0), abs=0.1)

    def test_a_temperature_among_equals_is_a_fair_draw(self) -> None:
        bench = Bench(3)
        chosen = Counter(name(bench.choose(demand(100), temperature=0.5)) for _ in range(900))
        assert min(chosen.values()) > 240

    def test_the_same_seed_draws_the_same(self) -> None:
        runs = [[name(bench.choose(demand(9))) for _ in range(50)] for bench in (Bench(), Bench())]
        assert runs[0] == runs[1]


class TestDecision:
    def test_candidates_come_by_cost_the_chosen_one_first(self) -> None:
        bench = Bench(4, {1: PrefixMatch(3), 2: PrefixMatch(9), 3: PrefixMatch(6)})
        decision = bench.choose(demand(1000))
        assert list(costs(decision)) == ["e2", "e3", "e1", "e0"]
        assert decision.candidates[0] is decision.chosen
        assert decision.first(2) == decision.candidates[:2]
        assert decision.first(99) == decision.candidates
        assert decision.destinations(1) == "10.0.0.2:8000"
        assert decision.destinations(3) == "10.0.0.2:8000,10.0.0.3:8000,10.0.0.1:8000"

    def test_the_terms_add_up(self) -> None:
        bench = Bench(1, {0: PrefixMatch(5)})
        bench.book(0, 300)
        endpoint = bench.pool.get("e0")
        assert endpoint is not None
        decision = bench.choose(demand(1000), running_tokens=10.0)
        assert decision.chosen == Candidate(
            endpoint, 80, 920, 300, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 920 + 300 + 10
        )

    def test_a_decision_keeps_the_terms_of_its_moment(self) -> None:
        bench = Bench(2)
        decision = bench.choose(demand(100))
        bench.book(0, 10**6)
        bench.book(1, 10**6)
        assert set(costs(decision).values()) == {100.0}

    def test_it_tells_who_was_refused_and_why(self) -> None:
        bench = Bench(3)
        bench.change(1, ready=False)
        bench.change(2, taints=(Taint.parse("drain:NoSchedule"),))
        eligibility = bench.selector.eligible(Constraints())
        refused = {endpoint.slot: reason for endpoint, reason in eligibility.refused.items()}
        assert eligibility.mask == 0b001
        assert refused == {1: Ineligible.NOT_READY, 2: Ineligible.TAINT}
        assert bench.choose(demand(100), eligibility.mask).eligibility is eligibility

    def test_nobody_in_the_mask_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="no endpoint"):
            Bench().choose(demand(), mask=0)


class TestEligible:
    def test_what_is_remembered_follows_the_pool(self) -> None:
        bench = Bench(2)
        assert bench.selector.eligible(Constraints()).mask == 0b11
        bench.pool.fence("e0", fenced=True)
        assert bench.selector.eligible(Constraints()).mask == 0b10
        bench.pool.fence("e0", fenced=False)
        assert bench.selector.eligible(Constraints()).mask == 0b11

    def test_no_more_is_remembered_than_the_bound(self) -> None:
        bench = Bench(2)
        bench.selector.max_remembered_constraints = 10
        for number in range(100):
            bench.selector.eligible(Constraints(pin=str(number)))
            bench.selector.eligible(Constraints(pin=str(number)), waiting=True)
        assert len(bench.selector._eligible) <= 10
        assert len(bench.selector._eligible_waiting) <= 10

    def test_waiting_matters_only_for_the_pinned(self) -> None:
        bench = Bench(2)
        bench.change(0, taints=(Taint.parse("drain:NoSchedule"),))
        anywhere, pinned = Constraints(), Constraints(pin="e0")
        assert bench.selector.eligible(anywhere, waiting=True).mask == 0b10
        assert bench.selector.eligible(pinned).mask == 0
        assert bench.selector.eligible(pinned, waiting=True).mask == 0b01


class TestBestCached:
    def test_the_best_of_those_that_may_serve(self) -> None:
        bench = Bench(3, {0: PrefixMatch(2), 1: PrefixMatch(9), 2: PrefixMatch(5)})
        assert bench.selector.best_cached(demand(1000), 0b111) == 144
        assert bench.selector.best_cached(demand(1000), 0b101) == 80
        assert bench.selector.best_cached(demand(1000), 0) == 0

    def test_an_unknown_prompt_has_nothing_cached(self) -> None:
        bench = Bench(3, {0: PrefixMatch(2)})
        assert bench.selector.best_cached(Demand(1000, PromptKeys.unknown()), 0b111) == 0

    def test_engines_with_other_block_sizes_are_asked_in_their_own(self) -> None:
        bench = Bench(2, {0: PrefixMatch(3), 1: PrefixMatch(3)})
        bench.change(1, block_size=64)
        assert bench.selector.cached(demand(1000), 0b11) == {0: 48, 1: 192}


class TestPrefillSeconds:
    def test_it_is_the_fastest_endpoints_time(self) -> None:
        bench = Bench(3)
        assert bench.selector.prefill_seconds(1000, 0b111) is None
        for slot, rate in ((0, 500), (1, 2000)):
            bench.calibration.observe(slot, rate, 1.0)
        assert bench.selector.prefill_seconds(1000, 0b111) == 0.5
        assert bench.selector.prefill_seconds(1000, 0b001) == 2.0
        assert bench.selector.prefill_seconds(1000, 0b100) == 0.8, "one that is not known is a typical one"
        assert bench.selector.prefill_seconds(1000, 0) is None


@given(
    blocks=st.lists(st.integers(0, 70), min_size=5, max_size=5),
    booked=st.lists(st.integers(0, 9000), min_size=5, max_size=5),
    rates=st.lists(st.sampled_from([0, 500, 1000, 3000]), min_size=5, max_size=5),
    tokens=st.integers(1, 1200),
    mask=st.integers(1, 31),
    weights=st.fixed_dictionaries(
        {"uncached": st.floats(0, 4), "prefill_load": st.floats(0, 4), "running_tokens": st.floats(0, 900)}
    ),
)
@settings(deadline=None, max_examples=120)
def test_the_chosen_one_is_cheapest_by_a_plain_sum(
    blocks: list[int],
    booked: list[int],
    rates: list[int],
    tokens: int,
    mask: int,
    weights: dict[str, float],
) -> None:
    bench = Bench(5, {slot: PrefixMatch(held) for slot, held in enumerate(blocks) if held})
    for slot in range(5):
        bench.book(slot, booked[slot])
    bench.learn({slot: rate for slot, rate in enumerate(rates) if rate})
    known = sorted(1 / rate for rate in rates if rate)
    middle = len(known) // 2
    typical = 0.0
    if known:
        typical = known[middle] if len(known) % 2 else (known[middle - 1] + known[middle]) / 2

    def plain(slot: int) -> float:
        usable = (tokens - 1) // BLOCK
        uncached = tokens - min(blocks[slot], usable) * BLOCK
        prefill = weights["uncached"] * uncached + weights["prefill_load"] * booked[slot]
        slowness = 1 / rates[slot] / typical if rates[slot] else 1.0
        return prefill * slowness + weights["running_tokens"]

    decision = bench.choose(demand(tokens), mask, **weights)
    expected = {f"e{slot}": plain(slot) for slot in range(5) if mask >> slot & 1}
    assert costs(decision) == pytest.approx(expected)
    assert decision.chosen.cost == pytest.approx(min(expected.values()))
    assert [each.cost for each in decision.candidates] == sorted(each.cost for each in decision.candidates)


class TestCrowding:
    """Computing again what another endpoint has cached delays all who wait."""

    def test_the_warm_one_is_worth_a_longer_wait_when_many_wait(self) -> None:
        bench = Bench(2, {0: PrefixMatch(40)})
        bench.book(0, 2000)
        assert name(bench.choose(demand(1000), crowding=4.0, running_tokens=0.0)) == "e1"
        for _ in range(3):
            bench.book(0, 100)
            bench.book(1, 100)
        decision = bench.choose(demand(1000), crowding=4.0, running_tokens=0.0)
        assert name(decision) == "e0"
        waiting = 7 / 2
        assert costs(decision) == {
            "e0": (1 + 4 * waiting) * 360 + 2300,
            "e1": (1 + 4 * waiting) * 1000 + 300,
        }
        assert decision.chosen.crowding == 4 * waiting * 360

    def test_who_has_been_prefilled_or_has_left_does_not_wait(self) -> None:
        bench = Bench(1)
        endpoint = bench.pool.get("e0")
        assert endpoint is not None
        bookings = [bench.ledger.book(endpoint, 100, 0.0) for _ in range(3)]
        bench.ledger.book(endpoint, 0, 0.0)
        bench.ledger.prefill_done(bookings[0])
        bench.ledger.release(bookings[0])
        bench.ledger.release(bookings[1])
        assert bench.choose(demand(10), crowding=1.0).chosen.crowding == 10
        bench.ledger.prefill_done(bookings[2])
        bench.ledger.release(bookings[2])
        assert bench.choose(demand(10), crowding=1.0).chosen.crowding == 0


class TestColdTurns:
    """A prompt that nobody has goes to who has rested longest from such ones."""

    def cold(self, bench: Bench, **weights: float) -> str:
        return name(bench.choose(demand(1000), cold_turn=1.0, **weights))

    def test_everybody_has_one_before_anybody_has_two(self) -> None:
        bench = Bench(3)
        first = [self.cold(bench) for _ in range(3)]
        assert sorted(first) == ["e0", "e1", "e2"]
        assert [self.cold(bench) for _ in range(6)] == first * 2

    def test_the_turn_gives_way_to_load(self) -> None:
        bench = Bench(2)
        taken = self.cold(bench)
        bench.book(1 - int(taken[1]), 1500)
        assert self.cold(bench) == taken

    def test_a_system_prompt_that_somebody_has_makes_no_prompt_warm_in_an_idle_pool(self) -> None:
        """Else it would send all that begins alike to one endpoint."""
        bench = Bench(3, {0: PrefixMatch(100 // BLOCK)})
        assert Counter(self.cold(bench) for _ in range(12)) == {"e0": 4, "e1": 4, "e2": 4}
        decision = bench.choose(demand(1000), cold_turn=1.0)
        fresh = 1000 - 100 // BLOCK * BLOCK
        assert sorted(each.cold_turn for each in decision.candidates) == [0.0, fresh / 2, fresh]

    def test_where_there_is_work_for_everybody_it_makes_them_warm(self) -> None:
        """The work spreads them."""
        bench = Bench(3, {0: PrefixMatch(100 // BLOCK)})
        for _ in range(3):
            bench.book(2, 500)
        decision = bench.choose(demand(1000), cold_turn=1.0)
        assert [each.cold_turn for each in decision.candidates] == [0.0, 0.0, 0.0]

    def test_what_somebody_has_cached_takes_no_turn(self) -> None:
        bench = Bench(2, {0: PrefixMatch(100 // BLOCK + 1)})
        for _ in range(3):
            decision = bench.choose(demand(1000), cold_turn=1.0)
            assert name(decision) == "e0"
            assert decision.chosen.cold_turn == 0.0

    def test_a_prompt_of_which_nothing_is_known_takes_no_turn(self) -> None:
        bench = Bench(2)
        self.cold(bench)
        unknown = Demand(1000, PromptKeys.unknown())
        found = bench.selector.choose(unknown, EVERYBODY, CostWeights())
        assert set(costs(found).values()) == {1000.0}

    def test_who_is_new_in_a_slot_has_rested_longest(self) -> None:
        bench = Bench(2)
        self.cold(bench)
        self.cold(bench)
        bench.change(0, uid="another")
        assert self.cold(bench) == "e0"
