"""From the text of a policy file to a Policy, or to one error that says where and what."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic import ValidationError

from picker.policy.document import Document, read_document
from picker.policy.errors import KeyPath, PolicyError, quoted
from picker.policy.model import (
    AffinitySettings,
    Bucket,
    ClassSettings,
    CostWeights,
    DisaggregationSettings,
    Policy,
    PolicyClass,
    Profile,
    default_root,
)
from picker.policy.rewrites import ModelRewrites, RewriteRule, RewriteTarget
from picker.policy.rules import check_profile
from picker.policy.schema import (
    IGNORED_SECTIONS,
    PROFILE_KEYS,
    BucketSettings,
    PolicySettings,
    ProfileSettings,
)

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_BYTES = 1 << 20
"""What a ConfigMap can hold."""
MAX_CLASSES = 256


def load_policy(
    text: str, source: str = "policy", *, max_bytes: int = MAX_BYTES, max_classes: int = MAX_CLASSES
) -> Policy:
    """Read a policy file: YAML as Dynamo 1.6.1 reads it, and Picker's additional keys.

    `source` is named in errors. `max_classes` counts for each profile. Raises PolicyError and nothing else.
    """
    size = len(text.encode("utf-8", "replace"))
    if size > max_bytes:
        raise PolicyError(source, f"{size:,} bytes; at most {max_bytes:,} are allowed")
    document = read_document(text, source)
    settings = _validate(document)
    if all(getattr(settings, key) in (None, {}) for key in PolicySettings.model_fields):
        raise PolicyError(source, f"the policy is empty; give {', '.join(PROFILE_KEYS)}, or models")
    root = _root(document, settings, max_classes)
    models: dict[str, Profile] = {}
    for name, entry in (settings.models or {}).items():
        check_profile(document, ("models", name), entry, max_classes)
        models[name] = _profile(document, name, entry)
    rewrites = ModelRewrites.of(settings.model_rewrites or ())
    return Policy(root, MappingProxyType(models), source, rewrites, _warnings(document))


def _root(document: Document, settings: PolicySettings, max_classes: int) -> Profile:
    if all(getattr(settings, key) is None for key in PROFILE_KEYS):
        return default_root(settings.selection, settings.disaggregation)
    check_profile(document, (), settings, max_classes)
    return _profile(document, "", settings)


def _profile(document: Document, name: str, settings: ProfileSettings) -> Profile:
    path = ("models", name) if name else ()
    buckets = tuple(Bucket(entry.bucket, entry.min_tokens) for entry in settings.uncached_isl_buckets or ())
    classes: list[PolicyClass] = []
    for index, entry in enumerate(settings.policy_classes or ()):
        values = {key.name: getattr(entry, key.name) for key in fields(entry)}
        given = document.keys((*path, "policy_classes", index, "selection"))
        values["selection"] = _merged(settings.selection, entry.selection, given)
        classes.append(PolicyClass(profile=name, **values))
    return Profile(
        name,
        tuple(classes),
        settings.default_policy_family,
        buckets,
        settings.selection,
        settings.disaggregation,
    )


def _merged(profile: CostWeights | None, own: CostWeights | None, given: list[str]) -> CostWeights | None:
    """The weights that the class gives, over those of its profile."""
    if profile is None or own is None:
        return own or profile
    return replace(profile, **{key: getattr(own, key) for key in given})


def _warnings(document: Document) -> tuple[str, ...]:
    data = document.data
    present = [key for key in IGNORED_SECTIONS if isinstance(data, dict) and key in data]
    return tuple(
        f"{key} (line {document.lines[(key,)]}): this section is Dynamo's; Picker accepts and ignores it"
        for key in present
    )


def _validate(document: Document) -> PolicySettings:
    data = document.data
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise document.error((), "a policy must be a mapping of keys to values")
    try:
        return PolicySettings.model_validate(data)
    except ValidationError as error:
        raise _first_error(document, error.errors(include_url=False, include_input=False)) from None


def _first_error(document: Document, errors: list[ErrorDetails]) -> PolicyError:
    """The error that stands first in the file. A key is only called missing when no other is misspelt, and a list is
    only called empty when it is: the items that are wrong do not count for its length.
    """
    found = [
        (error["type"] == "missing", document.error(_key_path(error), _problem(error)))
        for error in errors
        if error["type"] != "too_short" or not any(_inside(other, error) for other in errors)
    ]
    return min(found, key=lambda each: (each[0], each[1].line or 0))[1]


def _inside(error: ErrorDetails, group: ErrorDetails) -> bool:
    depth = len(group["loc"])
    return len(error["loc"]) > depth and error["loc"][:depth] == group["loc"]


def _key_path(error: ErrorDetails) -> KeyPath:
    # Pydantic marks an error in a mapping's key, rather than its value, with a last part of its own.
    path = error["loc"]
    return path[:-1] if error["type"] == "string_too_short" else path


_PROBLEMS = {
    "missing": "missing; it has no default",
    "greater_than": "must be greater than zero",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text; put a number or a word like true in quotes",
    "finite_number": "must be finite",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "dataclass_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "string_pattern_mismatch": "must match [A-Za-z0-9_.-]+",
    "string_too_short": "a model name must not be empty",
}


def _problem(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return _unknown_key(error["loc"])
    if kind == "greater_than_equal":
        return f"must be at least {context['ge']:g}"
    if kind == "less_than_equal":
        return f"must be at most {context['le']}"
    if kind == "enum":
        return f"must be one of {context['expected'].replace(chr(39), '')}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "too_short":
        return "must not be empty"
    return _PROBLEMS.get(kind) or error["msg"]


_GROUPS: dict[str, frozenset[str]] = {
    "affinity": frozenset(key.name for key in fields(AffinitySettings)),
    "disaggregation": frozenset(key.name for key in fields(DisaggregationSettings)),
    "model_rewrites": frozenset(key.name for key in fields(RewriteRule)),
    "policy_classes": frozenset(key.name for key in fields(ClassSettings)),
    "selection": frozenset(key.name for key in fields(CostWeights)),
    "targets": frozenset(key.name for key in fields(RewriteTarget)),
    "uncached_isl_buckets": frozenset(BucketSettings.model_fields),
}


def _unknown_key(path: KeyPath) -> str:
    valid = sorted(_keys_at(path[:-1]))
    nearest = difflib.get_close_matches(str(path[-1]), valid, n=1, cutoff=0.5)
    hint = f'did you mean "{nearest[0]}"?' if nearest else f"valid here: {', '.join(valid)}"
    return f"unknown key {quoted(str(path[-1]))}; {hint}"


def _keys_at(path: KeyPath) -> Iterable[str]:
    """The keys that may stand in the mapping at `path` of a policy file."""
    inside_profile = path[2:] if path[:1] == ("models",) else path
    group = next((part for part in reversed(inside_profile) if isinstance(part, str)), None)
    if group is not None:
        return _GROUPS[group]
    return ProfileSettings.model_fields if path else PolicySettings.model_fields
