"""Leader election: the rules on a fake clock, then candidates against an API server that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.pool.kube.api import KubeApi
from picker.pool.lease import Election, LeaderElector, LeaseSettings
from tests.pool.fake_kube import LEASES, FakeKube, connect, hold, refuse
from tests.pool.waiting import until

LEASE = f"{LEASES}/picker"


class Server:
    """The lease at the server, with its optimistic locking; the wall clock ticks with each write."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.writes = 0

    def write(self, lease: dict[str, Any]) -> dict[str, Any] | None:
        """The written lease; None for a conflict."""
        held = self.lease["metadata"]["resourceVersion"] if self.lease else None
        if lease["metadata"].get("resourceVersion") != held:
            return None
        self.writes += 1
        self.lease = {**lease, "metadata": {**lease["metadata"], "resourceVersion": str(self.writes)}}
        return self.lease

    def turn(self, candidate: Election, now: float) -> None:
        """One whole try of `candidate`, without a fault."""
        candidate.observe(self.lease, now)
        claim = candidate.claim(now, datetime.fromtimestamp(self.writes, UTC))
        if claim is not None and (written := self.write(claim)) is not None:
            candidate.claimed(written, now)


def candidate(identity: str) -> Election:
    return Election("picker", "default", identity, LeaseSettings())


def test_the_first_takes_the_lease_and_keeps_it_by_renewing() -> None:
    server, a, b = Server(), candidate("a"), candidate("b")
    for now in range(0, 60, 2):
        server.turn(a, now)
        server.turn(b, now)
        assert (a.leads, b.leads) == (True, False)
    assert b.holder == "a"
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 1
    assert server.lease["spec"]["acquireTime"] == "1970-01-01T00:00:00.000000Z"


def test_a_leader_that_is_gone_is_followed_after_its_lease_and_not_before() -> None:
    server, a, b = Server(), candidate("a"), candidate("b")
    server.turn(a, 0.0)
    server.turn(b, 5.0)
    for now in (10.0, 19.9):
        server.turn(b, now)
        assert not b.leads
    server.turn(b, 20.0)
    assert b.leads
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 2


def test_a_released_lease_is_free_at_once() -> None:
    server, a, b = Server(), candidate("a"), candidate("b")
    server.turn(a, 0.0)
    server.turn(b, 1.0)
    assert server.write(a.release(datetime.now(UTC))) is not None
    assert not a.leads
    server.turn(b, 1.5)
    assert b.leads


def test_of_two_that_see_a_free_lease_one_gets_it() -> None:
    server, a, b = Server(), candidate("a"), candidate("b")
    for one in (a, b):
        one.observe(None, 0.0)
    claims = [one.claim(0.0, datetime.now(UTC)) for one in (a, b)]
    assert [claim is not None and server.write(claim) is not None for claim in claims] == [True, False]


def test_a_leader_that_sees_another_holder_stops_at_once() -> None:
    server, a = Server(), candidate("a")
    server.turn(a, 0.0)
    assert server.lease is not None
    server.lease["spec"]["holderIdentity"] = "b"
    a.observe(server.lease, 1.0)
    assert not a.leads


def test_a_lease_must_outlast_a_call_that_hangs() -> None:
    with pytest.raises(ValueError, match="request_timeout"):
        LeaseSettings(duration=10, request_timeout=5)


@given(
    st.lists(
        st.tuples(
            st.floats(0.1, 30.0),
            st.integers(0, 2),
            st.sampled_from(["turn", "lost answer", "release"]),
        ),
        max_size=60,
    )
)
def test_nobody_is_pushed_out_of_a_lease_that_runs(steps: list[tuple[float, int, str]]) -> None:
    """Whatever the order of tries, pauses, releases and answers that get lost on their way back. And once everybody
    has seen the lease as it is, nobody leads but its holder."""
    server, candidates, now = Server(), [candidate(name) for name in "abc"], 0.0
    holder, written, writes = "", 0.0, 0
    for pause, who, what in steps:
        now += pause
        one = candidates[who]
        if what == "turn":
            server.turn(one, now)
        elif what == "lost answer":
            one.observe(server.lease, now)
            claim = one.claim(now, datetime.fromtimestamp(server.writes, UTC))
            if claim is not None:
                server.write(claim)
        elif one.leads:
            server.write(one.release(datetime.fromtimestamp(server.writes, UTC)))
        if server.writes > writes and server.lease is not None:
            before, holder = holder, server.lease["spec"]["holderIdentity"]
            assert before in ("", one.identity) or now >= written + 15.0
            written, writes = now, server.writes
        for each in candidates:
            each.observe(server.lease, now)
        assert [each.identity for each in candidates if each.leads] in ([], [holder])


def held_by(holder: str) -> dict[str, Any]:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 1, "renewTime": "2026-01-01T00:00:00Z"}
    return {"metadata": {"name": "picker"}, "spec": spec}


FAST = LeaseSettings(duration=5.0, retry_period=0.01, request_timeout=1.0)


class Candidate:
    """A running elector and what it has called."""

    def __init__(self, api: KubeApi, identity: str, clock: Callable[[], float] | None) -> None:
        self.said: list[str] = []
        options: dict[str, Any] = {} if clock is None else {"clock": clock}
        self.elector = LeaderElector(
            api,
            "default",
            "picker",
            identity,
            on_started_leading=lambda: self.said.append("started"),
            on_stopped_leading=lambda: self.said.append("stopped"),
            settings=FAST,
            **options,
        )
        self.task = asyncio.create_task(self.elector.run())

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def api(kube: FakeKube, tmp_path: Path) -> AsyncIterator[KubeApi]:
    kube.serve(LEASES)
    api, _ = await connect(kube, tmp_path)
    yield api
    await api.close()


async def test_a_leader_that_shuts_down_hands_over_at_once(kube: FakeKube, api: KubeApi) -> None:
    a = Candidate(api, "a", None)
    await until(lambda: a.elector.leading)
    # Its clock stands still: it can only get the lease by being given it.
    b = Candidate(api, "b", lambda: 0.0)
    await until(lambda: b.elector.holder == "a")
    await a.stop()
    assert a.said == ["started", "stopped"]
    await until(lambda: b.elector.leading)
    assert b.elector.holder == "b"
    await b.stop()
    assert (b.said, b.elector.stats.failures) == (["started", "stopped"], 0)


async def test_the_lease_is_given_back_even_if_a_renewal_was_on_its_way(kube: FakeKube, api: KubeApi) -> None:
    a = Candidate(api, "a", None)
    await until(lambda: a.elector.leading)
    # The server has taken a renewal whose answer will not be read any more.
    kube.put(LEASES, held_by("a"))
    await a.stop()
    assert a.elector.stats.failures == 0
    b = Candidate(api, "b", lambda: 0.0)
    await until(lambda: b.elector.leading)
    await b.stop()


async def test_a_lease_that_another_has_taken_is_not_given_back(kube: FakeKube, api: KubeApi) -> None:
    a = Candidate(api, "a", None)
    await until(lambda: a.elector.leading)
    kube.put(LEASES, held_by("b"))
    await a.stop()
    assert a.elector.holder == "b"


async def test_a_dead_leader_is_followed_when_its_lease_is_over(kube: FakeKube, api: KubeApi) -> None:
    now = 0.0
    kube.put(LEASES, held_by("dead"))
    b = Candidate(api, "b", lambda: now)
    await until(lambda: kube.count("GET", LEASE) >= 5)
    assert not b.elector.leading
    now = 1.1
    await until(lambda: b.elector.leading)
    await b.stop()


@pytest.mark.parametrize("fault", ["refused", "hanging"])
async def test_a_leader_stays_until_it_has_seen_another_holder(
    kube: FakeKube, api: KubeApi, fault: str
) -> None:
    release = asyncio.Event()
    a = Candidate(api, "a", None)
    await until(lambda: a.elector.leading)
    kube.fail_next("GET", LEASE, *[refuse(500) if fault == "refused" else hold(release)] * 100)
    await until(lambda: a.elector.stats.failures >= 2)
    assert a.said == ["started"]
    kube.put(LEASES, held_by("b"))
    kube.mend("GET", LEASE)
    release.set()
    await until(lambda: a.said == ["started", "stopped"])
    assert (a.elector.leading, a.elector.holder) == (False, "b")
    await a.stop()


async def test_a_rotated_token_does_not_cost_the_lease(kube: FakeKube, api: KubeApi, tmp_path: Path) -> None:
    kube.token = "first"
    a = Candidate(api, "a", None)
    await until(lambda: a.elector.leading)
    (tmp_path / "token").write_text("second")
    kube.token = "second"
    writes = kube.version
    await until(lambda: kube.version > writes + 2)
    assert a.said == ["started"]
    await a.stop()
