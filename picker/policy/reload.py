"""Following a policy file as it changes, and saying what a change means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path

from picker.policy.errors import PolicyError
from picker.policy.load import MAX_BYTES, MAX_CLASSES, load_policy
from picker.policy.model import AffinitySettings, ClassSettings, CostWeights, Policy, PolicyClass, Profile


@dataclass(slots=True)
class PolicyFileStats:
    """Counts since the start: versions taken, and versions (or failed reads) refused."""

    loaded: int = 0
    refused: int = 0


class PolicyFile:
    """A policy file, compared by content: a symlink swapped under it is seen, a touched file is not.

    Each version is reported once, good or bad. `error` is what is wrong with the present version, None when
    nothing is: by it a caller can tell that the running policy is not the one in the file.
    """

    def __init__(
        self, path: str | Path, *, max_bytes: int = MAX_BYTES, max_classes: int = MAX_CLASSES
    ) -> None:
        self.path = Path(path)
        self.error: PolicyError | None = None
        self.stats = PolicyFileStats()
        self._max_bytes = max_bytes
        self._max_classes = max_classes
        self._seen: str | None = None

    def load_if_changed(self) -> Policy | None:
        """The policy if the file is not as seen last; None if it is.

        Raises PolicyError the first time that a bad version, or a failure to read, is seen; then None until
        that changes, so that polling does not repeat the report.
        """
        try:
            with self.path.open("rb") as file:
                # One byte more than allowed is enough to know that it is too long.
                content = file.read(self._max_bytes + 1)
        except OSError as error:
            problem = PolicyError(str(self.path), f"cannot be read: {error.strerror or error}")
            if self._seen_before(str(problem)):
                return None
            raise self._refused(problem) from error
        if self._seen_before(sha256(content).hexdigest()):
            return None
        return self._load(content)

    def _seen_before(self, version: str) -> bool:
        seen, self._seen = self._seen, version
        return seen == version

    def _load(self, content: bytes) -> Policy:
        source = str(self.path)
        try:
            policy = load_policy(
                content.decode(), source, max_bytes=self._max_bytes, max_classes=self._max_classes
            )
        except UnicodeDecodeError as error:
            raise self._refused(PolicyError(source, f"not UTF-8 text: {error.reason}")) from error
        except PolicyError as error:
            raise self._refused(error) from None
        self.error = None
        self.stats.loaded += 1
        return policy

    def _refused(self, error: PolicyError) -> PolicyError:
        self.error = error
        self.stats.refused += 1
        return error


@dataclass(frozen=True, slots=True)
class PolicyDiff:
    """What differs between two policies: class labels, and changes in words. False when nothing does."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def __str__(self) -> str:
        """One change a line, marked as diff marks them: + added, - removed, ~ changed."""
        lines = [f"+ {label}" for label in self.added]
        lines += [f"- {label}" for label in self.removed]
        lines += [f"~ {change}" for change in self.changed]
        return "\n".join(lines) or "no change"


def diff_policies(old: Policy, new: Policy) -> PolicyDiff:
    """Classes are the same when profile and name are. Buckets and default families belong to the profiles."""
    before = {entry.label: entry for entry in old.classes()}
    after = {entry.label: entry for entry in new.classes()}
    changed = [
        f"{label}: {change}"
        for label in after
        if label in before
        for change in _class_changes(before[label], after[label])
    ]
    return PolicyDiff(
        added=tuple(label for label in after if label not in before),
        removed=tuple(label for label in before if label not in after),
        changed=(*_profiles_changes(old, new), *changed, *_rewrite_changes(old, new)),
    )


def _rewrite_changes(old: Policy, new: Policy) -> Iterator[str]:
    if old.rewrites != new.rewrites:
        yield "model_rewrites changed"


def _profiles_changes(old: Policy, new: Policy) -> Iterator[str]:
    before = {profile.name: profile for profile in old.profiles}
    for profile in new.profiles:
        if profile.name in before:
            where = f"profile {profile.name}" if profile.name else "root profile"
            for change in _profile_changes(before[profile.name], profile):
                yield f"{where}: {change}"


def _profile_changes(old: Profile, new: Profile) -> Iterator[str]:
    if old.default_family != new.default_family:
        yield _change("default_policy_family", old.default_family, new.default_family)
    if old.buckets != new.buckets:
        yield _change("uncached_isl_buckets", _buckets(old), _buckets(new))
    if old.disaggregation != new.disaggregation:
        yield "disaggregation changed"


def _buckets(profile: Profile) -> str:
    return ", ".join(f"{bucket.name} from {bucket.min_tokens}" for bucket in profile.buckets) or "none"


def _class_changes(old: PolicyClass, new: PolicyClass) -> Iterator[str]:
    for key in fields(ClassSettings):
        before, after = getattr(old, key.name), getattr(new, key.name)
        if before == after:
            continue
        if key.name == "affinity":
            yield from _weight_changes("affinity", before, after)
        elif key.name == "selection":
            yield from _weight_changes("selection", before or CostWeights(), after or CostWeights())
        else:
            yield _change(key.name, before, after)


def _weight_changes(
    group: str, old: AffinitySettings | CostWeights, new: AffinitySettings | CostWeights
) -> Iterator[str]:
    for key in fields(old):
        before, after = getattr(old, key.name), getattr(new, key.name)
        if before != after:
            yield _change(f"{group}.{key.name}", before, after)


def _change(key: str, old: object, new: object) -> str:
    return f"{key} {_shown(old)} -> {_shown(new)}"


def _shown(value: object) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(str(part) for part in value)
    return f"{value:.12g}" if isinstance(value, float) else str(value)
