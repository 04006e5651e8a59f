"""What a policy is: profiles of policy classes, and the class that a request belongs to.

A profile is either one flat list of classes, or (as written in a file) a full matrix of policy family x cache
bucket and explicit classes. A client's hint names a family or an explicit class; the bucket follows from the
uncached tokens, so no client can choose it. Everything here is immutable; a reload makes a new Policy.

The fields of the models are the keys of the YAML file, and their descriptions its reference.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Self

from pydantic import ConfigDict, Field, PlainValidator, StringConstraints, WithJsonSchema, field_validator
from pydantic.dataclasses import dataclass as validated

from picker.policy.constraints import LabelSelector, Toleration
from picker.policy.rewrites import ModelRewrites

# As large as a count in Dynamo's files can be; sums and products of them do not overflow in Python.
MAX_COUNT = 2**64 - 1

Identifier = Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Za-z0-9_.-]+$")]
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Field(strict=True, gt=0, le=MAX_COUNT)]
Weight = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Switch = Annotated[bool, Field(strict=True)]
Text = Annotated[str, StringConstraints(strict=True, min_length=1)]


class QueuePolicy(StrEnum):
    """The order in which the waiting requests of one class are served."""

    FCFS = "fcfs"
    WSPT = "wspt"
    PRIORITY = "priority"
    CACHE_AFFINITY = "cache_affinity"
    EDF = "edf"


def _toleration(value: object) -> Toleration:
    if isinstance(value, Toleration):
        return value
    if not isinstance(value, str):
        raise ValueError("a toleration must read key[=value][:effect] or *")
    return Toleration.parse(value)


def _selector(value: object) -> LabelSelector:
    if isinstance(value, LabelSelector):
        return value
    if not isinstance(value, dict) or not all(isinstance(label, str) for label in value.values()):
        raise ValueError("must map labels to strings; put numbers in quotes")
    return LabelSelector.of(value)


TolerationText = Annotated[
    Toleration,
    PlainValidator(_toleration),
    WithJsonSchema({"type": "string", "description": "key[=value][:effect], or * for every taint"}),
]
SelectorLabels = Annotated[
    LabelSelector,
    PlainValidator(_selector),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
]


# Validated dataclasses, not pydantic models: with slots, reading an attribute costs a third.
_STRICT_KEYS = ConfigDict(extra="forbid")


@validated(frozen=True, slots=True, kw_only=True, config=_STRICT_KEYS)
class CostWeights:
    """How the cost of an endpoint is weighed, in tokens of prefill. The cheapest endpoint wins."""

    uncached: Weight = Field(
        default=1.0,
        description="Weight of the request's own prompt tokens that the endpoint has not cached.",
    )
    crowding: Weight = Field(
        default=4.0,
        description="What is added to `uncached` for each request that waits for its prefill on an endpoint, on"
        " average: computing again what another endpoint has cached delays all who come after.",
    )
    cold_turn: Weight = Field(
        default=1.0,
        description="What a prompt that nobody has cached (in an idle pool: more than a tenth of it) costs on top, for"
        " each token that nobody has, on the endpoint that took such a one last; less on those that have rested longer,"
        " nothing on the one that has rested longest.",
    )
    prefill_load: Weight = Field(
        default=1.0, description="Weight of the prefill tokens already booked on the endpoint."
    )
    running_tokens: Weight = Field(
        default=64.0, description="What one running request on the endpoint costs, in tokens."
    )
    decode_interference: Weight = Field(
        default=0.0,
        description="What one running request costs, in inter-token times of the endpoint, each worth the tokens of"
        " prefill that take as long. It replaces `running_tokens` once the inter-token time and the prefill rate are"
        " learned. 0: off.",
    )
    kv_usage_tokens: Weight = Field(
        default=0.0, description="What a full KV cache costs, in tokens; in proportion below that."
    )
    prefer_no_schedule_tokens: Weight = Field(
        default=8192.0, description="What one PreferNoSchedule taint that is not tolerated costs, in tokens."
    )
    session_tokens: Weight = Field(
        default=4096.0,
        description="What leaving the endpoint of the request's session costs, in tokens (`sessions.affinity`).",
    )
    over_share: Weight = Field(
        default=16.0,
        description="What each token beyond a class's `endpoint_share_bound` costs that class there, in tokens.",
    )
    temperature: Weight = Field(
        default=0.0, description="0 takes the cheapest; higher spreads the choice over near ones (softmax)."
    )
    host_tier: Fraction = Field(
        default=0.75, description="What a block cached in host memory is worth, against 1 on the device."
    )
    disk_tier: Fraction = Field(
        default=0.25, description="What a block cached on disk or in remote storage is worth."
    )


@validated(frozen=True, slots=True, kw_only=True, config=_STRICT_KEYS)
class AffinitySettings:
    """The `cache_affinity` order: requests whose prefix is cached now go first, within bounds."""

    edges: tuple[PositiveCount, ...] = Field(
        default=(4, 16, 64, 256),
        min_length=1,
        description="Cached blocks at which a request moves up one bucket; inside a bucket arrival decides.",
    )
    min_blocks: Count = Field(default=2, description="Fewer cached blocks than this count as none.")
    max_wait: Seconds = Field(
        default=5.0, description="Seconds; a request that waited longer goes first, in order of arrival."
    )
    window: PositiveCount = Field(
        default=128,
        description="How many waiting requests, the first to come, are compared; the others come after them.",
    )
    leader_wait: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = Field(
        default=0.0,
        description="Seconds that requests with the same cold prefix wait for the first of them. 0: off.",
    )

    @field_validator("edges")
    @classmethod
    def _increasing(cls, edges: tuple[int, ...]) -> tuple[int, ...]:
        if any(low >= high for low, high in pairwise(edges)):
            raise ValueError("must be strictly increasing")
        return edges


_DEFAULT_AFFINITY = AffinitySettings()


@validated(frozen=True, slots=True, kw_only=True, config=_STRICT_KEYS)
class DisaggregationSettings:
    """Prefill and decode on two endpoints, as llm-d's sidecar beside the decoding engine does it: it is sent the
    request, and the address of who prefills in `x-prefiller-host-port`.
    """

    min_uncached_tokens: PositiveCount = Field(
        default=512,
        description="A prompt with fewer uncached tokens on the endpoint that decodes is prefilled there as well.",
    )
    role_label: Text = Field(
        default="llm-d.ai/role", description="The label by which endpoints say what they are there for."
    )
    prefill_roles: tuple[Text, ...] = Field(
        default=("prefill",), min_length=1, description="Its values of endpoints that prefill for others."
    )
    decode_roles: tuple[Text, ...] = Field(
        default=("decode", "both", "prefill-decode"),
        min_length=1,
        description="Its values of endpoints that requests are sent to; those without the label are too.",
    )


@validated(frozen=True, slots=True, kw_only=True, config=_STRICT_KEYS)
class ClassSettings:
    """One entry of `policy_classes`."""

    name: Identifier = Field(description="Unique in its profile. Letters, digits, `_`, `.` and `-`.")
    policy_family: Identifier | None = Field(
        default=None,
        description="The family that this class serves for one bucket. With `cache_bucket`, or neither:"
        " then the class is explicit and is chosen by its own name.",
    )
    cache_bucket: Identifier | None = Field(
        default=None, description="The bucket of `uncached_isl_buckets` that this class serves."
    )
    queue_policy: QueuePolicy = Field(
        default=QueuePolicy.FCFS,
        description="Order inside the class: `fcfs` by arrival, `wspt` small uncached work first,"
        " `priority` by number, `cache_affinity` cached prefixes first, `edf` earliest deadline first.",
    )
    quantum: PositiveCount = Field(
        description="Uncached tokens that the class may send in each ring round. The class's share under"
        " contention is its quantum over the sum of the quanta in its profile."
    )
    prefill_busy_threshold: Count | None = Field(
        default=None,
        description="An endpoint is busy for this class above this many booked prefill tokens. Requests"
        " wait when all their endpoints are busy. With no threshold of any kind the class never queues.",
    )
    prefill_busy_threshold_frac: Weight | None = Field(
        default=None,
        description="The same as a multiple of the endpoint's max_num_batched_tokens; may exceed 1."
        " With both forms set an endpoint is busy as soon as either says so.",
    )
    max_running_per_worker: PositiveCount | None = Field(
        default=None,
        description="An endpoint is busy for this class while it runs this many requests of any class.",
    )
    kv_usage_busy_threshold: Fraction | None = Field(
        default=None,
        description="An endpoint is busy for this class above this share (0 to 1) of its KV cache in use.",
    )
    endpoint_share_bound: Count | None = Field(
        default=None,
        description="Prefill tokens that the class may have booked on one endpoint beyond its share of what all"
        " classes have booked there (by the quanta of those with requests there). Past it the endpoint costs the"
        " class more (`selection.over_share`), so that a hot prefix spreads. Without it, no bound.",
    )
    request_queue_limit_per_worker: Count | None = Field(
        default=None,
        description="Waiting requests, times the endpoints in the pool. At the limit new ones get 429."
        " 0: never wait.",
    )
    raw_isl_token_queue_limit_per_worker: Count | None = Field(
        default=None, description="The same for the prompt tokens of the waiting requests."
    )
    cached_token_queue_limit_per_worker: Count | None = Field(
        default=None, description="The same for those of their prompt tokens that are cached somewhere."
    )
    max_queue_wait: Seconds | None = Field(
        default=None,
        description="Seconds a request may wait; then it gets 429. Without it, the setting `queue.max_wait` holds,"
        " which is 60 seconds unless set.",
    )
    shed_unreachable: Switch = Field(
        default=False,
        description="Give 429 to a request as soon as its first token cannot come before its target"
        " (`x-picker-ttft-ms`) any more, even from an idle endpoint. No effect until rates are learned.",
    )
    wspt_aging: Seconds | None = Field(
        default=None,
        description="Only for `wspt`: seconds; no request is overtaken by one that arrives more than this"
        " later. Without it, large requests can starve.",
    )
    high_priority_first: Switch = Field(
        default=False,
        description="For `priority` and `cache_affinity`: true serves the largest number first, false the"
        " smallest, as vLLM does.",
    )
    affinity: AffinitySettings = Field(
        default=_DEFAULT_AFFINITY, description="Only for `cache_affinity`: how the order is kept in bounds."
    )
    strict_priority: Count = Field(
        default=0,
        description="Tier of this class's requests that bring none of their own. Higher tiers go first inside"
        " the class, whatever its order; they never cross classes.",
    )
    fair_tenants: Switch = Field(
        default=False, description="Share the class's turns equally between tenants (the fairness id)."
    )
    output_charge: Weight | None = Field(
        default=None,
        description="Charge output tokens too, each as this many uncached prompt tokens: an estimate at"
        " dispatch, settled at completion. Needs observed responses that tell their usage; a stream does so where"
        " its request asks for it, else its estimate stands.",
    )
    output_estimate: PositiveCount = Field(
        default=4096,
        description="Only with `output_charge`: the estimate is the request's limit of output tokens, at most this.",
    )
    tolerations: tuple[TolerationText, ...] = Field(
        default=(), description="Taints that the class's requests tolerate: `key[=value][:effect]`, or `*`."
    )
    allowed_endpoints: SelectorLabels | None = Field(
        default=None, description="Labels that an endpoint must carry to serve this class, by equality."
    )
    selection: CostWeights | None = Field(
        default=None, description="Cost weights for this class; a weight not given comes from the profile."
    )


@validated(frozen=True, slots=True, kw_only=True, config=_STRICT_KEYS)
class PolicyClass(ClassSettings):
    """A class as the queue and the selection use it: its settings, with `selection` merged from its profile.

    `profile` is the model name of its profile, "" for the root. Class names are unique only inside a profile;
    `key` is unique in a policy, and so is `label`, for metrics and people: `class` in the root,
    `profile/class` elsewhere (names hold no slash).
    """

    profile: str = ""
    label: str = field(init=False)
    key: tuple[str, str] = field(init=False)
    has_queue_limit: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", f"{self.profile}/{self.name}" if self.profile else self.name)
        object.__setattr__(self, "key", (self.profile, self.name))
        limits = (
            self.request_queue_limit_per_worker,
            self.raw_isl_token_queue_limit_per_worker,
            self.cached_token_queue_limit_per_worker,
        )
        object.__setattr__(self, "has_queue_limit", any(limit is not None for limit in limits))

    @property
    def explicit(self) -> bool:
        """Chosen by its own name, whatever the request's uncached tokens."""
        return self.policy_family is None

    @property
    def can_queue(self) -> bool:
        """Whether an endpoint can be busy for this class at all; if not, its requests never wait."""
        return not (
            self.prefill_busy_threshold is None
            and self.prefill_busy_threshold_frac is None
            and self.max_running_per_worker is None
            and self.kv_usage_busy_threshold is None
        )

    def prefill_limit(self, max_num_batched_tokens: int | None) -> float | None:
        """Booked prefill tokens above which an endpoint is busy, the lower of the two forms; None: no limit.

        The fraction counts only where the endpoint's `max_num_batched_tokens` is known.
        """
        absolute = self.prefill_busy_threshold
        fraction = self.prefill_busy_threshold_frac
        if fraction is None or max_num_batched_tokens is None:
            return absolute
        relative = fraction * max_num_batched_tokens
        return relative if absolute is None else min(absolute, relative)

    def __hash__(self) -> int:
        return hash(self.label)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Requests with at least `min_tokens` uncached tokens, up to the next bucket."""

    name: str
    min_tokens: int


@dataclass(frozen=True, slots=True)
class Profile:
    """The classes that one model's requests fall into, or (name "") those of all models without their own.

    Without buckets the profile is flat: a hint picks a class by name, everything else takes the first one.
    With buckets, `classes` must hold every pair of family and bucket once; files are checked for that.
    """

    name: str
    classes: tuple[PolicyClass, ...]
    default_family: str | None = None
    buckets: tuple[Bucket, ...] = ()
    selection: CostWeights | None = None
    disaggregation: DisaggregationSettings | None = None
    _explicit: dict[str, PolicyClass] = field(init=False, repr=False, compare=False)
    _families: dict[str, tuple[PolicyClass, ...]] = field(init=False, repr=False, compare=False)
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        explicit = {entry.name: entry for entry in self.classes if entry.explicit}
        cells = {
            (entry.policy_family, entry.cache_bucket): entry for entry in self.classes if not entry.explicit
        }
        families = {
            family: tuple(cells[family, bucket.name] for bucket in self.buckets)
            for family, _ in cells
            if family is not None
        }
        object.__setattr__(self, "_explicit", explicit)
        object.__setattr__(self, "_families", families)
        object.__setattr__(self, "_starts", tuple(bucket.min_tokens for bucket in self.buckets))

    @property
    def families(self) -> tuple[str, ...]:
        """In the order of the file."""
        return tuple(self._families)

    def needs_uncached(self, hint: str | None) -> bool:
        """Whether `resolve` will look at the uncached tokens; if not, the cache lookup can be spared."""
        return bool(self._starts) and (hint is None or hint.strip() not in self._explicit)

    def resolve(self, hint: str | None, uncached_tokens: int) -> PolicyClass:
        """The class of a request with this hint and this many uncached prompt tokens.

        A missing, empty or unknown hint, and the name of a class that belongs to a family, all mean the
        default family: a client cannot choose its own bucket.
        """
        hint = hint.strip() if hint else ""
        explicit = self._explicit.get(hint)
        if explicit is not None:
            return explicit
        if not self._starts:
            return self.classes[0]
        row = self._families.get(hint) or self._families[self.default_family or ""]
        return row[bisect_right(self._starts, uncached_tokens, lo=1) - 1]


@dataclass(frozen=True, slots=True)
class Policy:
    """All profiles of one policy file. `warnings` says what the file holds that Picker does not use."""

    root: Profile
    models: Mapping[str, Profile] = field(default_factory=lambda: MappingProxyType({}))
    source: str = "policy"
    rewrites: ModelRewrites = field(default_factory=ModelRewrites)
    warnings: tuple[str, ...] = ()

    @classmethod
    def default(cls) -> Self:
        """Without a file: one class `default` in arrival order, without threshold, so that nothing waits."""
        return cls(default_root(), source="built-in default")

    def profile(self, model: str | None) -> Profile:
        """The model's own profile (exact name), which replaces the root whole; otherwise the root."""
        return self.root if model is None else self.models.get(model, self.root)

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The root first, then the models in the order of the file."""
        return (self.root, *self.models.values())

    def classes(self) -> Iterator[PolicyClass]:
        for profile in self.profiles:
            yield from profile.classes


def default_root(
    selection: CostWeights | None = None, disaggregation: DisaggregationSettings | None = None
) -> Profile:
    """The root profile of a policy that configures no classes."""
    classes = (PolicyClass(name="default", quantum=1, selection=selection),)
    return Profile("", classes, selection=selection, disaggregation=disaggregation)
