"""What telemetry makes of the queue's outcomes."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from picker.kvcache.index import KvIndex
from picker.policy import load_policy
from picker.pool.calibration import Calibration
from picker.pool.endpoint import EndpointSpec, EngineReport
from picker.pool.ledger import Ledger
from picker.pool.pool import Pool
from picker.queueing.admission import AdmissionQueue
from picker.queueing.work import Dropped, Released, Work
from picker.selection.constraints import Constraints
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand, Selector
from picker.telemetry import ClassStats, Telemetry
from picker.telemetry.decisions import Candidate, Rejection

POLICY = """
default_policy_family: standard
uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
policy_classes:
  - {name: standard, policy_family: standard, cache_bucket: all, quantum: 100}
"""


def outcome(
    *,
    allow: str | None = None,
    ready: bool = True,
    policy: str = POLICY,
    calibration: Calibration | None = None,
) -> tuple[Telemetry, Released | Dropped]:
    """One request to two endpoints. A calibration: they are that fast, and a request runs on each."""
    pool = Pool()
    pool.replace(
        [
            EndpointSpec("u1", "a", "10.0.0.1", 80, ready=ready),
            EndpointSpec("u2", "b", "10.0.0.2", 80, ready=ready),
        ]
    )
    ledger = Ledger()
    pool.subscribe(ledger.pool_changed)
    if calibration is not None:
        for endpoint in pool:
            ledger.book(endpoint, 0, 0.0)
    selector = Selector(pool, ledger, KvIndex(), calibration or Calibration())
    queue = AdmissionQueue(load_policy(policy), selector)
    telemetry = Telemetry(clock=lambda: 5.0, version="0")
    allowed = (frozenset({allow}),) if allow else ()
    demand = Demand(30, PromptKeys.of_tokens([range(30)]), Constraints(allow=allowed))
    policy_class = queue.policy.profile("m").resolve(None, 30)
    (result,) = queue.submit(Work("r1", 3.0, demand, policy_class, model="m"), 5.0)
    return telemetry, result


def test_a_dispatch_is_recorded_with_its_reasons() -> None:
    telemetry, released = outcome(allow="a")
    assert isinstance(released, Released)
    telemetry.released(released)
    (record,) = telemetry.decisions
    assert (record.id, record.outcome, record.policy_class, record.model) == (
        "r1",
        "dispatched",
        "standard",
        "m",
    )
    assert (record.prompt_tokens, record.cost, record.wait, record.estimated) == (30, 30, 2.0, False)
    assert record.chosen == "10.0.0.1:80"
    terms = {"uncached_tokens": 30, "booked_prefill_tokens": 0, "running_requests": 0}
    assert record.candidates == (Candidate("10.0.0.1:80", "a", record.candidates[0].total, 0, terms),)
    assert record.rejected == (Rejection("10.0.0.2:80", "b", "not_allowed"),)
    assert record.lane == "in 1 named"
    assert (record.deficit_before, record.deficit) == (released.deficit_before, released.deficit_after)
    assert record.deficit_before - record.deficit in (0, 30), "an empty class keeps neither debt nor credit"
    assert record.prefill == ""
    assert telemetry.requests.prompt_tokens == 30


def test_what_those_who_decode_cost_is_recorded_where_their_pace_is_learned() -> None:
    calibration = Calibration(min_samples=1)
    calibration.observe(0, 1000, 0.1)
    for number in range(20):
        told = EngineReport(at=0.0, inter_token_seconds=2.0 * number, inter_tokens=100.0 * number)
        calibration.inter_token.observe(0, told)
    policy = POLICY + "selection: {decode_interference: 0.5}\n"
    telemetry, released = outcome(allow="a", policy=policy, calibration=calibration)
    assert isinstance(released, Released)
    telemetry.released(released)
    (record,) = telemetry.decisions
    assert record.candidates[0].terms["decode_interference"] == pytest.approx(0.5 * 0.02 * 10_000)


def test_a_refusal_is_recorded_with_its_reason() -> None:
    telemetry, dropped = outcome(ready=False)
    assert isinstance(dropped, Dropped)
    telemetry.dropped(dropped)
    (record,) = telemetry.decisions
    assert (record.outcome, record.chosen, record.wait) == ("no_endpoint", "", 2.0)
    assert telemetry.requests.prompt_tokens == 0


def test_reported_tokens_show_the_drift_of_predictions() -> None:
    telemetry = Telemetry(clock=lambda: 0.0, version="0")
    telemetry.reported(predicted=100, cached=80)
    telemetry.reported(predicted=0, cached=5)
    assert telemetry.requests.reported_cached_tokens == 85
    assert telemetry.requests.prediction_error_tokens == 25


async def test_run_takes_samples_until_cancelled() -> None:
    sampled = asyncio.Event()

    def classes() -> list[ClassStats]:
        sampled.set()
        return []

    telemetry = Telemetry(clock=lambda: 0.0, version="0")
    telemetry.sources.classes = classes
    task = asyncio.create_task(telemetry.run())
    await asyncio.wait_for(sampled.wait(), 60)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
