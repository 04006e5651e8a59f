"""The static pool file: what a good one means, and what is said of a bad one."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.policy.constraints import Taint, TaintEffect
from picker.pool.endpoint import EndpointSpec, EngineKind
from picker.pool.static_file import PoolFileError, StaticPoolFile, parse_pool_file

FULL = """\
defaults:
  engine: sglang
  block_size: 64
  labels: {zone: a, tier: gold}
  kv_events: 5557
endpoints:
  - name: one
    address: 10.0.0.1:8000
    labels: {tier: silver}
    taints: ["gpu=old:PreferNoSchedule", "maint:NoSchedule"]
    cordoned: true
    models: [llama]
    max_num_batched_tokens: 4096
  - name: two
    address: "[2001:db8::1]:9000"
    engine: trtllm
    kv_events: tcp://10.9.9.9:7000
    kv_replay: 7001
  - name: three
    address: pod.example:80
    engine: vllm
    metrics: false
    block_size: 16
"""


def test_a_full_file() -> None:
    one, two, three = parse_pool_file(FULL)
    assert one == EndpointSpec(
        uid="one@10.0.0.1:8000",
        name="one",
        address="10.0.0.1",
        port=8000,
        labels={"zone": "a", "tier": "silver"},
        taints=(Taint("gpu", "old", TaintEffect.PREFER_NO_SCHEDULE), Taint("maint")),
        cordoned=True,
        engine=EngineKind.SGLANG,
        metrics_url="http://10.0.0.1:8000/metrics",
        kv_events="tcp://10.0.0.1:5557",
        block_size=64,
        max_num_batched_tokens=4096,
        models=frozenset({"llama"}),
    )
    assert (two.address, two.authority) == ("2001:db8::1", "[2001:db8::1]:9000")
    assert two.metrics_url == "http://[2001:db8::1]:9000/prometheus/metrics"
    assert (two.kv_events, two.kv_replay) == ("tcp://10.9.9.9:7000", "tcp://[2001:db8::1]:7001")
    assert (three.metrics_url, three.block_size, three.engine) == (None, 16, EngineKind.VLLM)


def test_events_that_are_not_told_of_are_asked_for_and_those_that_are_denied_are_not() -> None:
    text = """
    defaults: {kv_events: 5557}
    endpoints:
    - {name: a, address: "h:1"}
    - {name: b, address: "h:2", kv_events: null}
    - {name: c, address: "h:3", kv_events: false}
    """
    told, asked, denied = parse_pool_file(text)
    assert (told.kv_events, told.ask_kv_events) == ("tcp://h:5557", True)
    assert (asked.kv_events, asked.ask_kv_events) == (None, True)
    assert (denied.kv_events, denied.ask_kv_events) == (None, False)


def test_ranks_behind_one_address_are_endpoints_of_their_own() -> None:
    text = "endpoints: [{name: a, address: '10.0.0.1:80', ranks: 2, kv_events: 5557, metrics: /m}]"
    zero, one = parse_pool_file(text)
    assert (zero.uid, one.uid) == ("a-rank-0@10.0.0.1:80", "a-rank-1@10.0.0.1:80")
    assert (zero.rank, one.rank) == (0, 1)
    assert zero.metrics_url == one.metrics_url == "http://10.0.0.1:80/m"
    assert (zero.kv_events, one.kv_events) == ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")


@pytest.mark.parametrize(
    ("text", "line", "key", "said"),
    [
        ("", None, "", "mapping"),
        ("endpoint: []", 1, "endpoints", "required"),
        ("endpoints: []\nextra: 1", 2, "extra", "unknown key"),
        ("endpoints:\n- name: a\n  adress: h:1", 2, "endpoints[0].address", "required"),
        ("endpoints:\n- name: a\n  address: h:1\n  lables: {}", 4, "endpoints[0].lables", "mean 'labels'"),
        ("defaults:\n  blocksize: 1\nendpoints: []", 2, "defaults.blocksize", "mean 'block_size'"),
        ("endpoints:\n- name: a\n  address: h", 3, "endpoints[0].address", "host:port"),
        ("endpoints:\n- name: a\n  address: h:70000", 3, "endpoints[0].address", "65535"),
        ("endpoints:\n- name: a\n  address: ::1:80", 3, "endpoints[0].address", "brackets"),
        ("endpoints:\n- name: a\n  address: '[::x]:80'", 3, "endpoints[0].address", "x"),
        (
            "endpoints:\n- {name: a, address: 'h:1'}\n- {name: a, address: 'h:2'}",
            3,
            "endpoints[1].name",
            "already",
        ),
        (
            "endpoints:\n- {name: a, address: 'h:1'}\n- {name: b, address: 'h:1'}",
            3,
            "endpoints[1].address",
            "already",
        ),
        ("endpoints:\n- name: a\n  address: h:1\n  engine: tgi", 4, "endpoints[0].engine", "vllm"),
        (
            "endpoints:\n- name: a\n  address: h:1\n  taints:\n  - a:b\n",
            5,
            "endpoints[0].taints[0]",
            "effect",
        ),
        (
            "endpoints:\n- name: a\n  address: h:1\n  kv_events: ipc://x",
            4,
            "endpoints[0].kv_events",
            "tcp://",
        ),
        ("endpoints:\n- name: a\n  address: h:1\n  metrics: metrics", 4, "endpoints[0].metrics", "path"),
        ("endpoints:\n- name: a\n  name: b\n  address: h:1", 3, "endpoints[0].name", "repeated"),
        ("endpoints:\n- name: a\n  address: h:1\n  labels: {a: 1}", 4, "endpoints[0].labels.a", "string"),
        ("endpoints: [\n", 2, "", "not valid YAML"),
        ("a: !!timestamp x", 1, "a", "tag"),
    ],
)
def test_a_bad_file_is_refused_with_its_line_and_key(
    text: str, line: int | None, key: str, said: str
) -> None:
    with pytest.raises(PoolFileError) as caught:
        parse_pool_file(text, "pool.yaml")
    assert (caught.value.line, caught.value.key) == (line, key.rpartition(".")[2].partition("[")[0] or None)
    assert key in str(caught.value)
    assert said in str(caught.value)
    assert str(caught.value).startswith("pool.yaml")


@given(
    st.text(max_size=200) | st.sampled_from(["endpoints", "defaults"]).map(lambda key: f"{key}: {{&a a: *a}}")
)
def test_any_text_is_a_pool_or_a_pool_file_error(text: str) -> None:
    with contextlib.suppress(PoolFileError):
        parse_pool_file(text)


class Follower:
    """Collects what the watcher hands on."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[list[EndpointSpec] | PoolFileError] = asyncio.Queue()

    async def names(self) -> list[str]:
        got = await asyncio.wait_for(self.heard.get(), 60)
        assert isinstance(got, list), got
        return [spec.name for spec in got]

    async def error(self) -> PoolFileError:
        got = await asyncio.wait_for(self.heard.get(), 60)
        assert isinstance(got, PoolFileError), got
        return got


def pool_of(name: str) -> str:
    return f"endpoints: [{{name: {name}, address: 'h:1'}}]"


async def test_a_changed_file_is_taken_up_and_a_bad_version_is_refused_once(tmp_path: Path) -> None:
    # As a ConfigMap mount does it: the file is a link into a directory link that is swapped whole.
    for version, text in {"v1": pool_of("a"), "v2": "endpoints: nonsense", "v3": pool_of("b")}.items():
        (tmp_path / version).mkdir()
        (tmp_path / version / "pool.yaml").write_text(text)
    (tmp_path / "data").symlink_to("v1")
    (tmp_path / "pool.yaml").symlink_to("data/pool.yaml")

    def swap(version: str) -> None:
        (tmp_path / "new").symlink_to(version)
        os.replace(tmp_path / "new", tmp_path / "data")

    watcher, follower = StaticPoolFile(tmp_path / "pool.yaml", interval=0.005), Follower()
    task = asyncio.create_task(watcher.run(follower.heard.put_nowait, follower.heard.put_nowait))
    try:
        assert await follower.names() == ["a"]
        swap("v2")
        assert (await follower.error()).key == "endpoints"
        swap("v3")
        # The next word is of the new version: the bad one was complained of once, not at each poll.
        assert await follower.names() == ["b"]
        (tmp_path / "pool.yaml").unlink()
        assert "cannot be read" in str(await follower.error())
    finally:
        task.cancel()
    assert (watcher.stats.loaded, watcher.stats.refused) == (2, 2)


async def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_bytes(b"\xff\xfe")
    follower = Follower()
    task = asyncio.create_task(StaticPoolFile(path).run(follower.heard.put_nowait, follower.heard.put_nowait))
    try:
        assert "not UTF-8" in str(await follower.error())
    finally:
        task.cancel()
