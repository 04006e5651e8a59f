"""The pool: identities, slots, and what its listeners hear, and when."""

from __future__ import annotations

from typing import Any

from picker.pool.endpoint import EndpointSpec, EngineReport
from picker.pool.pool import Pool, PoolChange


def spec(name: str, **changes: Any) -> EndpointSpec:
    return EndpointSpec(**{"uid": name, "name": name, "address": "10.0.0.1", "port": 8000, **changes})


def pool_of(*names: str, **settings: Any) -> tuple[Pool, list[PoolChange]]:
    pool = Pool(**settings)
    heard: list[PoolChange] = []
    pool.replace([spec(name) for name in names])
    pool.subscribe(heard.append)
    return pool, heard


def names(*groups: Any) -> list[list[str]]:
    return [[endpoint.spec.name for endpoint in group] for group in groups]


def test_an_empty_answer_is_an_answer() -> None:
    pool = Pool()
    heard: list[PoolChange] = []
    pool.subscribe(heard.append)
    assert not pool.synced
    assert not pool.replace([])
    assert pool.synced
    assert len(heard) == 1, "that the source has spoken is news"
    pool.replace([])
    assert len(heard) == 1


def test_reconciling_tells_who_came_who_left_and_who_changed() -> None:
    pool, heard = pool_of("a", "b")
    kept = pool.get("b")
    pool.replace([spec("b", ready=False), spec("c")])
    assert names(heard[0].added, heard[0].removed, heard[0].changed) == [["c"], ["a"], ["b"]]
    assert pool.get("b") is kept
    assert pool.replace([spec("b", ready=False), spec("c")]) == PoolChange()
    assert len(heard) == 1


def test_a_slot_is_given_away_only_after_everybody_has_heard_that_it_is_free() -> None:
    pool, heard = pool_of("a", "b")
    pool.replace([spec("b"), spec("c")])
    slots = {endpoint.spec.name: endpoint.slot for endpoint in (*heard[0].added, *heard[0].removed)}
    assert slots["a"] != slots["c"]
    pool.replace([spec("b"), spec("c"), spec("d")])
    assert heard[1].added[0].slot == slots["a"]


def test_the_same_address_under_a_new_identity_is_another_endpoint() -> None:
    pool, heard = pool_of("a")
    old = pool.get("a")
    pool.replace([spec("a", uid="other")])
    assert pool.get("a") is None
    assert pool.get("other") is not old
    assert names(heard[0].added, heard[0].removed) == [["a"], ["a"]]


def test_endpoints_of_a_mask_come_by_slot() -> None:
    pool, _ = pool_of("a", "b", "c", "d")
    pool.replace([spec(name) for name in "acd"])
    assert names(pool.in_mask(0b1111), pool.in_mask(0b1001), pool.in_mask(0b0010)) == [
        ["a", "c", "d"],
        ["a", "d"],
        [],
    ]


def test_what_is_over_the_limit_is_left_out_and_counted() -> None:
    pool, _ = pool_of("a", "b", "c", max_endpoints=2)
    assert (len(pool), pool.stats.over_limit) == (2, 1)


def test_a_fence_is_announced_once_and_stays_over_a_change() -> None:
    pool, heard = pool_of("a")
    for _ in range(2):
        pool.fence("a", fenced=True)
    assert len(heard) == 1
    pool.replace([spec("a", labels={"zone": "west"})])
    endpoint = pool.get("a")
    assert endpoint is not None
    assert endpoint.fenced
    pool.fence("nobody", fenced=True)


def test_reports_are_news_only_where_they_change_who_may_be_chosen() -> None:
    pool, heard = pool_of("a")
    pool.report("a", EngineReport(at=1.0, running=3))
    assert not heard
    pool.report("a", EngineReport(at=2.0, adapters=frozenset({"lora"}), max_adapters=2))
    assert len(heard) == 1
    assert pool.adapters() == {"lora"}
    pool.report("a", EngineReport(at=3.0, adapters=frozenset({"lora"}), max_adapters=1))
    assert len(heard) == 2, "there is no room for another adapter any more"
    assert pool.report("gone", EngineReport(at=1.0)) is None


def test_an_adapter_without_requests_is_still_one() -> None:
    pool, _ = pool_of("a")
    for at, names in enumerate([{"lora", "other"}, {"other"}, set[str]()]):
        pool.report("a", EngineReport(at=float(at), adapters=frozenset(names), max_adapters=2))
        assert pool.adapters() == {"lora", "other"}
    for number in range(5000):
        pool.report("a", EngineReport(at=3.0, adapters=frozenset({str(number)}), max_adapters=2))
    assert len(pool.adapters()) == 4096
    assert "4999" in pool.adapters()
    assert "lora" not in pool.adapters()
    pool.report("a", EngineReport(at=4.0))
    assert not pool.adapters(), "no engine loads any"
    pool.report("a", EngineReport(at=5.0, adapters=frozenset({"lora"}), max_adapters=2))
    pool.replace([spec("b")])
    assert not pool.adapters(), "the last that loads any has left"


def test_block_sizes_follow_events_then_reports_then_configuration() -> None:
    pool, _ = pool_of("a", "b")
    assert pool.block_sizes() == {16: 0b11}
    pool.replace([spec("a", block_size=32), spec("b")])
    assert pool.block_sizes() == {32: 0b01, 16: 0b10}
    pool.report("a", EngineReport(at=1.0, block_size=64))
    assert pool.block_sizes() == {64: 0b01, 16: 0b10}
    endpoint = pool.get("a")
    assert endpoint is not None
    pool.learn_block_size(endpoint, 128)
    assert pool.block_sizes() == {128: 0b01, 16: 0b10}
