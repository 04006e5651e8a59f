"""Which requests go on under another model's name, by the rules of the policy and the pool."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from msgspec.structs import replace

from picker.policy.rewrites import ModelRewrites
from picker.requests.errors import BadRequest
from picker.requests.request import InferenceRequest
from picker.requests.splice import model_values

Places = tuple[tuple[int, int], ...]
"""Where the values of a body's model begin and end, in bytes."""


@dataclass(slots=True)
class RewriteStats:
    """Requests that a rule applied to, by the model that they went on with: names of rules, not of clients."""

    requests: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Rewriting:
    """Draws from the splits of the rules; whoever follows the rules replaces them."""

    rules: ModelRewrites = field(default_factory=ModelRewrites)
    random: Random = field(default_factory=Random)
    stats: RewriteStats = field(default_factory=RewriteStats)

    def apply(self, request: InferenceRequest) -> InferenceRequest:
        """The request with the model that serves it. Without a model of its own it stays as it is."""
        split = self.rules.split(request.model) if request.model is not None else None
        if split is None:
            return request
        model = split.choose(self.random.random())
        self.stats.requests[model] += 1
        return replace(request, model=model)


def places_of_model(body: bytes, is_coded: bool) -> Places:
    """Where the body of a request that has been read names its model. Raises BadRequest where that cannot be changed.

    is_coded: it has a content coding. To change it, it would have to be unpacked and packed again, and would not be
    what the client sent any more.
    """
    if is_coded:
        raise BadRequest(
            "the model of a body with a content coding cannot be rewritten; send the body without one",
            param="content-encoding",
            code="unsupported_content_encoding",
            status=415,
        )
    try:
        return model_values(body)
    except ValueError as error:
        raise BadRequest(f"the model cannot be rewritten: {error}", param="model") from None
