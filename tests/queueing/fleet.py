"""A small fleet for queue tests: endpoints, a ledger, a queue, and a clock that the test moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from picker.policy.model import Policy, PolicyClass, Profile
from picker.pool.endpoint import Endpoint, EndpointSpec
from picker.pool.ledger import Ledger
from picker.pool.pool import Pool
from picker.queueing.admission import AdmissionQueue, QueueLimits
from picker.queueing.work import Dropped, Outcome, Released, Work
from picker.selection.constraints import Constraints
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand, Selector


class NothingCached:
    """An index of a fleet with cold caches."""

    def find_matches(self, keys: Sequence[int], mask: int) -> Mapping[int, Any]:
        return {}


def spec(name: str, **changes: Any) -> EndpointSpec:
    number = sum(name.encode()) % 250 + 1
    return EndpointSpec(**{"uid": name, "name": name, "address": f"10.0.0.{number}", "port": 8000, **changes})


def policy_of(*classes: PolicyClass) -> Policy:
    return Policy(root=Profile("", classes))


class Fleet:
    """Engines by name, each taking work until the policy calls it busy. Time moves only when told to."""

    def __init__(
        self,
        classes: Sequence[PolicyClass],
        engines: Sequence[str | EndpointSpec] = ("a",),
        limits: QueueLimits = QueueLimits(),
    ) -> None:
        self.now = 0.0
        self.pool = Pool()
        self.ledger = Ledger()
        self.pool.subscribe(self.ledger.pool_changed)
        self.selector = Selector(self.pool, self.ledger, NothingCached(), random=Random(7))
        self.queue = AdmissionQueue(policy_of(*classes), self.selector, limits)
        self.classes = {each.name: each for each in classes}
        self.set_engines(*engines)
        self.released: list[Released] = []
        self.dropped: list[Dropped] = []
        self.count = 0

    def set_engines(self, *engines: str | EndpointSpec) -> None:
        self.pool.replace([spec(each) if isinstance(each, str) else each for each in engines])

    def engine(self, name: str) -> Endpoint:
        endpoint = self.pool.get(name)
        assert endpoint is not None
        return endpoint

    def work(self, name: str, cost: int, **changes: Any) -> Work:
        self.count += 1
        constraints = changes.pop("constraints", Constraints())
        prompt = changes.pop("prompt", PromptKeys.unknown())
        raw = cost + changes.get("cached_tokens", 0)
        return Work(
            id=str(self.count),
            arrival=changes.pop("arrival", self.now),
            demand=Demand(raw, prompt, constraints),
            policy_class=self.classes[name],
            class_hint=name,
            **changes,
        )

    def submit(self, name: str, cost: int = 100, **changes: Any) -> Work:
        work = self.work(name, cost, **changes)
        self.take(self.queue.submit(work, self.now))
        return work

    def poll(self) -> list[Outcome]:
        return self.take(self.queue.poll(self.now))

    def take(self, outcomes: list[Outcome]) -> list[Outcome]:
        for outcome in outcomes:
            (self.released if isinstance(outcome, Released) else self.dropped).append(outcome)  # type: ignore[arg-type]
        return outcomes

    def finish(self, released: Released) -> list[Outcome]:
        """The engine has done a request; whoever waits for its place goes."""
        self.ledger.release(released.booking)
        return self.poll()

    def serve_one_by_one(self, dispatches: int) -> list[str]:
        """Free one place at a time; the class names in order of dispatch."""
        order = []
        for _ in range(dispatches):
            done = self.released[-1]
            assert [each for each in self.finish(done) if isinstance(each, Released)], (
                "nothing was dispatched"
            )
            order.append(self.released[-1].work.policy_class.name)
        return order
