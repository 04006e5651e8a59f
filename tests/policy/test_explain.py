"""What an operator is told of a policy before it runs."""

from __future__ import annotations

from typing import Any

import pytest

from picker.policy import Policy, load_policy
from picker.policy.advice import policy_warnings
from picker.policy.explain import explain_policy
from tests.policy.policies import load, profile, sample, with_class

EXPLAINED = """\
premium: 4 endpoints, max_num_batched_tokens unknown

ROOT PROFILE: every model without a profile of its own

  Which class
    uncached tokens   family premium   family regular
    0 and more        premium          regular
    A request that names no family, or an unknown one: family regular

  Shares of uncached tokens while every class has requests waiting
    class      share   tokens/round   order
    premium   80.0 %            512   fcfs
    regular   20.0 %            128   fcfs
    One ring round is 640 tokens. What an idle class leaves goes to the others by their quanta.

  Who waits where
    premium, regular: held while the endpoints all have more than 1,536 prefill tokens booked; at
      most 60 s, then 429

  Queue limits at 4 endpoints: new requests get 429 while this much waits
    class     requests   prompt tokens   cached tokens
    premium      4,096               -               -
    regular      4,096               -               -

NO WARNINGS
"""


def test_the_whole_page() -> None:
    assert explain_policy(load_policy(sample("premium.yaml"), "premium"), 4) == EXPLAINED


def lines_of(policy: Policy, endpoints: int = 4, batch: int | None = None) -> list[str]:
    return [" ".join(line.split()) for line in explain_policy(policy, endpoints, batch).splitlines()]


def test_the_documented_sample() -> None:
    policy = load_policy(sample("dynamo_sample.yaml"), "sample")
    lines = lines_of(policy, endpoints=2, batch=8192)
    assert "Where models share endpoints, their classes share one ring: 19,968 tokens a round." in lines
    assert "0 to 3,071 cached latency_cached" in lines
    assert "3,072 and more uncached latency_uncached" in lines
    assert "By its own name, whatever the tokens: custom_priority" in lines
    assert "latency_cached 34.8 % 4,096 wspt" in lines
    assert "MODEL example/large-model" in lines
    assert "latency_cached 50.0 % 4,096 wspt" in lines
    # Limits are absolute: value x endpoints.
    assert "uncached 1,024 2,097,152 -" in lines
    assert "uncached: above 2,048 tokens a prompt the tokens bind first, below it the requests" in lines
    assert any("131,072 prefill tokens booked (16 x 8,192)" in line for line in lines)
    assert all(len(line) <= 100 for line in explain_policy(policy, 2, 8192).splitlines())


def test_thresholds_and_constraints_are_told() -> None:
    policy = load(
        with_class(
            prefill_busy_threshold=5000,
            prefill_busy_threshold_frac=0.5,
            max_running_per_worker=1,
            kv_usage_busy_threshold=0.9,
            allowed_endpoints={"gpu": "h100"},
            tolerations=["spot:NoSchedule"],
        )
    )
    text = " ".join(" ".join(lines_of(policy)).split())
    assert (
        "std-small: held while the endpoints with gpu=h100 (tolerating spot:NoSchedule) all have more than 5,000"
        " prefill tokens booked or more than 0.5 x max_num_batched_tokens booked or at least 1 request running or"
        " more than 90 % of the KV cache in use; without bound"
    ) in text


def test_a_class_that_never_waits_has_no_share() -> None:
    data = with_class(prefill_busy_threshold=100)
    data["policy_classes"][1].update(prefill_busy_threshold=100, request_queue_limit_per_worker=0)
    lines = lines_of(load(data))
    assert "std-small 100.0 % 512 fcfs" in lines
    assert "Never waiting, so outside the ring: std-large, direct" in lines
    assert "direct: never held; sent at once to the endpoints, whatever the load" in lines
    assert (
        "std-large: never held; 429 while the endpoints all have more than 100 prefill tokens booked" in lines
    )


def test_the_built_in_policy() -> None:
    lines = lines_of(Policy.default())
    assert "Every request: default" in lines
    assert "Shares: none, for no class ever has requests waiting" in lines
    assert "No queue limit binds" in lines


QUIET = {"prefill_busy_threshold": 1000, "request_queue_limit_per_worker": 10, "max_queue_wait": 10}


def quiet_profile(**of_first_class: Any) -> dict[str, Any]:
    """A profile without a warning but for what is changed in its first class."""
    data = profile()
    for entry in data["policy_classes"]:
        entry.update(QUIET)
    data["policy_classes"][0].update(of_first_class)
    return data


def warned(
    data: dict[str, Any], endpoints: int = 4, route: float | None = 60, batch: int | None = None
) -> list[str]:
    return policy_warnings(load(data), endpoints, route, max_num_batched_tokens=batch)


def test_a_sound_policy_has_no_warnings() -> None:
    assert warned(quiet_profile()) == []
    assert warned(quiet_profile(queue_policy="wspt", wspt_aging=5)) == []
    assert warned(quiet_profile(queue_policy="edf")) == []
    assert warned(quiet_profile(queue_policy="priority", high_priority_first=True)) == []
    assert warned(quiet_profile(queue_policy="cache_affinity", affinity={"window": 5})) == []
    assert warned(quiet_profile(), route=None) == []
    assert warned(quiet_profile(max_queue_wait=600), route=0) == []


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({"prefill_busy_threshold": None}, "can never queue, for it has no busy threshold"),
        ({"prefill_busy_threshold": None}, "request_queue_limit_per_worker, max_queue_wait: without effect"),
        ({"request_queue_limit_per_worker": 0}, "request_queue_limit_per_worker is 0: nothing ever waits"),
        ({"cached_token_queue_limit_per_worker": 0}, "cached_token_queue_limit_per_worker is 0"),
        ({"request_queue_limit_per_worker": None}, "no queue limit: the queue grows"),
        ({"queue_policy": "wspt"}, "small requests can overtake a large one for ever"),
        ({"queue_policy": "wspt", "wspt_aging": 10}, "wspt_aging 10 s is not below max_queue_wait 10 s"),
        ({"queue_policy": "edf", "max_queue_wait": None}, "edf without max_queue_wait"),
        ({"max_queue_wait": None}, "waits until the route's timeout of 60 s answers 504"),
        ({"max_queue_wait": 60}, "max_queue_wait 60 s is not below the route's timeout of 60 s"),
        ({"wspt_aging": 3}, "wspt_aging has no effect with queue_policy fcfs"),
        ({"high_priority_first": True}, "high_priority_first has no effect with queue_policy fcfs"),
        ({"affinity": {"window": 5}}, "affinity has no effect with queue_policy fcfs"),
        ({"strict_priority": 1}, "orders requests inside the class only"),
    ],
)
def test_warnings_of_one_class(change: dict[str, Any], warning: str) -> None:
    found = [text for text in warned(quiet_profile(**change)) if warning in text]
    assert len(found) == 1
    assert found[0].startswith("std-small: ")


def test_thresholds_that_differ_bend_the_shares() -> None:
    (warning,) = warned(quiet_profile(prefill_busy_threshold=2000))
    assert warning.startswith("root profile: the busy thresholds of its classes differ")


def test_a_fraction_of_an_unknown_budget() -> None:
    both = quiet_profile()
    for entry in both["policy_classes"]:
        entry["prefill_busy_threshold_frac"] = 2.0
    assert [text.partition(": ")[2] for text in warned(both)] == [
        "prefill_busy_threshold_frac has no effect on endpoints whose max_num_batched_tokens is not known:"
        " there only the other thresholds count"
    ]
    assert warned(both, batch=8192) == []


def test_the_settings_bound_the_wait_where_a_class_does_not() -> None:
    policy = load(quiet_profile(max_queue_wait=None, queue_policy="edf"))
    text = " ".join(explain_policy(policy, 4, default_wait=60.0).split())
    assert "at most 60 s (queue.max_wait), then 429" in text
    assert "without bound" not in text
    assert policy_warnings(policy, 4, None, default_wait=60.0) == []
    assert "without bound" in " ".join(explain_policy(policy, 4, default_wait=None).split())


def test_a_client_without_route_timeout_waits_until_it_gives_up() -> None:
    assert "the client gives up" in warned(quiet_profile(max_queue_wait=None), route=None)[0]


def test_a_token_limit_below_one_request_and_turns_that_come_in_bursts() -> None:
    data = quiet_profile()
    data["uncached_isl_buckets"][1]["min_tokens"] = 30_000
    data["policy_classes"][1]["raw_isl_token_queue_limit_per_worker"] = 7_500
    limit, bursts = warned(data)
    assert "7,500 x 4 endpoints is no more than the smallest request of 30,000 tokens" in limit
    # 30,000 / 128 rounded up, and the other two classes' 576 tokens in each of these rounds.
    assert "takes 235 rounds of quantum 128" in bursts
    assert "up to 135,360 tokens" in bursts


def test_a_model_does_not_inherit_the_roots_weights() -> None:
    data = {**quiet_profile(), "selection": {"temperature": 1}, "models": {"m": quiet_profile()}}
    assert warned(data) == ["profile m: has no selection of its own, and does not inherit the root's"]


def test_no_endpoints_and_sections_that_are_ignored() -> None:
    router, endpoints = warned({"router": {}, **quiet_profile()}, endpoints=0)
    assert router.startswith("router (line 1)")
    assert endpoints.startswith("no endpoints")


def test_what_many_classes_share_is_said_once() -> None:
    data = quiet_profile()
    data["policy_classes"] += [{"name": f"x{number}", "quantum": 1, **QUIET} for number in range(10)]
    for entry in data["policy_classes"]:
        entry["strict_priority"] = 1
    (warning,) = warned(data)
    assert warning.startswith("std-small, std-large, direct, x0, x1, x2 and 7 more: strict_priority 1")
