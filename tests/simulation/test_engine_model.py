"""The engine model: vLLM's events, conservation, preemption, aborts, and steps that span many iterations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.simulation.block_cache import BlockTable
from picker.simulation.engine_model import EngineModel, EngineShape, Job, Phase, StepCost
from picker.simulation.token_blocks import BlockRemoved, BlockStored, EventRecorder, TokenTable

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-0.32" / "recording.jsonl"
TICK = StepCost(base=1.0)


@dataclass
class Run:
    """What came of a history of arrivals: when each job gave its first and its last token."""

    first: dict[Job, float]
    last: dict[Job, float]


def run(model: EngineModel, arrivals: list[tuple[float, Job]], limit: int | None = None) -> Run:
    result = Run({}, {})
    pending = sorted(arrivals, key=lambda item: item[0])
    now = 0.0
    while True:
        while pending and pending[0][0] <= now:
            model.submit(pending.pop(0)[1])
        step = model.begin(now, limit)
        if step is None:
            if not pending:
                return result
            now = pending[0][0]
            continue
        if pending:
            step.cut(max(pending[0][0], now))
        now = step.ends
        outcome = model.end(step)
        for job in outcome.prefilled:
            result.first.setdefault(job, now)
        for job in outcome.finished:
            result.last[job] = now


def job(prompt: int, output: int = 1, family: int = 0, block_size: int = 4) -> Job:
    return Job(BlockTable([family * 1000 + i for i in range(prompt // block_size)]), prompt, output)


def test_the_events_of_each_step_are_those_of_a_real_server() -> None:
    records = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    real = [
        [(event["type"], event.get("block_hashes")) for event in record["decoded"][1]]
        for record in records
        if record["kind"] == "event"
    ]
    recorder = EventRecorder()
    model = EngineModel(EngineShape(32, 80, 8, 2048), TICK, recorder)
    ours: list[list[tuple[str, list[int] | None]]] = []
    for record in records:
        if record["kind"] != "request" or record["id"].startswith("busy"):
            if record.get("id", "").startswith("busy"):
                break
            continue
        prompt, output = record["prompt_token_ids"], record["output_token_ids"]
        request = Job(
            TokenTable(prompt + output, 32, record["body"].get("cache_salt")), len(prompt), len(output)
        )
        model.submit(request)
        while step := model.begin(0.0, 1):
            model.end(step)
            if events := recorder.take():
                ours.append(
                    [
                        ("BlockStored", list(event.block_hashes))
                        if isinstance(event, BlockStored)
                        else ("BlockRemoved", [event.block_hash])
                        for event in events
                        if isinstance(event, BlockStored | BlockRemoved)
                    ]
                )
        assert request.cached_tokens == record["cached_tokens"], record["id"]
    assert ours == real[:26]


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    model = EngineModel(EngineShape(4, 100, 8, 16), TICK)
    decoding, long = job(4, 10), job(40, 1, family=1)
    result = run(model, [(0.0, decoding), (0.5, long)])
    # 15 tokens of budget are left beside the decoding request: 40 tokens take three iterations.
    assert result.first[long] == 4.0
    assert result.last[decoding] == 10.0


def test_prompts_are_served_in_order_of_arrival() -> None:
    model = EngineModel(EngineShape(4, 100, 8, 16), TICK)
    jobs = [job(16, 1, family) for family in range(4)]
    result = run(model, [(0.0, each) for each in jobs])
    assert [result.last[each] for each in jobs] == [1.0, 2.0, 3.0, 4.0]


def test_the_number_of_running_requests_is_bounded() -> None:
    model = EngineModel(EngineShape(4, 100, 2, 64), TICK)
    jobs = [job(4, 5, family) for family in range(4)]
    result = run(model, [(0.0, each) for each in jobs])
    assert [result.last[each] for each in jobs] == [5.0, 5.0, 10.0, 10.0]


def test_prefill_costs_the_uncached_tokens_only() -> None:
    model = EngineModel(EngineShape(4, 100, 8, 1024), StepCost(base=1.0, prefill_token=0.5))
    cold, warm = job(41), job(41)
    result = run(model, [(0.0, cold), (100.0, warm)])
    assert result.last[cold] == 1.0 + 41 * 0.5
    assert result.last[warm] == 100.0 + 1.0 + 1 * 0.5
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 40)


def test_memory_pressure_preempts_the_last_admitted_and_everybody_finishes() -> None:
    model = EngineModel(EngineShape(4, 11, 8, 64), TICK)
    jobs = [job(8, 20, family) for family in range(3)]
    result = run(model, [(0.0, each) for each in jobs])
    assert jobs[0].preemptions == 0
    assert model.stats.preemptions > 0
    assert len(result.last) == 3
    assert model.stats.generated_tokens >= 60
    assert model.cache.usage == 0.0


def test_an_abort_frees_the_slot_and_the_blocks_at_once() -> None:
    model = EngineModel(EngineShape(4, 100, 1, 64), TICK)
    first, second, third = job(8, 50), job(8, 1, 1), job(8, 1, 2)
    for each in (first, second, third):
        model.submit(each)
    step = model.begin(0.0)
    assert step is not None
    model.abort(first)
    model.abort(second)
    model.end(step)
    assert not model.running
    assert model.cache.usage == 0.0
    step = model.begin(1.0)
    assert step is not None
    assert model.end(step).finished == [third]
    model.abort(third)
    assert model.stats.aborted == 2


def test_a_job_that_can_never_fit_is_refused() -> None:
    model = EngineModel(EngineShape(4, 5, 8, 64), TICK)
    with pytest.raises(ValueError, match="exceed the 16 tokens"):
        model.submit(job(12, 5))
    with pytest.raises(ValueError, match="at least one"):
        Job(BlockTable([]), 0, 1)


arrivals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 40), st.integers(1, 30), st.integers(0, 3)),
    min_size=1,
    max_size=15,
)


@settings(max_examples=200, deadline=None)
@given(arrivals, st.integers(18, 60), st.integers(1, 6), st.integers(2, 40))
def test_everybody_finishes_and_long_steps_change_nothing(
    history: list[tuple[int, int, int, int]], blocks: int, seqs: int, budget: int
) -> None:
    """The step limit is a matter of speed only, and every history drains to an empty engine."""
    shape = EngineShape(4, blocks + 1, seqs, budget + seqs)
    results = []
    for limit in (1, None):
        model = EngineModel(shape, TICK)
        jobs = [(float(at), job(prompt, output, family)) for at, prompt, output, family in history]
        result = run(model, jobs, limit)
        assert all(each.phase is Phase.DONE for _, each in jobs)
        assert not model.running
        assert not model.waiting
        assert model.cache.usage == 0.0
        assert all(result.first[each] <= result.last[each] for _, each in jobs)
        assert all(model.generated(each) == each.output_tokens for _, each in jobs)
        prompts = len(jobs) + model.stats.preemptions
        assert model.stats.inter_tokens >= model.stats.generated_tokens - prompts
        assert model.stats.inter_token_seconds == pytest.approx(model.stats.inter_tokens * TICK.base)
        results.append(
            [(result.first[each], result.last[each], each.cached_tokens) for _, each in jobs]
            + [(model.stats.prefix_hits, model.stats.preemptions)]
        )
    assert results[0] == results[1]
