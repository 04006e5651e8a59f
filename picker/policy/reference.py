"""The reference of every key of a policy file, as Markdown, from the same schema that validates the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from picker.policy.schema import policy_json_schema

_SECTIONS = (
    ("The file", "PolicySettings"),
    ("An entry of `uncached_isl_buckets`", "BucketSettings"),
    ("An entry of `policy_classes`", "ClassSettings"),
    ("`affinity`", "AffinitySettings"),
    ("`selection`", "CostWeights"),
    ("`disaggregation`", "DisaggregationSettings"),
    ("An entry of `models`", "ProfileSettings"),
    ("An entry of `model_rewrites`", "RewriteRule"),
    ("An entry of its `targets`", "RewriteTarget"),
)
_NAMES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}

Schema = dict[str, Any]


def policy_reference() -> str:
    """One table for each kind of mapping in the file: key, type, default, meaning."""
    schema = policy_json_schema()
    groups: dict[str, Schema] = {**schema["$defs"], schema["title"]: schema}
    lines: list[str] = []
    for title, name in _SECTIONS:
        lines += [f"### {title}", "", *_table(groups[name], groups), ""]
    return "\n".join(lines)


def _table(group: Schema, groups: dict[str, Schema]) -> Iterator[str]:
    yield "| Key | Type | Default | Meaning |"
    yield "|---|---|---|---|"
    required = group.get("required", ())
    for key, entry in group["properties"].items():
        default = "required" if key in required else _default(entry)
        yield f"| `{key}` | {_type(entry, groups)} | {default} | {entry['description']} |"


def _default(entry: Schema) -> str:
    value = entry.get("default")
    if isinstance(value, dict):
        return "see below"
    if value is None or value == []:
        return "none"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _type(entry: Schema, groups: dict[str, Schema]) -> str:
    if "anyOf" in entry:
        return _type(next(choice for choice in entry["anyOf"] if choice.get("type") != "null"), groups)
    if "$ref" in entry:
        referred = groups[entry["$ref"].rpartition("/")[2]]
        return " \\| ".join(f"`{name}`" for name in referred["enum"]) if "enum" in referred else "mapping"
    if entry.get("type") == "array":
        return f"list of {_items(entry['items'], groups)}"
    if entry.get("type") == "object":
        return "mapping"
    return f"{_NAMES[entry['type']]}{_bounds(entry)}" if "type" in entry else "anything"


def _items(entry: Schema, groups: dict[str, Schema]) -> str:
    return _type(entry, groups).replace("mapping", "mappings").replace("number", "numbers")


def _bounds(entry: Schema) -> str:
    low, above, high = entry.get("minimum"), entry.get("exclusiveMinimum"), entry.get("maximum")
    if low is not None and high == 1:
        return f", {low} to {high}"
    if low is not None:
        return f", at least {low}"
    return f", above {above}" if above is not None else ""
