"""Why a request cannot go or wait, in words."""

from __future__ import annotations

from typing import NamedTuple

from picker.policy.model import PolicyClass
from picker.pool.pool import Pool
from picker.queueing.class_stats import ClassStats
from picker.queueing.work import DropReason
from picker.selection.constraints import Constraints, Ineligible, names
from picker.selection.selector import Eligibility


class Refusal(NamedTuple):
    reason: DropReason
    message: str


SHUTTING_DOWN = Refusal(DropReason.SHUTTING_DOWN, "the endpoint picker is shutting down")


def no_endpoint(pool: Pool, constraints: Constraints, eligibility: Eligibility) -> Refusal:
    """No endpoint may take a request with these constraints: whose fault is it?"""
    if constraints.pin is not None and constraints.allow:
        for endpoint in pool:
            not_allowed = eligibility.refused.get(endpoint) is Ineligible.NOT_ALLOWED
            if not_allowed and names((constraints.pin,), endpoint.spec):
                return Refusal(
                    DropReason.PIN_NOT_ALLOWED, "the pinned endpoint is not in the request's allow-list"
                )
    if not len(pool):
        return Refusal(DropReason.NO_ENDPOINT, "the pool has no endpoints")
    tally: dict[str, int] = {}
    for reason in eligibility.refused.values():
        tally[reason] = tally.get(reason, 0) + 1
    reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(tally.items()))
    return Refusal(DropReason.NO_ENDPOINT, f"no endpoint may take this request ({reasons})")


def over_limit(stats: ClassStats, policy_class: PolicyClass, endpoints: int) -> Refusal | None:
    """Limits are value x endpoints and are compared before adding: who finds room is let in whole."""
    for reason, what, used, per_endpoint in _limits(stats, policy_class):
        if used >= per_endpoint * endpoints:
            return Refusal(
                reason,
                f"class {policy_class.label} has {used} {what} waiting, its limit for {endpoints} endpoints"
                f" is {per_endpoint * endpoints}",
            )
    return None


def queue_fill(stats: ClassStats, policy_class: PolicyClass, endpoints: int) -> float | None:
    """The used part of the fullest limit; None where the class has none, or there is no endpoint to count by."""
    if not endpoints:
        return None
    parts = [
        used / (limit * endpoints) if limit else 1.0 for _, _, used, limit in _limits(stats, policy_class)
    ]
    return max(parts, default=None)


def _limits(stats: ClassStats, policy_class: PolicyClass) -> list[tuple[DropReason, str, int, int]]:
    """Of each limit that the class has: the reason of its refusals, what it counts, how much of that waits, and
    the limit for one endpoint."""
    limits = (
        (
            DropReason.QUEUE_FULL_REQUESTS,
            "requests",
            stats.waiting_requests,
            policy_class.request_queue_limit_per_worker,
        ),
        (
            DropReason.QUEUE_FULL_RAW_TOKENS,
            "prompt tokens",
            stats.waiting_tokens,
            policy_class.raw_isl_token_queue_limit_per_worker,
        ),
        (
            DropReason.QUEUE_FULL_CACHED_TOKENS,
            "cached prompt tokens",
            stats.waiting_cached_tokens,
            policy_class.cached_token_queue_limit_per_worker,
        ),
    )
    return [(reason, what, used, limit) for reason, what, used, limit in limits if limit is not None]


def wait_is_over(policy_class: PolicyClass, waited: float, reason: DropReason) -> Refusal:
    """The request's time in the queue has ended, after so many seconds."""
    if reason is DropReason.TTFT_UNREACHABLE:
        return Refusal(reason, f"after {waited:.1f} s the request's first token cannot come in time any more")
    return Refusal(reason, f"the request waited {waited:.1f} s in class {policy_class.label}, its limit")
