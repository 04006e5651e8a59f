"""What `picker check` finds when settings, policy and pool are seen together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from picker.policy import Policy, PolicyClass
from picker.policy.advice import LIMIT_KEYS, may_wait, said_once
from picker.pool.endpoint import EndpointSpec
from picker.pool.pool import Pool
from picker.requests.hints import Trust
from picker.selection.constraints import Constraints
from picker.settings import Settings


def surprises(
    settings: Settings, policy: Policy, endpoints: Sequence[EndpointSpec], route_timeout: float | None
) -> list[str]:
    """One sentence each. Without endpoints (a pool that is not a file) what depends on them is left out."""
    found = [*_of_hints(settings, policy), *_of_streams(settings, policy, len(endpoints))]
    found += _of_roles(policy, endpoints)
    found += said_once(
        (entry.label, sentence)
        for entry in policy.classes()
        for sentence in (
            *_of_waits(entry, settings, route_timeout),
            *_of_endpoints(entry, endpoints),
        )
    )
    return found


def _of_hints(settings: Settings, policy: Policy) -> Iterator[str]:
    families = {family for profile in policy.profiles for family in profile.families}
    if len(families) > 1 and settings.policy.hints.policy_class is Trust.IGNORE:
        yield (
            "policy.hints.policy_class is `ignore`: no request can say its class, and all of them are of the"
            " default family"
        )


def _of_roles(policy: Policy, endpoints: Sequence[EndpointSpec]) -> Iterator[str]:
    for profile in policy.profiles:
        rule = profile.disaggregation
        if rule is None or not endpoints:
            continue
        roles = {spec.labels.get(rule.role_label) for spec in endpoints}
        where = f"models.{profile.name}.disaggregation" if profile.name else "disaggregation"
        if not roles & set(rule.prefill_roles):
            yield f"{where}: by {rule.role_label} no endpoint prefills: every prompt is read where it is decoded"
        if not roles & {None, *rule.decode_roles}:
            yield f"{where}: by {rule.role_label} no endpoint decodes: every request gets 503"


def _of_streams(settings: Settings, policy: Policy, endpoints: int) -> Iterator[str]:
    limits = [
        entry.request_queue_limit_per_worker
        for entry in policy.classes()
        if may_wait(entry) and entry.request_queue_limit_per_worker is not None
    ]
    together = sum(limits) * endpoints
    if together > settings.extproc.max_streams:
        yield (
            f"extproc.max_streams {settings.extproc.max_streams:,} binds before the classes' queue limits, which"
            f" add up to {together:,} requests: a class that floods then costs the others 503"
        )


def _of_waits(entry: PolicyClass, settings: Settings, route_timeout: float | None) -> Iterator[str]:
    """Where the class sets a wait of its own, the policy's own warnings compare it."""
    longest = settings.queue.max_wait
    if entry.max_queue_wait is not None or longest is None or not may_wait(entry):
        return
    if route_timeout and longest >= route_timeout:
        yield (
            f"queue.max_wait {longest:g} s is not below the route's timeout of {route_timeout:g} s: the gateway"
            " answers 504 before Picker can answer 429 with retry-after"
        )
    if entry.wspt_aging is not None and entry.wspt_aging >= longest:
        yield (
            f"wspt_aging {entry.wspt_aging:g} s is not below queue.max_wait {longest:g} s: a request is refused"
            " before ageing protects it"
        )


def _of_endpoints(entry: PolicyClass, specs: Sequence[EndpointSpec]) -> Iterator[str]:
    if not specs:
        return
    pool = Pool()
    pool.replace(specs)
    constraints = Constraints(
        selector=entry.allowed_endpoints or Constraints().selector, tolerations=entry.tolerations
    )
    refusals = [constraints.refuse(endpoint) for endpoint in pool]
    if all(refusals):
        reasons = ", ".join(sorted({str(reason) for reason in refusals}))
        yield f"no endpoint of the pool may take its requests ({reasons}): they get 503"
        return
    admitted = [
        spec for spec, reason in zip((each.spec for each in pool), refusals, strict=True) if not reason
    ]
    if entry.kv_usage_busy_threshold is not None and all(spec.metrics_url is None for spec in admitted):
        yield "kv_usage_busy_threshold has no effect: none of its endpoints is scraped"
    if len(admitted) < len(specs) and any(getattr(entry, key) for key in LIMIT_KEYS):
        yield (
            f"its queue limits count all {len(specs)} endpoints of the pool, of which it may use {len(admitted)}"
        )
