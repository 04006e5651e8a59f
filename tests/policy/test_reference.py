"""The written reference says what the code reads."""

from __future__ import annotations

import re
from pathlib import Path

import picker.policy
from picker.policy import load_policy, policy_json_schema
from picker.policy.explain import explain_policy
from picker.policy.reference import policy_reference

README = Path(picker.policy.__file__).with_name("README.md")


def test_the_example_in_the_readme_is_a_policy_without_warnings_and_with_the_shares_it_claims() -> None:
    example, *more = re.findall(r"```yaml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    for text in more:
        load_policy(example + text)
    page = explain_policy(load_policy(example), 4)
    assert "NO WARNINGS" in page
    assert re.findall(r"\d+\.\d %", page) == ["39.0 %", "39.0 %", "9.8 %", "9.8 %", "2.4 %"]


def test_every_key_is_in_the_reference_with_a_meaning() -> None:
    schema = policy_json_schema()
    rows = set(re.findall(r"^\| `(\w+)` \| .+ \| .+ \| .+ \|$", policy_reference(), re.MULTILINE))
    keys = {key for group in (schema, *schema["$defs"].values()) for key in group.get("properties", ())}
    assert rows == keys
    assert all(
        entry["description"]
        for group in schema["$defs"].values()
        for entry in group.get("properties", {}).values()
    )


def test_types_and_defaults_are_told() -> None:
    reference = policy_reference()
    assert "| `quantum` | whole number, above 0 | required |" in reference
    assert "| `kv_usage_busy_threshold` | number, 0 to 1 | none |" in reference
    assert (
        "| `queue_policy` | `fcfs` \\| `wspt` \\| `priority` \\| `cache_affinity` \\| `edf` | `fcfs` |"
        in reference
    )
    assert "| `edges` | list of whole numbers, above 0 | `[4, 16, 64, 256]` |" in reference


def test_the_schema_refuses_unknown_keys() -> None:
    schema = policy_json_schema()
    groups = [schema, *(group for group in schema["$defs"].values() if "properties" in group)]
    assert all(group["additionalProperties"] is False for group in groups)
