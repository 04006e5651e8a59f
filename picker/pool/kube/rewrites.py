"""The InferenceModelRewrites of a pool, as rules."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError

from picker.policy.rewrites import ModelRewrites, RewriteRule
from picker.pool.kube.pod_table import KubeObject
from picker.pool.kube.watch import Change

_log = logging.getLogger(__name__)

GROUP = "llm-d.ai"

_RULES = TypeAdapter(tuple[RewriteRule, ...])


class RewriteSink:
    """Those that refer to the pool; of two rules for one model the older object's counts. An object that cannot be
    read is left out, and said so.
    """

    def __init__(self, pool: str, on_rewrites: Callable[[ModelRewrites], object]) -> None:
        self._pool = pool
        self._on_rewrites = on_rewrites
        self._objects: dict[str, KubeObject] = {}
        self._last = ModelRewrites()

    def replace(self, objects: list[KubeObject]) -> None:
        self._objects = {_identity(item)[1]: item for item in objects}
        self._publish()

    def apply(self, change: Change, item: KubeObject) -> None:
        if change is Change.DELETED:
            self._objects.pop(_identity(item)[1], None)
        else:
            self._objects[_identity(item)[1]] = item
        self._publish()

    def _publish(self) -> None:
        rewrites = ModelRewrites()
        for item in sorted(self._objects.values(), key=_identity):
            try:
                rewrites = rewrites.then(ModelRewrites.of(_rules(item, self._pool)))
            except (ValidationError, TypeError, AttributeError, KeyError, ValueError) as error:
                _log.error("InferenceModelRewrite %s is left out: %s", _identity(item)[1], _first_line(error))
        if rewrites != self._last:
            self._last = rewrites
            self._on_rewrites(rewrites)


def _identity(item: KubeObject) -> tuple[str, str]:
    """(when it was created, as RFC 3339 text, which sorts; its name)"""
    metadata = item.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    return str(metadata.get("creationTimestamp") or ""), str(metadata.get("name") or "")


def _rules(item: KubeObject, pool: str) -> tuple[RewriteRule, ...]:
    spec = item["spec"]
    if spec["poolRef"]["name"] != pool:
        return ()
    return _RULES.validate_python([_rule(rule) for rule in spec.get("rules") or ()])


def _rule(rule: dict[str, Any]) -> dict[str, Any]:
    models = [match["model"] for match in rule.get("matches") or () if match.get("model") is not None]
    kinds = {model.get("type", "Exact") for model in models} - {"Exact"}
    if kinds:
        raise ValueError(f"a model match of type {', '.join(sorted(map(str, kinds)))} is not known")
    targets = [
        {"model": target.get("modelRewrite"), "weight": target.get("weight")} for target in rule["targets"]
    ]
    return {"match": [model["value"] for model in models], "targets": targets}


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{type(error).__name__}: {error}"
