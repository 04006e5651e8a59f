"""The policy file: which classes there are, what each is owed, and which one a request joins."""

from picker.policy.errors import PolicyError
from picker.policy.load import load_policy
from picker.policy.model import (
    AffinitySettings,
    Bucket,
    CostWeights,
    Policy,
    PolicyClass,
    Profile,
    QueuePolicy,
)
from picker.policy.schema import policy_json_schema

__all__ = [
    "AffinitySettings",
    "Bucket",
    "CostWeights",
    "Policy",
    "PolicyClass",
    "PolicyError",
    "Profile",
    "QueuePolicy",
    "load_policy",
    "policy_json_schema",
]
