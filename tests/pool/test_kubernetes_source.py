"""The watches against an API server that misbehaves in every known way (level W of the cases)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from picker.policy.rewrites import ModelRewrites, Split
from picker.pool.endpoint import EndpointSpec
from picker.pool.kube.api import KubeApi
from picker.pool.kube.pod_table import KubeObject
from picker.pool.kube.source import KubernetesSource
from picker.pool.kube.watch import Change, WatchFault, WatchLoop, WatchSettings, WatchStats
from tests.pool.fake_kube import (
    NODES,
    PODS,
    POOLS,
    REWRITES,
    FakeKube,
    Fault,
    Json,
    connect,
    drop,
    hold,
    objectives,
    pod,
    pool,
    refuse,
    say_and_end,
    status_object,
)
from tests.pool.waiting import until

QUICK = WatchSettings(silence=3.0, first_backoff=0.002, max_backoff=0.02, absent_retry=0.02, page_size=3)


class Follower:
    """A source that runs, and what it last said."""

    def __init__(self, api: KubeApi, settings: WatchSettings, watch_nodes: bool) -> None:
        self.specs: list[EndpointSpec] | None = None
        self.priorities: Mapping[str, int] | None = None
        self.rewrites = ModelRewrites()
        self.said = 0
        self.heard: Callable[[], None] = lambda: None
        self.source = KubernetesSource(
            api,
            "default",
            "pool",
            self._take,
            on_priorities=self._take_priorities,
            on_rewrites=self._take_rewrites,
            watch_nodes=watch_nodes,
            settings=settings,
        )
        self.task = asyncio.create_task(self.source.run())

    def _take(self, specs: list[EndpointSpec]) -> None:
        self.specs = specs
        self.said += 1
        self.heard()

    def _take_priorities(self, priorities: Mapping[str, int]) -> None:
        self.priorities = priorities

    def _take_rewrites(self, rewrites: ModelRewrites) -> None:
        self.rewrites = rewrites

    @property
    def watches(self) -> WatchStats:
        return self.source.stats.watches

    @property
    def names(self) -> list[str]:
        """The endpoints that may get requests."""
        return sorted(spec.name for spec in self.specs or [] if spec.ready and not spec.cordoned)

    async def settles(self, *names: str) -> None:
        await until(lambda: self.specs is not None and self.names == sorted(names))


Start = Callable[..., Awaitable[Follower]]


@pytest.fixture
async def follow(kube: FakeKube, tmp_path: Path) -> AsyncIterator[Start]:
    running: list[tuple[Follower, KubeApi]] = []

    async def start(settings: WatchSettings = QUICK, watch_nodes: bool = False) -> Follower:
        api, _ = await connect(kube, tmp_path)
        follower = Follower(api, settings, watch_nodes)
        running.append((follower, api))
        return follower

    yield start
    for follower, api in running:
        follower.task.cancel()
        await asyncio.gather(follower.task, return_exceptions=True)
        await api.close()


@pytest.fixture
def cluster(kube: FakeKube) -> FakeKube:
    kube.put(POOLS, pool())
    kube.put(PODS, pod("a", "10.0.0.1"))
    return kube


async def watching(kube: FakeKube) -> None:
    await until(lambda: kube.watchers(PODS) == 1 and kube.watchers(POOLS) == 1)


async def test_pods_come_and_go(cluster: FakeKube, follow: Start) -> None:
    follower = await follow()
    await follower.settles("a")
    await watching(cluster)
    cluster.put(PODS, pod("b", "10.0.0.2"))
    cluster.put(PODS, pod("other", "10.0.0.3", labels={"app": "y"}))
    await follower.settles("a", "b")
    cluster.delete(PODS, pod("a"))
    await follower.settles("b")
    assert follower.watches.faults == dict.fromkeys(WatchFault, 0)


async def test_a_long_list_is_read_page_by_page(cluster: FakeKube, follow: Start) -> None:
    names = [f"p{number}" for number in range(8)]
    for number, name in enumerate(names):
        cluster.put(PODS, pod(name, f"10.0.1.{number}"))
    follower = await follow()
    await follower.settles("a", *names)
    assert cluster.count("LIST", PODS) == 3


def error_event(code: int) -> dict[str, object]:
    return {"type": "ERROR", "object": status_object(code, "scripted")}


@pytest.mark.parametrize(
    ("faults", "kind", "relists"),
    [
        ([say_and_end(error_event(410))], WatchFault.EXPIRED, True),
        ([say_and_end(status_object(410, "Expired"))], WatchFault.EXPIRED, True),
        ([refuse(410)], WatchFault.EXPIRED, True),
        ([say_and_end(error_event(500))], WatchFault.SERVER, False),
        ([refuse(503)], WatchFault.SERVER, False),
        ([refuse(429, Retry_After="0")], WatchFault.THROTTLED, False),
        ([say_and_end(status_object(401, "Unauthorized"))], WatchFault.UNAUTHORIZED, False),
        ([refuse(403)], WatchFault.REFUSED, True),
        ([drop, drop], WatchFault.TRANSPORT, False),
        ([say_and_end({"type": "ERROR"})], WatchFault.SERVER, False),
    ],
)
async def test_a_watch_recovers_from_a_fault(
    cluster: FakeKube, follow: Start, faults: list[Fault], kind: WatchFault, relists: bool
) -> None:
    """C49: each fault is seen for what it is, and the next pod is found."""
    cluster.fail_next("WATCH", PODS, *faults)
    follower = await follow()
    await follower.settles("a")
    await watching(cluster)
    cluster.put(PODS, pod("b", "10.0.0.2"))
    await follower.settles("a", "b")
    stats = follower.watches
    assert {reason for reason, count in stats.faults.items() if count} == {kind}
    assert cluster.count("LIST", PODS) == (2 if relists else 1)
    assert follower.source.synced


@pytest.mark.parametrize(
    "line",
    [
        {"type": "SOMETHING", "object": pod("b")},
        {"type": ["ADDED"], "object": {"metadata": {"resourceVersion": "1"}}},
        {"type": "ADDED"},
        {"type": "ADDED", "object": {"metadata": None}},
        [],
        b"\xff not JSON",
    ],
)
async def test_a_line_that_makes_no_sense_is_ignored(
    cluster: FakeKube, follow: Start, line: dict[str, object] | bytes
) -> None:
    follower = await follow()
    await watching(cluster)
    cluster.say(PODS, line)  # type: ignore[arg-type]
    cluster.put(PODS, pod("b", "10.0.0.2"))
    await follower.settles("a", "b")
    assert follower.watches.ignored == 1
    assert cluster.count("WATCH", PODS) == 1


async def test_a_watch_resumes_at_the_last_bookmark(cluster: FakeKube, follow: Start) -> None:
    follower = await follow()
    await watching(cluster)
    cluster.bookmark(PODS, 250)
    await until(lambda: follower.watches.bookmarks == 1)
    cluster.cut(PODS)
    await until(lambda: cluster.count("WATCH", PODS) == 2)
    assert cluster.last("WATCH", PODS).query["resourceVersion"] == "250"
    assert cluster.count("LIST", PODS) == 1


async def test_what_happened_while_the_watch_was_cut_is_not_lost(cluster: FakeKube, follow: Start) -> None:
    follower = await follow()
    await follower.settles("a")
    await watching(cluster)
    cluster.fail_next("WATCH", PODS, refuse(500))
    cluster.cut(PODS)
    cluster.delete(PODS, pod("a"))
    cluster.put(PODS, pod("b", "10.0.0.2"))
    await follower.settles("b")
    assert cluster.count("LIST", PODS) == 1


async def test_a_rotated_token_is_read_again(cluster: FakeKube, tmp_path: Path, follow: Start) -> None:
    cluster.token = "first"
    follower = await follow()
    await follower.settles("a")
    await watching(cluster)
    cluster.token = "second"
    cluster.cut(PODS)
    await until(lambda: follower.watches.faults[WatchFault.UNAUTHORIZED] > 0)
    (tmp_path / "token").write_text("second")
    cluster.put(PODS, pod("b", "10.0.0.2"))
    await follower.settles("a", "b")
    assert cluster.last("WATCH", PODS).token == "Bearer second"
    assert cluster.count("LIST", PODS) == 1


async def test_an_endless_410_is_tried_once_a_back_off_step(cluster: FakeKube, follow: Start) -> None:
    cluster.fail_next("WATCH", PODS, *[refuse(410)] * 6)
    follower = await follow()
    await until(lambda: cluster.count("WATCH", PODS) == 7)
    await follower.settles("a")
    assert cluster.count("LIST", PODS) == 7
    assert follower.watches.faults[WatchFault.EXPIRED] == 6


async def test_the_waits_between_tries_double_up_to_a_limit_and_keep_to_retry_after(
    cluster: FakeKube, tmp_path: Path
) -> None:
    api, _ = await connect(cluster, tmp_path)
    waits: list[float] = []
    held = asyncio.Event()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 10:
            held.set()
            await asyncio.Event().wait()

    class Nowhere:
        def replace(self, objects: list[KubeObject]) -> None: ...
        def apply(self, change: Change, item: KubeObject) -> None: ...

    cluster.fail_next(
        "WATCH", PODS, *[refuse(410)] * 8, refuse(429, Retry_After="7"), refuse(429, Retry_After="9999")
    )
    settings = WatchSettings(first_backoff=1.0, max_backoff=16.0)
    task = asyncio.create_task(WatchLoop(api, PODS, Nowhere(), settings=settings, sleep=sleep).run())
    await asyncio.wait_for(held.wait(), 60)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await api.close()
    for number, wait in enumerate(waits[:8]):
        assert min(2**number, 16) / 2 <= wait <= min(2**number, 16)
    assert 7 <= waits[8] <= 16
    assert waits[9] == 60


async def test_a_version_that_never_works_is_given_up_for_a_list(cluster: FakeKube, follow: Start) -> None:
    cluster.fail_next("WATCH", PODS, refuse(500), refuse(500), refuse(500))
    await follow()
    await until(lambda: cluster.count("WATCH", PODS) == 4)
    assert cluster.count("LIST", PODS) == 2


async def test_a_half_open_watch_is_noticed_a_hundred_times(cluster: FakeKube, follow: Start) -> None:
    """C50: the server holds the connection and sends nothing; meanwhile A is deleted."""
    cluster.silent = True
    follower = await follow(
        WatchSettings(silence=0.01, first_backoff=0.001, max_backoff=0.002, absent_retry=60.0)
    )
    await until(lambda: cluster.count("LIST", PODS) >= 3)
    tasks = len(asyncio.all_tasks())
    cluster.delete(PODS, pod("a"))
    await follower.settles()
    await until(lambda: cluster.count("LIST", PODS) >= 100)
    assert len(asyncio.all_tasks()) < tasks + 10
    assert follower.watches.faults[WatchFault.SILENT] >= 90


async def test_the_last_good_state_serves_while_the_api_server_is_away(
    cluster: FakeKube, follow: Start
) -> None:
    follower = await follow()
    await follower.settles("a")
    said = follower.said
    await cluster.stop()
    await until(lambda: sum(follower.watches.faults.values()) >= 4)
    assert follower.names == ["a"]
    assert (follower.said, follower.source.synced) == (said, True)
    assert follower.source.stats.last_sync_age is not None
    assert not follower.task.done()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(pod("a", None, phase="Failed", ready=False), id="evicted, no address"),
        pytest.param(pod("a", deleting=True), id="being deleted, still Ready"),
        pytest.param(pod("a", labels={}), id="label removed"),
        pytest.param(pod("a", ready=False), id="not Ready"),
    ],
)
async def test_a_pod_that_is_no_longer_eligible_is_out(
    cluster: FakeKube, follow: Start, change: dict[str, object]
) -> None:
    """C51 (a) to (d)."""
    follower = await follow()
    await follower.settles("a")
    await watching(cluster)
    cluster.put(PODS, change)
    await follower.settles()


async def test_the_late_delete_of_a_namesake_takes_nothing_away(cluster: FakeKube, follow: Start) -> None:
    """C51 (e), and C35: the replacement at the same address is another endpoint."""
    follower = await follow()
    await follower.settles("a")
    old = follower.specs
    await watching(cluster)
    cluster.put(PODS, pod("a", "10.0.0.1", uid="uid-2", created="2026-01-02T00:00:00Z"))
    cluster.delete(PODS, pod("a", uid="uid-a"))
    cluster.put(PODS, pod("end", "10.0.0.9"))
    await follower.settles("a", "end")
    assert old is not None
    assert follower.specs is not None
    assert [spec.uid for spec in old + follower.specs] == ["uid-a:8000", "uid-2:8000", "uid-end:8000"]


async def test_the_address_of_a_dead_pod_in_another_app_gets_nothing(
    cluster: FakeKube, follow: Start
) -> None:
    """C51 (f)."""
    follower = await follow()
    await watching(cluster)
    cluster.put(PODS, pod("a", None, phase="Failed", ready=False))
    cluster.put(PODS, pod("z", "10.0.0.1", labels={"app": "y"}))
    await follower.settles()


async def test_an_edited_selector_takes_effect_and_does_not_revive_a_dying_pod(
    cluster: FakeKube, follow: Start
) -> None:
    """C51 (g)."""
    both = {"app": "x", "tier": "gold"}
    cluster.put(PODS, pod("dying", "10.0.0.2", labels=both, deleting=True))
    cluster.put(PODS, pod("gold", "10.0.0.3", labels=both))
    cluster.put(PODS, pod("new", "10.0.0.4", labels={"tier": "gold"}))
    follower = await follow()
    await follower.settles("a", "gold")
    await watching(cluster)
    cluster.put(POOLS, pool(tier="gold"))
    await follower.settles("gold", "new")
    assert cluster.last("LIST", PODS).query["labelSelector"] == "tier=gold"
    await until(lambda: cluster.watchers(PODS) == 1)


async def test_the_old_endpoints_serve_until_those_of_an_edited_selector_are_listed(
    cluster: FakeKube, follow: Start
) -> None:
    """Nobody who waits may be refused for want of endpoints because somebody edits the pool."""
    gold = {"tier": "gold"}
    cluster.put(PODS, pod("new", "10.0.0.2", labels=gold))
    follower = await follow()
    await follower.settles("a")
    await watching(cluster)
    release = asyncio.Event()
    cluster.fail_next("LIST", PODS, hold(release))
    cluster.put(POOLS, pool(ports=(8001,), **gold))
    await until(lambda: cluster.last("LIST", PODS).query["labelSelector"] == "tier=gold")
    # Meanwhile the old ones are followed as before: at the old port, and out once they are not ready.
    cluster.put(PODS, pod("b", "10.0.0.3"))
    await follower.settles("a", "b")
    cluster.put(PODS, pod("a", ready=False))
    await follower.settles("b")
    assert follower.specs is not None
    assert {spec.port for spec in follower.specs} == {8000}
    assert follower.source.synced

    said: list[list[str]] = []
    follower.heard = lambda: said.append(follower.names)
    release.set()
    await follower.settles("new")
    assert said == [["new"]], "one change, and never an empty pool between"
    assert [spec.port for spec in follower.specs] == [8001]
    await until(lambda: cluster.watchers(PODS) == 1)


async def test_an_edit_that_is_taken_back_leaves_everything_as_it_was(
    cluster: FakeKube, follow: Start
) -> None:
    follower = await follow()
    await follower.settles("a")
    await watching(cluster)
    release = asyncio.Event()
    cluster.fail_next("LIST", PODS, hold(release), hold(release))
    cluster.put(POOLS, pool(tier="gold"))
    await until(lambda: cluster.count("LIST", PODS) == 2)
    cluster.put(POOLS, pool(tier="silver"))
    await until(lambda: cluster.count("LIST", PODS) == 3)
    cluster.put(POOLS, pool(ports=(8001,)))
    await until(lambda: follower.specs is not None and [spec.port for spec in follower.specs] == [8001])
    release.set()
    cluster.put(PODS, pod("gold", "10.0.0.2", labels={"tier": "gold"}))
    cluster.put(PODS, pod("b", "10.0.0.3"))
    await follower.settles("a", "b")
    assert cluster.count("LIST", PODS) == 3, "nothing is listed anew"
    assert cluster.watchers(PODS) == 1


async def test_edited_ports_keep_the_endpoints_whose_port_stays(cluster: FakeKube, follow: Start) -> None:
    follower = await follow()
    await follower.settles("a")
    await watching(cluster)
    cluster.put(POOLS, pool(ports=(8001, 8000)))
    await follower.settles("a-rank-0", "a-rank-1")
    assert follower.specs is not None
    assert [(spec.uid, spec.rank) for spec in follower.specs] == [("uid-a:8001", 0), ("uid-a:8000", 1)]


async def test_a_pool_that_becomes_unusable_keeps_its_last_good_shape(
    cluster: FakeKube, follow: Start
) -> None:
    follower = await follow()
    await follower.settles("a")
    await watching(cluster)
    broken = pool()
    broken["spec"]["targetPorts"] = []
    cluster.put(POOLS, broken)
    cluster.put(PODS, pod("b", "10.0.0.2"))
    await follower.settles("a", "b")


async def test_a_deleted_pool_has_no_endpoints_until_it_is_back(cluster: FakeKube, follow: Start) -> None:
    follower = await follow()
    await follower.settles("a")
    await watching(cluster)
    cluster.delete(POOLS, pool())
    await follower.settles()
    await until(lambda: cluster.watchers(PODS) == 0)
    cluster.put(POOLS, pool())
    await follower.settles("a")


async def test_nothing_is_said_before_everything_is_listed(kube: FakeKube, follow: Start) -> None:
    """C53: not synced until the pool and its pods are known; an empty pool is then an answer."""
    release = asyncio.Event()
    kube.serve(POOLS, PODS)
    kube.fail_next("LIST", POOLS, hold(release))
    follower = await follow()
    await until(lambda: kube.count("LIST", POOLS) == 1)
    assert not follower.source.synced
    release.set()
    # The pool does not exist yet: still nothing to serve, and not ready.
    await until(lambda: kube.watchers(POOLS) == 1)
    assert (follower.source.synced, follower.specs) == (False, None)
    kube.put(POOLS, pool())
    await until(lambda: follower.source.synced)
    assert follower.specs == []


async def test_a_hundred_pods_that_come_and_go_leave_nothing_behind(cluster: FakeKube, follow: Start) -> None:
    """C35, the watcher's half."""
    follower = await follow()
    await follower.settles("a")
    await watching(cluster)
    tasks = len(asyncio.all_tasks())
    for number in range(100):
        cluster.put(PODS, pod("p", "10.0.0.2", uid=str(number), created=f"2026-01-01T00:{number:03}:00Z"))
        cluster.delete(PODS, pod("p", uid=str(number)))
    cluster.put(PODS, pod("end", "10.0.0.3"))
    await follower.settles("a", "end")
    # A few may be requests under way.
    assert len(asyncio.all_tasks()) < tasks + 10
    assert follower.source.table.problems() == []


async def test_nodes_are_watched_only_on_request_and_a_cordon_takes_their_pods_out(
    cluster: FakeKube, follow: Start
) -> None:
    cluster.put(PODS, pod("b", "10.0.0.2", node="n1"))
    cluster.put(NODES, {"metadata": {"name": "n1"}, "spec": {}})
    blind = await follow()
    await blind.settles("a", "b")
    assert cluster.count("LIST", NODES) == 0
    follower = await follow(watch_nodes=True)
    await follower.settles("a", "b")
    await until(lambda: cluster.watchers(NODES) == 1)
    cluster.put(NODES, {"metadata": {"name": "n1"}, "spec": {"unschedulable": True}})
    await follower.settles("a")
    cluster.delete(NODES, {"metadata": {"name": "n1"}})
    await follower.settles("a", "b")
    assert blind.names == ["a", "b"]


async def test_objectives_of_both_groups_give_priorities(cluster: FakeKube, follow: Start) -> None:
    def objective(name: str, priority: int | None, of: str = "pool") -> dict[str, object]:
        spec = {"poolRef": {"name": of}} | ({} if priority is None else {"priority": priority})
        return {"metadata": {"name": name}, "spec": spec}

    new, old = objectives("llm-d.ai"), objectives("inference.networking.x-k8s.io")
    cluster.put(new, objective("high", 10))
    cluster.put(new, objective("foreign", 99, of="another"))
    cluster.put(old, objective("high", 1))
    cluster.put(old, objective("low", -5))
    follower = await follow()
    await until(lambda: follower.priorities == {"high": 10, "low": -5})
    await until(lambda: cluster.watchers(new) == cluster.watchers(old) == 1)
    cluster.put(new, objective("plain", None))
    cluster.delete(new, objective("high", 10))
    await until(lambda: follower.priorities == {"high": 1, "low": -5, "plain": 0})


def rewrite(
    name: str, rules: list[object], *, created: str = "2026-01-01T00:00:00Z", of: str = "pool"
) -> Json:
    metadata = {"name": name, "creationTimestamp": created}
    return {"metadata": metadata, "spec": {"poolRef": {"name": of}, "rules": rules}}


def exact(*models: str) -> list[dict[str, object]]:
    return [{"model": {"type": "Exact", "value": model}} for model in models]


async def test_model_rewrites_of_the_pool_are_rules_and_the_older_goes_first(
    cluster: FakeKube, follow: Start, caplog: pytest.LogCaptureFixture
) -> None:
    split = [{"modelRewrite": "v1", "weight": 9}, {"modelRewrite": "v2", "weight": 1}]
    cluster.put(REWRITES, rewrite("b-older", [{"matches": exact("chat", "code"), "targets": split}]))
    cluster.put(
        REWRITES,
        rewrite(
            "a-newer",
            [
                {"matches": exact("chat", "new"), "targets": [{"modelRewrite": "late"}]},
                {"targets": [{"modelRewrite": "any"}]},
            ],
            created="2026-02-01T00:00:00Z",
        ),
    )
    cluster.put(REWRITES, rewrite("foreign", [{"targets": [{"modelRewrite": "x"}]}], of="another"))
    cluster.put(REWRITES, rewrite("half-weighted", [{"targets": [split[0], {"modelRewrite": "x"}]}]))
    cluster.put(
        REWRITES, rewrite("a-kind-to-come", [{"matches": [{"model": {"type": "Glob"}}], "targets": split}])
    )
    cluster.put(REWRITES, {"metadata": {"name": "empty"}})
    follower = await follow()
    expected = ModelRewrites(
        {
            "chat": Split(("v1", "v2"), (9, 10)),
            "code": Split(("v1", "v2"), (9, 10)),
            "new": Split(("late",), (1,)),
        },
        Split(("any",), (1,)),
    )
    await until(lambda: follower.rewrites == expected)
    for name in ("half-weighted", "a-kind-to-come", "empty"):
        assert f"InferenceModelRewrite {name} is left out" in caplog.text
    await until(lambda: cluster.watchers(REWRITES) == 1)
    cluster.delete(REWRITES, rewrite("b-older", []))
    cluster.put(
        REWRITES, rewrite("a-newer", [{"matches": exact("chat"), "targets": [{"modelRewrite": "late"}]}])
    )
    await until(lambda: follower.rewrites == ModelRewrites({"chat": Split(("late",), (1,))}))


async def test_kinds_that_are_absent_or_forbidden_are_done_without(cluster: FakeKube, follow: Start) -> None:
    cluster.fail_next("LIST", NODES, *[refuse(403)] * 3)
    follower = await follow(watch_nodes=True)
    await follower.settles("a")
    # They may appear later.
    cluster.put(objectives("llm-d.ai"), {"metadata": {"name": "o"}, "spec": {"poolRef": {"name": "pool"}}})
    await until(lambda: follower.priorities == {"o": 0})
    assert follower.watches.faults == dict.fromkeys(WatchFault, 0)
