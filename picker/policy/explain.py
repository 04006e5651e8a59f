"""A policy in words and numbers: who gets what under contention, who waits where, which limits bind."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from picker.policy.advice import LIMIT_KEYS, may_wait, policy_warnings, refuses_when_busy, said_once
from picker.policy.model import Policy, PolicyClass, Profile

_WIDTH = 100


def explain_policy(
    policy: Policy,
    endpoints: int,
    max_num_batched_tokens: int | None = None,
    *,
    route_timeout: float | None = None,
    default_wait: float | None = None,
) -> str:
    """Plain text of at most 100 columns (longer only for long names), for a terminal.

    `max_num_batched_tokens` is that of each engine, for thresholds given as a fraction of it;
    `route_timeout`, in seconds, is the gateway's, and `default_wait` what ends a wait where a class sets no limit.
    """
    lines = [_title(policy, endpoints, max_num_batched_tokens)]
    if len(policy.profiles) > 1:
        lines.append(
            f"Where models share endpoints, their classes share one ring: {_ring(policy):,} tokens a round."
        )
    for profile in policy.profiles:
        lines += ["", *_profile(profile, endpoints, max_num_batched_tokens, default_wait)]
    warnings = policy_warnings(
        policy,
        endpoints,
        route_timeout,
        max_num_batched_tokens=max_num_batched_tokens,
        default_wait=default_wait,
    )
    lines += ["", f"WARNINGS ({len(warnings)})" if warnings else "NO WARNINGS"]
    for number, warning in enumerate(warnings, 1):
        lines += _wrapped(f"{number:>4}. ", warning, indent=6)
    return "\n".join(lines) + "\n"


def _ring(policy: Policy) -> int:
    return sum(entry.quantum for entry in policy.classes() if may_wait(entry))


def _title(policy: Policy, endpoints: int, max_num_batched_tokens: int | None) -> str:
    budget = "unknown" if max_num_batched_tokens is None else f"{max_num_batched_tokens:,}"
    return f"{policy.source}: {_many(endpoints, 'endpoint')}, max_num_batched_tokens {budget}"


def _profile(
    profile: Profile, endpoints: int, max_num_batched_tokens: int | None, default_wait: float | None
) -> Iterator[str]:
    yield (
        f"MODEL {profile.name}" if profile.name else "ROOT PROFILE: every model without a profile of its own"
    )
    yield from _resolution(profile)
    yield from _shares(profile)
    yield ""
    yield "  Who waits where"
    waits = ((entry.name, _waits(entry, max_num_batched_tokens, default_wait)) for entry in profile.classes)
    for sentence in said_once(waits):
        yield from _wrapped("    ", sentence, indent=6)
    yield from _limits(profile, endpoints)


def _resolution(profile: Profile) -> Iterator[str]:
    yield ""
    yield "  Which class"
    if not profile.buckets:
        yield f"    Every request: {profile.classes[0].name}"
        return
    families = profile.families
    rows = [("uncached tokens", *(f"family {family}" for family in families))]
    for index, bucket in enumerate(profile.buckets):
        cells = (profile.resolve(family, bucket.min_tokens).name for family in families)
        rows.append((_range(profile, index), *cells))
    yield from _table(rows, numbers=())
    explicit = [entry.name for entry in profile.classes if entry.explicit]
    if explicit:
        yield f"    By its own name, whatever the tokens: {', '.join(explicit)}"
    yield f"    A request that names no family, or an unknown one: family {profile.default_family}"


def _range(profile: Profile, index: int) -> str:
    start = profile.buckets[index].min_tokens
    if index + 1 == len(profile.buckets):
        return f"{start:,} and more"
    return f"{start:,} to {profile.buckets[index + 1].min_tokens - 1:,}"


def _shares(profile: Profile) -> Iterator[str]:
    waiting = [entry for entry in profile.classes if may_wait(entry)]
    yield ""
    if not waiting:
        yield "  Shares: none, for no class ever has requests waiting"
        return
    total = sum(entry.quantum for entry in waiting)
    yield "  Shares of uncached tokens while every class has requests waiting"
    rows = [("class", "share", "tokens/round", "order")]
    rows += [
        (entry.name, f"{100 * entry.quantum / total:.1f} %", f"{entry.quantum:,}", str(entry.queue_policy))
        for entry in waiting
    ]
    yield from _table(rows, numbers=(1, 2))
    if len(waiting) > 1:
        yield f"    One ring round is {total:,} tokens. What an idle class leaves goes to the others by their quanta."
    apart = [entry.name for entry in profile.classes if not may_wait(entry)]
    if apart:
        yield f"    Never waiting, so outside the ring: {', '.join(apart)}"


def _waits(entry: PolicyClass, max_num_batched_tokens: int | None, default_wait: float | None) -> str:
    if not entry.can_queue:
        return f"never held; sent at once to {_endpoints(entry)}, whatever the load"
    busy = f"while {_endpoints(entry)} all have {' or '.join(_busy(entry, max_num_batched_tokens))}"
    if refuses_when_busy(entry):
        return f"never held; 429 {busy}"
    return f"held {busy}; {_bound(entry.max_queue_wait, default_wait)}"


def _bound(longest: float | None, default_wait: float | None) -> str:
    if longest is not None:
        return f"at most {longest:g} s, then 429"
    return f"at most {default_wait:g} s (queue.max_wait), then 429" if default_wait else "without bound"


def _endpoints(entry: PolicyClass) -> str:
    where = f"the endpoints with {entry.allowed_endpoints}" if entry.allowed_endpoints else "the endpoints"
    tolerated = ", ".join(str(toleration) for toleration in entry.tolerations)
    return f"{where} (tolerating {tolerated})" if tolerated else where


def _busy(entry: PolicyClass, max_num_batched_tokens: int | None) -> Iterator[str]:
    absolute, fraction = entry.prefill_busy_threshold, entry.prefill_busy_threshold_frac
    if absolute is not None:
        yield f"more than {absolute:,} prefill tokens booked"
    if fraction is not None and max_num_batched_tokens is None:
        yield f"more than {fraction:g} x max_num_batched_tokens booked"
    elif fraction is not None and max_num_batched_tokens is not None:
        tokens = fraction * max_num_batched_tokens
        yield f"more than {tokens:,.0f} prefill tokens booked ({fraction:g} x {max_num_batched_tokens:,})"
    if entry.max_running_per_worker is not None:
        yield f"at least {_many(entry.max_running_per_worker, 'request')} running"
    if entry.kv_usage_busy_threshold is not None:
        yield f"more than {100 * entry.kv_usage_busy_threshold:g} % of the KV cache in use"


def _limits(profile: Profile, endpoints: int) -> Iterator[str]:
    limited = [
        entry
        for entry in profile.classes
        if entry.can_queue and any(getattr(entry, key) is not None for key in LIMIT_KEYS)
    ]
    yield ""
    if not limited:
        yield "  No queue limit binds"
        return
    yield f"  Queue limits at {_many(endpoints, 'endpoint')}: new requests get 429 while this much waits"
    rows: list[tuple[str, ...]] = [("class", "requests", "prompt tokens", "cached tokens")]
    rows += [
        (entry.name, *(_limit(getattr(entry, key), endpoints) for key in LIMIT_KEYS)) for entry in limited
    ]
    yield from _table(rows, numbers=(1, 2, 3))
    for entry in limited:
        yield from _first_to_bind(entry)


def _limit(per_worker: int | None, endpoints: int) -> str:
    return "-" if per_worker is None else f"{per_worker * endpoints:,}"


def _first_to_bind(entry: PolicyClass) -> Iterator[str]:
    requests, raw = entry.request_queue_limit_per_worker, entry.raw_isl_token_queue_limit_per_worker
    if requests and raw:
        average = f"{raw / requests:,.0f}"
        yield f"    {entry.name}: above {average} tokens a prompt the tokens bind first, below it the requests"


def _table(rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> Iterator[str]:
    """Rows under a header; the columns in `numbers` are set flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"    {'   '.join(cells)}".rstrip()


def _wrapped(head: str, text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
