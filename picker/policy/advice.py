"""What in a valid policy will surprise its operator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from picker.policy.model import AffinitySettings, Policy, PolicyClass, Profile, QueuePolicy

# From here on a class's turns are rare enough to be seen as bursts.
_MANY_ROUNDS = 16
_MANY_NAMES = 6

LIMIT_KEYS = (
    "request_queue_limit_per_worker",
    "raw_isl_token_queue_limit_per_worker",
    "cached_token_queue_limit_per_worker",
)


def policy_warnings(
    policy: Policy,
    endpoints: int,
    route_timeout: float | None,
    *,
    max_num_batched_tokens: int | None = None,
    default_wait: float | None = None,
) -> list[str]:
    """One sentence for each thing that does not do what its author may expect, in the order of the file.

    What several classes share is said once. `route_timeout` is the gateway's, in seconds; None or 0: unknown
    or switched off. Without `max_num_batched_tokens` the engines' token budget is taken as unknown. `default_wait`
    is what ends a wait, in seconds, where a class sets no limit.
    """
    pool = _Pool(endpoints, route_timeout or None, max_num_batched_tokens, default_wait)
    general = list(policy.warnings)
    if endpoints == 0:
        general.append("no endpoints: every limit is 0 and every request is refused")
    return [*general, *said_once(_warnings(policy, pool))]


def said_once(sentences: Iterable[tuple[str, str]]) -> list[str]:
    """`(name, sentence)` pairs as `name, name: sentence`, each sentence where it comes first."""
    names: dict[str, list[str]] = {}
    for name, sentence in sentences:
        names.setdefault(sentence, []).append(name)
    return [f"{_listed(those)}: {sentence}" for sentence, those in names.items()]


def may_wait(entry: PolicyClass) -> bool:
    """Whether the class ever has requests waiting, and so takes part in the ring."""
    return entry.can_queue and not refuses_when_busy(entry)


def refuses_when_busy(entry: PolicyClass) -> bool:
    """Whether a limit of 0 keeps the class from ever waiting."""
    return entry.can_queue and any(getattr(entry, key) == 0 for key in LIMIT_KEYS)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MANY_NAMES])
    return shown if len(names) <= _MANY_NAMES else f"{shown} and {len(names) - _MANY_NAMES} more"


@dataclass(frozen=True, slots=True)
class _Pool:
    endpoints: int
    route_timeout: float | None
    max_num_batched_tokens: int | None
    default_wait: float | None


def _warnings(policy: Policy, pool: _Pool) -> Iterator[tuple[str, str]]:
    for profile in policy.profiles:
        name = f"profile {profile.name}" if profile.name else "root profile"
        for sentence in _of_profile(profile, policy):
            yield name, sentence
        for entry in profile.classes:
            for sentence in _of_class(entry, profile, pool):
                yield entry.label, sentence


def _of_profile(profile: Profile, policy: Policy) -> Iterator[str]:
    rules = {_busy_rule(entry) for entry in profile.classes if entry.can_queue}
    if len(rules) > 1:
        yield (
            "the busy thresholds of its classes differ: while endpoints are busy for one class and not for"
            " another only the other is served, so shares follow the quanta only below the lowest threshold"
        )
    if profile is not policy.root and policy.root.selection and not profile.selection:
        yield "has no selection of its own, and does not inherit the root's"


def _busy_rule(entry: PolicyClass) -> tuple[float | None, ...]:
    return (
        entry.prefill_busy_threshold,
        entry.prefill_busy_threshold_frac,
        entry.max_running_per_worker,
        entry.kv_usage_busy_threshold,
    )


def _of_class(entry: PolicyClass, profile: Profile, pool: _Pool) -> Iterator[str]:
    if not entry.can_queue:
        yield from _never_queues(entry)
        return
    yield from _thresholds(entry, pool)
    yield from _limits(entry, profile, pool)
    yield from _order(entry, pool)
    if may_wait(entry):
        yield from _waiting(entry, pool)
        yield from _bursts(entry, profile)


def _never_queues(entry: PolicyClass) -> Iterator[str]:
    moot = [key for key in (*LIMIT_KEYS, "max_queue_wait") if getattr(entry, key) is not None]
    unused = f"; {', '.join(moot)}: without effect" if moot else ""
    yield (
        "can never queue, for it has no busy threshold: its requests go out at once, past classes that wait,"
        f" and its quantum and order decide nothing{unused}"
    )


def _thresholds(entry: PolicyClass, pool: _Pool) -> Iterator[str]:
    if entry.prefill_busy_threshold_frac is None or pool.max_num_batched_tokens is not None:
        return
    others = (entry.prefill_busy_threshold, entry.max_running_per_worker, entry.kv_usage_busy_threshold)
    alone = all(other is None for other in others)
    yield (
        "prefill_busy_threshold_frac has no effect on endpoints whose max_num_batched_tokens is not known:"
        f" there {'its requests never wait' if alone else 'only the other thresholds count'}"
    )


def _limits(entry: PolicyClass, profile: Profile, pool: _Pool) -> Iterator[str]:
    limits = {key: getattr(entry, key) for key in LIMIT_KEYS}
    for key, limit in limits.items():
        if limit == 0:
            yield f"{key} is 0: nothing ever waits; while the endpoints are busy requests get 429 at once"
    if not entry.has_queue_limit:
        yield "no queue limit: the queue grows as long as requests come; set request_queue_limit_per_worker"
    raw, smallest = entry.raw_isl_token_queue_limit_per_worker, _smallest_request(entry, profile)
    if raw and raw * pool.endpoints <= smallest:
        yield (
            f"raw_isl_token_queue_limit_per_worker {raw:,} x {pool.endpoints} endpoints is no more than the"
            f" smallest request of {smallest:,} tokens: one request at a time can wait"
        )


def _order(entry: PolicyClass, pool: _Pool) -> Iterator[str]:
    order = entry.queue_policy
    if order is QueuePolicy.WSPT and entry.wspt_aging is None:
        yield (
            "wspt without wspt_aging: small requests can overtake a large one for ever;"
            " set wspt_aging, for instance 10"
        )
    if order is QueuePolicy.EDF and entry.max_queue_wait is None and pool.default_wait is None:
        yield "edf without max_queue_wait: only requests that bring a target have a deadline"
    if order is not QueuePolicy.WSPT and entry.wspt_aging is not None:
        yield f"wspt_aging has no effect with queue_policy {order}"
    if order not in (QueuePolicy.PRIORITY, QueuePolicy.CACHE_AFFINITY) and entry.high_priority_first:
        yield f"high_priority_first has no effect with queue_policy {order}"
    if order is not QueuePolicy.CACHE_AFFINITY and entry.affinity != AffinitySettings():
        yield f"affinity has no effect with queue_policy {order}"
    if entry.strict_priority:
        yield (
            f"strict_priority {entry.strict_priority} orders requests inside the class only; to favour the"
            " class over others raise its quantum"
        )


def _waiting(entry: PolicyClass, pool: _Pool) -> Iterator[str]:
    longest, route, aging = entry.max_queue_wait, pool.route_timeout, entry.wspt_aging
    if longest is None and pool.default_wait is None:
        end = f"the route's timeout of {route:g} s answers 504" if route else "the client gives up"
        yield f"no max_queue_wait: a request waits until {end}"
    elif longest is not None and route is not None and longest >= route:
        yield (
            f"max_queue_wait {longest:g} s is not below the route's timeout of {route:g} s: the gateway"
            " answers 504 before Picker can answer 429 with retry-after"
        )
    if longest is not None and aging is not None and aging >= longest:
        yield (
            f"wspt_aging {aging:g} s is not below max_queue_wait {longest:g} s: a request is refused before"
            " ageing protects it"
        )


def _bursts(entry: PolicyClass, profile: Profile) -> Iterator[str]:
    smallest = _smallest_request(entry, profile)
    rounds = -(-smallest // entry.quantum)
    others = sum(other.quantum for other in profile.classes if may_wait(other)) - entry.quantum
    if others and rounds >= _MANY_ROUNDS:
        yield (
            f"the smallest request of {smallest:,} uncached tokens takes {rounds:,} rounds of quantum"
            f" {entry.quantum:,}: the share holds, but the other classes send up to {others * rounds:,}"
            " tokens between two requests"
        )


def _smallest_request(entry: PolicyClass, profile: Profile) -> int:
    """The least uncached tokens of a request in this class."""
    return next((bucket.min_tokens for bucket in profile.buckets if bucket.name == entry.cache_bucket), 0)
