"""The pool as a YAML file: read, validated and watched, for a run without Kubernetes.

A file with every key:

    defaults:                       # optional; for each endpoint, whose own keys win (labels are merged)
      engine: vllm                  # vllm | sglang | trtllm
      kv_events: 5557
    endpoints:
      - name: a                     # unique
        address: 10.0.0.1:8000      # ip:port or [ipv6]:port; host:port only for a gateway that resolves names
        ranks: 2                    # data-parallel ranks behind this one address, each its own endpoint
        labels: {zone: a}
        taints: ["gpu=old:PreferNoSchedule"]
        cordoned: false
        metrics: /metrics           # a path, a whole URL, or false; by default the engine's own path
        kv_events: tcp://10.0.0.1:5557
        kv_replay: 5657
        block_size: 16
        max_num_batched_tokens: 8192
        models: [llama]

`kv_events` and `kv_replay` are addresses, or ports of the endpoint's own host. Rank r is at that port plus r,
which is where vLLM publishes it. Without `kv_events` a vLLM is asked where it publishes them; `kv_events: false`
says that it publishes none.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import ipaddress
import pathlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from picker.policy.constraints import Taint
from picker.policy.document import Document, read_document
from picker.policy.errors import PolicyError, dotted
from picker.pool.endpoint import EndpointSpec, EngineKind
from picker.pool.metrics_text import METRICS_PATH

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_METRICS_URL = re.compile(r"/\S*|https?://[^\s/]+(?:/\S*)?")


class PoolFileError(ValueError):
    """The pool file cannot be used. Its text is for the operator: where, what, and what would be right.

    `line` counts from 1, None where no line is to blame; `key` is the key at fault, without its path.
    """

    def __init__(self, source: str, problem: str, *, key: str | None = None, line: int | None = None) -> None:
        self.line = line
        self.key = key
        super().__init__(f"{source}: {problem}" if line is None else f"{source}:{line}: {problem}")


def _split_authority(text: str) -> tuple[str, int]:
    """`host:port`, `ip:port` or `[ipv6]:port` as (bare host, port); ValueError says what is wrong."""
    host, colon, port_text = text.rpartition(":")
    if not colon or not port_text.isascii() or not port_text.isdigit() or not 1 <= int(port_text) <= 65535:
        raise ValueError(f"{text!r} must read host:port with a port from 1 to 65535")
    if host.startswith("[") and host.endswith("]"):
        return str(ipaddress.IPv6Address(host[1:-1])), int(port_text)
    if ":" in host:
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, as [2001:db8::1]:8000")
    if not _HOST.fullmatch(host):
        raise ValueError(f"{host!r} is neither an IP address nor a host name")
    return host, int(port_text)


def _check_authority(text: str) -> str:
    _split_authority(text)
    return text


def _check_zmq(value: object) -> object:
    if value is None or value is False:
        return value
    if isinstance(value, str) and value.startswith("tcp://"):
        _split_authority(value.removeprefix("tcp://"))
    elif type(value) is not int or not 1 <= value <= 65535:
        raise ValueError(
            f"{value!r} must read tcp://host:port, be a port of the endpoint's own host, or false"
        )
    return value


def _check_metrics(value: object) -> object:
    if not isinstance(value, bool) and not (isinstance(value, str) and _METRICS_URL.fullmatch(value)):
        raise ValueError(f"{value!r} must be a path that starts with /, an http(s) URL, or false")
    return value


def _check_taint(text: str) -> str:
    Taint.parse(text)
    return text


_Path = tuple[str | int, ...]
_Model = TypeVar("_Model", bound=BaseModel)

# Checked by hand, not as unions: a union's errors name each of its members.
_ZmqAddress = Annotated[Any, AfterValidator(_check_zmq)]
_Metrics = Annotated[Any, AfterValidator(_check_metrics)]


class _Defaults(BaseModel):
    """The keys that `defaults` and each endpoint share."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ranks: int = Field(default=1, ge=1, le=1024)
    labels: dict[str, str] = {}
    taints: list[Annotated[str, AfterValidator(_check_taint)]] = []
    cordoned: bool = False
    engine: Annotated[EngineKind, Field(strict=False)] = EngineKind.VLLM
    metrics: _Metrics = True
    kv_events: _ZmqAddress = None
    kv_replay: _ZmqAddress = None
    block_size: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    models: list[str] = []


class _Entry(_Defaults):
    name: str = Field(min_length=1, max_length=253)
    address: Annotated[str, AfterValidator(_check_authority)]


class _File(BaseModel):
    """The top level; the endpoints are validated one by one, after the defaults are merged in."""

    model_config = ConfigDict(extra="forbid", strict=True)

    defaults: _Defaults = _Defaults()
    endpoints: list[dict[str, Any]]


def parse_pool_file(text: str, source: str = "pool file") -> list[EndpointSpec]:
    """The endpoints that the YAML `text` describes, in its order, one for each rank. Raises PoolFileError."""
    try:
        document = read_document(text, source)
    except PolicyError as error:
        problem = str(error).removeprefix(source if error.line is None else f"{source}:{error.line}")
        raise PoolFileError(source, problem.removeprefix(": "), key=error.key, line=error.line) from None
    if not isinstance(document.data, dict):
        raise _error(document, (), "must be a mapping with the key 'endpoints'")
    top = _validate(document, _File, document.data, ())
    defaults = top.defaults.model_dump(exclude_unset=True)
    seen: dict[str, str] = {}
    specs: list[EndpointSpec] = []
    for index, own in enumerate(top.endpoints):
        path = ("endpoints", index)
        merged = defaults | own
        if isinstance(merged.get("labels"), dict):
            merged["labels"] = defaults.get("labels", {}) | merged["labels"]
        entry = _validate(document, _Entry, merged, path)
        for key, value in (("name", entry.name), ("address", entry.address)):
            if value in seen:
                raise _error(document, (*path, key), f"{value!r} is already used by {seen[value]}")
            seen[value] = dotted(path)
        specs.extend(_expand(entry))
    return specs


def _validate(document: Document, model: type[_Model], data: Any, path: _Path) -> _Model:
    """`data`, which stands at `path`, as a `model`; PoolFileError with the first thing that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        location = first["loc"]
        problem = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            known = _Defaults if location[0] == "defaults" else model
            near = difflib.get_close_matches(str(location[-1]), known.model_fields, n=1)
            problem = f"unknown key; did you mean {near[0]!r}?" if near else "unknown key"
        raise _error(document, (*path, *location), problem) from None


def _error(document: Document, path: _Path, problem: str) -> PoolFileError:
    """An error at `path`, in the line of its last part that the document has."""
    known = path
    while known and known not in document.lines:
        known = known[:-1]
    text = f"{dotted(path)}: {problem}" if path else problem
    key = next((part for part in reversed(path) if isinstance(part, str)), None)
    return PoolFileError(document.source, text, key=key, line=document.lines.get(known))


def _expand(entry: _Entry) -> Iterator[EndpointSpec]:
    address, port = _split_authority(entry.address)
    for rank in range(entry.ranks):
        suffix = f"-rank-{rank}" if entry.ranks > 1 else ""
        spec = EndpointSpec(
            uid=f"{entry.name}{suffix}@{entry.address}",
            name=f"{entry.name}{suffix}",
            address=address,
            port=port,
            rank=rank,
            shares_port=entry.ranks > 1,
            labels=entry.labels,
            taints=tuple(sorted({Taint.parse(taint) for taint in entry.taints})),
            cordoned=entry.cordoned,
            engine=entry.engine,
            metrics_url=_metrics_url(entry),
            kv_events=_zmq_address(entry.kv_events, address, rank),
            ask_kv_events=entry.kv_events is not False,
            kv_replay=_zmq_address(entry.kv_replay, address, rank),
            block_size=entry.block_size,
            max_num_batched_tokens=entry.max_num_batched_tokens,
            models=frozenset(entry.models),
        )
        yield spec


def _metrics_url(entry: _Entry) -> str | None:
    if entry.metrics is False:
        return None
    path = METRICS_PATH[entry.engine] if entry.metrics is True else entry.metrics
    return f"http://{entry.address}{path}" if path.startswith("/") else path


def _zmq_address(value: int | str | bool | None, host: str, rank: int) -> str | None:
    """The rank's own address: engines publish rank r at their configured port plus r."""
    if value is None or value is False:
        return None
    if isinstance(value, str):
        host, base = _split_authority(value.removeprefix("tcp://"))
    else:
        base = value
    return f"tcp://[{host}]:{base + rank}" if ":" in host else f"tcp://{host}:{base + rank}"


@dataclass(slots=True)
class PoolFileStats:
    """Versions of the file that were taken up, and versions that were refused."""

    loaded: int = 0
    refused: int = 0


class StaticPoolFile:
    """Follows a pool file: each new good version is handed on, a bad one is refused and the old one stays.

    It polls the content, not the modification time: a ConfigMap mount swaps a symbolic link, and a file whose
    times are copied along with it would otherwise go unseen.
    """

    def __init__(self, path: pathlib.Path, interval: float = 1.0) -> None:
        self.path = path
        self.interval = interval
        self.stats = PoolFileStats()

    async def run(
        self, on_specs: Callable[[list[EndpointSpec]], None], on_error: Callable[[PoolFileError], None]
    ) -> None:
        """Poll until cancelled. Each version is reported once, good or bad, and so is a missing file."""
        seen: bytes | str | None = None
        while True:
            content = await asyncio.to_thread(self._read)
            version = hashlib.sha256(
                content if isinstance(content, bytes) else str(content).encode()
            ).digest()
            if version != seen:
                seen = version
                self._take(content, on_specs, on_error)
            await asyncio.sleep(self.interval)

    def _read(self) -> bytes | OSError:
        try:
            return self.path.read_bytes()
        except OSError as error:
            return error

    def _take(
        self,
        content: bytes | OSError,
        on_specs: Callable[[list[EndpointSpec]], None],
        on_error: Callable[[PoolFileError], None],
    ) -> None:
        try:
            specs = parse_pool_file(self._text(content), str(self.path))
        except PoolFileError as error:
            self.stats.refused += 1
            on_error(error)
        else:
            self.stats.loaded += 1
            on_specs(specs)

    def _text(self, content: bytes | OSError) -> str:
        if isinstance(content, OSError):
            raise PoolFileError(str(self.path), f"cannot be read: {content.strerror or content}")
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise PoolFileError(str(self.path), f"not UTF-8: {error.reason}") from None
