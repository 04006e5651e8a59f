"""The rooms' live objects as the plain values that telemetry reads."""

from __future__ import annotations

from picker.extproc.endpoint_accounts import EndpointAccounts
from picker.kvcache.index import KvIndex
from picker.pool.ledger import Ledger
from picker.pool.pool import Pool
from picker.queueing.admission import AdmissionQueue
from picker.queueing.refusals import queue_fill
from picker.telemetry import ClassStats, EndpointStats


def class_stats(queue: AdmissionQueue, now: float) -> list[ClassStats]:
    """Every class of the policy, in its order. `now` is on the queue's clock."""
    found = []
    for flow in queue.flows():
        stats = flow.queue.stats
        found.append(
            ClassStats(
                label=flow.queue.policy_class.label,
                quantum=flow.quantum,
                waiting_requests=stats.waiting_requests,
                waiting_tokens=stats.waiting_tokens,
                waiting_cached_tokens=stats.waiting_cached_tokens,
                deficit=flow.deficit,
                fill=queue_fill(stats, flow.queue.policy_class, len(queue.selector.pool)),
                oldest_wait=max(0.0, now - flow.queue.oldest_arrival),
                dispatched_requests=stats.dispatched_requests,
                dispatched_cost=stats.dispatched_cost,
                cancelled=stats.cancelled,
                shared_lane=stats.shared_lane,
                shared_tenant=stats.shared_tenant,
                dropped={str(reason): count for reason, count in stats.dropped.items()},
                blocked={str(reason): seconds for reason, seconds in stats.blocked.items()},
            )
        )
    return found


def endpoint_stats(
    pool: Pool, ledger: Ledger, index: KvIndex, accounts: EndpointAccounts, now: float
) -> list[EndpointStats]:
    """Every endpoint of the pool. `now` is on the clock of the engines' reports."""
    found = []
    for endpoint in pool:
        spec, report, load = endpoint.spec, endpoint.report, ledger.load(endpoint.slot)
        account = accounts.of(endpoint)
        found.append(
            EndpointStats(
                uid=spec.uid,
                name=spec.name,
                address=spec.authority,
                rank=spec.rank,
                ready=spec.ready and not endpoint.fenced,
                cordoned=spec.cordoned,
                taints=tuple(str(taint) for taint in spec.taints),
                labels=spec.labels,
                prefill_tokens=load.prefill_tokens,
                running=load.running,
                foreign=load.foreign,
                engine_running=report.running if report else None,
                engine_waiting=report.waiting if report else None,
                kv_usage=report.kv_usage if report else None,
                cached_blocks=index.blocks_of(endpoint.slot),
                num_blocks=report.num_blocks if report else None,
                block_size=endpoint.block_size,
                report_age=max(0.0, now - report.at) if report else None,
                prompt_tokens=account.prompt_tokens,
                predicted_cached_tokens=account.cached_tokens,
                reported_cached_tokens=account.reported_cached_tokens,
                timed_requests=account.timed,
                predicted_ttft=account.predicted_ttft,
                observed_ttft=account.observed_ttft,
            )
        )
    return found
