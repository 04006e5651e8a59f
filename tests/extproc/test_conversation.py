"""The ext_proc conversation, message by message."""

from __future__ import annotations

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from picker.extproc.body import MAX_PIECE_BYTES
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
    ResponseChunk,
    ResponseHeaders,
    StreamEnded,
)
from picker.extproc.handler import Arrival, Refused, Routed
from picker.rpc import ByteBudget
from tests.support import messages
from tests.support.handlers import RecordedExchange
from tests.support.messages import FULL_DUPLEX, kind, set_header_values, streamed_pieces

ENDPOINT = "10.0.0.7:8000"
BUFFERED = (BodyMode.BUFFERED, BodyMode.NONE)
ALL_MODES = list(BodyMode)


class Driver:
    """A conversation whose replies are gathered as they become available."""

    def __init__(self, limits: ConversationLimits | None = None, budget: ByteBudget | None = None) -> None:
        self.budget = budget or ByteBudget(max_bytes=1 << 30)
        self.conversation = Conversation(limits or ConversationLimits(), self.budget)
        self.replies: list[ProcessingResponse] = []

    def feed(self, *incoming: ProcessingRequest) -> list[Event]:
        events = []
        for message in incoming:
            event = self.conversation.receive(message, now=12.5)
            if event is not None:
                events.append(event)
            self.drain()
        return events

    def ask(self, *incoming: ProcessingRequest) -> Arrival:
        (event,) = self.feed(*incoming)
        assert isinstance(event, Ask)
        return event.arrival

    def forward(self, *, body: bytes | None = None, **changes: object) -> list[ProcessingResponse]:
        routed = Routed(ENDPOINT, RecordedExchange(), body=body, **changes)  # type: ignore[arg-type]
        self.conversation.forward(routed)
        return self.drain()

    def drain(self) -> list[ProcessingResponse]:
        fresh = []
        while (reply := self.conversation.next_reply()) is not None:
            fresh.append(reply)
        self.replies += fresh
        return fresh

    @property
    def kinds(self) -> list[str]:
        return [kind(reply) for reply in self.replies]


def upload(*pieces: bytes) -> list[ProcessingRequest]:
    """A full-duplex request whose last piece ends it."""
    *first, last = pieces
    bodies = [messages.request_body(piece) for piece in first]
    return [messages.request_headers(), *bodies, messages.request_body(last, end=True)]


# The request


def test_nothing_is_said_before_the_request_is_whole() -> None:
    driver = Driver()
    assert driver.feed(messages.request_headers(), messages.request_body(b"ab")) == []
    assert driver.replies == []
    arrival = driver.ask(messages.request_body(b"cd", end=True))
    assert (arrival.body, arrival.has_body, arrival.method, arrival.path) == (
        b"abcd",
        True,
        "POST",
        "/v1/completions",
    )
    assert (arrival.authority, arrival.received_at) == ("models.example", 12.5)


def test_the_destination_comes_first_and_then_the_body_as_it_came() -> None:
    """C01: a body answer before the headers answer is a spurious message to Envoy."""
    driver = Driver()
    pieces = [bytes([n]) * 40_000 for n in range(5)]
    driver.ask(*upload(*pieces, b""))
    driver.forward()
    assert driver.kinds[0] == "request_headers"
    assert set(driver.kinds[1:]) == {"request_body"}
    sent = streamed_pieces(driver.replies, "request_body")
    assert b"".join(data for data, _ in sent) == b"".join(pieces)
    assert [last for _, last in sent] == [False] * (len(sent) - 1) + [True]


def test_header_and_metadata_name_the_same_endpoint() -> None:
    driver = Driver()
    driver.ask(*upload(b"{}"))
    reply = driver.forward(set_headers=(("x-note", "a"),), remove_headers=("x-hint",))[0]
    mutation = reply.request_headers.response.header_mutation
    assert set_header_values(reply) == {"x-note": ["a"], "x-gateway-destination-endpoint": [ENDPOINT]}
    assert all(option.append_action == option.OVERWRITE_IF_EXISTS_OR_ADD for option in mutation.set_headers)
    assert list(mutation.remove_headers) == ["x-hint"]
    assert reply.request_headers.response.clear_route_cache
    balancer = reply.dynamic_metadata["envoy.lb"]
    assert balancer["x-gateway-destination-endpoint"] == ENDPOINT


@pytest.mark.parametrize("size", [1, 30_000, 61_999, 62_000, 62_001, 65_536, 1 << 20, 6 << 20])
def test_pieces_stay_under_the_limit(size: int) -> None:
    """C05: whole-body answers are too large for some gateways."""
    driver = Driver()
    body = bytes(i % 251 for i in range(4096)) * (size // 4096 + 1)
    driver.ask(*upload(body[:size]))
    driver.forward()
    sent = streamed_pieces(driver.replies, "request_body")
    assert all(0 < len(data) <= MAX_PIECE_BYTES for data, _ in sent)
    assert b"".join(data for data, _ in sent) == body[:size]
    assert [last for _, last in sent].count(True) == 1


def test_a_bodiless_request_is_answered_in_the_header_phase() -> None:
    """C04 a: no body message ever comes."""
    driver = Driver()
    arrival = driver.ask(messages.request_headers("GET", "/v1/models", end=True))
    assert not arrival.has_body
    driver.forward()
    assert driver.kinds == ["request_headers"]


def test_an_empty_body_is_not_a_missing_one() -> None:
    """C04 b."""
    driver = Driver()
    arrival = driver.ask(messages.request_headers(), messages.request_body(b"", end=True))
    assert arrival.has_body
    assert arrival.body == b""
    driver.forward()
    assert streamed_pieces(driver.replies, "request_body") == [(b"", True)]


@pytest.mark.parametrize("body", [b"", b"x", b"x" * 130_000])
def test_with_trailers_no_piece_ends_the_stream(body: bytes) -> None:
    driver = Driver()
    driver.ask(messages.request_headers(), messages.request_body(body), messages.request_trailers())
    driver.forward()
    assert driver.kinds[0] == "request_headers"
    assert driver.kinds[-1] == "request_trailers"
    sent = streamed_pieces(driver.replies, "request_body")
    assert b"".join(data for data, _ in sent) == body
    assert not any(last for _, last in sent)


@pytest.mark.parametrize("decided", [False, True])
def test_a_second_end_of_stream_changes_nothing(decided: bool) -> None:
    driver = Driver()
    driver.ask(*upload(b"abc"))
    if decided:
        driver.forward()
    assert driver.feed(messages.request_body(b"", end=True)) == []
    if not decided:
        driver.forward()
    assert streamed_pieces(driver.replies, "request_body") == [(b"abc", True)]


def test_trailers_after_the_end_are_answered() -> None:
    driver = Driver()
    driver.ask(*upload(b"abc"))
    driver.forward()
    driver.feed(messages.request_trailers())
    assert driver.kinds[-1] == "request_trailers"


def test_headers_keep_order_duplicates_and_odd_bytes() -> None:
    driver = Driver()
    given = [("x-tag", "b"), ("x-tag", "a"), ("x-latin", "\xe9")]
    arrival = driver.ask(messages.request_headers(headers=given, end=True))
    assert list(arrival.headers) == given


def test_header_values_are_read_from_either_field() -> None:
    message = messages.request_headers(end=True)
    message.request_headers.headers.headers.add(key="x-old", value="plain")
    assert ("x-old", "plain") in Driver().ask(message).headers


def test_metadata_of_later_messages_adds_to_the_first() -> None:
    first = {"envoy.lb.subset_hint": {"subset": ["a:1", 7, ""]}}
    later = {"other": {"n": 1.5, "deep": {"yes": True, "no": None}}}
    arrival = Driver().ask(
        messages.request_headers(metadata=first), messages.request_body(b"{}", end=True, metadata=later)
    )
    assert arrival.metadata == first | later


def test_content_length_is_never_touched_in_full_duplex() -> None:
    """C07: Envoy owns the framing there."""
    driver = Driver()
    driver.ask(
        messages.request_headers(headers=[("content-length", "2")]), messages.request_body(b"{}", end=True)
    )
    reply = driver.forward(body=b"a longer body than before")[0]
    assert "content-length" not in set_header_values(reply)
    assert streamed_pieces(driver.replies, "request_body") == [(b"a longer body than before", True)]


# Modes


@pytest.mark.parametrize("modes", [None, FULL_DUPLEX, (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE)])
@pytest.mark.parametrize("without_waiting", [False, True])
def test_the_declared_protocol_is_taken_as_it_is(
    modes: tuple[BodyMode, BodyMode] | None, without_waiting: bool
) -> None:
    """C17: a flag that makes no difference does not refuse a stream."""
    driver = Driver()
    headers = messages.request_headers(modes=modes)
    if modes is not None:
        headers.protocol_config.send_body_without_waiting_for_header_response = without_waiting
    arrival = driver.ask(headers, messages.request_body(b"{}", end=True))
    assert arrival.observes_response == (modes != (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE))
    driver.forward()
    assert driver.kinds == ["request_headers", "request_body"]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_mode_that_cannot_be_served_is_refused_and_never_left_waiting(mode: BodyMode) -> None:
    driver = Driver()
    events = driver.feed(messages.request_headers(modes=(mode, BodyMode.NONE)))
    match mode:
        case BodyMode.FULL_DUPLEX_STREAMED:
            assert (events, driver.kinds) == ([], [])
        case BodyMode.BUFFERED:
            assert (events, driver.kinds) == ([], ["request_headers"])
        case _:
            (event,) = events
            assert isinstance(event, RefusedEarly)
            assert event.refused.reason == "unsupported_mode"
            assert mode.name in event.refused.message
            assert driver.kinds == ["immediate_response"]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_bodiless_request_can_be_served_in_every_mode(mode: BodyMode) -> None:
    driver = Driver()
    driver.ask(messages.request_headers("GET", end=True, modes=(mode, mode)))
    driver.forward()
    assert driver.kinds == ["request_headers"]


def test_a_mode_may_be_assumed_where_the_gateway_says_nothing() -> None:
    driver = Driver(ConversationLimits(assumed_body_mode=BodyMode.BUFFERED))
    assert driver.feed(messages.request_headers(modes=None)) == []
    assert driver.kinds == ["request_headers"]


@pytest.mark.parametrize("end", [False, True])
def test_buffered_headers_are_let_through_and_the_destination_goes_with_the_body(end: bool) -> None:
    driver = Driver()
    assert driver.feed(messages.request_headers(modes=BUFFERED)) == []
    assert set_header_values(driver.replies[0]) == {}
    arrival = driver.ask(messages.request_body(b"[1,  2]", end=end))
    assert arrival.body == b"[1,  2]"
    (reply,) = driver.forward()
    assert kind(reply) == "request_body"
    assert set_header_values(reply) == {"x-gateway-destination-endpoint": [ENDPOINT]}
    assert reply.request_body.response.clear_route_cache
    assert reply.request_body.response.body_mutation.WhichOneof("mutation") is None
    assert reply.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == ENDPOINT
    if not end:
        driver.feed(messages.request_trailers())
        assert driver.kinds[-1] == "request_trailers"


def test_a_changed_buffered_body_gets_one_new_length() -> None:
    """C07."""
    driver = Driver()
    driver.feed(messages.request_headers(modes=BUFFERED, headers=[("content-length", "2")]))
    driver.ask(messages.request_body(b"{}", end=True))
    (reply,) = driver.forward(body=b'{"model": "m"}')
    assert set_header_values(reply)["content-length"] == ["14"]
    assert reply.request_body.response.body_mutation.body == b'{"model": "m"}'


def test_a_buffered_wait_is_announced_once() -> None:
    driver = Driver(ConversationLimits(buffered_hold=2.5))
    driver.feed(messages.request_headers(modes=BUFFERED))
    driver.ask(messages.request_body(b"{}", end=True))
    announcement = driver.replies[-1]
    assert announcement.WhichOneof("response") is None
    assert announcement.override_message_timeout.ToMilliseconds() == 2500
    driver.forward()
    assert driver.kinds == ["request_headers", "None", "request_body"]


def test_buffered_trailers_without_a_body_are_refused() -> None:
    driver = Driver()
    (event,) = driver.feed(messages.request_headers(modes=BUFFERED), messages.request_trailers())
    assert isinstance(event, RefusedEarly)


# Limits


def test_a_body_past_its_limit_is_refused_at_once_and_freed() -> None:
    """C06 b: no end-of-stream is needed for the answer."""
    driver = Driver(ConversationLimits(max_body_bytes=100_000))
    driver.feed(messages.request_headers(), messages.request_body(b"x" * 60_000))
    assert driver.budget.stats.held_bytes == 60_000
    (event,) = driver.feed(messages.request_body(b"x" * 60_000))
    assert isinstance(event, RefusedEarly)
    assert driver.replies[-1].immediate_response.status.code == 413
    assert driver.budget.stats.held_bytes == 0
    assert driver.feed(messages.request_body(b"x" * 60_000), messages.request_body(b"", end=True)) == []
    assert driver.kinds == ["immediate_response"]
    assert driver.budget.stats.held_bytes == 0


def test_a_body_of_exactly_the_limit_is_taken() -> None:
    driver = Driver(ConversationLimits(max_body_bytes=100))
    assert len(driver.ask(*upload(b"x" * 60, b"x" * 40)).body) == 100


def test_a_declared_length_past_the_limit_is_refused_before_the_body() -> None:
    driver = Driver(ConversationLimits(max_body_bytes=100))
    (event,) = driver.feed(messages.request_headers(headers=[("content-length", "101")]))
    assert isinstance(event, RefusedEarly)
    assert event.refused.status == 413


@pytest.mark.parametrize("end", [False, True])
def test_headers_past_their_limit_are_refused(end: bool) -> None:
    driver = Driver(ConversationLimits(max_header_bytes=1000))
    (event,) = driver.feed(messages.request_headers(headers=[("x", "y" * 1000)], end=end))
    assert isinstance(event, RefusedEarly)
    assert (event.refused.status, event.refused.reason) == (431, "headers_too_large")


@pytest.mark.parametrize("end", [False, True])
def test_in_shadow_mode_large_headers_go_on(end: bool) -> None:
    driver = Driver(ConversationLimits(max_header_bytes=1000, refuses=False))
    driver.feed(messages.request_headers(headers=[("x", "y" * 1000)], end=end))
    assert driver.kinds == ["request_headers"]


@pytest.mark.parametrize("declared", ["", "abc", "-5", "1e9", "\xb2"])
def test_a_senseless_length_is_left_to_envoy(declared: str) -> None:
    driver = Driver()
    driver.ask(
        messages.request_headers(headers=[("content-length", declared)]),
        messages.request_body(b"{}", end=True),
    )


def test_all_bodies_together_have_a_limit() -> None:
    budget = ByteBudget(max_bytes=100)
    first, second, third = (Driver(budget=budget) for _ in range(3))
    first.ask(*upload(b"x" * 80))
    (event,) = second.feed(messages.request_headers(), messages.request_body(b"x" * 40))
    assert isinstance(event, RefusedEarly)
    assert event.refused.status == 503
    first.forward()
    assert budget.stats.held_bytes == 0
    third.ask(*upload(b"x" * 90))
    assert (budget.stats.peak_bytes, budget.stats.refusals) == (90, 1)


def test_in_shadow_mode_too_the_budget_is_held_until_the_last_piece_is_taken() -> None:
    driver = Driver(ConversationLimits(refuses=False))
    driver.ask(*upload(b"x" * 100_000))
    driver.conversation.refuse(Refused(429, "queue_full_requests", "full"))
    assert driver.budget.stats.held_bytes == 100_000
    while driver.conversation.next_reply() is not None:
        pass
    assert driver.budget.stats.held_bytes == 0


def test_the_budget_is_held_until_the_last_piece_is_taken() -> None:
    driver = Driver()
    driver.ask(*upload(b"x" * 100_000))
    driver.conversation.forward(Routed(ENDPOINT, RecordedExchange()))
    driver.conversation.next_reply()
    driver.conversation.next_reply()
    assert driver.budget.stats.held_bytes == 100_000
    driver.conversation.next_reply()
    assert driver.budget.stats.held_bytes == 0


@pytest.mark.parametrize("stage", range(5))
def test_an_end_at_any_point_frees_everything_once(stage: int) -> None:
    driver = Driver()
    steps = [
        lambda: driver.feed(messages.request_headers()),
        lambda: driver.feed(messages.request_body(b"abc")),
        lambda: driver.feed(messages.request_body(b"def", end=True)),
        lambda: driver.conversation.forward(Routed(ENDPOINT, RecordedExchange())),
    ]
    for step in steps[:stage]:
        step()
    assert driver.conversation.receive_end() == StreamEnded()
    if stage < 4:
        assert driver.conversation.phase is Phase.CLOSED
        assert driver.budget.stats.held_bytes == 0
    driver.conversation.close()
    driver.conversation.close()
    assert driver.conversation.next_reply() is None
    assert driver.budget.stats.held_bytes == 0


def test_a_gateway_may_close_its_side_behind_the_last_message() -> None:
    driver = routed()
    driver.conversation.receive(messages.response_body(b"abc"), 0.0)
    driver.conversation.receive(messages.response_body(b"", end=True), 0.0)
    driver.conversation.receive_end()
    driver.drain()
    assert streamed_pieces(driver.replies, "response_body") == [(b"abc", True)]


# Refusals


def test_a_refusal_is_a_whole_response() -> None:
    driver = Driver()
    driver.ask(*upload(b"{}"))
    driver.conversation.refuse(Refused(429, "queue_full", "too much", retry_after=1.2))
    (reply,) = driver.drain()
    response = reply.immediate_response
    assert response.status.code == 429
    assert set_header_values(reply) == {
        "content-type": ["application/json"],
        "x-picker-dropped-reason": ["queue_full"],
        "retry-after": ["2"],
    }
    assert response.body == (
        b'{"error":{"message":"too much","type":"rate_limit_error","param":null,"code":"queue_full"}}'
    )
    assert driver.budget.stats.held_bytes == 0


def test_what_was_forwarded_cannot_be_refused() -> None:
    driver = Driver()
    driver.ask(*upload(b"{}"))
    driver.forward()
    with pytest.raises(ProtocolError):
        driver.conversation.refuse(Refused(500, "late", "late"))
    with pytest.raises(ProtocolError):
        driver.forward()


# The response


def routed(response_mode: BodyMode = BodyMode.FULL_DUPLEX_STREAMED, *, watching: bool = False) -> Driver:
    driver = Driver()
    driver.ask(
        messages.request_headers(modes=(BodyMode.FULL_DUPLEX_STREAMED, response_mode)),
        messages.request_body(b"{}", end=True),
    )
    driver.conversation.forward(Routed(ENDPOINT, RecordedExchange(wants_response_body=watching)))
    driver.drain()
    driver.replies.clear()
    return driver


def test_the_response_headers_are_left_alone() -> None:
    """C08: copying them back broke streams at the next gateway."""
    driver = routed()
    given = [("transfer-encoding", "chunked"), ("content-type", "text/event-stream"), ("connection", "close")]
    served = {"envoy.lb": {"x-gateway-destination-endpoint-served": "10.0.0.8:8000"}}
    events = driver.feed(messages.response_headers(200, headers=given, metadata=served))
    assert events == [ResponseHeaders(200, given, "10.0.0.8:8000")]
    (reply,) = driver.replies
    assert kind(reply) == "response_headers"
    assert reply.ByteSize() <= 4  # an empty answer


def test_what_is_to_be_added_to_the_response_goes_beside_what_is_there() -> None:
    driver = Driver()
    driver.ask(*upload(b"{}"))
    cookie = (("set-cookie", "a=1; Path=/"), ("set-cookie", "b=2"))
    driver.forward(response_headers=cookie)
    driver.replies.clear()
    driver.feed(messages.response_headers(200, headers=[("set-cookie", "theirs=3")]))
    (reply,) = driver.replies
    assert set_header_values(reply) == {"set-cookie": ["a=1; Path=/", "b=2"]}
    mutation = reply.response_headers.response.header_mutation
    assert {option.append_action for option in mutation.set_headers} == {0}, "APPEND_IF_EXISTS_OR_ADD"
    assert not mutation.remove_headers


def test_each_chunk_goes_back_to_the_end() -> None:
    driver = routed()
    chunks = [b"data: %d\n\n" % n for n in range(20)]
    driver.feed(messages.response_headers(), *map(messages.response_body, chunks))
    driver.feed(messages.response_body(b"", end=True))
    assert streamed_pieces(driver.replies, "response_body") == [
        *((chunk, False) for chunk in chunks),
        (b"", True),
    ]


def test_chunks_that_wait_leave_together() -> None:
    driver = routed()
    conversation = driver.conversation
    for _ in range(30):
        conversation.receive(messages.response_body(b"x" * 5000), 0.0)
    conversation.receive(messages.response_body(b"end", end=True), 0.0)
    sent = streamed_pieces(driver.drain(), "response_body")
    assert [len(data) for data, _ in sent] == [60_000, 60_000, 30_003]
    assert [last for _, last in sent] == [False, False, True]


def test_response_trailers_end_the_body_in_its_place() -> None:
    driver = routed()
    driver.conversation.receive(messages.response_body(b"abc"), 0.0)
    driver.conversation.receive(messages.response_trailers(), 0.0)
    driver.drain()
    assert driver.kinds == ["response_body", "response_trailers"]
    assert streamed_pieces(driver.replies, "response_body") == [(b"abc", False)]


def test_a_gateway_that_does_not_take_the_response_congests_it() -> None:
    driver = routed()
    conversation = driver.conversation
    while not conversation.congested:
        conversation.receive(messages.response_body(b"x" * 50_000), 0.0)
    driver.drain()
    assert not conversation.congested


@pytest.mark.parametrize("mode", [BodyMode.STREAMED, BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL])
def test_lockstep_responses_get_one_empty_answer_each(mode: BodyMode) -> None:
    driver = routed(mode)
    driver.feed(messages.response_body(b"abc"), messages.response_body(b"", end=True))
    assert driver.kinds == ["response_body", "response_body"]
    assert all(not reply.response_body.HasField("response") for reply in driver.replies)


def test_the_first_chunk_is_shown_always_and_others_only_where_wanted() -> None:
    pieces = [messages.response_body(piece) for piece in (b"", b"abc", b"def")]
    assert routed().feed(*pieces) == [ResponseChunk(b""), ResponseChunk(b"abc")]
    assert routed(watching=True).feed(*pieces)[-1] == ResponseChunk(b"def")


@pytest.mark.parametrize("asked", [False, True])
def test_a_local_reply_of_the_gateway_ends_the_question(asked: bool) -> None:
    """An idle timer, or a filter before ours, answers the client; its response still passes through us."""
    driver = Driver()
    driver.feed(messages.request_headers(), messages.request_body(b"{}", end=asked))
    assert driver.feed(messages.response_headers(504)) == [GaveUp()]
    assert not driver.conversation.undecided
    assert driver.budget.stats.held_bytes == 0
    driver.feed(messages.response_body(b"stream timeout", end=True))
    assert driver.kinds == ["response_headers", "response_body"]
    with pytest.raises(ProtocolError):
        driver.forward()


def test_a_stream_may_start_with_a_response() -> None:
    first = messages.response_headers(401)
    first.protocol_config.request_body_mode, first.protocol_config.response_body_mode = FULL_DUPLEX
    driver = Driver()
    driver.feed(first, messages.response_body(b"who are you", end=True))
    assert driver.kinds == ["response_headers", "response_body"]


# What the protocol does not allow


def test_disorder_is_named() -> None:
    for incoming in (
        [messages.request_body(b"x", end=True)],
        [messages.request_trailers()],
        [messages.request_headers(), messages.request_headers()],
        [*upload(b"x"), messages.request_body(b"more")],
        [ProcessingRequest()],
    ):
        with pytest.raises(ProtocolError):
            Driver().feed(*incoming)


def test_an_unknown_mode_is_named() -> None:
    headers = messages.request_headers()
    headers.protocol_config.request_body_mode = 77
    with pytest.raises(ProtocolError, match="77"):
        Driver().feed(headers)
