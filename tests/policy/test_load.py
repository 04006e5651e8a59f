"""What a policy file may hold, what it may not, and how well the errors point at it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.policy import CostWeights, PolicyError, QueuePolicy, load_policy
from picker.policy.constraints import LabelSelector, Taint, TaintEffect
from tests.policy.policies import load, profile, sample, text_of, with_class


def refused(data: dict[str, Any] | str) -> PolicyError:
    text = data if isinstance(data, str) else text_of(data)
    with pytest.raises(PolicyError) as caught:
        load_policy(text, "policy.yaml")
    assert str(caught.value).startswith("policy.yaml")
    return caught.value


def test_disaggregation_is_of_a_profile_and_needs_no_classes() -> None:
    own = {"disaggregation": {"min_uncached_tokens": 64, "role_label": "role", "prefill_roles": ["p"]}}
    policy = load({**own, "models": {"llama": profile()}})
    rule = policy.profile("other").disaggregation
    assert rule is not None
    assert (rule.min_uncached_tokens, rule.role_label, rule.prefill_roles) == (64, "role", ("p",))
    assert rule.decode_roles == ("decode", "both", "prefill-decode")
    assert policy.profile("llama").disaggregation is None, "a model's profile replaces the root whole"
    assert [entry.name for entry in policy.root.classes] == ["default"]
    of_model = load({"models": {"llama": profile() | own}})
    assert of_model.profile("llama").disaggregation == rule
    assert of_model.profile("other").disaggregation is None


def test_every_key_reaches_its_class() -> None:
    policy = load(
        with_class(
            queue_policy="cache_affinity",
            prefill_busy_threshold=0,
            prefill_busy_threshold_frac=16.0,
            max_running_per_worker=32,
            kv_usage_busy_threshold=0.9,
            request_queue_limit_per_worker=0,
            raw_isl_token_queue_limit_per_worker=2**64 - 1,
            cached_token_queue_limit_per_worker=5,
            max_queue_wait=30,
            endpoint_share_bound=7,
            wspt_aging=2.5,
            high_priority_first=True,
            strict_priority=3,
            fair_tenants=True,
            output_charge=0.5,
            tolerations=["gpu=a100:NoSchedule", "*"],
            allowed_endpoints={"zone": "a"},
            affinity={"edges": [1, 2], "min_blocks": 0, "max_wait": 1, "window": 8, "leader_wait": 0.1},
            selection={"uncached": 2},
        )
    )
    entry = policy.root.classes[0]
    assert entry.key == ("", "std-small")
    assert entry.queue_policy is QueuePolicy.CACHE_AFFINITY
    assert (entry.prefill_busy_threshold, entry.prefill_busy_threshold_frac) == (0, 16.0)
    assert (entry.max_running_per_worker, entry.kv_usage_busy_threshold) == (32, 0.9)
    assert entry.request_queue_limit_per_worker == 0
    assert entry.raw_isl_token_queue_limit_per_worker == 2**64 - 1
    assert entry.cached_token_queue_limit_per_worker == 5
    assert (entry.max_queue_wait, entry.wspt_aging, entry.output_charge) == (30.0, 2.5, 0.5)
    assert entry.endpoint_share_bound == 7
    assert entry.high_priority_first
    assert entry.fair_tenants
    assert entry.strict_priority == 3
    assert entry.tolerations[0].tolerates(Taint("gpu", "a100", TaintEffect.NO_SCHEDULE))
    assert entry.tolerations[1].tolerates(Taint("any", "", TaintEffect.NO_EXECUTE))
    assert entry.allowed_endpoints == LabelSelector.of({"zone": "a"})
    assert (entry.affinity.edges, entry.affinity.window) == ((1, 2), 8)
    assert entry.selection == CostWeights(uncached=2.0)


def test_optional_keys_have_defaults() -> None:
    entry = load(profile()).root.classes[0]
    assert entry.queue_policy is QueuePolicy.FCFS
    assert entry.max_queue_wait is None
    assert entry.affinity.edges == (4, 16, 64, 256)
    assert entry.tolerations == ()
    assert entry.selection is None


def test_a_key_without_a_value_counts_as_absent() -> None:
    policy = load_policy(text_of(with_class(prefill_busy_threshold=None)) + "models:\nselection:\n")
    assert policy.root.classes[0].prefill_busy_threshold is None
    assert not policy.models


def test_class_weights_override_the_profiles_one_by_one() -> None:
    data = with_class(selection={"temperature": 0, "disk_tier": 0.5})
    policy = load({**data, "selection": {"temperature": 1, "uncached": 3}})
    first, second = policy.root.classes[:2]
    # 0 is the default of temperature, and still overrides because it is given.
    assert first.selection == CostWeights(uncached=3.0, temperature=0.0, disk_tier=0.5)
    assert second.selection == CostWeights(uncached=3.0, temperature=1.0)


def test_weights_of_the_root_alone_apply_to_the_default_class_and_not_to_models() -> None:
    policy = load({"selection": {"temperature": 1}, "models": {"m": profile()}})
    (default,) = policy.root.classes
    assert (default.name, default.selection) == ("default", CostWeights(temperature=1.0))
    assert all(entry.selection is None for entry in policy.models["m"].classes)


def test_dynamos_other_sections_are_accepted_and_reported() -> None:
    sections = {
        "router": {"use_kv_events": True},
        "worker_selection": {"aggregated": "mine", "instances": [{"name": "mine", "type": "x"}]},
        "request_classifier": {"type": "thunderagent", "parameters": {}},
    }
    policy = load({**sections, **profile()})
    assert [warning.split(" ")[0] for warning in policy.warnings] == list(sections)
    assert "line 1" in policy.warnings[0]
    assert load(profile()).warnings == ()


def test_only_ignored_sections_give_the_default_class() -> None:
    policy = load({"router": {"use_kv_events": True}})
    assert [entry.name for entry in policy.classes()] == ["default"]


REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown top key": (
        profile(polcy_classes=[]),
        'unknown key "polcy_classes"; did you mean "policy_classes"?',
    ),
    "unknown disaggregation key": (
        {"disaggregation": {"prefil_roles": ["p"]}},
        'unknown key "prefil_roles"; did you mean "prefill_roles"?',
    ),
    "a role that is a number": (
        {"disaggregation": {"decode_roles": [5]}},
        "must be text; put a number or a word like true in quotes",
    ),
    "no role": ({"disaggregation": {"decode_roles": []}}, "must not be empty"),
    "nothing uncached": (
        {"disaggregation": {"min_uncached_tokens": 0}},
        "must be greater than zero",
    ),
    "unknown class key": (with_class(quantumm=1), 'unknown key "quantumm"; did you mean "quantum"?'),
    "unknown bucket key": (
        profile(uncached_isl_buckets=[{"min_tokens": 0, "bucket": "small", "max": 1}]),
        'unknown key "max"; valid here: bucket, min_tokens',
    ),
    "unknown model key": (profile(models={"m": profile(default_family="x")}), "default_policy_family"),
    "unknown affinity key": (with_class(affinity={"edge": [1]}), 'did you mean "edges"?'),
    "unknown selection key": (with_class(selection={"temprature": 1}), 'did you mean "temperature"?'),
    "quantum zero": (with_class(quantum=0), "must be greater than zero"),
    "quantum missing": (with_class(quantum=...), "policy_classes[0].quantum: missing"),
    "quantum negative": (with_class(quantum=-5), "must be greater than zero"),
    "quantum fractional": (with_class(quantum=512.0), "must be a whole number"),
    "quantum as text": (with_class(quantum="512"), "must be a whole number"),
    "quantum true": (with_class(quantum=True), "must be a whole number"),
    "quantum too large": (with_class(quantum=2**64), "must be at most"),
    "threshold negative": (with_class(prefill_busy_threshold=-1), "must be at least 0"),
    "frac negative": (with_class(prefill_busy_threshold_frac=-0.5), "must be at least 0"),
    "frac infinite": (with_class(prefill_busy_threshold_frac=float("inf")), "must be finite"),
    "frac not a number": (with_class(prefill_busy_threshold_frac=float("nan")), "must be finite"),
    "limit negative": (with_class(request_queue_limit_per_worker=-1), "must be at least 0"),
    "lcfs": (with_class(queue_policy="lcfs"), "must be one of fcfs, wspt, priority, cache_affinity or edf"),
    "name missing": (with_class(name=...), "policy_classes[0].name: missing"),
    "name not an identifier": (with_class(name="a/b"), "must match [A-Za-z0-9_.-]+"),
    "name empty": (with_class(name=""), "must match [A-Za-z0-9_.-]+"),
    "name with a line end": (with_class(name="a\n"), "must match [A-Za-z0-9_.-]+"),
    "name a number": (with_class(name=7), "must be text"),
    "family not an identifier": (with_class(policy_family="a b"), "must match [A-Za-z0-9_.-]+"),
    "family without bucket": (
        with_class(cache_bucket=...),
        "must specify both policy_family and cache_bucket",
    ),
    "bucket without family": (
        with_class(policy_family=...),
        "must specify both policy_family and cache_bucket",
    ),
    "unknown bucket": (with_class(cache_bucket="huge"), 'unknown bucket "huge"; there are small, large'),
    "duplicate class name": (with_class(2, name="std-small"), 'duplicate class name "std-small"'),
    "duplicate pair": (
        with_class(2, policy_family="standard", cache_bucket="small"),
        'duplicate pair of family "standard" and bucket "small"; class "std-small" has it already',
    ),
    "missing cell": (
        with_class(1, policy_family=..., cache_bucket=...),
        'family "standard" has no class for bucket "large"',
    ),
    "default family not configured": (
        profile(default_policy_family="premium"),
        'no class has policy_family "premium"',
    ),
    "default family not an identifier": (profile(default_policy_family="a b"), "must match"),
    "explicit class named like a family": (with_class(2, name="standard"), "collides with a policy family"),
    "buckets empty": (profile(uncached_isl_buckets=[]), "uncached_isl_buckets: must not be empty"),
    "buckets not from 0": (
        profile(uncached_isl_buckets=[{"min_tokens": 1, "bucket": "small"}]),
        "the first bucket must start at 0",
    ),
    "buckets not increasing": (
        profile(
            uncached_isl_buckets=[{"min_tokens": 0, "bucket": "small"}, {"min_tokens": 0, "bucket": "large"}]
        ),
        "must be strictly increasing",
    ),
    "bucket named twice": (
        profile(
            uncached_isl_buckets=[{"min_tokens": 0, "bucket": "small"}, {"min_tokens": 9, "bucket": "small"}]
        ),
        'duplicate bucket name "small"',
    ),
    "bucket without name": (profile(uncached_isl_buckets=[{"min_tokens": 0}]), "bucket: missing"),
    "bucket without start": (profile(uncached_isl_buckets=[{"bucket": "small"}]), "min_tokens: missing"),
    "bucket name not an identifier": (
        profile(uncached_isl_buckets=[{"min_tokens": 0, "bucket": "a b"}]),
        "must match",
    ),
    "classes empty": (profile(policy_classes=[]), "policy_classes: must not be empty"),
    "classes not a list": (profile(policy_classes={"a": 1}), "must be a list"),
    "class not a mapping": (profile(policy_classes=[1]), "must be a mapping"),
    "root without family": (profile(default_policy_family=None), "missing default_policy_family"),
    "root without buckets": (profile(uncached_isl_buckets=None), "missing uncached_isl_buckets"),
    "root without classes": (profile(policy_classes=None), "missing policy_classes"),
    "model without buckets": (profile(models={"m": profile(uncached_isl_buckets=None)}), "models.m: "),
    "model without anything": (profile(models={"m": {"selection": {}}}), "models.m: "),
    "model without name": (profile(models={"": profile()}), "a model name must not be empty"),
    "models not a mapping": (profile(models=[1]), "must be a mapping"),
    "empty mapping": ({}, "the policy is empty"),
    "all keys empty": ({"policy_classes": None, "models": {}}, "the policy is empty"),
    "max_queue_wait zero": (with_class(max_queue_wait=0), "must be greater than zero"),
    "max_queue_wait with a unit": (with_class(max_queue_wait="30s"), "must be a number"),
    "wspt_aging zero": (with_class(wspt_aging=0), "must be greater than zero"),
    "max_running zero": (with_class(max_running_per_worker=0), "must be greater than zero"),
    "kv usage over 1": (with_class(kv_usage_busy_threshold=1.5), "must be at most 1"),
    "switch not a boolean": (with_class(fair_tenants=1), "must be true or false"),
    "toleration effect": (with_class(tolerations=["a:Sometimes"]), "effect must be one of NoSchedule"),
    "toleration shape": (with_class(tolerations=["a b"]), "must read key[=value][:effect]"),
    "toleration not text": (with_class(tolerations=[{"key": "a"}]), "must read key[=value][:effect]"),
    "selector value not text": (with_class(allowed_endpoints={"gpu": 1}), "put numbers in quotes"),
    "selector not a mapping": (with_class(allowed_endpoints=["a"]), "must map labels to strings"),
    "edges not increasing": (with_class(affinity={"edges": [4, 4]}), "must be strictly increasing"),
    "edges empty": (with_class(affinity={"edges": []}), "must not be empty"),
    "tier worth more than the device": (with_class(selection={"host_tier": 1.1}), "must be at most 1"),
    "weight infinite": (with_class(selection={"uncached": float("inf")}), "must be finite"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejected(case: str) -> None:
    data, problem = REJECTED[case]
    assert problem in str(refused(data))


@pytest.mark.parametrize(
    ("old", "new", "line", "key"),
    [
        ("quantum: 128", "qantum: 128", 16, "qantum"),
        ("quantum: 128", "quantum: none", 16, "quantum"),
        ("cache_bucket: all\n    quantum: 128", "cache_bucket: most\n    quantum: 128", 15, "cache_bucket"),
        ("min_tokens: 0", "min_tokens: 3", 4, "min_tokens"),
        ("default_policy_family: regular", "default_policy_family: basic", 2, "default_policy_family"),
        ("name: regular", "name: premium", 13, "name"),
        ("    quantum: 128\n", "", 13, "quantum"),
        ("    quantum: 128\n", "    quantum: 128\n    quantum: 129\n", 17, "quantum"),
        ("policy_family: regular\n    ", "", 13, "policy_classes"),
    ],
)
def test_errors_give_line_and_key(old: str, new: str, line: int, key: str) -> None:
    text = sample("premium.yaml")
    assert text.count(old) == 1
    error = refused(text.replace(old, new))
    assert (error.line, error.key) == (line, key)
    assert str(error).startswith(f"policy.yaml:{line}: ")


def test_errors_in_a_model_profile_name_the_model() -> None:
    error = refused(profile(models={"org/m-1.5": with_class(quantum=0)}))
    assert 'models["org/m-1.5"].policy_classes[0].quantum' in str(error)


def test_a_misspelt_key_is_reported_rather_than_the_one_it_leaves_missing() -> None:
    error = refused(with_class(quantum=..., quantun=512))
    assert error.key == "quantun"


def test_of_several_mistakes_the_first_in_the_file_is_reported() -> None:
    data = with_class(1, quantum=0)
    data["policy_classes"][0]["queue_policy"] = "lifo"
    assert refused(data).key == "queue_policy"


def test_keys_in_errors_are_escaped_and_cut() -> None:
    error = refused(with_class(**{"evil\n\x1b[31m" + "x" * 500: 1}))
    assert "\n" not in str(error)
    assert "\x1b" not in str(error)
    assert len(str(error)) < 1500


def test_too_many_classes_are_refused_for_each_profile() -> None:
    crowd = profile()
    crowd["policy_classes"] += [{"name": f"extra-{number}", "quantum": 1} for number in range(7)]
    text = text_of(crowd)
    assert len(load_policy(text, max_classes=10).root.classes) == 10
    with pytest.raises(PolicyError, match="10 classes; at most 9 are allowed") as caught:
        load_policy(text, max_classes=9)
    assert caught.value.key == "policy_classes"


def test_the_default_bound_is_256_classes() -> None:
    crowd = profile()
    crowd["policy_classes"] += [{"name": f"extra-{number}", "quantum": 1} for number in range(254)]
    assert "at most 256" in str(refused(crowd))


def test_too_long_a_file_is_refused_by_its_bytes() -> None:
    text = sample("premium.yaml") + "# \u00e9\n"
    size = len(text.encode())
    assert load_policy(text, max_bytes=size)
    with pytest.raises(PolicyError, match="bytes"):
        load_policy(text, max_bytes=size - 1)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_loads_or_raises_policy_error(text: str) -> None:
    try:
        load_policy(text)
    except PolicyError as error:
        assert str(error)  # noqa: PT017  (both outcomes are right)


_WORDS = st.sampled_from(
    [
        "default_policy_family", "uncached_isl_buckets", "policy_classes", "models", "selection", "name",
        "quantum", "standard", "affinity", "edges", "tolerations", "allowed_endpoints", "queue_policy",
    ]
)  # fmt: skip
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | _WORDS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(_WORDS | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(_WORDS, _VALUES, max_size=5), st.booleans(), st.data())
def test_any_shape_loads_or_raises_policy_error(
    junk: dict[str, Any], spoil_a_class: bool, data: st.DataObject
) -> None:
    shape = with_class(data.draw(st.integers(0, 2)), **junk) if spoil_a_class else profile(**junk)
    try:
        load(shape)
    except PolicyError as error:
        assert str(error).startswith("policy.yaml")  # noqa: PT017


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_spoilt_file_loads_or_raises_policy_error(data: st.DataObject) -> None:
    text = sample("dynamo_sample.yaml")
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    patch = data.draw(st.text(alphabet=st.sampled_from("&*!%{}[]:-? \n'\"|>#,0x.~abc"), max_size=12))
    try:
        load_policy(text[:start] + patch + text[end:])
    except PolicyError as error:
        assert str(error).startswith("policy")  # noqa: PT017
