"""The reading side: a request as the gateway handed it over becomes a `Prepared`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

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
    Rewriting,
    Route,
    SessionSource,
    parse_hints,
    parse_request,
    places_of_model,
    subset_hint,
)
from picker.requests.rewriting import Places
from picker.selection.constraints import Constraints
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand
from picker.selection.sessions import SessionKey
from picker.tokens import TokenCount, Tokenizers

T = TypeVar("T")

# What nearly all requests ask of their endpoint: allow, tolerations, required_taints, pin, rank, adapter.
_NOTHING = ((), (), (), None, None, None)
_NOTHING_ASKED = Constraints()

# Bytes from which on a body is large.
_LARGE = 64 * 1024
# What a token is taken for, in bytes of a body.
_TOKEN_BYTES = 4


@dataclass(slots=True)
class Preparation:
    """Reads requests: hints, body, tokens, and the keys of its blocks in every size that the pool has.

    sessions: how a request says its session; None: nobody asks. rewriting: who goes on under another model's name.
    """

    tokenizers: Tokenizers
    pool: PoolShape
    body_limits: BodyLimits = field(default_factory=BodyLimits)
    trust: HintTrust = field(default_factory=HintTrust)
    sessions: SessionSource | None = None
    rewriting: Rewriting = field(default_factory=Rewriting)
    _unpacking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    _large: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def prepare(self, arrival: Arrival) -> Prepared | Refused:
        stage = StageClock()
        try:
            hints = parse_hints(arrival.headers, arrival.metadata, self.trust)
            request, renamed = await self._rewrite(arrival, await self._read(arrival))
        except BadRequest as error:
            return _refuse(error)
        stage.done("parse")
        if request.route is Route.OTHER:
            demand = Demand(0, PromptKeys.unknown(), _constraints(arrival, hints, None))
        else:
            demand = await self._demand(arrival, hints, request, stage)
        session, new_session = self._session(arrival, hints, request.route)
        if session is not None:
            demand = replace(demand, session=session)
        return Prepared(
            route=request.route,
            hints=hints,
            demand=demand,
            received_at=arrival.received_at,
            observes_response=arrival.observes_response,
            model=request.model,
            max_tokens=request.max_tokens,
            gateway_id=_gateway_id(arrival),
            new_session=new_session,
            renamed=renamed,
            stages=stage.taken,
        )

    async def _demand(
        self, arrival: Arrival, hints: Hints, request: InferenceRequest, stage: StageClock
    ) -> Demand:
        tokens = await self.tokenizers.tokenize(request)
        stage.done("tokenize")
        model = request.model or ""
        adapter = model if model in self.pool.adapters() else None
        prompt = _prompt_keys(request, tokens, adapter)
        await self._in_turn(tokens.count * _TOKEN_BYTES, partial(_hash, prompt, self.pool.block_sizes()))
        stage.done("hash")
        return Demand(tokens.count, prompt, _constraints(arrival, hints, adapter), hints.preferred_taints)

    def _session(self, arrival: Arrival, hints: Hints, route: Route) -> tuple[SessionKey | None, bool]:
        """The request's session, and whether it begins with this request, so that a cookie has to say so."""
        source = self.sessions
        if source is None:
            return None, False
        found = source.find(arrival.headers, hints.session)
        begins = found is None and source.cookie is not None
        if begins and arrival.observes_response and route is not Route.OTHER:
            return (hints.fairness_id or "", source.new_id()), True
        return ((hints.fairness_id or "", found) if found is not None else None), False

    async def _read(self, arrival: Arrival) -> InferenceRequest:
        """Parse the request. Raises BadRequest.

        A compressed body is unpacked beside the event loop, and one at a time: a small one may be many megabytes.
        """
        read = partial(
            parse_request, arrival.method, arrival.path, arrival.headers, arrival.body, self.body_limits
        )
        if all(name != "content-encoding" for name, _ in arrival.headers):
            return await self._in_turn(len(arrival.body), read)
        async with self._unpacking:
            return await asyncio.to_thread(read)

    async def _rewrite(self, arrival: Arrival, request: InferenceRequest) -> tuple[InferenceRequest, Places]:
        """The request as it goes on, and where its body still says otherwise. Raises BadRequest."""
        rewritten = self.rewriting.apply(request)
        if rewritten.model == request.model:
            return request, ()
        codings = (value for name, value in arrival.headers if name == "content-encoding")
        is_coded = any(value.strip().lower() not in ("", "identity") for value in codings)
        places = partial(places_of_model, arrival.body, is_coded)
        return rewritten, await self._in_turn(len(arrival.body), places)

    async def _in_turn(self, size: int, work: Callable[[], T]) -> T:
        """Do work on so many bytes of a body. Of large ones only one in a turn of the event loop: each takes a
        millisecond or more, and many may come at the same time.
        """
        if size < _LARGE:
            return work()
        async with self._large:
            try:
                return work()
            finally:
                await asyncio.sleep(0)


def _hash(prompt: PromptKeys, block_sizes: Iterable[int]) -> None:
    for block_size in block_sizes:
        prompt.blocks(block_size)


def _gateway_id(arrival: Arrival) -> str | None:
    given = next((value for name, value in arrival.headers if name == REQUEST_ID_HEADER), "")
    return given if 0 < len(given) <= MAX_REQUEST_ID_CHARS else None


def _constraints(arrival: Arrival, hints: Hints, adapter: str | None) -> Constraints:
    """What the gateway and trusted hints ask of the endpoint, and the adapter that the model is."""
    lists = (subset_hint(arrival.metadata), hints.allow_list)
    allow = tuple([frozenset(entries) for entries in lists if entries is not None])
    given = (allow, hints.tolerations, hints.required_taints, hints.pin, hints.rank, adapter)
    if given == _NOTHING:
        return _NOTHING_ASKED
    return Constraints(
        allow=allow,
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
