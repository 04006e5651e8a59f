"""Pods, their InferencePool and their nodes in; endpoints out. No I/O: the watches feed it, and so can a test.

Each pod that the pool selects is one endpoint for each target port; its rank is the port's place in the list.
Its identity is the pod's uid and the port: a pod that flaps keeps it, a replacement under the same name does not.

- A pod that is not Ready, or is being deleted, stays an endpoint that is not ready: it gets nothing new, and
  what runs there stays booked.
- A pod without an address, or whose containers have all ended (Failed, Succeeded), is no endpoint at all.

Objects are plain dicts as the API server's JSON gives them. Whatever has an unexpected shape there counts as
absent; nothing in them raises.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from picker.policy.constraints import LabelSelector, Taint, TaintEffect
from picker.pool.endpoint import EndpointSpec, EngineKind
from picker.pool.metrics_text import METRICS_PATH

KubeObject = Mapping[str, Any]

TAINTS = "picker.dev/taints"
# "true" keeps everything new away, whatever it tolerates: what `kubectl picker drain` writes.
CORDONED = "picker.dev/cordoned"
ENGINE = "picker.dev/engine"
METRICS = "picker.dev/metrics"
METRICS_PORT = "picker.dev/metrics-port"
KV_EVENTS_PORT = "picker.dev/kv-events-port"
KV_REPLAY_PORT = "picker.dev/kv-replay-port"
BLOCK_SIZE = "picker.dev/block-size"
MAX_NUM_BATCHED_TOKENS = "picker.dev/max-num-batched-tokens"
MODELS = "picker.dev/models"
# The first one present counts; the others are what llm-d's and the Gateway API's pods carry.
ACTIVE_PORTS = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
ENGINE_LABELS = (ENGINE, "llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
_ENGINE_NAMES = {
    **{kind.value: kind for kind in EngineKind},
    "trtllm-serve": EngineKind.TRTLLM,
    "triton-tensorrt-llm": EngineKind.TRTLLM,
}

# What switches a port off.
_OFF = ("0", "false")
_CORDON_TAINT = "node.kubernetes.io/unschedulable"


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What an InferencePool says of its endpoints."""

    selector: LabelSelector
    ports: tuple[int, ...]

    @classmethod
    def read(cls, pool: KubeObject) -> PoolShape:
        """From an `inference.networking.k8s.io/v1` InferencePool. ValueError if it selects nothing sensible."""
        spec = _mapping(pool, "spec")
        labels = _strings(_mapping(_mapping(spec, "selector"), "matchLabels"))
        ports = tuple(
            port["number"]
            for port in _items(spec, "targetPorts")
            if type(port.get("number")) is int and 1 <= port["number"] <= 65535
        )
        if not labels or not ports:
            raise ValueError("an InferencePool needs selector.matchLabels and targetPorts")
        return cls(LabelSelector.of(labels), tuple(dict.fromkeys(ports)))


@dataclass(frozen=True, slots=True)
class PodDefaults:
    """What holds for a pod that does not say otherwise. Without a port for KV events the engine is asked.

    With several target ports there is no default replay port: rank r publishes at the events port plus r, so
    the next port up belongs to the next rank.
    """

    engine: EngineKind = EngineKind.VLLM
    kv_events_port: int | None = 5557
    kv_replay_port: int | None = 5558
    block_size: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Node:
    cordoned: bool = False
    taints: tuple[Taint, ...] = ()


@dataclass(slots=True)
class _Pod:
    uid: str
    name: str
    created: str
    manifest: KubeObject
    specs: tuple[EndpointSpec, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class PodTable:
    """The state behind the watches. Every method that takes events returns whether the endpoints changed."""

    defaults: PodDefaults = field(default_factory=PodDefaults)
    _shape: PoolShape | None = None
    _pods: dict[str, _Pod] = field(default_factory=dict)
    _uid_by_name: dict[str, str] = field(default_factory=dict)
    _nodes: dict[str, _Node] = field(default_factory=dict)

    def specs(self) -> list[EndpointSpec]:
        return [spec for pod in self._pods.values() for spec in pod.specs]

    def problems(self) -> list[str]:
        """What is wrong with the pods' annotations now, one line each; the defaults hold in their stead."""
        return [f"pod {pod.name}: {problem}" for pod in self._pods.values() for problem in pod.problems]

    def set_pool(self, shape: PoolShape | None) -> bool:
        """The pool as it is now; None when it does not exist."""
        if shape == self._shape:
            return False
        self._shape = shape
        return self._derive(self._pods.values())

    def replace_pods(self, pods: Iterable[KubeObject]) -> bool:
        """A complete list: pods that are not in it are gone."""
        before = self.specs()
        self._pods, self._uid_by_name = {}, {}
        for manifest in pods:
            self._put(manifest)
        return self.specs() != before

    def put_pod(self, manifest: KubeObject) -> bool:
        """A pod that was added or modified."""
        before = self._specs_of(_text(_mapping(manifest, "metadata"), "name"))
        pod = self._put(manifest)
        return pod is not None and pod.specs != before

    def delete_pod(self, manifest: KubeObject) -> bool:
        """A pod that is gone. The delete of an older namesake leaves the present pod alone."""
        pod = self._pods.pop(_text(_mapping(manifest, "metadata"), "uid"), None)
        if pod is None:
            return False
        del self._uid_by_name[pod.name]
        return bool(pod.specs)

    def replace_nodes(self, nodes: Iterable[KubeObject]) -> bool:
        self._nodes = {_text(_mapping(node, "metadata"), "name"): _read_node(node) for node in nodes}
        return self._derive(self._pods.values())

    def put_node(self, manifest: KubeObject) -> bool:
        name, node = _text(_mapping(manifest, "metadata"), "name"), _read_node(manifest)
        if self._nodes.get(name) == node:
            return False
        self._nodes[name] = node
        return self._derive(pod for pod in self._pods.values() if _node_name(pod.manifest) == name)

    def delete_node(self, manifest: KubeObject) -> bool:
        name = _text(_mapping(manifest, "metadata"), "name")
        if self._nodes.pop(name, None) is None:
            return False
        return self._derive(pod for pod in self._pods.values() if _node_name(pod.manifest) == name)

    def _specs_of(self, name: str) -> tuple[EndpointSpec, ...]:
        uid = self._uid_by_name.get(name)
        return self._pods[uid].specs if uid is not None else ()

    def _put(self, manifest: KubeObject) -> _Pod | None:
        metadata = _mapping(manifest, "metadata")
        uid, name = _text(metadata, "uid"), _text(metadata, "name")
        pod = _Pod(uid, name, _text(metadata, "creationTimestamp"), manifest)
        if not uid or not name:
            return None
        namesake = self._uid_by_name.get(name)
        if namesake is not None and namesake != uid:
            if pod.created < self._pods[namesake].created:
                return None
            del self._pods[namesake]
        self._pods[uid] = pod
        self._uid_by_name[name] = uid
        self._derive((pod,))
        return pod

    def _derive(self, pods: Iterable[_Pod]) -> bool:
        changed = False
        for pod in pods:
            before = pod.specs
            reading = _PodReading(pod, self._shape, self._nodes.get(_node_name(pod.manifest)), self.defaults)
            pod.specs, pod.problems = reading.specs(), tuple(reading.problems)
            changed |= pod.specs != before
        return changed


class _PodReading:
    """One pod read under one pool, with its node's state."""

    def __init__(self, pod: _Pod, shape: PoolShape | None, node: _Node | None, defaults: PodDefaults) -> None:
        self.problems: list[str] = []
        self._pod = pod
        self._shape = shape
        self._node = node or _Node()
        self._defaults = defaults
        metadata = _mapping(pod.manifest, "metadata")
        self._labels = _strings(_mapping(metadata, "labels"))
        self._annotations = _strings(_mapping(metadata, "annotations"))

    def specs(self) -> tuple[EndpointSpec, ...]:
        status = _mapping(self._pod.manifest, "status")
        address = _address(_text(status, "podIP"))
        if self._shape is None or not self._shape.selector.matches(self._labels):
            return ()
        if address is None or _text(status, "phase") in ("Failed", "Succeeded"):
            return ()
        active = self._active_ports()
        return tuple(
            self._endpoint(address, rank, port, _is_ready(self._pod.manifest))
            for rank, port in enumerate(self._shape.ports)
            if active is None or port in active
        )

    def _endpoint(self, address: str, rank: int, port: int, ready: bool) -> EndpointSpec:
        assert self._shape is not None
        several = len(self._shape.ports) > 1
        engine = self._engine()
        defaults = self._defaults
        has_events = engine is not EngineKind.TRTLLM
        events = self._port(KV_EVENTS_PORT, defaults.kv_events_port if has_events else None)
        replay = self._port(KV_REPLAY_PORT, defaults.kv_replay_port if has_events and not several else None)
        return EndpointSpec(
            uid=f"{self._pod.uid}:{port}",
            name=f"{self._pod.name}-rank-{rank}" if several else self._pod.name,
            address=address,
            port=port,
            rank=rank,
            labels=self._labels,
            taints=self._taints(),
            ready=ready,
            cordoned=self._node.cordoned or self._annotations.get(CORDONED) == "true",
            engine=engine,
            metrics_url=self._metrics_url(address, port, engine),
            kv_events=_tcp(address, events, rank),
            ask_kv_events=self._annotations.get(KV_EVENTS_PORT) not in _OFF,
            kv_replay=_tcp(address, replay, rank) if events is not None else None,
            block_size=self._number(BLOCK_SIZE, defaults.block_size),
            max_num_batched_tokens=self._number(MAX_NUM_BATCHED_TOKENS, defaults.max_num_batched_tokens),
            models=frozenset(_split(self._annotations.get(MODELS, ""))),
        )

    def _engine(self) -> EngineKind:
        said = next((self._labels[key] for key in ENGINE_LABELS if key in self._labels), None)
        if said is not None and said not in _ENGINE_NAMES:
            self._complain(f"engine {said!r} is not one of {', '.join(_ENGINE_NAMES)}")
        return _ENGINE_NAMES.get(said or "", self._defaults.engine)

    def _taints(self) -> tuple[Taint, ...]:
        taints = set(self._node_taints())
        for text in _split(self._annotations.get(TAINTS, "")):
            try:
                taints.add(Taint.parse(text))
            except ValueError as error:
                self._complain(f"{TAINTS}: {error}")
        return tuple(sorted(taints))

    def _node_taints(self) -> list[Taint]:
        """The node's taints that the pod does not tolerate for good. A taint that marks a kind of node, as
        those of GPU nodes do, is tolerated by the pods meant for it and says nothing against them."""
        tolerations = list(_items(_mapping(self._pod.manifest, "spec"), "tolerations"))
        return [
            taint for taint in self._node.taints if not any(_tolerates(one, taint) for one in tolerations)
        ]

    def _metrics_url(self, address: str, port: int, engine: EngineKind) -> str | None:
        path = self._annotations.get(METRICS, METRICS_PATH[engine])
        if path == "false":
            return None
        if not path.startswith("/"):
            self._complain(f"{METRICS}: {path!r} is neither a path that starts with / nor false")
            path = METRICS_PATH[engine]
        port = self._port(METRICS_PORT, port) or port
        return f"http://{_bracketed(address)}:{port}{path}"

    def _port(self, annotation: str, default: int | None) -> int | None:
        text = self._annotations.get(annotation)
        if text is None:
            return default
        if text in _OFF:
            return None
        number = _whole_number(text)
        if number is None or not 1 <= number <= 65535:
            self._complain(f"{annotation}: {text!r} is neither a port nor false")
            return default
        return number

    def _number(self, annotation: str, default: int | None) -> int | None:
        text = self._annotations.get(annotation)
        if text is None:
            return default
        number = _whole_number(text)
        if not number:
            self._complain(f"{annotation}: {text!r} is no whole number above 0")
            return default
        return number

    def _active_ports(self) -> set[int] | None:
        text = next((self._annotations[key] for key in ACTIVE_PORTS if key in self._annotations), None)
        if text is None:
            return None
        numbers = [_whole_number(part) for part in _split(text)]
        if None in numbers:
            self._complain(f"{ACTIVE_PORTS[0]}: {text!r} is no list of ports")
        return {number for number in numbers if number is not None}

    def _complain(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def _is_ready(pod: KubeObject) -> bool:
    if _mapping(pod, "metadata").get("deletionTimestamp"):
        return False
    conditions = _items(_mapping(pod, "status"), "conditions")
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def _read_node(node: KubeObject) -> _Node:
    spec = _mapping(node, "spec")
    taints = {
        Taint(_text(item, "key"), _text(item, "value"), TaintEffect(_text(item, "effect")))
        for item in _items(spec, "taints")
        if _text(item, "effect") in set(TaintEffect) and item.get("key") != _CORDON_TAINT
    }
    return _Node(spec.get("unschedulable") is True, tuple(sorted(taints)))


def _tolerates(toleration: KubeObject, taint: Taint) -> bool:
    """Whether the pod's toleration covers the node's taint without a time limit (Kubernetes' own rules)."""
    if toleration.get("tolerationSeconds") is not None:
        return False
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    key = _text(toleration, "key")
    if toleration.get("operator") == "Exists":
        return key in ("", taint.key)
    return key == taint.key and _text(toleration, "value") == taint.value


def _node_name(pod: KubeObject) -> str:
    return _text(_mapping(pod, "spec"), "nodeName")


def _address(text: str) -> str | None:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _tcp(address: str, base: int | None, rank: int) -> str | None:
    return f"tcp://{_bracketed(address)}:{base + rank}" if base is not None else None


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None


def _mapping(parent: KubeObject, key: str) -> KubeObject:
    value = parent.get(key)
    return value if isinstance(value, dict) else {}


def _items(parent: KubeObject, key: str) -> Iterable[KubeObject]:
    value = parent.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(parent: KubeObject, key: str) -> str:
    value = parent.get(key)
    return value if isinstance(value, str) else ""


def _strings(parent: KubeObject) -> dict[str, str]:
    return {key: value for key, value in parent.items() if isinstance(value, str)}
