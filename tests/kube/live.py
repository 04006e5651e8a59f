"""Picker as a process of its own on the real control plane: real Envoy before it, mock engines as its pods.

Nothing runs pods here, so a test makes a Pod object for each engine and writes its status, as a kubelet would.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.pool.kube.api import KubeApi
from picker.simulation.envoy import EnvoyProcess
from picker.simulation.envoy_config import EnvoyOptions, bootstrap
from picker.simulation.mock_engine import MockEngine, MockEngineSettings
from picker.simulation.prompts import DEFAULT_TOKENIZER
from tests.kube.chart import CHART
from tests.kube.control_plane import Account, ControlPlane
from tests.support.ports import free_ports

MODEL = "tiny"
POOL = "vllm"
RELEASE = "picker"
LABELS = {"app": "vllm"}
# Seconds after which what is waited for counts as never: a busy machine is slow, not wrong.
PATIENCE = 60.0


async def until(holds: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not in {seconds:.0f} s: {what}") from None


# Picker


class PickerProcess:
    """`picker serve` as a child. `ports` are known once it has said that it serves."""

    def __init__(self, name: str, directory: Path, settings: dict[str, Any]) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self.ports: dict[str, int] = {}
        self._config = directory / f"{name}.yaml"
        self._config.write_text(yaml.safe_dump(settings))
        self._child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as output:
            self._child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "picker", "serve", "--config", str(self._config)),
                stdout=output,
                stderr=output,
            )
        await until(lambda: bool(self._find_ports()) or not self.running, f"{self.name} serves")
        self.ports = self._find_ports()
        assert self.ports, self.log.read_text()

    def _find_ports(self) -> dict[str, int]:
        found = re.search(r"serving: Addresses\((.*?)\)", self.log.read_text())
        return {name: int(port) for name, port in re.findall(r"(\w+)=(\d+)", found[1])} if found else {}

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.returncode is None

    async def stop(self, signum: int = signal.SIGTERM) -> int:
        """Its exit code."""
        assert self._child is not None
        if self.running:
            self._child.send_signal(signum)
        return await asyncio.wait_for(self._child.wait(), PATIENCE)

    async def kill(self) -> None:
        if self.running:
            await self.stop(signal.SIGKILL)


# The API server, through a wire that can be cut


class Wire:
    """A TCP relay to the API server. `cut` breaks every connection; `silent` holds all bytes back, both ways."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self._target = port
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def relaying(self) -> AsyncIterator[Wire]:
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.cut()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def silence(self, silent: bool) -> None:
        (self._open.clear if silent else self._open.set)()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(OSError, asyncio.CancelledError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            pair = {writer, far_writer}
            self._writers |= pair
            try:
                await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
            finally:
                self._writers -= pair
                for each in pair:
                    each.transport.abort()
        self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionError("the other side has closed")


# Load


@dataclass(slots=True)
class Answer:
    """`pod` is the engine that answered; `began` and `took` are seconds."""

    status: int
    pod: str
    began: float
    took: float
    body: str = ""


@dataclass(slots=True)
class Load:
    """Clients that send one short request after the other."""

    url: str
    session: aiohttp.ClientSession
    answers: list[Answer] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _serial: int = 0

    async def ask(self, prompt: Any = None, headers: dict[str, str] | None = None, tokens: int = 1) -> Answer:
        self._serial += 1
        body = {"model": MODEL, "prompt": prompt or f"Number {self._serial}", "max_tokens": tokens}
        began = time.monotonic()
        async with self.session.post(
            f"{self.url}/v1/completions", json=body, headers=headers or {}
        ) as response:
            text = await response.text()
        pod = response.headers.get("x-inference-pod", "")
        return Answer(response.status, pod, began, time.monotonic() - began, text)

    @asynccontextmanager
    async def running(self, clients: int = 4, pause: float = 0.02) -> AsyncIterator[Load]:
        async def client() -> None:
            while not stopping.is_set():
                self.answers.append(await self.ask())
                await asyncio.sleep(pause)

        stopping = asyncio.Event()
        tasks = [asyncio.create_task(client()) for _ in range(clients)]
        try:
            yield self
        finally:
            stopping.set()
            # Nobody may be stuck: every request that was sent is answered, one way or the other.
            await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)

    def statuses(self, since: float = 0.0) -> Counter[int]:
        return Counter(answer.status for answer in self.answers if answer.began >= since)

    async def served_by(self, *pods: str) -> None:
        """Wait until requests go to exactly these pods, and then that they keep doing so."""

        async def lately() -> set[str]:
            answers = await asyncio.gather(*(self.ask() for _ in range(6 * len(pods) or 1)))
            return {answer.pod or str(answer.status) for answer in answers}

        wanted, seen = set(pods), set[str]()
        async with asyncio.timeout(PATIENCE):
            while (seen := await lately()) != wanted:
                await asyncio.sleep(0.05)
        assert await lately() | seen == wanted


# All of it


@dataclass(slots=True)
class Live:
    """One pool with its engines, pickers and Envoy. The API is reached as an administrator."""

    cluster: ControlPlane
    namespace: str
    directory: Path
    api: KubeApi
    session: aiohttp.ClientSession
    exits: AsyncExitStack
    engines: dict[str, MockEngine] = field(default_factory=dict)
    kubeconfig: Path = Path()
    port: int = 0
    gateway: EnvoyProcess | None = None
    _serial: int = 0

    # Engines and their pods

    async def engine(self, name: str, port: int | None = None, **options: Any) -> MockEngine:
        """A mock engine on an address of its own; all engines without `port` share one number."""
        number = len(self.engines) + 1
        settings = MockEngineSettings(
            host=f"127.0.77.{number}",
            port=self.port if port is None else port,
            name=name,
            model=MODEL,
            **{"iteration_time": 0.002} | options,
        )
        engine = await self.exits.enter_async_context(MockEngine(settings))
        self.engines[name] = engine
        self.port = self.port or int(engine.addresses.http.rpartition(":")[2])
        return engine

    async def pool(self, ports: Sequence[int] = ()) -> None:
        """Make the InferencePool, or change its ports."""
        spec = {
            "selector": {"matchLabels": LABELS},
            "targetPorts": [{"number": port} for port in ports or [self.port]],
            "endpointPickerRef": {"name": RELEASE, "port": {"number": 9002}},
        }
        pool = {
            "apiVersion": "inference.networking.k8s.io/v1",
            "kind": "InferencePool",
            "metadata": {"name": POOL, "namespace": self.namespace},
            "spec": spec,
        }
        await asyncio.to_thread(self.cluster.kubectl, "apply", "-f", "-", input=json.dumps(pool))

    async def pod(self, name: str, annotations: dict[str, str] | None = None) -> None:
        """Make the pod of an engine, ready."""
        addresses = self.engines[name].addresses
        ports = {
            f"picker.dev/kv-{kind}-port": address.rpartition(":")[2] if address else "false"
            for kind, address in (("events", addresses.kv_events), ("replay", addresses.kv_replay))
        }
        pod = {
            "metadata": {"name": name, "labels": LABELS, "annotations": ports | (annotations or {})},
            "spec": {"containers": [{"name": "engine", "image": "engine"}]},
        }
        await self.api.request("POST", self._pods(), body=pod)
        await self.set_ready(name, True)

    async def set_ready(self, name: str, ready: bool) -> None:
        status = _running(self.engines[name].addresses.http.rpartition(":")[0], ready)
        await self._patch(f"{self._pods(name)}/status", {"status": status})

    async def annotate(self, name: str, **annotations: str | None) -> None:
        keys = {f"picker.dev/{key}": value for key, value in annotations.items()}
        await self._patch(self._pods(name), {"metadata": {"annotations": keys}})

    async def label(self, name: str, **labels: str | None) -> None:
        await self._patch(self._pods(name), {"metadata": {"labels": labels}})

    async def delete(self, name: str) -> None:
        await self.api.request("DELETE", self._pods(name), [("gracePeriodSeconds", "0")])

    async def _patch(self, path: str, patch: dict[str, Any]) -> None:
        await self.api.request("PATCH", path, body=patch, content_type="application/merge-patch+json")

    def _pods(self, name: str = "") -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods{'/' * bool(name)}{name}"

    # Pickers

    async def access(self, port: int | None = None, *flags: str) -> None:
        """Make what the chart makes for Picker's account, and a kubeconfig with a token of it.

        port: of a `Wire`, in place of the API server's own.
        """
        rendered = await asyncio.to_thread(
            self.cluster.helm, "template", RELEASE, str(CHART), "--namespace", self.namespace, *flags
        )
        kinds = ("ServiceAccount", "Role", "RoleBinding")
        objects = [each for each in yaml.safe_load_all(rendered) if each and each["kind"] in kinds]
        text = yaml.safe_dump_all(objects)
        at = ("--namespace", self.namespace)
        await asyncio.to_thread(self.cluster.kubectl, "apply", *at, "-f", "-", input=text)
        await self.sign_in(port)

    async def sign_in(self, port: int | None = None) -> None:
        """A kubeconfig with a token of Picker's account."""
        at = ("--namespace", self.namespace)
        token = await asyncio.to_thread(self.cluster.kubectl, "create", "token", RELEASE, *at)
        config = yaml.safe_load(self.cluster.kubeconfig_for(Account(RELEASE, token.strip()), self.namespace))
        if port is not None:
            config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
        self.kubeconfig = self.directory / "picker.kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(config))

    async def picker(self, **changes: dict[str, Any]) -> PickerProcess:
        """Start one; `changes` are settings by section."""
        settings: dict[str, dict[str, Any]] = {
            "extproc": {"host": "127.0.0.1", "port": 0, "health_port": 0},
            "admin": {"port": 0, "grpc_port": 0},
            "pool": {
                "scrape_interval": 0.2,
                "kubernetes": {
                    "name": POOL,
                    "namespace": self.namespace,
                    "kubeconfig": str(self.kubeconfig),
                    "watch": {"max_backoff": 1.0, "silence": 20.0},
                },
            },
            "tokens": {"models": {"*": str(DEFAULT_TOKENIZER)}},
            "log": {"format": "json"},
        }
        for section, values in changes.items():
            settings[section] = _merged(settings.get(section, {}), values)
        self._serial += 1
        picker = PickerProcess(f"picker-{self._serial}", self.directory, settings)
        self.exits.push_async_callback(picker.kill)
        await picker.start()
        return picker

    async def rendered(self, template: str, *flags: str) -> Any:
        """The first object that one template of the chart makes."""
        text = await asyncio.to_thread(
            self.cluster.helm,
            *("template", RELEASE, str(CHART), "--namespace", self.namespace),
            *("--show-only", f"templates/{template}.yaml"),
            *flags,
        )
        return next(iter(yaml.safe_load_all(text)))

    async def picker_pod(self, address: str, name: str = "picker-0", *flags: str) -> None:
        """The Pod that the chart's Deployment would make for a picker, at this address."""
        values = ("--values", str(CHART / "examples" / "policy.yaml"), *flags)
        template = (await self.rendered("deployment", *values))["spec"]["template"]
        labels = template["metadata"]["labels"]
        pod = {"metadata": {"name": name, "labels": labels}, "spec": template["spec"]}
        await self.api.request("POST", self._pods(), body=pod)
        await self._patch(f"{self._pods(name)}/status", {"status": _running(address, True)})

    async def selected(self, *flags: str) -> list[str]:
        """The pods that Picker's Service selects."""
        selector = (await self.rendered("service", *flags))["spec"]["selector"]
        labels = ",".join(f"{key}={value}" for key, value in selector.items())
        answer = await self.api.request("GET", self._pods(), [("labelSelector", labels)])
        return [pod["metadata"]["name"] for pod in answer["items"]]

    async def await_selected(self, *names: str, flags: Sequence[str] = ()) -> None:
        async with asyncio.timeout(PATIENCE):
            while await self.selected(*flags) != list(names):
                await asyncio.sleep(0.2)

    async def ready(self, picker: PickerProcess, path: str = "/readyz") -> bool:
        with suppress(aiohttp.ClientError):
            async with self.session.get(f"http://127.0.0.1:{picker.ports['admin']}{path}") as response:
                return response.status == 200
        return False

    async def await_ready(self, picker: PickerProcess, ready: bool = True, seconds: float = PATIENCE) -> None:
        async with asyncio.timeout(seconds):
            while await self.ready(picker) is not ready:
                assert picker.running, picker.log.read_text()
                await asyncio.sleep(0.05)

    async def status(self, picker: PickerProcess, token: str = "") -> Any:
        url = f"http://127.0.0.1:{picker.ports['admin']}/status"
        async with self.session.get(url, headers={"Authorization": f"Bearer {token}"}) as response:
            return await response.json()

    async def metric(self, picker: PickerProcess, name: str) -> float:
        async with self.session.get(f"http://127.0.0.1:{picker.ports['admin']}/metrics") as response:
            found = re.search(rf"^{re.escape(name)} (\S+)$", await response.text(), re.MULTILINE)
        assert found, name
        return float(found[1])

    # The way in

    async def envoy(self, *ports: int) -> Load:
        """An Envoy that asks the pickers on these ports, and clients of it."""
        first, *others = [("127.0.0.1", port) for port in ports]
        options = EnvoyOptions(picker=first, standby_pickers=others)
        process = EnvoyProcess(bootstrap(options).to_json(), directory=self.directory)
        self.gateway = await self.exits.enter_async_context(process)
        return Load(f"http://127.0.0.1:{self.gateway.port}", self.session)

    async def await_known(self, pickers: int) -> None:
        """Wait until the gateway takes this many pickers to be ready."""
        assert self.gateway is not None
        name = "cluster.picker.membership_healthy"
        async with asyncio.timeout(PATIENCE):
            while (await self.gateway.stats(name))[name] != pickers:
                await asyncio.sleep(0.05)


def _running(address: str, ready: bool) -> dict[str, Any]:
    """A pod's status as a kubelet writes it."""
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [{"type": "Ready", "status": str(ready)}],
    }


def _merged(first: Any, second: Any) -> Any:
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return second
    return first | {key: _merged(first.get(key), value) for key, value in second.items()}


def on_these_ports(config: dict[str, Any], extproc: int) -> dict[str, Any]:
    """The rendered configuration with nothing changed but the numbers of its ports."""
    resources = config["static_resources"]
    (admin,) = free_ports(1)
    config["admin"]["address"]["socket_address"]["port_value"] = admin
    for listener in resources["listeners"]:
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": 0}
    for cluster in resources["clusters"]:
        port = {"picker": extproc, "admin": admin}.get(cluster["name"])
        if port is not None:
            endpoint = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
            endpoint["address"]["socket_address"]["port_value"] = port
    return config


async def health(picker: PickerProcess, service: str) -> str:
    """What its health port says of a service."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.ports['health']}") as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service)
            )
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def own_address() -> str:
    """An address of this machine that is not loopback: the API server proxies to no other. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback, and the API server proxies to none such")
        return str(probe.getsockname()[0])


@asynccontextmanager
async def living(cluster: ControlPlane, namespace: str, directory: Path) -> AsyncIterator[Live]:
    async with AsyncExitStack() as exits:
        api = await KubeApi.connect(cluster.kubeconfig)
        exits.push_async_callback(api.close)
        session = await exits.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60)
            )
        )
        yield Live(cluster, namespace, directory, api, session, exits)
