"""The deciding side: a `Prepared` request gets its class, waits its turn, and is placed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from uuid import uuid4

from msgspec.structs import replace

from picker.extproc.access_log import REQUEST_ID_HEADER
from picker.extproc.dispatcher import Dispatcher
from picker.extproc.exchange import Exchanges, RoutedExchange
from picker.extproc.handler import Facts, Refused
from picker.extproc.handover import Answer, Placed, Prepared
from picker.extproc.stages import StageClock, Stages
from picker.kvcache.predicted import Prediction
from picker.policy.model import CostWeights, PolicyClass
from picker.queueing.work import Dropped, DropReason, Outcome, Released, Work
from picker.requests import Hints, Route
from picker.selection.disaggregation import PREFILLER_HEADER
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Selector

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
class DecidingSettings:
    """max_wait: seconds a request may wait where its class sets no limit. choices: endpoints in the answer.

    shadow: decide as ever but name no endpoint, and drop at once what would have to wait.
    """

    max_wait: float = inf
    choices: int = 1
    shadow: bool = False


@dataclass(slots=True)
class Deciding:
    """The `Decider` that has the queue, the index and the ledger.

    `observe` hears of each stage that a request passed and its seconds. `on_sent` hears of each decision that is put
    into practice, with what it was made from; `on_cost` of the seconds that a dispatched request spent in all stages
    but the queue. `objectives` holds the priority of each InferenceObjective by name; whoever follows them replaces
    it.
    """

    selector: Selector
    dispatcher: Dispatcher
    exchanges: Exchanges
    clock: Callable[[], float]
    settings: DecidingSettings = field(default_factory=DecidingSettings)
    observe: Mapping[str, Callable[[float], None]] = field(default_factory=dict)
    on_sent: Callable[[Released, PromptKeys], Sequence[Prediction]] = lambda released, prompt: ()
    on_cost: Callable[[float], None] = lambda seconds: None
    objectives: Mapping[str, int] = field(default_factory=dict)
    _prefix: str = field(default_factory=lambda: uuid4().hex[:12])
    _serial: count[int] = field(default_factory=count)

    def begin(self, prepared: Prepared, tell: Callable[[Answer], None]) -> Callable[[], None]:
        self._observe(prepared.stages)
        if prepared.route is Route.OTHER:
            tell(self._pass_through(prepared))
            return _nothing
        stage = StageClock()
        work = self._work(prepared)
        stage.done("lookup")

        def conclude(outcome: Outcome) -> None:
            try:
                answer: Answer = self._conclude(prepared, stage, outcome)
            except Exception as error:
                answer = error
            tell(answer)

        self.dispatcher.submit(work, conclude)
        return partial(self.dispatcher.cancel, work)

    def _conclude(self, prepared: Prepared, stage: StageClock, outcome: Outcome) -> Placed | Refused:
        stage.done("queue")
        if isinstance(outcome, Dropped):
            self._observe(stage.taken)
            return _refuse(outcome, _facts(outcome.work, stage.taken))
        exchange = self._follow(prepared, outcome)
        destination, headers = None, [(REQUEST_ID_HEADER, outcome.work.id)]
        if not self.settings.shadow:
            destination = outcome.decision.destinations(self.settings.choices)
            headers += self._send(prepared, outcome, exchange)
        stage.done("reply")
        self._observe(stage.taken)
        self.on_cost(sum([s for name, s in (*prepared.stages, *stage.taken) if name != "queue"]))
        facts = _facts(outcome.work, stage.taken, outcome.decision.endpoint.spec.authority)
        return Placed(destination, exchange, tuple(headers), facts)

    def _observe(self, stages: Stages) -> None:
        for name, seconds in stages:
            if (observe := self.observe.get(name)) is not None:
                observe(seconds)

    def _work(self, prepared: Prepared) -> Work:
        """Take the snapshot that stays with the request while it waits.

        The class depends on the uncached tokens, and what is cached on the endpoints that the class may use: the
        request's own constraints decide the class, the class's are added, and the lookup is repeated only if
        they matter.
        """
        hints, demand = prepared.hints, prepared.demand
        apart = self.dispatcher.queue.disaggregation
        cached = self.selector.best_cached(demand, self.selector.eligible(demand.constraints).mask)
        profile = self.dispatcher.queue.policy.profile(prepared.model)
        policy_class = profile.resolve(hints.policy_class, demand.raw_tokens - cached)
        own = demand.constraints
        narrowed = self.dispatcher.queue.constraints(demand, own, profile, policy_class)
        if narrowed != own:
            demand = replace(demand, constraints=narrowed)
            readers = self.selector.eligible(narrowed).mask | apart.mask(narrowed)
            cached = self.selector.best_cached(demand, readers)
        received_at = prepared.received_at
        work = Work(
            id=self._new_id(),
            arrival=received_at,
            demand=prepared.demand,
            policy_class=policy_class,
            cached_tokens=cached,
            strict=self._tier(hints, policy_class),
            priority=hints.priority if hints.priority is not None else 0.0,
            tenant=hints.fairness_id or "",
            model=prepared.model or "",
            class_hint=hints.policy_class,
            deadline=self._deadline(received_at, hints, policy_class),
            explain=hints.explain,
            ttft_deadline=received_at + hints.ttft_ms / 1000 if hints.ttft_ms else inf,
            expected_output_tokens=prepared.max_tokens or 0,
        )
        work.demand = demand
        return work

    def _tier(self, hints: Hints, policy_class: PolicyClass) -> int:
        """What the request says itself, else what its objective does, else its class."""
        if hints.strict_priority is not None:
            return hints.strict_priority
        return self.objectives.get(hints.objective or "", policy_class.strict_priority)

    def _deadline(self, received_at: float, hints: Hints, policy_class: PolicyClass) -> float:
        if self.settings.shadow:
            return self.clock() + _SHADOW_HOLD
        longest = policy_class.max_queue_wait or self.settings.max_wait
        return received_at + min(longest, inf if hints.ttl is None else hints.ttl)

    def _follow(self, prepared: Prepared, released: Released) -> RoutedExchange:
        block_size = released.reader.endpoint.block_size or self.selector.pool.default_block_size
        return self.exchanges.begin(
            released,
            observes_response=prepared.observes_response,
            last_block=released.work.demand.prompt.last_block(block_size),
            gateway_id=prepared.gateway_id,
        )

    def _send(
        self, prepared: Prepared, released: Released, exchange: RoutedExchange
    ) -> list[tuple[str, str]]:
        """It really goes there. Returns the headers that its engine has to see."""
        spec = released.decision.endpoint.spec
        exchange.predictions = self.on_sent(released, released.work.demand.prompt)
        self._finish_session(prepared)
        headers = []
        if spec.shares_port:
            headers.append((RANK_HEADER, str(spec.rank)))
        if released.prefill is not None:
            headers.append((PREFILLER_HEADER, released.prefill.decision.endpoint.spec.authority))
        return headers

    def _pass_through(self, prepared: Prepared) -> Placed | Refused:
        """What is no inference is not queued and costs nothing, but goes only where its constraints allow."""
        eligibility = self.selector.eligible(prepared.demand.constraints)
        if not eligibility.mask:
            return Refused(503, DropReason.NO_ENDPOINT, "no endpoint may take this request")
        decision = self.selector.choose(prepared.demand, eligibility.mask, _DEFAULT_WEIGHTS)
        self._finish_session(prepared)
        return Placed(None if self.settings.shadow else decision.destinations(self.settings.choices))

    def _finish_session(self, prepared: Prepared) -> None:
        session = prepared.demand.session
        if session is not None and prepared.hints.session_finish:
            self.selector.sessions.finish(session)

    def _new_id(self) -> str:
        """Unique in this process and, by its random prefix, among all pickers."""
        return f"{self._prefix}-{next(self._serial)}"


def _nothing() -> None:
    """How to leave when the answer has been given."""


def _facts(work: Work, stages: Stages, endpoint: str | None = None) -> Facts:
    return Facts(work.id, work.policy_class.label, work.cached_tokens, work.cost, stages, endpoint)


def _refuse(dropped: Dropped, facts: Facts) -> Refused:
    return Refused(_STATUS[dropped.reason], dropped.reason, dropped.message, dropped.retry_after, facts=facts)
