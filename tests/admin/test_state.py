"""The live objects as telemetry sees them."""

from __future__ import annotations

from picker.admin.state import class_stats, endpoint_stats
from picker.extproc.endpoint_accounts import EndpointAccounts
from picker.kvcache.index import KvIndex
from picker.policy import load_policy
from picker.pool.endpoint import EndpointSpec, EngineReport
from picker.pool.ledger import Ledger
from picker.pool.pool import Pool
from picker.queueing.admission import AdmissionQueue
from picker.queueing.work import Work
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand, Selector

POLICY = """
default_policy_family: standard
uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
policy_classes:
  - {name: standard, policy_family: standard, cache_bucket: all, quantum: 100, prefill_busy_threshold: 10,
     request_queue_limit_per_worker: 4, raw_isl_token_queue_limit_per_worker: 80}
"""


def test_classes_and_endpoints_follow_a_request_through() -> None:
    pool, ledger, index = Pool(), Ledger(), KvIndex()
    pool.subscribe(ledger.pool_changed)
    pool.replace([EndpointSpec("u1", "a", "::1", 80)])
    queue = AdmissionQueue(load_policy(POLICY), Selector(pool, ledger, index))
    standard = queue.policy.profile("m").resolve(None, 30)
    for number, arrival in enumerate((1.0, 2.0, 3.0)):
        demand = Demand(30, PromptKeys.of_tokens([range(30)]))
        queue.submit(Work(f"r{number}", arrival, demand, standard), arrival)
    (stats,) = class_stats(queue, 10.0)
    assert (stats.label, stats.quantum, stats.waiting_requests, stats.waiting_tokens) == (
        "standard",
        100,
        2,
        60,
    )
    assert (stats.dispatched_requests, stats.dispatched_cost, stats.oldest_wait) == (1, 30, 8.0)
    assert stats.fill == 0.75, "60 of 80 tokens: nearer to its limit than 2 of 4 requests"

    index.add(0, [1, 2, 3], 0)
    pool.report("u1", EngineReport(at=9.5, running=4, kv_usage=0.25, num_blocks=100))
    accounts = EndpointAccounts(pool)
    accounts.of(next(iter(pool))).reported_cached_tokens += 16
    (endpoint,) = endpoint_stats(pool, ledger, index, accounts, 10.0)
    assert endpoint.reported_cached_tokens == 16
    assert (endpoint.address, endpoint.prefill_tokens, endpoint.running) == ("[::1]:80", 30, 1)
    assert (endpoint.cached_blocks, endpoint.num_blocks, endpoint.kv_usage) == (3, 100, 0.25)
    assert (endpoint.engine_running, endpoint.engine_waiting, endpoint.report_age) == (4, None, 0.5)


def test_what_was_never_scraped_is_unknown_not_zero() -> None:
    pool = Pool()
    pool.replace([EndpointSpec("u1", "a", "10.0.0.1", 80, ready=False)])
    (endpoint,) = endpoint_stats(pool, Ledger(), KvIndex(), EndpointAccounts(pool), 0.0)
    assert (endpoint.ready, endpoint.kv_usage, endpoint.report_age) == (False, None, None)
