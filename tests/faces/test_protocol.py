"""Messages become bytes and come back the same, whatever the pieces in which they arrive; noise is an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.extproc.handler import Facts, Refused
from picker.extproc.handover import Placed, Prepared
from picker.extproc.usage import Usage
from picker.faces.messages import (
    Answer,
    Counted,
    Decide,
    Finished,
    FromCore,
    FromFace,
    Leave,
    Logged,
    Pool,
    Refusal,
    Rewrites,
)
from picker.faces.protocol import MAX_FRAME_BYTES, ProtocolError, core_end, face_end
from picker.policy.constraints import Toleration
from picker.policy.rewrites import ModelRewrites, Split
from picker.requests import Hints, Route
from picker.selection.constraints import Constraints
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand


def prepared(prompts: tuple[range, ...] = (range(100), range(7))) -> Prepared:
    keys = PromptKeys.of_tokens(prompts, salt="s")
    for size in (16, 64):
        keys.blocks(size)
    constraints = Constraints(
        allow=(frozenset({"10.0.0.1"}),),
        tolerations=(Toleration("gpu", "old"),),
        required_taints=frozenset({"fast"}),
        pin="pod-a",
        rank=3,
        adapter="lora",
    )
    return Prepared(
        route=Route.CHAT,
        hints=Hints(policy_class="premium", priority=2.5, tolerations=(Toleration("a"),), explain=True),
        demand=Demand(107, keys, constraints, (("zone", -1.5),), session=("acme", "s-1")),
        received_at=12.5,
        observes_response=True,
        model="m",
        max_tokens=9,
        gateway_id="g",
        new_session=True,
        renamed=((9, 12),),
        stages=(("parse", 0.25),),
    )


def to_core(*messages: FromFace) -> list[FromFace]:
    return core_end().feed(face_end().encode(messages))


def to_face(*messages: FromCore) -> list[FromCore]:
    return face_end().feed(core_end().encode(messages))


def test_a_request_arrives_as_it_was_read() -> None:
    sent = prepared()
    (message,) = to_core(Decide(7, sent))
    assert isinstance(message, Decide)
    got = message.prepared
    assert message.serial == 7
    assert (got.hints, got.route, got.stages) == (sent.hints, sent.route, sent.stages)
    assert (got.new_session, got.renamed, got.demand.session) == (True, ((9, 12),), ("acme", "s-1"))
    assert got.demand.constraints == sent.demand.constraints
    # Constraints are keys of dicts: whatever a process salts its hashes with, ours are made here.
    assert hash(got.demand.constraints) == hash(sent.demand.constraints)
    assert got.demand.prompt.lengths == sent.demand.prompt.lengths
    assert got.demand.preferred_taints == sent.demand.preferred_taints
    for size in (16, 64):
        assert got.demand.prompt.blocks(size) == sent.demand.prompt.blocks(size)
    assert got.demand.prompt.last_block(64) == sent.demand.prompt.last_block(64)


def test_in_a_block_size_that_the_face_did_not_know_nothing_is_cached() -> None:
    (message,) = to_core(Decide(7, prepared()))
    assert isinstance(message, Decide)
    assert message.prepared.demand.prompt.blocks(32) == ((), ())
    assert message.prepared.demand.prompt.last_block(32) is None


def test_a_prompt_that_could_only_be_estimated_stays_unknown() -> None:
    sent = Prepared(Route.COMPLETIONS, Hints(), Demand(50, PromptKeys.unknown()), 0.0, False)
    (message,) = to_core(Decide(0, sent))
    assert isinstance(message, Decide)
    assert message.prepared.demand.prompt.lengths == ()
    assert message.prepared.demand.prompt.blocks(16) == ()


def test_answers_arrive_as_they_were_given() -> None:
    facts = Facts("id", "premium", 3, 4, (("queue", 0.5),), "10.0.0.1:80")
    messages: list[FromCore] = [
        Answer(1, Placed("10.0.0.1:80,10.0.0.2:80", set_headers=(("a", "b"),), facts=facts), True),
        Answer(2, Placed(None), False),
        Refusal(3, Refused(429, "queue_full_requests", "full", retry_after=2.5, facts=facts)),
        Pool((16, 32), frozenset({"lora"})),
        Rewrites(ModelRewrites({"chat": Split(("a", "b"), (9, 10))}, Split(("c",), (1,)))),
        Rewrites(ModelRewrites()),
    ]
    assert to_face(*messages) == messages


def test_counts_and_ends_arrive_too() -> None:
    messages: list[FromFace] = [
        Counted({"extproc": {"streams": 3, "refused": {"deadline": 2}}}),
        Finished(1, True, Usage(5, None, 7)),
        Finished(2, False),
        Logged("id", True),
    ]
    assert to_core(*messages) == messages


@given(
    batches=st.lists(st.lists(st.integers(0, 2**63 - 1), max_size=4), max_size=6),
    cuts=st.lists(st.integers(1, 9), min_size=1),
)
def test_frames_come_in_whatever_pieces(batches: list[list[int]], cuts: list[int]) -> None:
    sender, receiver = face_end(), core_end()
    stream = b"".join(sender.encode([Leave(serial) for serial in batch]) for batch in batches)
    got: list[FromFace] = []
    while stream:
        size = cuts[len(stream) % len(cuts)]
        got += receiver.feed(stream[:size])
        stream = stream[size:]
    assert got == [Leave(serial) for batch in batches for serial in batch]


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    "noise",
    [
        framed(b"\xc1"),
        framed(b"\x91\x92\xa7unknown\x01"),
        framed(b"\x91\x92\xa1d\x01"),
        framed(b"\x91\x92\xa1l\xa1x"),
        framed(b"\x90\x90"),
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
    ],
    ids=["no msgpack", "unknown kind", "a field is missing", "a wrong type", "more than a list", "too long"],
)
def test_noise_is_an_error(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        core_end().feed(noise)


def test_keys_that_are_no_keys_are_an_error() -> None:
    frame = bytearray(face_end().encode([Decide(0, prepared((range(16),)))]))
    at = frame.index(b"\xc4\x08")
    odd = frame[:at] + b"\xc4\x07" + frame[at + 2 : at + 9] + frame[at + 10 :]
    with pytest.raises(ProtocolError):
        core_end().feed(framed(bytes(odd[4:])))
