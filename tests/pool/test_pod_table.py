"""Pods in, endpoints out: what a pod, its node and its annotations make of an endpoint."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.policy.constraints import LabelSelector, Taint, TaintEffect
from picker.pool.endpoint import EndpointSpec, EngineKind
from picker.pool.kube.pod_table import PodDefaults, PodTable, PoolShape
from tests.pool.fake_kube import pod, pool

ONE_PORT = PoolShape(LabelSelector.of({"app": "x"}), (8000,))
TWO_PORTS = PoolShape(LabelSelector.of({"app": "x"}), (8000, 8001))


def table(
    *pods: dict[str, Any], shape: PoolShape = ONE_PORT, defaults: PodDefaults | None = None
) -> PodTable:
    result = PodTable(defaults or PodDefaults())
    result.set_pool(shape)
    result.replace_pods(pods)
    return result


def only(*pods: dict[str, Any], **options: Any) -> EndpointSpec:
    (spec,) = table(*pods, **options).specs()
    return spec


def annotated(**annotations: str) -> dict[str, Any]:
    return pod(
        "a", annotations={f"picker.dev/{key.replace('_', '-')}": text for key, text in annotations.items()}
    )


def test_a_plain_pod() -> None:
    assert only(pod("a")) == EndpointSpec(
        uid="uid-a:8000",
        name="a",
        address="10.0.0.1",
        port=8000,
        labels={"app": "x"},
        metrics_url="http://10.0.0.1:8000/metrics",
        kv_events="tcp://10.0.0.1:5557",
        kv_replay="tcp://10.0.0.1:5558",
    )


def test_each_target_port_is_a_rank() -> None:
    zero, one = table(pod("a", "2001:db8::7"), shape=TWO_PORTS).specs()
    assert (zero.name, zero.rank, zero.authority) == ("a-rank-0", 0, "[2001:db8::7]:8000")
    assert (one.name, one.rank, one.authority) == ("a-rank-1", 1, "[2001:db8::7]:8001")
    assert one.metrics_url == "http://[2001:db8::7]:8001/metrics"
    assert (zero.kv_events, one.kv_events) == ("tcp://[2001:db8::7]:5557", "tcp://[2001:db8::7]:5558")
    # The port after the first rank's events is the second rank's: not a place to look for replays.
    assert zero.kv_replay is None


def test_active_ports_limit_the_ranks_and_keep_their_numbers() -> None:
    for key in ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports"):
        spec = only(pod("a", annotations={key: " 8001, 9999"}), shape=TWO_PORTS)
        assert (spec.port, spec.rank) == (8001, 1)
    assert table(pod("a", annotations={"llm-d.ai/active-ports": ""}), shape=TWO_PORTS).specs() == []


def test_annotations_say_what_the_pod_is() -> None:
    spec = only(
        annotated(
            taints="gpu=old:PreferNoSchedule, maint:NoSchedule",
            metrics="/custom",
            metrics_port="9100",
            kv_events_port="6000",
            kv_replay_port="false",
            block_size="64",
            max_num_batched_tokens="4096",
            models="llama, qwen",
        )
    )
    assert spec.taints == (Taint("gpu", "old", TaintEffect.PREFER_NO_SCHEDULE), Taint("maint"))
    assert spec.metrics_url == "http://10.0.0.1:9100/custom"
    assert (spec.kv_events, spec.kv_replay) == ("tcp://10.0.0.1:6000", None)
    assert (spec.block_size, spec.max_num_batched_tokens) == (64, 4096)
    assert spec.models == {"llama", "qwen"}


def test_connections_can_be_switched_off() -> None:
    spec = only(annotated(metrics="false", kv_events_port="0"))
    assert (spec.metrics_url, spec.kv_events, spec.kv_replay) == (None, None, None)
    assert not spec.ask_kv_events


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("taints", "nonsense"),
        ("metrics", "metrics"),
        ("metrics_port", "70000"),
        ("kv_events_port", "five"),
        ("kv_replay_port", "-1"),
        ("block_size", "0"),
        ("max_num_batched_tokens", "1e3"),
    ],
)
def test_an_annotation_that_cannot_be_read_is_told_and_the_default_holds(key: str, text: str) -> None:
    bad = table(annotated(**{key: text}))
    assert bad.specs() == table(pod("a")).specs()
    (problem,) = bad.problems()
    assert text in problem
    assert problem.startswith("pod a: ")
    bad.put_pod(pod("a"))
    assert bad.problems() == []


def test_one_bad_taint_leaves_the_others() -> None:
    assert only(annotated(taints="bad, maint:NoSchedule")).taints == (Taint("maint"),)


@pytest.mark.parametrize(
    ("label", "value", "kind"),
    [
        ("picker.dev/engine", "sglang", EngineKind.SGLANG),
        ("llm-d.ai/engine-type", "trtllm-serve", EngineKind.TRTLLM),
        ("llm-d.ai/engine-type", "tgi", EngineKind.VLLM),
    ],
)
def test_the_engine_comes_from_a_label(label: str, value: str, kind: EngineKind) -> None:
    spec = only(pod("a", labels={"app": "x", label: value}))
    assert spec.engine is kind
    if kind is EngineKind.TRTLLM:
        assert (spec.metrics_url, spec.kv_events) == ("http://10.0.0.1:8000/prometheus/metrics", None)


def test_defaults_are_a_setting() -> None:
    defaults = PodDefaults(engine=EngineKind.SGLANG, kv_events_port=None, block_size=32)
    spec = only(pod("a"), defaults=defaults)
    assert (spec.engine, spec.kv_events, spec.block_size) == (EngineKind.SGLANG, None, 32)


def test_a_pod_whose_events_nobody_told_of_is_asked() -> None:
    silent = PodDefaults(kv_events_port=None)
    assert only(pod("a"), defaults=silent).ask_kv_events
    assert not only(annotated(kv_events_port="false"), defaults=silent).ask_kv_events


@pytest.mark.parametrize(
    ("manifest", "present"),
    [
        (pod("a", ready=False), True),
        (pod("a", deleting=True), True),
        (pod("a", phase="Pending", ready=False), True),
        (pod("a", phase="Failed"), False),
        (pod("a", phase="Succeeded"), False),
        (pod("a", None), False),
        (pod("a", ""), False),
        (pod("a", "nonsense"), False),
        (pod("a", labels={"app": "y"}), False),
    ],
)
def test_a_pod_that_cannot_serve_keeps_its_place_only_while_its_process_may_run(
    manifest: dict[str, Any], present: bool
) -> None:
    """Its identity, and with it what is booked there, stays through a flap (C28)."""
    pods = table(pod("a"))
    assert pods.put_pod(manifest)
    assert [(spec.uid, spec.ready) for spec in pods.specs()] == ([("uid-a:8000", False)] if present else [])
    assert pods.put_pod(pod("a"))
    assert only(pod("a")) == pods.specs()[0]


def test_a_replacement_under_the_same_name_is_another_endpoint() -> None:
    pods = table(pod("a", uid="1", created="2026-01-01T00:00:00Z"))
    newer = pod("a", uid="2", created="2026-01-01T00:00:05Z")
    assert pods.put_pod(newer)
    assert not pods.delete_pod(pod("a", uid="1"))
    # Nor does a late word of the old pod bring it back.
    assert not pods.put_pod(pod("a", uid="1", created="2026-01-01T00:00:00Z"))
    assert [spec.uid for spec in pods.specs()] == ["2:8000"]
    assert pods.delete_pod(newer)
    assert pods.specs() == []


def test_a_change_that_means_nothing_is_no_change() -> None:
    pods = table(pod("a"))
    assert not pods.put_pod(pod("a"))
    assert not pods.put_pod(pod("b", labels={"app": "y"}))
    assert not pods.delete_pod(pod("b", labels={"app": "y"}))
    assert not pods.replace_pods([pod("a")])
    assert not pods.set_pool(ONE_PORT)


def node(name: str = "n", *taints: dict[str, str], cordoned: bool = False) -> dict[str, Any]:
    spec: dict[str, Any] = {"taints": list(taints)}
    if cordoned:
        spec["unschedulable"] = True
    return {"metadata": {"name": name}, "spec": spec}


GPU = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
SICK = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
CORDON = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


def test_a_pod_can_be_cordoned_by_itself() -> None:
    pods = table(pod("a"))
    assert not pods.specs()[0].cordoned
    assert pods.put_pod(pod("a", annotations={"picker.dev/cordoned": "true"}))
    assert pods.specs()[0].cordoned


def test_a_nodes_taints_and_cordon_reach_its_pods_alone() -> None:
    pods = table(pod("a", node="n"), pod("b", "10.0.0.2", node="m"))
    assert pods.put_node(node("n", SICK, CORDON, cordoned=True))
    a, b = pods.specs()
    assert (a.cordoned, a.taints) == (True, (Taint(SICK["key"], "", TaintEffect.NO_EXECUTE),))
    assert (b.cordoned, b.taints) == (False, ())
    assert not pods.put_node(node("n", SICK, CORDON, cordoned=True))
    assert pods.delete_node(node("n"))
    assert not pods.specs()[0].cordoned


@pytest.mark.parametrize(
    ("toleration", "covered"),
    [
        ({"key": "nvidia.com/gpu", "operator": "Exists"}, True),
        ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": "nvidia.com/gpu", "value": "present"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "nvidia.com/gpu", "value": "absent", "operator": "Equal"}, False),
        ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "nvidia.com/gpu", "operator": "Exists", "tolerationSeconds": 300}, False),
    ],
)
def test_a_node_taint_that_the_pod_tolerates_for_good_says_nothing_against_it(
    toleration: dict[str, Any], covered: bool
) -> None:
    pods = table(pod("a", node="n", tolerations=[toleration]))
    pods.replace_nodes([node("n", GPU)])
    assert pods.specs()[0].taints == (() if covered else (Taint("nvidia.com/gpu", "present"),))


def test_an_inference_pool_is_read() -> None:
    shape = PoolShape.read(pool("p", (8000, 8001, 8000), app="x", tier="gold"))
    assert shape == PoolShape(LabelSelector.of({"app": "x", "tier": "gold"}), (8000, 8001))


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"selector": {"matchLabels": {}}, "targetPorts": [{"number": 1}]},
        {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": []},
        {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": 0}, {"number": "8000"}, 8000]},
        {"selector": "app=x", "targetPorts": 8000},
    ],
)
def test_an_inference_pool_that_selects_nothing_sensible_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="selector"):
        PoolShape.read({"spec": spec})


FIELDS = ["metadata", "spec", "status", "name", "uid", "labels", "annotations", "podIP", "conditions", "type"]
KEYS = [*FIELDS, "taints", "effect", "key", "tolerations", "nodeName", "app", "picker.dev/taints"]
SCALARS = ["", "a", "x", "True", "10.0.0.1", "NoSchedule", None, True, -1, 70000]
json = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from(["metadata", "spec", "status"]), json)


@given(
    st.lists(
        st.tuples(st.sampled_from(["put_pod", "delete_pod", "put_node", "delete_node"]), objects), max_size=4
    )
)
def test_objects_of_any_shape_are_taken_without_an_error(events: list[tuple[str, dict[str, Any]]]) -> None:
    pods = table(pod("keep"))
    for method, item in events:
        getattr(pods, method)(item)
    assert "uid-keep:8000" in [spec.uid for spec in pods.specs()]


manifests = st.builds(
    pod,
    st.sampled_from("ab"),
    st.sampled_from([None, "10.0.0.1", "10.0.0.2"]),
    uid=st.sampled_from("12"),
    ready=st.booleans(),
    deleting=st.booleans(),
    phase=st.sampled_from(["Running", "Failed"]),
    labels=st.sampled_from([{"app": "x"}, {"app": "y"}, {}]),
    node=st.sampled_from([None, "n"]),
)


@given(st.lists(st.tuples(st.booleans(), manifests), max_size=20), st.booleans())
def test_events_one_by_one_say_what_a_list_at_the_end_says(
    events: list[tuple[bool, dict[str, Any]]], cordoned: bool
) -> None:
    """The state is that of the present pods alone, and `changed` is true exactly when the endpoints differ."""
    pods, present = table(), {}
    pods.put_node(node("n", cordoned=cordoned))
    for delete, manifest in events:
        before = pods.specs()
        # As an API server: a name has one pod, and a uid never changes its name.
        manifest["metadata"]["uid"] += manifest["metadata"]["name"]
        name, uid = manifest["metadata"]["name"], manifest["metadata"]["uid"]
        if delete:
            changed = pods.delete_pod(manifest)
            if name in present and present[name]["metadata"]["uid"] == uid:
                del present[name]
        else:
            changed = pods.put_pod(manifest)
            present[name] = manifest
        assert changed == (pods.specs() != before)
    fresh = table(*present.values())
    fresh.replace_nodes([node("n", cordoned=cordoned)])
    assert sorted(pods.specs(), key=lambda spec: spec.uid) == sorted(fresh.specs(), key=lambda spec: spec.uid)
