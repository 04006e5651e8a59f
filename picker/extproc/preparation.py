"""The reading side: a request as the gateway handed it over becomes a `Prepared`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial

from picker.extproc.access_log import MAX_REQUEST_ID_CHARS, REQUEST_ID_HEADER
from picker.extproc.handler import Arrival, Refused
from picker.extproc.handover import PoolShape, Prepared
from picker.extproc.stages import StageClock
from picker.requests import (
    BadRequest,
    BodyLimits,
    Hints,
    HintTrust,
    InferenceRequest,
    OverLimit,
    Route,
    parse_hints,
    parse_request,
    subset_hint,
)
from picker.selection.constraints import Constraints
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand
from picker.tokens import TokenCount, Tokenizers


@dataclass(slots=True)
class Preparation:
    """Reads requests: hints, body, tokens, and the keys of its blocks in every size that the pool has."""

    tokenizers: Tokenizers
    pool: PoolShape
    body_limits: BodyLimits = field(default_factory=BodyLimits)
    trust: HintTrust = field(default_factory=HintTrust)
    _unpacking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    async def prepare(self, arrival: Arrival) -> Prepared | Refused:
        stage = StageClock()
        try:
            hints = parse_hints(arrival.headers, arrival.metadata, self.trust)
            request = await self._read(arrival)
        except BadRequest as error:
            return _refuse(error)
        stage.done("parse")
        if request.route is Route.OTHER:
            demand = Demand(0, PromptKeys.unknown(), _constraints(arrival, hints, None))
        else:
            demand = await self._demand(arrival, hints, request, stage)
        return Prepared(
            route=request.route,
            hints=hints,
            demand=demand,
            received_at=arrival.received_at,
            observes_response=arrival.observes_response,
            model=request.model,
            max_tokens=request.max_tokens,
            gateway_id=_gateway_id(arrival),
            stages=stage.taken,
        )

    async def _demand(
        self, arrival: Arrival, hints: Hints, request: InferenceRequest, stage: StageClock
    ) -> Demand:
        tokens = await self.tokenizers.tokenize(request)
        stage.done("tokenize")
        model = request.model or ""
        adapter = model if self.pool.serves_adapter(model) else None
        prompt = _prompt_keys(request, tokens, adapter)
        for block_size in self.pool.block_sizes():
            prompt.blocks(block_size)
        stage.done("hash")
        return Demand(tokens.count, prompt, _constraints(arrival, hints, adapter), hints.preferred_taints)

    async def _read(self, arrival: Arrival) -> InferenceRequest:
        """Parse the request. Raises BadRequest.

        A compressed body is unpacked beside the event loop, and one at a time: a small one may be many megabytes.
        """
        read = partial(
            parse_request, arrival.method, arrival.path, arrival.headers, arrival.body, self.body_limits
        )
        if all(name != "content-encoding" for name, _ in arrival.headers):
            return read()
        async with self._unpacking:
            return await asyncio.to_thread(read)


def _gateway_id(arrival: Arrival) -> str | None:
    given = next((value for name, value in arrival.headers if name == REQUEST_ID_HEADER), "")
    return given if 0 < len(given) <= MAX_REQUEST_ID_CHARS else None


def _constraints(arrival: Arrival, hints: Hints, adapter: str | None) -> Constraints:
    """What the gateway and trusted hints ask of the endpoint, and the adapter that the model is."""
    lists = (subset_hint(arrival.metadata), hints.allow_list)
    return Constraints(
        allow=tuple(frozenset(entries) for entries in lists if entries is not None),
        tolerations=hints.tolerations,
        required_taints=frozenset(hints.required_taints),
        pin=hints.pin,
        rank=hints.rank,
        adapter=adapter,
    )


def _prompt_keys(request: InferenceRequest, tokens: TokenCount, adapter: str | None) -> PromptKeys:
    if tokens.estimated:
        return PromptKeys.unknown()
    return PromptKeys.of_tokens(tokens.ids, adapter=adapter, salt=request.cache_salt)


def _refuse(error: BadRequest) -> Refused:
    reasons = {413: "body_too_large", 415: "unsupported_coding"}
    default = error.limit if isinstance(error, OverLimit) else "bad_request"
    reason = reasons.get(error.status, default)
    return Refused(error.status, reason, error.message, param=error.param, code=error.code)
