"""One request as the deciding core sees it, and what can become of it."""

from __future__ import annotations

from enum import StrEnum
from math import inf

from msgspec import Struct

from picker.policy.model import PolicyClass
from picker.pool.ledger import Booking
from picker.selection.constraints import Constraints
from picker.selection.selector import Decision, Demand


class WorkState(StrEnum):
    NEW = "new"
    WAITING = "waiting"
    RELEASED = "released"
    DROPPED = "dropped"
    CANCELLED = "cancelled"


class DropReason(StrEnum):
    """Why a request leaves without an endpoint. Machine words: clients and dashboards match on them."""

    QUEUE_FULL_REQUESTS = "queue_full_requests"
    QUEUE_FULL_RAW_TOKENS = "queue_full_raw_tokens"
    QUEUE_FULL_CACHED_TOKENS = "queue_full_cached_tokens"
    DEADLINE = "deadline"
    TTFT_UNREACHABLE = "ttft_unreachable"
    NO_ENDPOINT = "no_endpoint"
    PIN_NOT_ALLOWED = "pin_not_allowed"
    SHUTTING_DOWN = "shutting_down"


class Work(Struct, eq=False):
    """A request with its frozen snapshot.

    Times are seconds on the driver's clock; `arrival` is when its headers came, so that time spent on
    tokenizing counts as waiting. `cached_tokens` is what the best eligible endpoint held at enqueue.
    `strict` is a tier, higher first; the meaning of `priority` is the queue policy's. `class_hint` and `model`
    are kept so that a new policy can resolve the request again, and `own`, the constraints that it is made with, so
    that this can replace what class and profile have added to them in `demand`.

    `period` and `tenant_period` say in which backlog of its class and of its tenant it was charged, so that a
    correction finds the account or finds it closed. `output_charge` is what its class took for a token then.
    """

    id: str
    arrival: float
    demand: Demand
    policy_class: PolicyClass
    cached_tokens: int = 0
    strict: int = 0
    priority: float = 0.0
    tenant: str = ""
    model: str = ""
    class_hint: str | None = None
    deadline: float = inf
    ttft_deadline: float = inf
    expected_output_tokens: int = 0
    # A trusted source wants this request's decision written to the log, whatever is sampled.
    explain: bool = False
    # These four follow from the others.
    own: Constraints = Constraints()
    uncached_tokens: int = 0
    cost: int = 0
    output_charge: float = 0.0
    sequence: int = 0
    period: int = 0
    tenant_period: int = 0
    state: WorkState = WorkState.NEW

    def __post_init__(self) -> None:
        self.own = self.demand.constraints
        self.cached_tokens = min(self.cached_tokens, self.demand.raw_tokens)
        self.uncached_tokens = self.demand.raw_tokens - self.cached_tokens
        self.output_charge = self.policy_class.output_charge or 0.0
        self.cost = self.cost_of(min(self.expected_output_tokens, self.policy_class.output_estimate))

    def cost_of(self, output_tokens: int) -> int:
        """The charge when this many tokens are generated; by estimate at dispatch, in truth at the end."""
        return max(1, self.uncached_tokens) + round(self.output_charge * output_tokens)


class Prefill(Struct, frozen=True):
    """Another endpoint reads the prompt, and is booked for as long as that takes."""

    decision: Decision
    booking: Booking


class Released(Struct, eq=False):
    """The request goes to `decision.endpoint`, where it is booked. prefill: where its prompt is read, if elsewhere.

    deficit: the class's deficit before and after the charge of `work.cost`. waited: seconds since arrival.
    """

    work: Work
    decision: Decision
    booking: Booking
    waited: float
    deficit_before: int
    deficit_after: int
    prefill: Prefill | None = None

    @property
    def reader(self) -> Decision:
        """The choice of the endpoint that reads the prompt."""
        return self.decision if self.prefill is None else self.prefill.decision


class Dropped(Struct, frozen=True):
    """The request is refused. retry_after: seconds after which a retry may succeed, where that can be said."""

    work: Work
    reason: DropReason
    message: str
    retry_after: float | None = None


Outcome = Released | Dropped
