"""A class's part of one endpoint's prefill: the rule against a plain model, its laws, and one class against another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.kvcache.matching import PrefixMatch
from picker.policy.model import CostWeights, PolicyClass
from picker.pool.endpoint import EndpointSpec
from picker.pool.ledger import Ledger
from picker.pool.pool import Pool
from picker.queueing.work import Released
from picker.selection.endpoint_share import Claim
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand, Selector
from tests.queueing.fleet import Fleet

QUANTA = {"hot": 1, "cool": 3, "idle": 4}


class Caches:
    """The same prefix for every question, in blocks by slot."""

    def __init__(self, blocks: Mapping[int, int]) -> None:
        self.blocks = blocks

    def find_matches(self, keys: Sequence[int], mask: int) -> Mapping[int, PrefixMatch]:
        return {
            slot: PrefixMatch(min(held, len(keys))) for slot, held in self.blocks.items() if mask >> slot & 1
        }


class Bench:
    def __init__(self, endpoints: int, blocks: Mapping[int, int] | None = None) -> None:
        self.pool, self.ledger = Pool(), Ledger()
        self.pool.subscribe(self.ledger.pool_changed)
        self.pool.replace(EndpointSpec(f"e{n}", f"e{n}", f"10.0.0.{n}", 8000) for n in range(endpoints))
        self.selector = Selector(self.pool, self.ledger, Caches(blocks or {}), random=Random(3))

    def book(self, slot: int, holder: str, tokens: int) -> None:
        endpoint = self.pool.by_slot(slot)
        assert endpoint is not None
        self.ledger.book(endpoint, tokens, 0.0, holder, QUANTA[holder])


def claim(holder: str, bound: int = 0, price: float = 2.0) -> Claim:
    return Claim(holder, QUANTA[holder], bound, price)


def test_the_surplus_is_what_goes_beyond_the_share_by_quanta_of_those_present() -> None:
    bench = Bench(1)
    bench.book(0, "hot", 900)
    bench.book(0, "cool", 100)
    load = bench.ledger.load(0)
    assert claim("hot").surplus(load, 200) == 900 + 200 - (900 + 100 + 200) / 4
    assert claim("cool").surplus(load, 200) == 100 + 200 - (900 + 100 + 200) * 3 / 4
    assert claim("idle").surplus(load, 200) == 200 - (900 + 100 + 200) * 4 / 8
    assert claim("hot", bound=700).surcharge(load, 200) == (800 - 700) * 2.0
    assert claim("hot", bound=800).surcharge(load, 200) == 0


def test_a_class_that_only_decodes_there_is_present_and_one_that_has_ended_is_not() -> None:
    bench = Bench(1)
    bench.book(0, "hot", 1000)
    endpoint = bench.pool.by_slot(0)
    assert endpoint is not None
    decoding = bench.ledger.book(endpoint, 50, 0.0, "cool", QUANTA["cool"])
    bench.ledger.prefill_done(decoding)
    load = bench.ledger.load(0)
    assert claim("hot").surplus(load, 0) == 1000 * 3 / 4
    bench.ledger.release(decoding)
    assert claim("hot").surplus(load, 0) == 0


bookings = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(sorted(QUANTA)), st.integers(0, 20_000)), max_size=25
)


@given(bookings, st.integers(0, 5000))
@settings(deadline=None, max_examples=100)
def test_surpluses_of_those_present_cancel_out_and_a_class_alone_has_none(
    booked: list[tuple[int, str, int]], tokens: int
) -> None:
    bench = Bench(3)
    for slot, holder, amount in booked:
        bench.book(slot, holder, amount)
    for slot in range(3):
        load = bench.ledger.load(slot)
        present = set(load.held)
        surpluses = [claim(holder).surplus(load, 0) for holder in present]
        assert sum(surpluses) == pytest.approx(0, abs=1e-6)
        assert not present or min(surpluses) <= 1e-6, "somebody finds it no dearer"
        if present <= {"hot"}:
            assert claim("hot").surplus(load, tokens) == 0


@given(
    bookings,
    st.lists(st.integers(0, 600), min_size=3, max_size=3),
    st.integers(1, 10_000),
    st.integers(0, 4000),
    st.sampled_from([0.5, 4.0, 16.0]),
)
@settings(deadline=None, max_examples=150)
def test_who_is_sent_beyond_the_bound_saves_more_than_the_price_of_it(
    booked: list[tuple[int, str, int]], blocks: list[int], tokens: int, bound: int, price: float
) -> None:
    bench = Bench(3, dict(enumerate(blocks)))
    for slot, holder, amount in booked:
        bench.book(slot, holder, amount)
    demand = Demand(tokens, PromptKeys([tokens], lambda block_size: (range(tokens // block_size),)))
    weights = CostWeights(over_share=price, cold_turn=0.0)
    asked = claim("hot", bound, price)
    plain = {each.endpoint.slot: each for each in bench.selector.choose(demand, 0b111, weights).candidates}
    decision = bench.selector.choose(demand, 0b111, weights, claim=asked)
    for each in decision.candidates:
        load = bench.ledger.load(each.endpoint.slot)
        over = max(0.0, asked.surplus(load, each.uncached_tokens) - bound)
        assert each.over_share == pytest.approx(price * over)
        assert each.cost == pytest.approx(plain[each.endpoint.slot].cost + price * over)
    chosen = decision.chosen
    surplus = asked.surplus(bench.ledger.load(chosen.endpoint.slot), chosen.uncached_tokens)
    unhindered = [other for other in decision.candidates if not other.over_share]
    for other in unhindered:
        saved = other.cost - plain[chosen.endpoint.slot].cost
        assert surplus <= bound + max(0.0, saved) / price + 1e-6


# One class hammers a prefix that endpoint `a` holds; another has its own prefix there.

SAVED = 8000


def hammer(bound: int | None) -> tuple[list[str], float]:
    """Where the victim's requests went, and the most that the hot class was over its share on `a` beyond what that
    saved it, at the price.
    """
    shared: dict[str, Any] = {"quantum": 100, "selection": CostWeights(uncached=2.0, crowding=0.0)}
    hot = PolicyClass(name="hot", endpoint_share_bound=bound, **shared)
    fleet = Fleet([hot, PolicyClass(name="victim", **shared)], ["a", "b", "c"])
    fleet.selector.index = Caches({0: SAVED // 16})
    unread: dict[str, list[Released]] = {"a": [], "b": [], "c": []}
    worst = 0.0
    price = CostWeights().over_share

    def send(name: str, tokens: int) -> Released:
        prompt = PromptKeys([tokens], lambda block_size: (range(tokens // block_size),))
        fleet.submit(name, tokens, prompt=prompt)
        released = fleet.released[-1]
        unread[released.decision.endpoint.spec.name].append(released)
        return released

    fleet.ledger.prefill_done(send("victim", 3000).booking)  # it decodes for as long as this lasts
    went = []
    for step in range(60):
        for _ in range(2):
            chosen, *others = send("hot", SAVED + 1000).decision.candidates
            if chosen.endpoint.slot == 0:
                elsewhere = min(other.cost for other in others)
                saved = elsewhere - (chosen.cost - chosen.over_share)
                surplus = Claim("hot", 100, 0, price).surplus(fleet.ledger.load(0), 0)
                worst = max(worst, surplus - saved / price)
        if step % 3 == 2:
            went.append(send("victim", 3000).decision.endpoint.spec.name)
        for waiting in unread.values():
            if waiting and step % 4:
                fleet.ledger.prefill_done(waiting.pop(0).booking)
    return went, worst


def test_a_class_that_hammers_one_prefix_pushes_another_off_its_pod() -> None:
    went, worst = hammer(None)
    assert set(went) != {"a"}, "without a bound there is nothing to show"
    assert worst > 4000, "tokens over its share, and nothing to show for them"


def test_with_a_bound_it_gives_way_and_the_other_keeps_its_pod() -> None:
    went, worst = hammer(1000)
    assert went == ["a"] * 20
    assert worst <= 1000
