"""The exposition: what a scrape gives, from whatever the rooms hold at that moment."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from picker.admin.token_review import TokenReviewStats
from picker.extproc.access_log import AccessLogStats
from picker.extproc.exchange import ExchangeStats
from picker.extproc.server import ExtProcStats
from picker.faces.crew import CrewStats
from picker.faces.tally import ProcessStats
from picker.kvcache.accuracy import AccuracyStats
from picker.kvcache.asking import AskingStats
from picker.kvcache.engine_blocks import BlockStats
from picker.kvcache.index import IndexStats
from picker.kvcache.predicted import PredictedStats
from picker.kvcache.stream import StreamStats
from picker.policy.reload import PolicyFileStats
from picker.pool.kube.source import KubeStats
from picker.pool.kube.watch import WatchStats
from picker.pool.lease import LeaseStats
from picker.pool.ledger import LedgerStats
from picker.pool.pool import PoolStats
from picker.pool.scraper import ScraperStats
from picker.pool.static_file import PoolFileStats
from picker.queueing.fairness import Gap
from picker.requests import RewriteStats
from picker.rpc import BudgetStats
from picker.selection.disaggregation import DisaggregationStats
from picker.selection.sessions import SessionStats
from picker.telemetry import ClassStats, EndpointStats, Telemetry
from picker.telemetry.catalogue import CATALOGUE, HISTOGRAMS, ROOM_METRICS, STAGES, Kind
from picker.telemetry.logs import LogStats
from picker.telemetry.observer import LoopStats, RequestStats
from picker.telemetry.recording import RecordingStats
from picker.tokens.service import TokenStats

ROOMS = {
    "extproc": ExtProcStats,
    "bodies": BudgetStats,
    "access_log": AccessLogStats,
    "exchanges": ExchangeStats,
    "token_review": TokenReviewStats,
    "requests": RequestStats,
    "ledger": LedgerStats,
    "pool": PoolStats,
    "pool_file": PoolFileStats,
    "kube": KubeStats,
    "kube_watch": WatchStats,
    "scraper": ScraperStats,
    "policy_file": PolicyFileStats,
    "kv_index": IndexStats,
    "kv_asking": AskingStats,
    "kv_streams": StreamStats,
    "kv_blocks": BlockStats,
    "predicted_index": PredictedStats,
    "accuracy": AccuracyStats,
    "tokens": TokenStats,
    "lease": LeaseStats,
    "fairness": Gap,
    "fairness_worst": Gap,
    "recording": RecordingStats,
    "sessions": SessionStats,
    "rewriting": RewriteStats,
    "disaggregation": DisaggregationStats,
    "log": LogStats,
    "faces": CrewStats,
    "face": ProcessStats,
    "loop": LoopStats,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def telemetry(clock: Clock) -> Telemetry:
    return Telemetry(clock=clock, version="1.2.3")


def scrape(telemetry: Telemetry) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name -> labels -> value, as a Prometheus client reads it."""
    text, _ = telemetry.metrics.expose()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {}), f"twice: {sample.name} {labels}"
            found[sample.name][labels] = sample.value
    return found


def test_class_gauges_are_the_truth_at_scrape_time(telemetry: Telemetry) -> None:
    waiting = {"premium": 3}
    telemetry.sources.classes = lambda: [
        ClassStats(name, 512, waiting_requests=count, dropped={"deadline": 2}, blocked={"deficit": 1.5})
        for name, count in waiting.items()
    ]
    labels = (("policy_class", "premium"),)
    assert scrape(telemetry)["picker_queue_requests"] == {labels: 3.0}
    waiting["premium"] = 0
    after = scrape(telemetry)
    assert after["picker_queue_requests"] == {labels: 0.0}
    assert after["picker_dropped_requests_total"] == {(*labels, ("reason", "deadline")): 2.0}
    assert after["picker_class_blocked_seconds_total"] == {(*labels, ("reason", "deficit")): 1.5}


def test_each_room_is_looked_at_once_in_a_scrape(telemetry: Telemetry) -> None:
    looks = []

    def look() -> Gap:
        looks.append(1)
        return Gap(0.5, 2.5)

    telemetry.sources.stats["fairness"] = look
    found = scrape(telemetry)
    assert (found["picker_fairness_gap_rounds"], found["picker_fairness_bound_rounds"]) == (
        {(): 0.5},
        {(): 2.5},
    )
    assert len(looks) == 1


def test_endpoints_that_leave_leave_no_series(telemetry: Telemetry) -> None:
    endpoints = [EndpointStats("1", "a", "10.0.0.1:80", kv_usage=0.5), EndpointStats("2", "b", "10.0.0.2:80")]
    telemetry.sources.endpoints = lambda: endpoints
    first = scrape(telemetry)
    assert len(first["picker_endpoint_ready"]) == 2
    assert len(first["picker_endpoint_kv_usage_ratio"]) == 1, "what is not reported is no sample, not zero"
    assert first["picker_pool_endpoints"] == {(): 2.0}
    endpoints.clear()
    assert "picker_endpoint_ready" not in scrape(telemetry)


def test_two_endpoints_with_equal_labels_do_not_break_the_exposition(telemetry: Telemetry) -> None:
    twins = [
        EndpointStats("1", "a", "10.0.0.1:80", running=1),
        EndpointStats("2", "a", "10.0.0.1:80", running=2),
    ]
    telemetry.sources.endpoints = lambda: twins
    assert list(scrape(telemetry)["picker_endpoint_booked_requests"].values()) == [1.0]


def test_labels_with_any_text_in_them_are_escaped(telemetry: Telemetry) -> None:
    name = 'a"} 1\npicker_forged 2\\'
    telemetry.sources.classes = lambda: [ClassStats(name, 1)]
    found = scrape(telemetry)
    assert "picker_forged" not in found
    assert found["picker_class_quantum_tokens"] == {(("policy_class", name),): 1.0}


def test_histogram_labels_are_bounded(clock: Clock) -> None:
    telemetry = Telemetry(clock=clock, version="0")
    for number in range(1000):
        telemetry.metrics.queue_wait(f"class-{number}", 0.1)
    counts = scrape(telemetry)["picker_queue_wait_seconds_count"]
    assert len(counts) == 201
    assert counts[(("policy_class", "other"),)] == 800.0


def test_shares_appear_with_their_windows(telemetry: Telemetry, clock: Clock) -> None:
    cost = 0
    telemetry.sources.classes = lambda: [
        ClassStats("premium", 3, waiting_requests=1, dispatched_cost=3 * cost),
        ClassStats("regular", 1, waiting_requests=1, dispatched_cost=cost),
    ]
    telemetry.shares.sample(telemetry.sources.classes(), 0.0)
    cost, clock.now = 100, 10.0
    telemetry.shares.sample(telemetry.sources.classes(), 10.0)
    found = scrape(telemetry)
    labels = (("policy_class", "premium"), ("window", "1m"))
    assert found["picker_class_share_ratio"][labels] == 0.75
    assert found["picker_class_entitlement_ratio"][labels] == 0.75


@pytest.mark.parametrize("entry", ROOM_METRICS, ids=lambda entry: entry.metric.name)
def test_every_field_that_the_catalogue_reads_exists(entry: object, telemetry: Telemetry) -> None:
    stats = ROOMS[entry.room]()  # type: ignore[attr-defined]
    value = getattr(stats, entry.field)  # type: ignore[attr-defined]
    assert isinstance(value, dict) == bool(entry.metric.labels)  # type: ignore[attr-defined]


def test_all_rooms_together_make_one_valid_exposition(telemetry: Telemetry) -> None:
    telemetry.sources.stats |= {room: stats() for room, stats in ROOMS.items()}
    found = scrape(telemetry)
    assert found["picker_ledger_bookings_total"] == {(): 0.0}
    assert found["picker_build_info"] == {tuple(sorted([("version", "1.2.3"), _python(found)])): 1.0}


def _python(found: dict[str, dict[tuple[tuple[str, str], ...], float]]) -> tuple[str, str]:
    (labels,) = found["picker_build_info"]
    return next(label for label in labels if label[0] == "python")


def test_exposed_names_are_those_of_the_catalogue(telemetry: Telemetry) -> None:
    telemetry.sources.stats |= {room: stats() for room, stats in ROOMS.items()}
    text = telemetry.metrics.expose()[0].decode()
    exposed = set(re.findall(r"^# TYPE (picker_\w+) ", text, re.MULTILINE))
    exposed = {name for name in exposed if not name.endswith("_created")}
    assert exposed == {metric.name for metric in CATALOGUE} | {"picker_build_info"}


def test_names_follow_the_conventions() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(set(names)) == len(names)
    for metric in CATALOGUE:
        assert re.fullmatch(r"picker_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert metric.help.endswith("."), metric.name
        if metric.kind is Kind.HISTOGRAM:
            assert metric.name.endswith("_seconds")
    for entry in HISTOGRAMS:
        assert list(entry.buckets) == sorted(entry.buckets)


def test_stages_are_a_closed_set(telemetry: Telemetry) -> None:
    telemetry.stages["parse"](0.5)
    assert scrape(telemetry)["picker_stage_seconds_count"][(("stage", "parse"),)] == 1.0
    assert set(telemetry.stages) == set(STAGES)
    with pytest.raises(ValueError, match="not a stage"):
        telemetry.metrics.stage("lunch")


def test_openmetrics_for_who_asks_for_it(telemetry: Telemetry) -> None:
    text, content_type = telemetry.metrics.expose("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


def test_promtool_finds_nothing_to_say(telemetry: Telemetry) -> None:
    """The names and their units follow Prometheus's conventions, in its own judgement."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: Debian has it in the package prometheus")
    telemetry.sources.stats |= {room: stats() for room, stats in ROOMS.items()}
    telemetry.sources.classes = lambda: [
        ClassStats("premium", 512, dropped={"deadline": 2}, blocked={"deficit": 1.5})
    ]
    telemetry.sources.endpoints = lambda: [
        EndpointStats("1", "a", "10.0.0.1:80", 0, engine_running=1, engine_waiting=0, kv_usage=0.5)
    ]
    telemetry.metrics.queue_wait("premium", 0.1)
    telemetry.metrics.decision(0.001)
    text, _ = telemetry.metrics.expose()
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
