"""Routing hints: whose word counts, what it may say, and what is stripped."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.policy.constraints import TaintEffect, Toleration
from picker.requests import BadRequest, Hints, HintTrust, Trust, is_control_header, parse_hints

ACCEPT_ALL = HintTrust(**dict.fromkeys(HintTrust.model_fields, Trust.ACCEPT))
IGNORE_ALL = HintTrust(**dict.fromkeys(HintTrust.model_fields, Trust.IGNORE))

HEADERS = [
    ("x-picker-policy-class", "premium"),
    ("x-picker-priority", "3"),
    ("x-picker-strict-priority", "2"),
    ("x-llm-d-inference-objective", "urgent"),
    ("x-picker-endpoint", "10.0.0.1:8000"),
    ("x-picker-rank", "1"),
    ("x-picker-tolerations", "gpu=h100:NoSchedule, *"),
    ("x-picker-required-taints", "zone=a"),
    ("x-picker-preferred-taints", "spot=-0.5, zone=b=2"),
    ("x-picker-allowed-endpoints", "a, b"),
    ("x-picker-explain", "true"),
    ("x-picker-session-finish", "1"),
    ("x-picker-ttl-ms", "1500"),
    ("x-picker-ttft-ms", "250"),
    ("x-picker-tenant", "acme"),
    ("x-request-id", "r-1"),
    ("session-id", "s-1"),
]

EXPECTED = Hints(
    policy_class="premium",
    priority=3.0,
    strict_priority=2,
    objective="urgent",
    pin="10.0.0.1:8000",
    rank=1,
    tolerations=(Toleration("gpu", "h100", TaintEffect.NO_SCHEDULE), Toleration()),
    required_taints=("zone=a",),
    preferred_taints=(("spot", -0.5), ("zone=b", 2.0)),
    allow_list=("a", "b"),
    explain=True,
    ttl=1.5,
    ttft_ms=250.0,
    fairness_id="acme",
    session="s-1",
    session_finish=True,
    consumed_headers=tuple(name for name, _ in HEADERS if name not in ("x-request-id", "session-id")),
)


def test_headers_count_where_they_are_accepted() -> None:
    assert parse_hints(HEADERS, {}, ACCEPT_ALL) == EXPECTED


def test_by_default_no_header_promotes_or_steers() -> None:
    hints = parse_hints(HEADERS, {})
    assert hints == Hints(
        session="s-1",
        consumed_headers=EXPECTED.consumed_headers,
    )


def test_what_is_ignored_has_no_effect_but_is_stripped() -> None:
    metadata = {"picker": {"policy_class": "premium", "priority": "not read at all"}}
    assert parse_hints(HEADERS, metadata, IGNORE_ALL) == Hints(consumed_headers=EXPECTED.consumed_headers)


def test_metadata_counts_and_goes_before_headers() -> None:
    metadata = {
        "picker": {
            "policy_class": "batch",
            "priority": 7.0,
            "strict_priority": -1.0,
            "rank": 3.0,
            "tolerations": ["a:NoExecute"],
            "preferred_taints": {"spot": 1.0},
            "allow_list": [],
            "explain": False,
            "ttl": 100.0,
        }
    }
    hints = parse_hints(HEADERS, metadata, ACCEPT_ALL)
    assert (hints.policy_class, hints.priority, hints.strict_priority, hints.rank) == ("batch", 7.0, -1, 3)
    assert hints.tolerations == (Toleration("a", None, TaintEffect.NO_EXECUTE),)
    assert hints.preferred_taints == (("spot", 1.0),)
    assert hints.allow_list == ()
    assert not hints.explain
    assert hints.ttl == 0.1
    assert hints.pin == "10.0.0.1:8000"
    only_metadata = parse_hints([], metadata)
    assert only_metadata.policy_class == "batch"


def test_the_first_of_repeated_headers_counts() -> None:
    headers = [("x-picker-tenant", "one"), ("x-picker-tenant", "two")]
    hints = parse_hints(headers, {}, ACCEPT_ALL)
    assert (hints.fairness_id, hints.consumed_headers) == ("one", ("x-picker-tenant",))


def test_dynamos_header_names_the_class_too() -> None:
    headers = [("x-dynamo-meta-policy-class", " latency ")]
    assert parse_hints(headers, {}, ACCEPT_ALL).policy_class == "latency"
    assert parse_hints(headers, {}).policy_class is None


def test_an_empty_header_says_nothing() -> None:
    headers = [
        ("x-picker-priority", " "),
        ("x-picker-tenant", ""),
        ("x-gateway-inference-fairness-id", "old"),
    ]
    hints = parse_hints(headers, {}, ACCEPT_ALL)
    assert (hints.priority, hints.fairness_id) == (None, "old")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-picker-priority", "high"),
        ("x-picker-priority", "nan"),
        ("x-picker-priority", "inf"),
        ("x-picker-priority", "1" * 100),
        ("x-picker-strict-priority", "1.5"),
        ("x-picker-rank", "-1"),
        ("x-picker-rank", "65536"),
        ("x-data-parallel-rank", "one"),
        ("x-picker-endpoint", "a b"),
        ("x-picker-endpoint", "a" * 300),
        ("x-picker-endpoint", "a\x00b"),
        ("x-picker-policy-class", "caf\u00e9"),
        ("x-picker-tolerations", "=x"),
        ("x-picker-tolerations", ",".join("a" * 300)),
        ("x-picker-required-taints", "a b"),
        ("x-picker-preferred-taints", "spot"),
        ("x-picker-preferred-taints", "spot=much"),
        ("x-picker-ttl-ms", "-1"),
        ("x-slo-ttft-ms", "soon"),
    ],
)
def test_a_malformed_hint_that_counts_is_refused(name: str, value: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_hints([(name, value)], {}, ACCEPT_ALL)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, name, "invalid_hint")
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 300


def test_a_malformed_hint_that_does_not_count_is_just_stripped() -> None:
    hints = parse_hints([("x-picker-priority", "high"), ("x-picker-rank", "-1")], {})
    assert hints == Hints(consumed_headers=("x-picker-priority", "x-picker-rank"))


def test_absurd_numbers_are_clamped() -> None:
    headers = [
        ("x-llm-d-slo-ttft-ms", "9223372036855"),
        ("x-picker-ttl-ms", "1e300"),
        ("x-picker-priority", "-1e300"),
        ("x-picker-strict-priority", "1e9"),
        ("x-picker-preferred-taints", "spot=1e9"),
    ]
    hints = parse_hints(headers, {}, ACCEPT_ALL)
    assert (hints.ttft_ms, hints.ttl, hints.priority) == (86_400_000.0, 86_400.0, -1e6)
    assert (hints.strict_priority, hints.preferred_taints) == (1_000_000, (("spot", 100.0),))


def test_names_of_clients_are_bounded_and_printable() -> None:
    long, strange = "t" * 10_000, "a\nb\x1b[31m"
    for text in (long, strange):
        hints = parse_hints([("x-picker-tenant", text), ("x-session-id", text)], {}, ACCEPT_ALL)
        assert hints.fairness_id is not None
        assert hints.fairness_id.isprintable()
        assert len(hints.fairness_id) < 64
        assert hints.fairness_id == hints.session
    one, other = (parse_hints([("x-picker-tenant", each)], {}, ACCEPT_ALL) for each in (long, long + "t"))
    assert one != other


@pytest.mark.parametrize(
    "name",
    [
        "x-picker-anything",
        "x-dynamo-meta-policy-class",
        "x-data-parallel-rank",
        "x-gateway-destination-endpoint",
        "x-gateway-destination-endpoint-subset",
        "x-prefiller-host-port",
        "x-gateway-inference-fairness-id",
        "x-slo-ttft-ms",
    ],
)
def test_control_headers_are_always_stripped(name: str) -> None:
    assert is_control_header(name)
    assert parse_hints([("accept", "*/*"), (name, "x" * 1000)], {}, IGNORE_ALL).consumed_headers == (name,)


@pytest.mark.parametrize(
    "name", ["x-request-id", "session-id", "x-session-affinity", "authorization", "x-pickers"]
)
def test_other_headers_are_not(name: str) -> None:
    assert not is_control_header(name)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from([name for name, _ in HEADERS])
_HINTS = st.sampled_from(sorted(HintTrust.model_fields))


@given(
    headers=st.lists(st.tuples(_NAMES, st.text(max_size=30)), max_size=5),
    metadata=st.dictionaries(_HINTS, _VALUES, max_size=4),
)
def test_any_hints_are_read_or_refused(headers: list[tuple[str, str]], metadata: dict[str, Any]) -> None:
    refused: BadRequest | None = None
    try:
        hints = parse_hints(headers, {"picker": metadata}, ACCEPT_ALL)
    except BadRequest as error:
        refused = error
    if refused is None:
        assert set(hints.consumed_headers) <= {name for name, _ in headers}
    else:
        assert refused.message.isprintable()


@pytest.mark.parametrize(
    "name",
    ["x-claude-code-session-id", "x-session-affinity", "x-session-id", "session-id", "session_id"],
)
def test_the_headers_of_known_agents_say_the_session_and_go_on_to_the_engine(name: str) -> None:
    hints = parse_hints([(name, "run-7")], {})
    assert (hints.session, hints.fairness_id, hints.consumed_headers) == ("run-7", None, ())


def test_a_session_is_a_tenant_only_on_a_word_that_counts() -> None:
    """Or a client with a new session for each request would have as many turns as it likes."""
    said = [("x-session-id", "run-7")]
    assert parse_hints(said, {}).fairness_id is None
    assert parse_hints(said, {}, HintTrust(fairness_id=Trust.ACCEPT)).fairness_id == "session run-7"
    hints = parse_hints([], {"picker": {"session": "run-7"}})
    assert (hints.session, hints.fairness_id) == ("run-7", "session run-7")


def test_no_client_is_another_tenant_unless_clients_are_trusted() -> None:
    claimed = [("x-picker-tenant", "victim"), ("x-llm-d-inference-fairness-id", "victim")]
    assert parse_hints(claimed, {}).fairness_id is None
    assert parse_hints(claimed, {"picker": {"fairness_id": "honest"}}).fairness_id == "honest"
    trusting = HintTrust(fairness_id=Trust.ACCEPT)
    assert parse_hints(claimed, {}, trusting).fairness_id == "victim"
    assert parse_hints(claimed, {"picker": {"fairness_id": "honest"}}, trusting).fairness_id == "honest"
