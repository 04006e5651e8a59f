"""A request's path through the rooms: read it, count its tokens, look at the caches, queue it, send it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import inf
from typing import TYPE_CHECKING
from uuid import uuid4

from picker.extproc.access_log import MAX_REQUEST_ID_CHARS, REQUEST_ID_HEADER
from picker.extproc.dispatcher import Dispatcher
from picker.extproc.exchange import Exchanges
from picker.extproc.handler import Arrival, Refused, Routed
from picker.policy.model import CostWeights, PolicyClass
from picker.queueing.work import Dropped, DropReason, Released, Work
from picker.requests import (
    BadRequest,
    BodyLimits,
    Hints,
    HintTrust,
    InferenceRequest,
    Route,
    parse_hints,
    parse_request,
    subset_hint,
)
from picker.selection.constraints import Constraints
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Decision, Demand, Selector
from picker.tokens import TokenCount, Tokenizers

if TYPE_CHECKING:
    from picker.telemetry.tracing import RequestTrace, Tracing

# What vLLM and SGLang read to choose among the ranks behind one port.
RANK_HEADER = "x-data-parallel-rank"

_STATUS = {
    DropReason.QUEUE_FULL_REQUESTS: 429,
    DropReason.QUEUE_FULL_RAW_TOKENS: 429,
    DropReason.QUEUE_FULL_CACHED_TOKENS: 429,
    DropReason.DEADLINE: 429,
    DropReason.TTFT_UNREACHABLE: 429,
    DropReason.NO_ENDPOINT: 503,
    DropReason.PIN_NOT_ALLOWED: 400,
    DropReason.SHUTTING_DOWN: 503,
}
_DEFAULT_WEIGHTS = CostWeights()
# Seconds, in shadow mode: for the decision itself to be made before the wait is over.
_SHADOW_HOLD = 0.001


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """max_wait: seconds a request may wait where its class sets no limit. choices: endpoints in the answer.

    shadow: decide as ever but name no endpoint, and drop at once what would have to wait.
    """

    body_limits: BodyLimits = field(default_factory=BodyLimits)
    trust: HintTrust = field(default_factory=HintTrust)
    max_wait: float = inf
    choices: int = 1
    shadow: bool = False


class StageClock:
    """Tells each stage how long it took; a stage starts where the one before ended."""

    __slots__ = ("_last", "_observers", "_trace", "spent")

    def __init__(self, observers: Mapping[str, Callable[[float], None]], trace: RequestTrace | None) -> None:
        self._observers = observers
        self._trace = trace
        self._last = time.perf_counter()
        # Seconds in all stages but the queue.
        self.spent = 0.0

    def done(self, stage: str) -> None:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if stage != "queue":
            self.spent += seconds
        observe = self._observers.get(stage)
        if observe is not None:
            observe(seconds)
        if self._trace is not None:
            self._trace.stage(stage, seconds)


@dataclass(slots=True)
class Pipeline:
    """Implements the ext_proc server's `RequestHandler`.

    `on_sent` hears of each decision that is put into practice, with what it was made from; `on_cost` of the
    seconds that a dispatched request spent here outside its queue. `objectives` holds the priority of each
    InferenceObjective by name; whoever follows them replaces it.
    """

    tokenizers: Tokenizers
    selector: Selector
    dispatcher: Dispatcher
    exchanges: Exchanges
    clock: Callable[[], float]
    settings: PipelineSettings = field(default_factory=PipelineSettings)
    stages: Mapping[str, Callable[[float], None]] = field(default_factory=dict)
    on_sent: Callable[[Released, PromptKeys], None] = lambda released, prompt: None
    on_cost: Callable[[float], None] = lambda seconds: None
    tracing: Tracing | None = None
    objectives: Mapping[str, int] = field(default_factory=dict)
    _prefix: str = field(default_factory=lambda: uuid4().hex[:12])
    _serial: count[int] = field(default_factory=count)
    _unpacking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    async def route(self, arrival: Arrival) -> Routed | Refused:
        """Decide where a request goes. Cancelling it means that the client has left."""
        if self.tracing is None:
            return await self._route(arrival, None)
        trace = self.tracing.begin(arrival.headers)
        error: str | None = "cancelled"
        try:
            answer = await self._route(arrival, trace)
            error = answer.reason if isinstance(answer, Refused) else None
        finally:
            trace.end(error)
        if isinstance(answer, Refused):
            return answer
        return replace(answer, set_headers=(*answer.set_headers, *trace.headers))

    async def _route(self, arrival: Arrival, trace: RequestTrace | None) -> Routed | Refused:
        stage = StageClock(self.stages, trace)
        try:
            hints = parse_hints(arrival.headers, arrival.metadata, self.settings.trust)
            request = await self._read(arrival)
        except BadRequest as error:
            return _refuse_bad(error)
        stage.done("parse")
        constraints = _constraints(arrival, hints)
        if request.route is Route.OTHER:
            return self._pass_through(arrival, hints, constraints)
        tokens = await self.tokenizers.tokenize(request)
        stage.done("tokenize")
        constraints = self._with_adapter(constraints, request)
        prompt = _prompt_keys(request, tokens, constraints.adapter)
        for block_size in self.selector.pool.block_sizes():
            prompt.blocks(block_size)
        stage.done("hash")
        demand = Demand(tokens.count, prompt, constraints, hints.preferred_taints)
        work = self._work(arrival, request, hints, demand)
        stage.done("lookup")
        outcome = await self.dispatcher.admit(work)
        stage.done("queue")
        if isinstance(outcome, Dropped):
            if trace is not None:
                trace.decided(work, outcome.reason)
            return _refuse_dropped(outcome)
        if trace is not None:
            trace.decided(work, "dispatched", outcome.decision.endpoint.spec.authority)
        routed = self._send(arrival, hints, outcome)
        stage.done("reply")
        self.on_cost(stage.spent)
        return routed

    def _work(
        self,
        arrival: Arrival,
        request: InferenceRequest,
        hints: Hints,
        demand: Demand,
    ) -> Work:
        """Take the snapshot that stays with the request while it waits.

        The class depends on the uncached tokens, and what is cached on the endpoints that the class may use: the
        request's own constraints decide the class, the class's are added, and the lookup is repeated only if
        they matter.
        """
        cached = self.selector.best_cached(demand, self.selector.eligible(demand.constraints).mask)
        profile = self.dispatcher.queue.policy.profile(request.model)
        policy_class = profile.resolve(hints.policy_class, demand.raw_tokens - cached)
        narrowed = _with_class(demand.constraints, policy_class)
        if narrowed != demand.constraints:
            demand = replace(demand, constraints=narrowed)
            cached = self.selector.best_cached(demand, self.selector.eligible(narrowed).mask)
        priority = hints.priority if hints.priority is not None else 0.0
        return Work(
            id=self._new_id(),
            arrival=arrival.received_at,
            demand=demand,
            policy_class=policy_class,
            cached_tokens=cached,
            strict=self._tier(hints, policy_class),
            priority=priority,
            tenant=hints.fairness_id or hints.session or "",
            model=request.model or "",
            class_hint=hints.policy_class,
            deadline=self._deadline(arrival, hints, policy_class),
            explain=hints.explain,
            ttft_deadline=arrival.received_at + hints.ttft_ms / 1000 if hints.ttft_ms else inf,
            expected_output_tokens=request.max_tokens or 0,
        )

    async def _read(self, arrival: Arrival) -> InferenceRequest:
        """Parse the request. Raises BadRequest.

        A compressed body is unpacked beside the event loop, and one at a time: a small one may be many megabytes.
        """
        read = partial(
            parse_request,
            arrival.method,
            arrival.path,
            arrival.headers,
            arrival.body,
            self.settings.body_limits,
        )
        if all(name != "content-encoding" for name, _ in arrival.headers):
            return read()
        async with self._unpacking:
            return await asyncio.to_thread(read)

    def _with_adapter(self, constraints: Constraints, request: InferenceRequest) -> Constraints:
        model = request.model or ""
        return (
            replace(constraints, adapter=model) if self.selector.pool.serves_adapter(model) else constraints
        )

    def _tier(self, hints: Hints, policy_class: PolicyClass) -> int:
        """What the request says itself, else what its objective does, else its class."""
        if hints.strict_priority is not None:
            return hints.strict_priority
        return self.objectives.get(hints.objective or "", policy_class.strict_priority)

    def _deadline(self, arrival: Arrival, hints: Hints, policy_class: PolicyClass) -> float:
        if self.settings.shadow:
            return self.clock() + _SHADOW_HOLD
        longest = policy_class.max_queue_wait or self.settings.max_wait
        return arrival.received_at + min(longest, inf if hints.ttl is None else hints.ttl)

    def _send(self, arrival: Arrival, hints: Hints, released: Released) -> Routed:
        work, endpoint = released.work, released.decision.endpoint
        prompt = work.demand.prompt
        block_size = endpoint.block_size or self.selector.pool.default_block_size
        exchange = self.exchanges.begin(
            released,
            observes_response=arrival.observes_response,
            last_block=prompt.last_block(block_size),
            gateway_id=_gateway_id(arrival),
        )
        headers = [(REQUEST_ID_HEADER, work.id)]
        if self.settings.shadow:
            return Routed(None, exchange, set_headers=tuple(headers))
        self.on_sent(released, prompt)
        if endpoint.spec.shares_port:
            headers.append((RANK_HEADER, str(endpoint.spec.rank)))
        return Routed(
            endpoint=released.decision.destinations(self.settings.choices),
            exchange=exchange,
            set_headers=tuple(headers),
            remove_headers=hints.consumed_headers,
        )

    def _pass_through(self, arrival: Arrival, hints: Hints, constraints: Constraints) -> Routed | Refused:
        """What is no inference is not queued and costs nothing, but goes only where its constraints allow."""
        eligibility = self.selector.eligible(constraints)
        if not eligibility.mask:
            return Refused(503, DropReason.NO_ENDPOINT, "no endpoint may take this request")
        demand = Demand(0, PromptKeys.unknown(), constraints)
        decision = self.selector.choose(demand, eligibility.mask, _DEFAULT_WEIGHTS)
        if self.settings.shadow:
            return Routed(None, _Unfollowed(decision))
        return Routed(
            endpoint=decision.destinations(self.settings.choices),
            exchange=_Unfollowed(decision),
            remove_headers=hints.consumed_headers,
        )

    def _new_id(self) -> str:
        """Unique in this process and, by its random prefix, among all pickers."""
        return f"{self._prefix}-{next(self._serial)}"


@dataclass(slots=True)
class _Unfollowed:
    """A request that booked nothing."""

    decision: Decision
    wants_response_body: bool = False

    def response_headers(self, status: int, headers: object, served: str | None) -> None:
        pass

    def response_chunk(self, data: bytes) -> None:
        pass

    def finished(self, delivered: bool) -> None:
        pass


def _gateway_id(arrival: Arrival) -> str | None:
    given = next((value for name, value in arrival.headers if name == REQUEST_ID_HEADER), "")
    return given if 0 < len(given) <= MAX_REQUEST_ID_CHARS else None


def _constraints(arrival: Arrival, hints: Hints) -> Constraints:
    """What the gateway and trusted hints ask of the endpoint."""
    lists = (subset_hint(arrival.metadata), hints.allow_list)
    return Constraints(
        allow=tuple(frozenset(entries) for entries in lists if entries is not None),
        tolerations=hints.tolerations,
        required_taints=frozenset(hints.required_taints),
        pin=hints.pin,
        rank=hints.rank,
    )


def _with_class(constraints: Constraints, policy_class: PolicyClass) -> Constraints:
    if policy_class.allowed_endpoints is None and not policy_class.tolerations:
        return constraints
    return replace(
        constraints,
        selector=policy_class.allowed_endpoints or constraints.selector,
        tolerations=(*constraints.tolerations, *policy_class.tolerations),
    )


def _prompt_keys(request: InferenceRequest, tokens: TokenCount, adapter: str | None) -> PromptKeys:
    if tokens.estimated:
        return PromptKeys.unknown()
    return PromptKeys.of_tokens(tokens.ids, adapter=adapter, salt=request.cache_salt)


def _refuse_bad(error: BadRequest) -> Refused:
    reasons = {413: "body_too_large", 415: "unsupported_coding"}
    reason = reasons.get(error.status, "bad_request")
    return Refused(error.status, reason, error.message, param=error.param, code=error.code)


def _refuse_dropped(dropped: Dropped) -> Refused:
    return Refused(_STATUS[dropped.reason], dropped.reason, dropped.message, dropped.retry_after)
