"""The parts of an experiment: its workload, its figures, its confidence, its drawings."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from picker.policy import Policy, load_policy
from picker.simulation.engine_model import EngineShape, StepCost
from picker.simulation.experiments.charts import bars, lines
from picker.simulation.experiments.confidence import Estimate
from picker.simulation.experiments.contenders import CONTENDERS, contender, weights_of, without_fairness
from picker.simulation.experiments.joining import flooded, in_classes, tenant_rates, with_tenants
from picker.simulation.experiments.measures import measure
from picker.simulation.experiments.recipe import Recipe
from picker.simulation.experiments.tables import Table
from picker.simulation.replay import Pod, Run, Trip
from picker.simulation.workloads import Arrival, Workload

# A pod that prefills a token in a millisecond.
PODS = [Pod(0, EngineShape(max_num_batched_tokens=10**6), StepCost(prefill_token=0.001))]


def trip(arrived: float, first_token: float, tokens: int, name: str, cached: int = 0) -> Trip:
    return Trip(
        Arrival(arrived, tokens, 1, policy_class=name),
        arrived,
        pod=0,
        dispatched=arrived,
        first_token=first_token,
        finished=first_token,
        cached_tokens=cached,
    )


def test_a_class_that_always_waits_and_gets_less_than_its_due_falls_short() -> None:
    """Two windows of 10 s; `a` and `b` wait all the time, `a` is owed 3/4 and gets half."""
    trips = [trip(0.0, 5.0 * number, 1000, name) for number in range(1, 5) for name in ("a", "b")]
    run = Run([trip(0.0, 21.0, 1000, "a"), trip(0.0, 21.0, 1000, "b"), *trips], 0.0, 25.0)
    found = measure(run, PODS, {"a": 3, "b": 1})
    assert found.classes["a"].shortfall == pytest.approx(0.25)
    assert found.classes["b"].shortfall == 0.0
    assert found.unfairness == pytest.approx(0.25)
    assert found.classes["a"].share == pytest.approx(0.5)


def test_who_does_not_wait_all_the_time_is_owed_nothing() -> None:
    """A request that takes no longer than its own prefill has not waited."""
    run = Run(
        [trip(0.0, 1.0, 1000, "a"), *(trip(0.0, float(at), 1000, "b") for at in range(1, 30))], 0.0, 30.0
    )
    assert measure(run, PODS, {"a": 3, "b": 1}).unfairness == 0.0


def test_figures_of_a_run() -> None:
    run = Run([trip(0.0, 1.0, 100, ""), trip(1.0, 4.0, 300, "", cached=200)], 0.0, 4.0)
    run.trips.append(Trip(Arrival(2.0, 100, 1), 2.0, refused="deadline"))
    found = measure(run, PODS)
    assert (found.requests, found.refused) == (3, 1)
    assert found.ttft.mean == pytest.approx(2.0)
    assert found.hit_share == pytest.approx(0.5)
    assert found.prompt_rate == pytest.approx(100.0)
    assert found.pods[0].prefill_tokens == 200
    assert found.classes["default"].requests == 3


def test_an_interval_of_several_values() -> None:
    """By hand: mean 2, standard deviation 1, t(2) = 4.303, divided by the root of 3."""
    estimate = Estimate.of([1.0, 2.0, 3.0])
    assert estimate.mean == 2.0
    assert estimate.half_width == pytest.approx(4.303 / 3**0.5)
    assert estimate.text(".1f") == "2.0 ±2.5"
    assert Estimate.of([7.0]) == Estimate(7.0)
    assert Estimate.of([7.0]).text(".0f") == "7"
    with pytest.raises(ValueError, match="no values"):
        Estimate.of([])


def workload(*arrivals: Arrival) -> Workload:
    return Workload("w", 16, list(arrivals))


def test_classes_get_whole_tenants_and_about_the_same_work() -> None:
    arrivals = [Arrival(float(n), 100, 1, [1, 10 + n % 7], tenant=f"t{n % 7}") for n in range(70)]
    joined = in_classes(workload(*arrivals), ["a", "b", "c"])
    owners = {arrival.tenant: arrival.policy_class for arrival in joined.arrivals}
    assert all(owners[arrival.tenant] == arrival.policy_class for arrival in joined.arrivals)
    counts = [sum(arrival.policy_class == name for arrival in joined.arrivals) for name in ("a", "b", "c")]
    assert sorted(counts) == [20, 20, 30]


def test_requests_without_tenants_and_blocks_are_shared_out_one_by_one() -> None:
    joined = in_classes(workload(*(Arrival(float(n), 10, 1) for n in range(8))), ["a", "b"])
    assert sum(arrival.policy_class == "a" for arrival in joined.arrivals) == 4


def test_a_prefix_tree_stays_with_one_tenant() -> None:
    arrivals = [Arrival(float(n), 12, 1, [0, n % 5, 100 + n]) for n in range(100)] + [Arrival(200.0, 1, 1)]
    joined = with_tenants(workload(*arrivals), {"a": 1.0, "b": 1.0}, seed=2)
    owners = {(arrival.blocks[1], arrival.tenant) for arrival in joined.arrivals if arrival.blocks}
    assert len(owners) == 5
    assert {tenant for _, tenant in owners} <= {"a", "b"}
    assert joined.name == "w+tenants"


def test_a_flood_multiplies_one_class_by_prompts_of_its_own() -> None:
    calm = workload(
        Arrival(5.0, 64, 1, [1, 2, 3], policy_class="a"),
        Arrival(6.0, 64, 1, [1, 2, 4], policy_class="a"),
        Arrival(7.0, 64, 1, [1, 9], policy_class="b"),
    )
    wild = flooded(calm, "a", 10, seed=3)
    flood = [arrival for arrival in wild.arrivals if arrival.policy_class == "a"]
    assert len(flood) == 20
    assert len(wild.arrivals) - len(flood) == 1
    assert [arrival.at for arrival in wild.arrivals] == sorted(arrival.at for arrival in wild.arrivals)
    assert {arrival.blocks[0] for arrival in flood} == {1}
    seconds = [arrival.blocks[1] for arrival in flood]
    assert len(set(seconds)) == 10, "each copy is a population of its own, alike inside"


def test_rates_of_tenants_are_read(tmp_path: Path) -> None:
    (tmp_path / "clients.csv").write_text("client,arrival_s\n3,0\n3,1\n5,2\n")
    assert tenant_rates(tmp_path / "clients.csv") == {"client-3": 2.0, "client-5": 1.0}
    (tmp_path / "clients.json").write_text(
        '[{"client": 7, "windows_600s": {"0": [1.5, 1], "600": [0.5, 1]}}]'
    )
    assert tenant_rates(tmp_path / "clients.json") == {"client-7": 2.0}
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="neither"):
        tenant_rates(tmp_path / "other.csv")


def test_traces_are_known_by_what_is_in_them(tmp_path: Path) -> None:
    files = {
        "m.jsonl": json.dumps({"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]}),
        "a.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44",
        "v.csv": "req_id,client,arrival_s,prompt_len,output_len\n0,1,0.5,10,20",
        "s.json": json.dumps(
            [
                {
                    "client": 1,
                    "windows_600s": {str(14 * 3600): [1.0, 1.0]},
                    "lengths_6h_quantiles_0_2pct_steps": {"0": {"in_q": [10, 20], "out_q": [1, 2]}},
                }
            ]
        ),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    with gzip.open(tmp_path / "l.jsonl.gz", "wt") as file:
        line = {
            "session": "s",
            "turn": 0,
            "offset_ms": 0,
            "input_length_est": 20,
            "output_length_est": 3,
            "hash_ids": [1],
        }
        file.write(json.dumps(line) + "\n")
    names = {name: Recipe(str(tmp_path / name)).make(0).name for name in (*files, "l.jsonl.gz")}
    assert names == {
        "m.jsonl": "mooncake-conversation",
        "a.csv": "azure-conversation",
        "v.csv": "vtc-arena",
        "s.json": "servegen",
        "l.jsonl.gz": "lmcache-agents",
    }


def test_without_fairness_there_is_one_queue_behind_the_widest_gate() -> None:
    text = """
default_policy_family: a
uncached_isl_buckets: [{min_tokens: 0, bucket: x}, {min_tokens: 100, bucket: y}]
policy_classes:
  - {name: ax, policy_family: a, cache_bucket: x, quantum: 10, prefill_busy_threshold: 500, queue_policy: wspt}
  - {name: ay, policy_family: a, cache_bucket: y, quantum: 20, prefill_busy_threshold: 900, queue_policy: wspt}
  - {name: bx, policy_family: b, cache_bucket: x, quantum: 5, prefill_busy_threshold: 100}
  - {name: by, policy_family: b, cache_bucket: y, quantum: 5, prefill_busy_threshold: 100}
"""
    policy = load_policy(text)
    alone = without_fairness(policy)
    assert weights_of(policy) == {"a": 30, "b": 10}
    (only,) = alone.classes()
    assert (only.queue_policy, only.prefill_busy_threshold) == ("fcfs", 900)
    assert alone.root.resolve("b", 3) is only


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_can_be_made(name: str) -> None:
    pods = [Pod(index, EngineShape(), StepCost(base=0.01)) for index in range(2)]
    picker = contender(name, pods, Policy.default(), seed=1)
    (dispatch,) = picker.arrive(0.0, Arrival(0.0, 100, 1, [1]))
    assert dispatch.pod in (0, 1)


def test_drawings_are_well_formed_and_say_what_they_show() -> None:
    drawn = lines({"a<b": [(0.01, 0.0), (10.0, 1.0)], "c": [(0.5, 0.5)]}, "seconds", "part", log_x=True)
    figure = ElementTree.fromstring(drawn)
    assert "a<b" in "".join(figure.itertext())
    assert len(figure.findall(".//polyline")) == 2
    barred = ElementTree.fromstring(bars({"x": {"a": Estimate(1.0, 0.5), "b": Estimate(0.0)}}, "seconds"))
    heights = [float(bar.attrib["height"]) for bar in barred.iter("rect")]
    assert heights[0] > heights[1] == 0.0
    assert lines({}, "x", "y") == bars({}, "y")


def test_a_table_is_the_same_everywhere() -> None:
    table = Table("T", ["name", "value"], [["a", "1"], ["b", "2"]])
    table.mark_lowest(1, [1.0, 2.0])
    assert table.markdown() == "| name | value |\n|---|---:|\n| a | **1** |\n| b | 2 |"
    assert ElementTree.fromstring(table.html()).find(".//td[@class='best']").text == "1"  # type: ignore[union-attr]
