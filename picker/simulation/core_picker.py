"""Picker's own deciding core as a policy of the simulator: the same queue, index, ledger and selection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from random import Random

from picker.kvcache.index import KvIndex
from picker.kvcache.keys import root_key
from picker.kvcache.predicted import CombinedIndex, PredictedIndex
from picker.policy import Policy
from picker.pool.calibration import Calibration
from picker.pool.endpoint import EndpointSpec, EngineReport
from picker.pool.ledger import Ledger
from picker.pool.pool import Pool
from picker.queueing.admission import AdmissionQueue
from picker.queueing.work import Outcome, Released, Work
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand, Selector
from picker.simulation.replay import Dispatch, Pod
from picker.simulation.workloads import Arrival

# The defaults of `kvcache.bridge_ttl` and `pool.scrape_interval`.
_BRIDGE_SECONDS = 10.0
_SCRAPE_SECONDS = 0.2


@dataclass(slots=True)
class _IndexFeed:
    """The pods' blocks into the index; a pod's number is its slot."""

    index: KvIndex
    root: int

    def stored(self, pod: int, keys: Sequence[int], parent: int | None) -> None:
        self.index.add(pod, keys, self.root if parent is None else parent)

    def removed(self, pod: int, keys: Sequence[int]) -> None:
        self.index.remove(pod, keys)


class CorePicker:
    """`policy` is what the policy file would say; arrivals name their class by `policy_class`.

    `max_wait` (seconds) bounds the wait of requests whose class does not.
    """

    def __init__(self, policy: Policy, pods: Sequence[Pod], *, seed: int = 0, max_wait: float = inf) -> None:
        shape = pods[0].model.shape
        self.index = KvIndex(max_blocks=2 * len(pods) * shape.num_blocks)
        self.predicted = PredictedIndex()
        self.feed = _IndexFeed(self.index, root_key(shape.block_size, None))
        self.pool = Pool(default_block_size=shape.block_size)
        self.ledger = Ledger()
        self.calibration = Calibration()
        self.selector = Selector(
            self.pool,
            self.ledger,
            CombinedIndex(self.index, self.predicted),
            self.calibration,
            Random(f"{seed}/picker"),
        )
        self.queue = AdmissionQueue(policy, self.selector)
        self.pool.replace(
            EndpointSpec(
                uid=f"pod-{pod.index}",
                name=f"pod-{pod.index}",
                address=f"10.0.{pod.index >> 8}.{pod.index & 255}",
                port=8000,
                block_size=shape.block_size,
                max_num_batched_tokens=shape.max_num_batched_tokens,
            )
            for pod in pods
        )
        self._pods = pods
        self._scraped_at = -inf
        self._capacity = shape.num_blocks
        self._max_wait = max_wait
        self._waiting: dict[Work, Arrival] = {}
        self._sent: dict[Arrival, tuple[Released, float]] = {}
        self._serial = count()

    def arrive(self, now: float, arrival: Arrival) -> Iterable[Dispatch]:
        self.predicted.sweep(now)
        if now - self._scraped_at >= _SCRAPE_SECONDS:
            self._scrape(now)
        work = self._work(now, arrival)
        self._waiting[work] = arrival
        return self._dispatches(self.queue.submit(work, now), now)

    def prefilled(self, now: float, arrival: Arrival, pod: int) -> None:
        released, at = self._sent[arrival]
        self.ledger.prefill_done(released.booking)
        chosen = released.decision.chosen
        ahead = chosen.booked_prefill_tokens + chosen.uncached_tokens
        self.calibration.observe(chosen.endpoint.slot, ahead, now - at)

    def finished(self, now: float, arrival: Arrival, pod: int) -> None:
        released, _ = self._sent.pop(arrival)
        self.ledger.release(released.booking)

    def poll(self, now: float) -> Iterable[Dispatch]:
        return self._dispatches(self.queue.poll(now), now)

    def next_wakeup(self) -> float:
        return self.queue.next_wakeup()

    def _scrape(self, now: float) -> None:
        """Take the engines' figures, as old as a scrape may be when the next decision is made."""
        self._scraped_at = now
        for endpoint in self.pool:
            model = self._pods[endpoint.slot].model
            report = EngineReport(
                at=now,
                running=len(model.running),
                waiting=len(model.waiting),
                kv_usage=model.cache.usage,
                block_size=model.shape.block_size,
                num_blocks=model.shape.num_blocks,
                inter_token_seconds=model.stats.inter_token_seconds,
                inter_tokens=model.stats.inter_tokens,
            )
            self.pool.report(endpoint.spec.uid, report)
            self.ledger.correct(endpoint, report)
            self.calibration.inter_token.observe(endpoint.slot, report)
            self.queue.reported(endpoint)

    def _work(self, now: float, arrival: Arrival) -> Work:
        prompt = PromptKeys((arrival.prompt_tokens,), lambda block_size: (arrival.blocks,))
        demand = Demand(arrival.prompt_tokens, prompt)
        cached = self.selector.best_cached(demand, self.selector.eligible(demand.constraints).mask)
        hint = arrival.policy_class or None
        policy_class = self.queue.policy.profile(None).resolve(hint, arrival.prompt_tokens - cached)
        return Work(
            id=str(next(self._serial)),
            arrival=now,
            demand=demand,
            policy_class=policy_class,
            cached_tokens=cached,
            strict=policy_class.strict_priority,
            tenant=arrival.tenant,
            class_hint=hint,
            deadline=now + (policy_class.max_queue_wait or self._max_wait),
            expected_output_tokens=arrival.output_tokens,
        )

    def _dispatches(self, outcomes: Iterable[Outcome], now: float) -> Iterable[Dispatch]:
        # A list, not a generator: the bookings have to stand before the caller does anything else.
        dispatches = []
        for outcome in outcomes:
            arrival = self._waiting.pop(outcome.work)
            if isinstance(outcome, Released):
                slot = outcome.decision.endpoint.slot
                self._sent[arrival] = (outcome, now)
                ttl = _BRIDGE_SECONDS + self.selector.backlog_seconds(slot)
                self.predicted.predict(slot, arrival.blocks, now, ttl=ttl, capacity=self._capacity)
                dispatches.append(Dispatch(arrival, slot))
            else:
                dispatches.append(Dispatch(arrival, refused=outcome.reason))
        return dispatches
