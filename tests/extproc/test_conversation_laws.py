"""Any order, any split, any end: the conversation against the model of what Envoy accepts."""

from __future__ import annotations

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from picker.extproc.conversation import (
    Ask,
    BodyMode,
    Conversation,
    ConversationLimits,
    Event,
    GaveUp,
    Phase,
    ProtocolError,
    RefusedEarly,
)
from picker.extproc.handler import Refused, Routed
from picker.rpc import ByteBudget
from tests.extproc.envoy_model import EnvoyModel
from tests.support import messages
from tests.support.handlers import RecordedExchange

MAX_BODY = 200_000
BUDGET = 300_000

sizes = st.one_of(st.integers(0, 40), st.sampled_from([61_999, 62_000, 62_001, 100_000]))


def content(size: int, seed: int) -> bytes:
    return bytes((seed + i) % 253 for i in range(min(size, 4096))) * (size // 4096 + 1)


class EnvoyAndPicker(RuleBasedStateMachine):
    """Envoy's moves and the deciding side's, in any order that the real ones could take."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = ByteBudget(BUDGET)
        self.conversation = Conversation(ConversationLimits(max_body_bytes=MAX_BODY), self.budget)
        self.envoy = EnvoyModel()
        self.asked = False
        self.gave_up = False
        self.ended = False
        self.seed = 0

    # Envoy's moves

    @precondition(lambda self: self.open and not self.envoy.request.headers_sent and not self.local_reply)
    @rule(end=st.booleans(), declared=st.booleans())
    def send_request_headers(self, end: bool, declared: bool) -> None:
        self.envoy.request.headers_sent = True
        self.envoy.request.body_ended = end
        if end:
            self.envoy.request.body_answered = True
        self.feed(messages.request_headers(end=end, modes=messages.FULL_DUPLEX if declared else None))

    @precondition(lambda self: self.open and self.uploading)
    @rule(size=sizes, end=st.booleans())
    def send_request_body(self, size: int, end: bool) -> None:
        self.seed += 1
        data = content(size, self.seed)[:size]
        self.envoy.request.sent += data
        self.envoy.request.body_ended = end
        self.feed(messages.request_body(data, end=end))

    @precondition(lambda self: self.open and self.uploading)
    @rule()
    def send_request_trailers(self) -> None:
        self.envoy.request.trailers_sent = True
        self.feed(messages.request_trailers())

    @precondition(lambda self: self.open and self.envoy.request.body_ended and self.envoy.immediate is None)
    @rule()
    def end_the_request_again(self) -> None:
        self.feed(messages.request_body(b"", end=True))

    @precondition(lambda self: self.open and not self.envoy.response.headers_sent and not self.refused)
    @rule()
    def send_response_headers(self) -> None:
        """The upstream's, after the request went on, or Envoy's own before that."""
        self.gave_up = not self.envoy.request.headers_answered
        self.envoy.response.headers_sent = True
        self.feed(messages.response_headers())

    @precondition(lambda self: self.open and self.downloading)
    @rule(size=sizes, end=st.booleans())
    def send_response_body(self, size: int, end: bool) -> None:
        self.seed += 1
        data = content(size, self.seed)[:size]
        self.envoy.response.sent += data
        self.envoy.response.body_ended = end
        self.feed(messages.response_body(data, end=end))

    @precondition(lambda self: self.open and self.downloading)
    @rule()
    def send_response_trailers(self) -> None:
        self.envoy.response.trailers_sent = True
        self.feed(messages.response_trailers())

    @precondition(lambda self: self.open)
    @rule()
    def end_the_stream(self) -> None:
        self.ended = True
        self.conversation.receive_end()

    # The deciding side's moves

    @precondition(lambda self: self.asked and self.conversation.phase is Phase.DECIDING)
    @rule()
    def forward(self) -> None:
        self.conversation.forward(Routed("10.0.0.1:80", RecordedExchange()))

    @precondition(lambda self: self.open and self.conversation.undecided)
    @rule(status=st.sampled_from([400, 429, 500, 503]))
    def refuse(self, status: int) -> None:
        self.conversation.refuse(Refused(status, "why", "why"))

    @rule(count=st.integers(1, 5))
    def write_some(self, count: int) -> None:
        for _ in range(count):
            if (reply := self.conversation.next_reply()) is not None:
                self.envoy.take(reply)

    # What must hold

    @invariant()
    def it_asks_once_exactly_when_the_request_is_whole(self) -> None:
        whole = self.envoy.request.headers_sent and self.envoy.request.ended
        if self.conversation.phase is Phase.DECIDING:
            assert self.asked
            assert whole

    @invariant()
    def it_holds_no_more_than_what_came(self) -> None:
        held = self.budget.stats.held_bytes
        assert 0 <= held <= min(len(self.envoy.request.sent), BUDGET)
        if self.conversation.phase in (Phase.REFUSED, Phase.GIVEN_UP, Phase.CLOSED):
            assert held == 0

    def teardown(self) -> None:
        """All that waits is written: then every direction is answered as far as it was sent."""
        while (reply := self.conversation.next_reply()) is not None:
            self.envoy.take(reply)
        if self.conversation.phase is Phase.FORWARDED:
            assert self.envoy.request.answered
            assert self.envoy.request.got == self.envoy.request.sent
        if self.conversation.phase in (Phase.FORWARDED, Phase.GIVEN_UP):
            response = self.envoy.response
            assert response.headers_answered == response.headers_sent
            assert response.got == response.sent
            assert response.answered == response.ended
        self.conversation.close()
        assert self.budget.stats.held_bytes == 0

    # Helpers

    @property
    def open(self) -> bool:
        return not self.ended

    @property
    def refused(self) -> bool:
        return self.conversation.phase is Phase.REFUSED

    @property
    def local_reply(self) -> bool:
        return self.envoy.response.headers_sent

    @property
    def uploading(self) -> bool:
        request = self.envoy.request
        return request.headers_sent and not request.ended and not self.gave_up and not self.envoy.immediate

    @property
    def downloading(self) -> bool:
        return self.envoy.response.headers_sent and not self.envoy.response.ended

    def feed(self, message: ProcessingRequest) -> None:
        match self.conversation.receive(message, 0.0):
            case Ask(arrival):
                assert not self.asked
                self.asked = True
                assert arrival.body == self.envoy.request.sent
            case RefusedEarly(refused_with):
                assert refused_with.status == (413 if len(self.envoy.request.sent) > MAX_BODY else 503)
            case GaveUp():
                assert self.gave_up


EnvoyAndPicker.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestEnvoyAndPicker = EnvoyAndPicker.TestCase


any_mode = st.sampled_from(list(BodyMode))
any_message = st.one_of(
    st.builds(
        messages.request_headers,
        end=st.booleans(),
        modes=st.one_of(st.none(), st.tuples(any_mode, any_mode)),
    ),
    st.builds(messages.request_body, st.binary(max_size=50), end=st.booleans()),
    st.builds(messages.request_trailers),
    st.builds(messages.response_headers, st.integers(0, 999), end=st.booleans()),
    st.builds(messages.response_body, st.binary(max_size=50), end=st.booleans()),
    st.builds(messages.response_trailers),
    st.just(ProcessingRequest()),
)


@given(incoming=st.lists(any_message, max_size=12), decision=st.sampled_from(["forward", "refuse", "wait"]))
@settings(max_examples=150, deadline=None)
def test_nonsense_raises_only_its_own_error_and_frees_everything(
    incoming: list[ProcessingRequest], decision: str
) -> None:
    budget = ByteBudget(100)
    conversation = Conversation(ConversationLimits(max_body_bytes=80), budget)
    for message in incoming:
        event: Event | None = None
        try:
            event = conversation.receive(message, 0.0)
        except ProtocolError:
            if conversation.undecided:
                conversation.refuse(Refused(500, "protocol", "protocol"))
        if isinstance(event, Ask) and decision == "forward":
            conversation.forward(Routed("10.0.0.1:80", RecordedExchange()))
        elif isinstance(event, Ask) and decision == "refuse":
            conversation.refuse(Refused(429, "full", "full"))
        while conversation.next_reply() is not None:
            pass
    conversation.close()
    assert budget.stats.held_bytes == 0


@given(data=st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_a_message_of_random_bytes_is_read_or_refused(data: bytes) -> None:
    try:
        message = ProcessingRequest.FromString(data)
    except Exception:
        return
    conversation = Conversation(ConversationLimits(), ByteBudget(1 << 20))
    try:
        conversation.receive(message, 0.0)
    except ProtocolError:
        assert conversation.undecided
