"""Which class a request falls into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.policy import Bucket, Policy, PolicyClass, Profile, load_policy
from tests.policy.policies import load, profile, sample

HUGE = 2**63


@pytest.fixture(scope="module")
def dynamo() -> Policy:
    return load_policy(sample("dynamo_sample.yaml"))


@pytest.mark.parametrize(
    ("hint", "uncached", "expected"),
    [
        (None, 0, "cached"),
        ("", 0, "cached"),
        (None, -1, "cached"),
        (None, 3071, "cached"),
        (None, 3072, "uncached"),
        (None, HUGE, "uncached"),
        ("standard", 3072, "uncached"),
        ("latency", 0, "latency_cached"),
        ("latency", 3071, "latency_cached"),
        ("latency", 3072, "latency_uncached"),
        (" latency ", 3072, "latency_uncached"),
        ("Latency", 0, "cached"),
        ("unknown", 0, "cached"),
        ("unknown", 5000, "uncached"),
        # The name of a class inside a family is no way around its bucket.
        ("cached", HUGE, "uncached"),
        ("latency_cached", 0, "cached"),
        ("custom_priority", 0, "custom_priority"),
        ("custom_priority", HUGE, "custom_priority"),
    ],
)
def test_documented_sample_root(dynamo: Policy, hint: str | None, uncached: int, expected: str) -> None:
    assert dynamo.profile("any/other-model").resolve(hint, uncached).name == expected


@pytest.mark.parametrize(
    ("hint", "uncached", "expected"),
    [
        (None, 0, "latency_cached"),
        (None, 4095, "latency_cached"),
        (None, 4096, "latency_uncached"),
        ("batch", 4095, "batch_cached"),
        ("batch", 4096, "batch_uncached"),
        ("other/unknown", 4096, "latency_uncached"),
        # Neither the root's families nor its explicit class exist here.
        ("standard", 0, "latency_cached"),
        ("custom_priority", 0, "latency_cached"),
    ],
)
def test_documented_sample_model(dynamo: Policy, hint: str | None, uncached: int, expected: str) -> None:
    found = dynamo.profile("example/large-model").resolve(hint, uncached)
    assert (found.name, found.profile) == (expected, "example/large-model")


def test_documented_sample_settings(dynamo: Policy) -> None:
    figures = {
        entry.label: (
            str(entry.queue_policy),
            entry.quantum,
            entry.request_queue_limit_per_worker,
            entry.raw_isl_token_queue_limit_per_worker,
            entry.cached_token_queue_limit_per_worker,
        )
        for entry in dynamo.classes()
    }
    assert figures == {
        "cached": ("wspt", 2048, 1024, None, 2097152),
        "uncached": ("fcfs", 512, 512, 1048576, None),
        "latency_cached": ("wspt", 4096, 256, None, None),
        "latency_uncached": ("wspt", 1024, 128, 524288, None),
        "custom_priority": ("wspt", 4096, 128, None, None),
        "example/large-model/latency_cached": ("wspt", 4096, 256, None, None),
        "example/large-model/latency_uncached": ("wspt", 1024, 128, None, None),
        "example/large-model/batch_cached": ("fcfs", 2048, None, None, 1048576),
        "example/large-model/batch_uncached": ("fcfs", 1024, None, 524288, None),
    }
    assert all(entry.prefill_busy_threshold_frac == 16.0 for entry in dynamo.classes())


def test_a_model_profile_replaces_the_root_whole_and_others_use_the_root() -> None:
    own = profile(default_policy_family="own", policy_classes=[])
    own["uncached_isl_buckets"] = [{"min_tokens": 0, "bucket": "all"}]
    own["policy_classes"] = [{"name": "only", "policy_family": "own", "cache_bucket": "all", "quantum": 1}]
    policy = load({**profile(), "models": {"m": own}})
    assert policy.profile("m").resolve("direct", 0).label == "m/only"
    assert policy.profile("M").resolve("direct", 0).label == "direct"
    assert policy.profile(None).resolve(None, 0).label == "std-small"


def test_without_a_root_other_models_fall_to_the_default_class() -> None:
    policy = load({"models": {"m": profile()}})
    default = policy.profile("other").resolve("standard", 5000)
    assert (default.name, default.quantum, default.can_queue) == ("default", 1, False)
    assert policy.profile("m").resolve(None, 5000).name == "std-large"


def test_the_built_in_policy_has_one_class_that_never_waits() -> None:
    policy = Policy.default()
    root = policy.profile("any")
    assert not root.needs_uncached("anything")
    assert root.resolve("anything", 10**9).label == "default"
    assert [entry.can_queue for entry in policy.classes()] == [False]


@pytest.mark.parametrize(
    ("hint", "needed"),
    [
        (None, True),
        ("", True),
        ("standard", True),
        ("std-small", True),
        ("no-such", True),
        ("direct", False),
        (" direct ", False),
    ],
)
def test_only_explicit_classes_spare_the_cache_lookup(hint: str | None, needed: bool) -> None:
    assert load(profile()).root.needs_uncached(hint) is needed


@st.composite
def matrices(draw: st.DrawFn) -> Profile:
    starts = [0, *sorted(draw(st.sets(st.integers(1, 10_000), max_size=8)))]
    buckets = tuple(Bucket(f"b{number}", start) for number, start in enumerate(starts))
    families = draw(st.lists(st.sampled_from("fghij"), min_size=1, max_size=4, unique=True))
    cells = [
        PolicyClass(name=f"{family}-{bucket.name}", quantum=1, policy_family=family, cache_bucket=bucket.name)
        for family in families
        for bucket in buckets
    ]
    explicit = [PolicyClass(name=f"x{number}", quantum=1) for number in range(draw(st.integers(0, 2)))]
    classes = draw(st.permutations([*cells, *explicit]))
    return Profile("", tuple(classes), draw(st.sampled_from(families)), buckets)


def resolve_slowly(profile: Profile, hint: str | None, uncached: int) -> str:
    """The rules of resolution, read one after the other."""
    for entry in profile.classes:
        if entry.name == hint and entry.policy_family is None:
            return entry.name
    families = [entry.policy_family for entry in profile.classes if entry.policy_family]
    family = hint if hint in families else profile.default_family
    bucket = ""
    for candidate in profile.buckets:
        if candidate.min_tokens <= uncached:
            bucket = candidate.name
    (found,) = (e for e in profile.classes if (e.policy_family, e.cache_bucket) == (family, bucket))
    return found.name


@given(matrices(), st.data())
def test_resolution_agrees_with_the_rules_read_slowly(matrix: Profile, data: st.DataObject) -> None:
    names = [entry.name for entry in matrix.classes]
    hint = data.draw(st.none() | st.sampled_from([*names, *"fghij", "nobody"]))
    edges = [bucket.min_tokens + step for bucket in matrix.buckets for step in (-1, 0, 1)]
    uncached = data.draw(st.sampled_from([edge for edge in edges if edge >= 0]) | st.integers(0, 20_000))
    assert matrix.resolve(hint, uncached).name == resolve_slowly(matrix, hint, uncached)
    assert matrix.needs_uncached(hint) is (hint not in {"x0", "x1"} & set(names))
