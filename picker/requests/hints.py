"""Routing hints: what a request may ask of Picker, and whose word is taken for it.

A hint comes from Envoy's dynamic metadata (namespace `picker`, key = the hint's name), which only the operator's own
configuration can write, or from a request header, which any client can. `HintTrust` says for each hint whether
headers count. Every control header is stripped before the upstream, believed or not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from typing import Any, TypeVar

from msgspec import Struct
from pydantic import BaseModel, ConfigDict

from picker.policy.constraints import Toleration
from picker.requests.errors import BadRequest, excerpt

T = TypeVar("T")

METADATA_NAMESPACE = "picker"


class Trust(StrEnum):
    """Where a hint may come from."""

    ACCEPT = "accept"
    """Metadata, else headers."""
    METADATA = "metadata"
    """Metadata only."""
    IGNORE = "ignore"
    """Nowhere: the hint has no effect."""


class HintTrust(BaseModel):
    """Whose word counts, per hint. By default no header promotes, steers or reveals anything."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy_class: Trust = Trust.METADATA
    priority: Trust = Trust.METADATA
    strict_priority: Trust = Trust.METADATA
    objective: Trust = Trust.METADATA
    pin: Trust = Trust.METADATA
    rank: Trust = Trust.METADATA
    tolerations: Trust = Trust.METADATA
    required_taints: Trust = Trust.METADATA
    preferred_taints: Trust = Trust.METADATA
    allow_list: Trust = Trust.METADATA
    explain: Trust = Trust.METADATA
    fairness_id: Trust = Trust.METADATA
    """Who may say it, can have its requests charged to anybody."""
    session_finish: Trust = Trust.METADATA
    ttl: Trust = Trust.METADATA
    ttft_ms: Trust = Trust.METADATA
    """Where a class serves the earliest deadline first, this one and `ttl` promote."""
    session: Trust = Trust.ACCEPT
    """It is a tenant of its own only where clients may say that (`fairness_id`), or the gateway has said it."""

    @cached_property
    def accepted(self) -> tuple[str, ...]:
        """The hints that headers may carry."""
        return tuple(hint for hint in _HINTS if getattr(self, hint) is Trust.ACCEPT)


class Hints(Struct, frozen=True, array_like=True):
    """The hints of one request that count. None or empty: not given."""

    policy_class: str | None = None
    priority: float | None = None
    """Seconds of head start; higher goes first."""
    strict_priority: int | None = None
    """Tier inside the class's queue; higher goes first."""
    objective: str | None = None
    """An InferenceObjective, whose priority is the tier if no tier is given."""
    pin: str | None = None
    """The only endpoint wanted: `ip:port` or an endpoint's name."""
    rank: int | None = None
    """The data-parallel rank wanted."""
    tolerations: tuple[Toleration, ...] = ()
    required_taints: tuple[str, ...] = ()
    """Taints that the endpoint must carry, all of them."""
    preferred_taints: tuple[tuple[str, float], ...] = ()
    """(taint, weight); a positive weight attracts."""
    allow_list: tuple[str, ...] | None = None
    """Endpoints that may be chosen. Empty: none."""
    ttl: float | None = None
    """Longest wait in the queue, seconds."""
    ttft_ms: float | None = None
    """Wanted time to first token, milliseconds."""
    fairness_id: str | None = None
    """The tenant; without one, the session under a name that no tenant can have, if its word counts for that."""
    session: str | None = None
    """The conversation or the agent's run that the request is part of, as agents say it in headers of their own."""
    session_finish: bool = False
    """This request is the last of its session."""
    explain: bool = False
    consumed_headers: tuple[str, ...] = ()
    """Control headers of this request, to be removed before the upstream."""


def parse_hints(
    headers: Sequence[tuple[str, str]], metadata: Mapping[str, Any], trust: HintTrust | None = None
) -> Hints:
    """Read the hints of a request. Header names are lower case; of a repeated header the first counts.

    Raises BadRequest for a malformed hint from a source that counts. Numbers out of any useful range are clamped.
    """
    trust = trust or HintTrust()
    first: dict[str, str] = {}
    for name, value in headers:
        first.setdefault(name, value)
    given = metadata.get(METADATA_NAMESPACE)
    trusted = given if isinstance(given, Mapping) else {}
    found: dict[str, Any] = {}
    for hint in trusted:
        if hint in _HINTS and trusted[hint] is not None and getattr(trust, hint) is not Trust.IGNORE:
            found[hint] = _read(_HINTS[hint][1], trusted[hint], f"metadata {METADATA_NAMESPACE}.{hint}")
    for hint in trust.accepted:
        if hint not in found:
            names, read = _HINTS[hint]
            for name in names:
                if first.get(name, "").strip():
                    found[hint] = _read(read, first[name], name)
                    break
    says_tenant = trust.fairness_id is Trust.ACCEPT or trusted.get("session") is not None
    if says_tenant and "session" in found and "fairness_id" not in found:
        found["fairness_id"] = f"session {found['session']}"
    consumed = tuple(name for name in first if is_control_header(name))
    return Hints(**found, consumed_headers=consumed)


def is_control_header(name: str) -> bool:
    """Whether a request header (lower case) steers a picker, an engine's rank or a sidecar."""
    return name.startswith("x-picker-") or name in _CONTROL_HEADERS


def _read(read: Callable[[Any], T], value: Any, where: str) -> T:
    try:
        return read(value)
    except (ValueError, TypeError, OverflowError) as error:
        message = f"{where}: {excerpt(str(error), 160)[1:-1]}"
        raise BadRequest(message, param=where, code="invalid_hint") from None


# Readers take a header's text or a metadata value (text, number, bool or list) and raise ValueError.

_MAX_ITEMS = 256
_MAX_NAME = 256
_NAME = re.compile(r"[!-~]{1,256}")
_TAINT_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_./=:-]{0,254}[A-Za-z0-9])?")


def _name(value: Any) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not _NAME.fullmatch(text):
        raise ValueError(f"must be 1 to {_MAX_NAME} visible ASCII characters")
    return text


def identity(value: Any) -> str:
    """Any text names a tenant, session or request; what is long or unprintable is named by its digest."""
    text = value.strip() if isinstance(value, str) else repr(value)
    if _NAME.fullmatch(text):
        return text
    return "digest:" + blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _items(value: Any) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ValueError("must be a list of texts or a comma-joined text")
    if len(parts) > _MAX_ITEMS:
        raise ValueError(f"must hold at most {_MAX_ITEMS} items")
    return [text for part in parts if (text := part.strip())]


def _number(lowest: float, highest: float, *, at_least: float = -math.inf) -> Callable[[Any], float]:
    """A reader for finite numbers, clamped to the range; below `at_least` they make no sense and are refused."""

    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, str | int | float) or len(str(value)) > 64:
            raise ValueError("must be a number")
        try:
            number = float(value)
        except ValueError:
            raise ValueError("must be a number") from None
        if not math.isfinite(number) or number < at_least:
            raise ValueError("must be a finite number" + (" and not negative" if at_least == 0 else ""))
        return min(highest, max(lowest, number))

    return read


def _integer(lowest: int, highest: int) -> Callable[[Any], int]:
    read_number = _number(lowest, highest)

    def read(value: Any) -> int:
        number = read_number(value)
        if number != int(number):
            raise ValueError("must be an integer")
        return int(number)

    return read


def _rank(value: Any) -> int:
    rank = _integer(-1, _MAX_RANK + 1)(value)
    if not 0 <= rank <= _MAX_RANK:
        raise ValueError(f"must be an integer from 0 to {_MAX_RANK}")
    return rank


_MAX_RANK = 65535


def _tolerations(value: Any) -> tuple[Toleration, ...]:
    return tuple(dict.fromkeys(Toleration.parse(item) for item in _items(value)))


def _taint_name(text: str) -> str:
    if not _TAINT_NAME.fullmatch(text):
        raise ValueError("a taint must read key, key=value or key=value:effect")
    return text


def _required_taints(value: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_taint_name(item) for item in _items(value)))


def _preferred_taints(value: Any) -> tuple[tuple[str, float], ...]:
    """`name=weight` items (the last `=` separates), or a mapping in metadata."""
    read_weight = _number(-100.0, 100.0)
    if isinstance(value, Mapping):
        pairs = [(str(name), weight) for name, weight in value.items()]
        if len(pairs) > _MAX_ITEMS:
            raise ValueError(f"must hold at most {_MAX_ITEMS} items")
    else:
        pairs = [(name, weight) for name, _, weight in (item.rpartition("=") for item in _items(value))]
    return tuple({_taint_name(name.strip()): read_weight(weight) for name, weight in pairs}.items())


def _allow_list(value: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_name(item) for item in _items(value)))


def _flag(value: Any) -> bool:
    return value is True or str(value).strip().lower() in ("1", "true", "yes")


_milliseconds = _number(0.0, 86_400_000.0, at_least=0)


def _ttl(value: Any) -> float:
    return _milliseconds(value) / 1000


# hint -> (headers that carry it, first found counts; reader)
_HINTS: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "policy_class": (("x-picker-policy-class", "x-dynamo-meta-policy-class"), _name),
    "priority": (("x-picker-priority",), _number(-1e6, 1e6)),
    "strict_priority": (("x-picker-strict-priority",), _integer(-1_000_000, 1_000_000)),
    "objective": (("x-llm-d-inference-objective", "x-gateway-inference-objective"), _name),
    "pin": (("x-picker-endpoint",), _name),
    "rank": (("x-picker-rank", "x-data-parallel-rank"), _rank),
    "tolerations": (("x-picker-tolerations",), _tolerations),
    "required_taints": (("x-picker-required-taints",), _required_taints),
    "preferred_taints": (("x-picker-preferred-taints",), _preferred_taints),
    "allow_list": (("x-picker-allowed-endpoints",), _allow_list),
    "ttl": (("x-picker-ttl-ms",), _ttl),
    "ttft_ms": (("x-picker-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"), _milliseconds),
    "fairness_id": (
        ("x-picker-tenant", "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"),
        identity,
    ),
    "session": (
        ("x-claude-code-session-id", "x-session-affinity", "x-session-id", "session-id", "session_id"),
        identity,
    ),
    "session_finish": (("x-picker-session-finish",), _flag),
    "explain": (("x-picker-explain",), _flag),
}

# Read by others than pickers too, so they go on to the upstream.
_PASSED_ON = frozenset(_HINTS["session"][0])

_CONTROL_HEADERS = (
    frozenset(name for names, _ in _HINTS.values() for name in names)
    | {
        "x-gateway-destination-endpoint",
        "x-gateway-destination-endpoint-served",
        "x-gateway-destination-endpoint-subset",
        "x-gateway-model-name-rewrite",
        "x-llm-d-model-name-rewrite",
        "x-llm-d-inference-ttl",
        "x-llm-d-slo-tpot-ms",
        "x-slo-tpot-ms",
        # Addresses that a sidecar next to the engine would connect to.
        "x-prefiller-host-port",
        "x-encoder-hosts-ports",
        "x-data-parallel-host-port",
        "x-kv-cache-source-host-port",
    }
) - _PASSED_ON

assert set(_HINTS) == set(HintTrust.model_fields) == set(Hints.__struct_fields__) - {"consumed_headers"}
