"""The shape of the policy file, above its classes. Keys that depend on each other are checked in `rules`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from picker.policy.model import ClassSettings, CostWeights, Count, DisaggregationSettings, Identifier
from picker.policy.rewrites import RewriteRule

ModelName = Annotated[str, StringConstraints(strict=True, min_length=1)]


class Section(BaseModel):
    """A frozen group of keys in which an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class BucketSettings(Section):
    """One entry of `uncached_isl_buckets`."""

    min_tokens: Count = Field(
        description="Uncached prompt tokens from which the bucket counts, up to the next one. The first"
        " is 0, and they increase."
    )
    bucket: Identifier = Field(description="Its name, for `cache_bucket` of the classes.")


class ProfileSettings(Section):
    """A profile: which classes there are, and how a request finds its own. The root of the file is one."""

    default_policy_family: Identifier | None = Field(
        default=None, description="The family of requests that name none, or an unknown one."
    )
    uncached_isl_buckets: tuple[BucketSettings, ...] | None = Field(
        default=None, description="Ranges of uncached prompt tokens; each family has a class for each."
    )
    policy_classes: tuple[ClassSettings, ...] | None = Field(
        default=None, description="The classes: every pair of family and bucket once, and explicit ones."
    )
    selection: CostWeights | None = Field(
        default=None, description="Cost weights for every class of this profile."
    )
    disaggregation: DisaggregationSettings | None = Field(
        default=None,
        description="Prefill long prompts on other endpoints than those that decode. Without it: no.",
    )


class PolicySettings(ProfileSettings):
    """The whole file: the root profile, profiles of single models, and sections that belong to Dynamo."""

    models: dict[ModelName, ProfileSettings] | None = Field(
        default=None,
        description="Profiles by exact model name. A profile replaces the root whole; nothing is inherited.",
    )
    model_rewrites: tuple[RewriteRule, ...] | None = Field(
        default=None,
        description="Which models serve requests that name another, and splits between models by weight. It is the"
        " new name that finds the profile, the tokenizer and the adapter.",
    )
    router: Any = Field(default=None, description="Dynamo's router settings: accepted and ignored.")
    worker_selection: Any = Field(
        default=None, description="Dynamo's selection plugins: accepted and ignored; see `selection`."
    )
    request_classifier: Any = Field(
        default=None, description="Dynamo's classifier plugin: accepted and ignored."
    )


IGNORED_SECTIONS = ("router", "worker_selection", "request_classifier")
PROFILE_KEYS = ("default_policy_family", "uncached_isl_buckets", "policy_classes")


def policy_json_schema() -> dict[str, Any]:
    """The JSON schema of a policy file. The rules between keys are beyond it; `load_policy` checks those."""
    return PolicySettings.model_json_schema()
