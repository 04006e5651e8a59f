"""The rules between the keys of a profile, the same as Dynamo 1.6.1 enforces at start-up.

Together they make resolution unambiguous: a full matrix of families and buckets, each pair once, and no
explicit class that could be taken for a family.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from picker.policy.document import Document
from picker.policy.errors import KeyPath, PolicyError
from picker.policy.model import ClassSettings
from picker.policy.schema import PROFILE_KEYS, BucketSettings, ProfileSettings


def check_profile(document: Document, path: KeyPath, settings: ProfileSettings, max_classes: int) -> None:
    """Raise PolicyError for the first rule that the profile at `path` breaks."""
    missing = [key for key in PROFILE_KEYS if getattr(settings, key) is None]
    if missing:
        raise document.error(
            path, f"a profile needs all of {', '.join(PROFILE_KEYS)}; missing {', '.join(missing)}"
        )
    check = _ProfileCheck(document, path, settings, max_classes)
    check.buckets()
    check.classes()
    check.families()


class _ProfileCheck:
    def __init__(
        self, document: Document, path: KeyPath, settings: ProfileSettings, max_classes: int
    ) -> None:
        self._document = document
        self._path = tuple(path)
        self._buckets: tuple[BucketSettings, ...] = settings.uncached_isl_buckets or ()
        self._classes: tuple[ClassSettings, ...] = settings.policy_classes or ()
        self._default_family = settings.default_policy_family
        self._max_classes = max_classes

    def buckets(self) -> None:
        if not self._buckets:
            raise self._error(("uncached_isl_buckets",), "must not be empty")
        if self._buckets[0].min_tokens != 0:
            raise self._error(("uncached_isl_buckets", 0, "min_tokens"), "the first bucket must start at 0")
        for index in range(1, len(self._buckets)):
            before, here = self._buckets[index - 1].min_tokens, self._buckets[index].min_tokens
            if here <= before:
                problem = f"must be strictly increasing; {here} follows {before}"
                raise self._error(("uncached_isl_buckets", index, "min_tokens"), problem)
        repeated = _first_repeated(bucket.bucket for bucket in self._buckets)
        if repeated is not None:
            name = self._buckets[repeated].bucket
            raise self._error(("uncached_isl_buckets", repeated, "bucket"), f'duplicate bucket name "{name}"')

    def classes(self) -> None:
        if not self._classes:
            raise self._error(("policy_classes",), "must not be empty")
        if len(self._classes) > self._max_classes:
            problem = f"{len(self._classes)} classes; at most {self._max_classes} are allowed in a profile"
            raise self._error(("policy_classes",), problem)
        repeated = _first_repeated(entry.name for entry in self._classes)
        if repeated is not None:
            name = self._classes[repeated].name
            raise self._error(("policy_classes", repeated, "name"), f'duplicate class name "{name}"')
        for index, entry in enumerate(self._classes):
            self._binding(index, entry)
        self._matrix_pairs()

    def families(self) -> None:
        families = {entry.policy_family: None for entry in self._classes if entry.policy_family}
        if self._default_family not in families:
            problem = f'no class has policy_family "{self._default_family}"'
            raise self._error(("default_policy_family",), problem)
        for index, entry in enumerate(self._classes):
            if entry.policy_family is None and entry.name in families:
                problem = f'the explicit class "{entry.name}" collides with a policy family of that name'
                raise self._error(("policy_classes", index, "name"), problem)
        self._full_matrix(families)

    def _binding(self, index: int, entry: ClassSettings) -> None:
        if (entry.policy_family is None) != (entry.cache_bucket is None):
            problem = (
                f'class "{entry.name}" must specify both policy_family and cache_bucket,'
                " or neither for an explicit class"
            )
            raise self._error(("policy_classes", index), problem)
        known = [bucket.bucket for bucket in self._buckets]
        if entry.cache_bucket is not None and entry.cache_bucket not in known:
            problem = f'unknown bucket "{entry.cache_bucket}"; there are {", ".join(known)}'
            raise self._error(("policy_classes", index, "cache_bucket"), problem)

    def _matrix_pairs(self) -> None:
        bound = [index for index, entry in enumerate(self._classes) if entry.policy_family is not None]
        pairs = [(self._classes[index].policy_family, self._classes[index].cache_bucket) for index in bound]
        repeated = _first_repeated(pairs)
        if repeated is not None:
            family, bucket = pairs[repeated]
            first = self._classes[bound[pairs.index((family, bucket))]].name
            problem = (
                f'duplicate pair of family "{family}" and bucket "{bucket}"; class "{first}" has it already'
            )
            raise self._error(("policy_classes", bound[repeated]), problem)

    def _full_matrix(self, families: Iterable[str]) -> None:
        cells = {(entry.policy_family, entry.cache_bucket) for entry in self._classes}
        for family in families:
            for bucket in self._buckets:
                if (family, bucket.bucket) not in cells:
                    problem = f'family "{family}" has no class for bucket "{bucket.bucket}"'
                    raise self._error(("policy_classes",), problem)

    def _error(self, path: KeyPath, problem: str) -> PolicyError:
        return self._document.error((*self._path, *path), problem)


def _first_repeated(values: Iterable[Hashable]) -> int | None:
    seen: set[Hashable] = set()
    for index, value in enumerate(values):
        if value in seen:
            return index
        seen.add(value)
    return None
