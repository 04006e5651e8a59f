"""Policy files for the tests of this room."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from picker.policy import Policy, load_policy

HERE = Path(__file__).parent


def sample(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def profile(**changes: Any) -> dict[str, Any]:
    """A small valid profile: one family, two buckets, one explicit class."""
    return {
        "default_policy_family": "standard",
        "uncached_isl_buckets": [
            {"min_tokens": 0, "bucket": "small"},
            {"min_tokens": 1000, "bucket": "large"},
        ],
        "policy_classes": [
            {"name": "std-small", "policy_family": "standard", "cache_bucket": "small", "quantum": 512},
            {"name": "std-large", "policy_family": "standard", "cache_bucket": "large", "quantum": 128},
            {"name": "direct", "quantum": 64},
        ],
        **changes,
    }


def with_class(index: int = 0, **changes: Any) -> dict[str, Any]:
    """The small profile with one class changed; a value of `...` takes the key out."""
    result = profile()
    entry = {**result["policy_classes"][index], **changes}
    result["policy_classes"][index] = {key: value for key, value in entry.items() if value is not ...}
    return result


def text_of(data: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(data), sort_keys=False)


def load(data: Mapping[str, Any]) -> Policy:
    return load_policy(text_of(data), "policy.yaml")
