"""Which endpoints a request may use at all, as a value: equal constraints share a lane."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from picker.policy.constraints import LabelIn, LabelSelector, Taint, TaintEffect, Toleration
from picker.policy.model import PolicyClass
from picker.pool.endpoint import Endpoint, EndpointSpec


class Ineligible(StrEnum):
    """Why an endpoint cannot take a request, in the order in which the reasons are looked for."""

    NOT_ALLOWED = "not_allowed"
    NOT_PINNED = "not_pinned"
    NOT_SELECTED = "not_selected"
    NOT_READY = "not_ready"
    FENCED = "fenced"
    RANK = "rank"
    TAINT = "taint"
    REQUIRED_TAINT = "required_taint"
    ADAPTER = "adapter"
    STALE = "stale"  # only where another endpoint would do that is heard
    OVERLOADED = "overloaded"  # only where another endpoint would do that is not
    ADAPTER_FULL = "adapter_full"  # only where another endpoint has the adapter, or a place for it


_MAX_TEXT = 400


@dataclass(frozen=True, slots=True)
class Constraints:
    """What a request asks of its endpoint.

    allow: allow-lists that must all admit it (Envoy's subset hint, a trusted header): `ip`, `ip:port`,
    `[v6]:port` or an endpoint's name. pin: one endpoint, in the same forms. required_taints: taint keys (or
    `key=value`) that the endpoint must carry; requiring a taint tolerates it. role: what the endpoint must be there
    for. prefill: what is asked of another endpoint that reads the prompt in its place.
    """

    allow: tuple[frozenset[str], ...] = ()
    selector: LabelSelector = LabelSelector()
    tolerations: tuple[Toleration, ...] = ()
    required_taints: frozenset[str] = frozenset()
    pin: str | None = None
    rank: int | None = None
    adapter: str | None = None
    role: LabelIn | None = None
    prefill: Constraints | None = None
    # Constraints are keys of many dicts, and their fields do not remember their hashes.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fields = (self.allow, self.selector, self.tolerations, self.required_taints)
        others = (self.pin, self.rank, self.adapter, self.role, self.prefill)
        object.__setattr__(self, "_hash", hash((fields, others)))

    def __hash__(self) -> int:
        return self._hash

    def within(self, policy_class: PolicyClass) -> Constraints:
        """With what the class asks of its endpoints, and what it lets its requests tolerate."""
        if policy_class.allowed_endpoints is None and not policy_class.tolerations:
            return self
        return replace(
            self,
            selector=policy_class.allowed_endpoints or self.selector,
            tolerations=(*self.tolerations, *policy_class.tolerations),
        )

    def __str__(self) -> str:
        """For people: what is asked, `any` where that is nothing. Lists by their lengths."""
        parts = [f"in {len(entries)} named" for entries in self.allow]
        parts += [f"pin {self.pin}"] if self.pin is not None else []
        parts += [f"rank {self.rank}"] if self.rank is not None else []
        parts += [str(self.selector)] if self.selector.match_labels else []
        parts += [f"tolerates {', '.join(map(str, self.tolerations))}"] if self.tolerations else []
        parts += [f"requires {', '.join(sorted(self.required_taints))}"] if self.required_taints else []
        parts += [f"adapter {self.adapter}"] if self.adapter is not None else []
        parts += ["decodes"] if self.role is not None else []
        parts += ["prefill apart"] if self.prefill is not None else []
        return "; ".join(parts)[:_MAX_TEXT] or "any"

    def refuse(self, endpoint: Endpoint, *, waiting: bool = False) -> Ineligible | None:
        """Why this endpoint cannot take the request, or None when it can.

        A request that waits for its pinned endpoint has been scheduled to it, as a pod to its node: a
        NoSchedule taint or a cordon that comes later does not repel it, NoExecute does.
        """
        spec = endpoint.spec
        scheduled = waiting and self.pin is not None
        if any(not names(entries, spec) for entries in self.allow):
            return Ineligible.NOT_ALLOWED
        if self.pin is not None and not names((self.pin,), spec):
            return Ineligible.NOT_PINNED
        if not self.selector.matches(spec.labels):
            return Ineligible.NOT_SELECTED
        if self.role is not None and not self.role.matches(spec.labels):
            return Ineligible.NOT_SELECTED
        if not spec.ready:
            return Ineligible.NOT_READY
        if endpoint.fenced or (spec.cordoned and not scheduled):
            return Ineligible.FENCED
        if self.rank is not None and self.rank != spec.rank:
            return Ineligible.RANK
        if any(self._repelled_by(taint, scheduled) for taint in spec.taints):
            return Ineligible.TAINT
        if any(not _carries(spec.taints, required) for required in self.required_taints):
            return Ineligible.REQUIRED_TAINT
        if self.adapter is not None and not _can_load(endpoint, self.adapter):
            return Ineligible.ADAPTER
        return None

    def tolerates(self, taint: Taint) -> bool:
        return any(toleration.tolerates(taint) for toleration in self.tolerations) or any(
            _names_taint(required, taint) for required in self.required_taints
        )

    def _repelled_by(self, taint: Taint, scheduled: bool) -> bool:
        if taint.effect is TaintEffect.PREFER_NO_SCHEDULE:
            return False
        if scheduled and taint.effect is TaintEffect.NO_SCHEDULE:
            return False
        return not self.tolerates(taint)


def names(entries: frozenset[str] | tuple[str, ...], spec: EndpointSpec) -> bool:
    """Does any entry name this endpoint: by `ip:port`, by `ip` (every port of it), or by name?"""
    return spec.authority in entries or spec.address in entries or spec.name in entries


def _names_taint(text: str, taint: Taint) -> bool:
    key, equals, value = text.partition("=")
    return taint.key == key and (not equals or taint.value == value)


def _carries(taints: tuple[Taint, ...], required: str) -> bool:
    return any(_names_taint(required, taint) for taint in taints)


def has_adapter_place(endpoint: Endpoint, adapter: str) -> bool:
    """Can the endpoint serve this LoRA adapter now: declared, in use there, or with a free place? An engine whose
    places are all in use serves it when one of the others has no more requests.
    """
    if adapter in endpoint.spec.models:
        return True
    report = endpoint.report
    if report is None or report.max_adapters is None:
        return False
    return adapter in report.adapters or len(report.adapters) < report.max_adapters


def _can_load(endpoint: Endpoint, adapter: str) -> bool:
    """Can the endpoint ever serve this LoRA adapter: declared, or does its engine load adapters at all?"""
    return adapter in endpoint.spec.models or endpoint.loads_adapters
