"""A face and the core talk: who waits for an answer, who has left, and what is free when one of them is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from picker.extproc import handover
from picker.extproc.handler import Refused
from picker.extproc.handover import Placed, Prepared
from picker.extproc.usage import Usage
from picker.faces.answering import Answering
from picker.faces.asking import Asking, DecidingFailed
from picker.faces.messages import FromCore, FromFace
from picker.faces.protocol import core_end, face_end
from picker.requests import Hints, Route
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand


@dataclass
class Told:
    """The `Progress` of a request in the core, as it was told."""

    events: list[tuple[object, ...]] = field(default_factory=list)

    def served(self, authority: str) -> None:
        self.events.append(("served", authority))

    def answered(self, ok: bool) -> None:
        self.events.append(("answered", ok))

    def prefilled(self, at: float) -> None:
        self.events.append(("prefilled", at))

    def finished(self, delivered: bool, usage: Usage | None) -> None:
        self.events.append(("finished", delivered, usage))


@dataclass
class Core:
    """A `Decider` that is told what to answer, by the request's model."""

    waiting: dict[str, Callable[[handover.Answer], None]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    at_once: handover.Answer | None = None
    breaks: bool = False

    def begin(self, prepared: Prepared, tell: Callable[[handover.Answer], None]) -> Callable[[], None]:
        assert prepared.model is not None
        name = prepared.model
        if self.breaks:
            raise RuntimeError("a fault of ours")
        if self.at_once is not None:
            tell(self.at_once)
        else:
            self.waiting[name] = tell
        return lambda: self.left.append(name)


class Connection:
    """Both ends, with the bytes between them held until they are let through."""

    def __init__(self) -> None:
        self.core = Core()
        self._to_core: list[FromFace] = []
        self._to_face: list[FromCore] = []
        self._framings = face_end(), core_end()
        self.asking = Asking(self._to_core.append)
        self.answering = Answering(self.core, self._to_face.append)

    def ask(self, model: str) -> tuple[list[handover.Answer], Callable[[], None]]:
        answers: list[handover.Answer] = []
        request = Prepared(Route.COMPLETIONS, Hints(), Demand(1, PromptKeys.unknown()), 0.0, True, model)
        return answers, self.asking.begin(request, answers.append)

    def carry_to_core(self) -> None:
        messages, self._to_core[:] = list(self._to_core), []
        for message in self._framings[1].feed(self._framings[0].encode(messages)):
            self.answering.take(message)  # type: ignore[arg-type]

    def carry_to_face(self) -> None:
        messages, self._to_face[:] = list(self._to_face), []
        for message in self._framings[0].feed(self._framings[1].encode(messages)):
            self.asking.take(message)  # type: ignore[arg-type]

    def carry(self) -> None:
        self.carry_to_core()
        self.carry_to_face()
        self.carry_to_core()

    @property
    def idle(self) -> bool:
        """Nothing is remembered at either end, and nothing is on its way."""
        return not (len(self.asking) or len(self.answering) or self._to_core or self._to_face)


@pytest.fixture
def connection() -> Connection:
    return Connection()


def placed(answers: list[handover.Answer]) -> Placed:
    (answer,) = answers
    assert isinstance(answer, Placed)
    return answer


def test_a_request_is_placed_followed_and_over(connection: Connection) -> None:
    answers, _ = connection.ask("m")
    connection.carry()
    assert answers == []
    progress = Told()
    connection.core.waiting["m"](Placed("10.0.0.1:80", progress, (("a", "b"),)))
    connection.carry()
    answer = placed(answers)
    assert (answer.endpoint, answer.set_headers) == ("10.0.0.1:80", (("a", "b"),))
    assert answer.progress is not None
    answer.progress.served("10.0.0.2:80")
    answer.progress.prefilled(3.5)
    answer.progress.answered(False)
    answer.progress.finished(True, Usage(1, 2, 3))
    connection.carry()
    assert progress.events == [
        ("served", "10.0.0.2:80"),
        ("prefilled", 3.5),
        ("answered", False),
        ("finished", True, Usage(1, 2, 3)),
    ]
    assert connection.idle


@pytest.mark.parametrize("answer", [Placed("10.0.0.1:80"), Placed(None), Refused(429, "deadline", "late")])
def test_what_books_nothing_is_over_with_its_answer(connection: Connection, answer: Placed | Refused) -> None:
    connection.core.at_once = answer
    answers, leave = connection.ask("m")
    connection.carry()
    assert answers == [answer]
    assert connection.idle
    leave()
    connection.carry()
    assert connection.core.left == []


def test_who_leaves_while_it_waits_is_taken_out(connection: Connection) -> None:
    answers, leave = connection.ask("m")
    connection.carry()
    leave()
    leave()
    connection.carry()
    assert (connection.core.left, answers) == (["m"], [])
    assert connection.idle


def test_who_leaves_before_the_core_has_heard_of_it_is_taken_out(connection: Connection) -> None:
    _, leave = connection.ask("m")
    leave()
    connection.carry()
    assert connection.core.left == ["m"]
    assert connection.idle


def test_an_answer_that_crosses_a_leaving_is_given_back(connection: Connection) -> None:
    answers, leave = connection.ask("m")
    connection.carry()
    progress = Told()
    connection.core.waiting["m"](Placed("10.0.0.1:80", progress))
    leave()
    connection.carry_to_core()
    assert progress.events == [], "the core cannot know yet whether the answer was taken"
    connection.carry()
    assert progress.events == [("finished", False, None)]
    assert (answers, connection.core.left) == ([], [])
    assert connection.idle


def test_a_decision_for_one_that_has_left_is_undone(connection: Connection) -> None:
    """Deciders do not tell whom they were told has left; if one does, nothing stays booked."""
    _, leave = connection.ask("m")
    connection.carry()
    leave()
    connection.carry()
    progress = Told()
    connection.core.waiting["m"](Placed("10.0.0.1:80", progress))
    assert progress.events == [("finished", False, None)]
    assert connection.idle


def test_a_face_that_is_gone_leaves_nothing_behind(connection: Connection) -> None:
    progress = Told()
    connection.core.at_once = Placed("10.0.0.1:80", progress)
    connection.ask("placed")
    connection.carry_to_core()
    connection.core.at_once = None
    connection.ask("waits")
    connection.carry_to_core()
    connection.answering.close()
    assert progress.events == [("finished", False, None)]
    assert connection.core.left == ["waits"]
    assert len(connection.answering) == 0
    connection.answering.close()
    assert len(progress.events) == len(connection.core.left) == 1


def test_when_the_core_is_gone_whoever_asks_is_refused(connection: Connection) -> None:
    before, _ = connection.ask("before")
    connection.carry()
    connection.asking.close()
    after, leave = connection.ask("after")
    leave()
    for answers in (before, after):
        (answer,) = answers
        assert isinstance(answer, Refused)
        assert (answer.status, answer.reason) == (503, "shutting_down")
    assert len(connection.asking) == 0


def test_a_fault_of_the_core_is_a_fault_for_who_asked(connection: Connection) -> None:
    connection.core.breaks = True
    first, _ = connection.ask("m")
    connection.carry()
    connection.core.breaks = False
    second, _ = connection.ask("n")
    connection.carry()
    connection.core.waiting["n"](RuntimeError("later"))
    connection.carry()
    assert [type(answer) for answer in (*first, *second)] == [DecidingFailed, DecidingFailed]
    assert connection.idle


def test_each_answer_finds_its_own(connection: Connection) -> None:
    asked = {name: connection.ask(name)[0] for name in "abc"}
    connection.carry()
    for name in "cab":
        connection.core.waiting[name](Placed(name))
    connection.carry()
    assert {name: placed(answers).endpoint for name, answers in asked.items()} == {n: n for n in "abc"}
