"""Sessions: bounded in number and time, by uid, and a preference that gives way."""

from __future__ import annotations

from collections import OrderedDict
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.policy.model import CostWeights
from picker.pool.endpoint import EndpointSpec
from picker.pool.ledger import Ledger
from picker.pool.pool import Pool
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand, Selector
from picker.selection.sessions import Sessions
from tests.selection.test_endpoint_share import Caches

ALICE, BOB = ("acme", "alice"), ("acme", "bob")


class TestMemory:
    def test_a_session_is_at_the_endpoint_of_its_last_request(self) -> None:
        sessions = Sessions()
        assert sessions.endpoint_of(ALICE) is None
        for uid in ("a", "a", "b"):
            sessions.sent(ALICE, uid, 0.0)
        assert sessions.endpoint_of(ALICE) == "b"
        assert (sessions.stats.started, sessions.stats.kept, sessions.stats.moved) == (1, 1, 1)

    def test_the_same_id_of_another_tenant_is_another_session(self) -> None:
        sessions = Sessions()
        sessions.sent(("acme", "1"), "a", 0.0)
        sessions.sent(("evil", "1"), "b", 0.0)
        sessions.finish(("evil", "1"))
        assert sessions.endpoint_of(("acme", "1")) == "a"

    def test_silence_ends_it_and_every_request_puts_that_off(self) -> None:
        sessions = Sessions(ttl=10.0)
        sessions.sent(ALICE, "a", 0.0)
        sessions.sent(BOB, "b", 5.0)
        sessions.sent(ALICE, "a", 9.0)
        sessions.expire(15.0)
        assert (sessions.endpoint_of(ALICE), sessions.endpoint_of(BOB)) == ("a", None)
        sessions.expire(18.999)
        assert sessions.endpoint_of(ALICE) == "a"
        sessions.expire(19.0)
        assert (sessions.endpoint_of(ALICE), sessions.stats.ended["expired"], sessions.stats.known) == (
            None,
            2,
            0,
        )

    def test_the_one_used_least_lately_makes_room(self) -> None:
        sessions = Sessions(max_sessions=2)
        for number, session in enumerate((ALICE, BOB, ALICE, ("acme", "carol"))):
            sessions.sent(session, "a", float(number))
        assert sessions.endpoint_of(BOB) is None
        assert sessions.endpoint_of(ALICE) == "a"
        assert (sessions.stats.known, sessions.stats.ended["evicted"]) == (2, 1)

    def test_a_finished_session_is_forgotten_and_may_begin_anew(self) -> None:
        sessions = Sessions()
        sessions.sent(ALICE, "a", 0.0)
        sessions.finish(ALICE)
        sessions.finish(ALICE)
        assert (sessions.endpoint_of(ALICE), sessions.stats.ended["finished"]) == (None, 1)
        sessions.sent(ALICE, "b", 1.0)
        assert (sessions.endpoint_of(ALICE), sessions.stats.started) == ("b", 2)

    def test_it_follows_the_endpoint_that_really_served(self) -> None:
        sessions = Sessions(ttl=10.0)
        sessions.sent(ALICE, "a", 0.0)
        sessions.served_by(ALICE, "b")
        assert sessions.endpoint_of(ALICE) == "b"
        sessions.served_by(BOB, "b")
        assert sessions.endpoint_of(BOB) is None, "one that has ended is not begun by that"

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["sent", "finish", "expire", "served"]),
                st.integers(0, 9),
                st.floats(0, 8),
            ),
            max_size=60,
        )
    )
    @settings(deadline=None, max_examples=100)
    def test_it_is_a_plain_map_with_a_bound_and_an_end(self, steps: list[tuple[str, int, float]]) -> None:
        sessions = Sessions(ttl=10.0, max_sessions=4)
        model: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()
        now = 0.0
        for what, number, passed in steps:
            now += passed
            key, uid = ("t", str(number)), f"pod-{number % 3}"
            if what in ("sent", "expire"):
                for old in [old for old, (_, at) in model.items() if at + 10.0 <= now]:
                    del model[old]
            match what:
                case "sent":
                    sessions.sent(key, uid, now)
                    model.pop(key, None)
                    if len(model) == 4:
                        model.popitem(last=False)
                    model[key] = (uid, now)
                case "finish":
                    sessions.finish(key)
                    model.pop(key, None)
                case "expire":
                    sessions.expire(now)
                case "served":
                    sessions.served_by(key, uid)
                    if key in model:
                        model[key] = (uid, model[key][1])
            found = {k: sessions.endpoint_of(k) for k in (("t", str(n)) for n in range(10))}
            assert found == {k: model[k][0] if k in model else None for k in found}
            assert sessions.stats.known == len(model) <= 4


class Bench:
    """Two endpoints, a session that was on the first, and nothing cached anywhere."""

    def __init__(self, **options: Any) -> None:
        self.pool, self.ledger = Pool(), Ledger()
        self.pool.subscribe(self.ledger.pool_changed)
        self.set("e0", "e1")
        self.sessions = Sessions(**options)
        self.selector = Selector(self.pool, self.ledger, Caches({}), random=Random(3), sessions=self.sessions)
        self.sessions.sent(ALICE, "e0", 0.0)

    def set(self, *uids: str) -> None:
        self.pool.replace(EndpointSpec(uid, uid, f"10.0.0.{uid[1]}", 8000) for uid in uids)

    def load(self, number: int, tokens: int) -> None:
        endpoint = self.pool.by_slot(number)
        assert endpoint is not None
        self.ledger.book(endpoint, tokens, 0.0)

    def choose(self, session: tuple[str, str] | None = ALICE, mask: int = 0b11) -> str:
        demand = Demand(1000, PromptKeys.unknown(), session=session)
        weights = CostWeights(session_tokens=4000.0, running_tokens=0.0)
        return self.selector.choose(demand, mask, weights).endpoint.spec.uid


@pytest.mark.parametrize("sticky", [False, True])
class TestChoice:
    def test_it_stays_where_it_was(self, sticky: bool) -> None:
        bench = Bench(sticky=sticky)
        bench.load(0, 3900)
        assert {bench.choose() for _ in range(20)} == {"e0"}
        assert bench.choose(BOB) == "e1"
        assert bench.choose(None) == "e1"

    def test_it_goes_elsewhere_when_its_endpoint_cannot_take_it(self, sticky: bool) -> None:
        bench = Bench(sticky=sticky)
        assert bench.choose(mask=0b10) == "e1"

    def test_a_new_pod_at_the_same_address_is_not_its_own(self, sticky: bool) -> None:
        bench = Bench(sticky=sticky)
        bench.pool.replace(
            [EndpointSpec("e2", "e0", "10.0.0.0", 8000), EndpointSpec("e1", "e1", "10.0.0.1", 8000)]
        )
        found = bench.pool.get("e2")
        assert found is not None
        bench.ledger.book(found, 1, 0.0)
        assert bench.choose(mask=-1) == "e1"

    def test_a_pod_that_comes_back_is(self, sticky: bool) -> None:
        bench = Bench(sticky=sticky)
        bench.set("e1")
        assert bench.choose(mask=-1) == "e1"
        bench.set("e0", "e1")
        assert {bench.choose(mask=-1) for _ in range(20)} == {"e0"}


def test_a_preference_gives_way_when_the_wait_there_costs_more_and_stickiness_does_not() -> None:
    for sticky, expected in ((False, "e1"), (True, "e0")):
        bench = Bench(sticky=sticky)
        bench.load(0, 4100)
        assert bench.choose() == expected


def test_the_preference_is_among_the_terms() -> None:
    bench = Bench()
    demand = Demand(1000, PromptKeys.unknown(), session=ALICE)
    stays, leaves = bench.selector.choose(demand, 0b11, CostWeights(session_tokens=500.0)).candidates
    assert (stays.off_session, leaves.off_session) == (0.0, 500.0)
    assert leaves.cost == stays.cost + 500.0
