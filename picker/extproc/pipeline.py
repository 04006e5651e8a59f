"""A request's path: it is read here, decided wherever the `Decider` is, and answered and followed here again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from picker.extproc.following import Followed, Unfollowed
from picker.extproc.handler import Arrival, Exchange, Refused, Routed
from picker.extproc.handover import Answer, Decider, Placed, Prepared, never_taken
from picker.extproc.preparation import Preparation
from picker.extproc.usage import UsageReader
from picker.requests import with_model

if TYPE_CHECKING:
    from picker.telemetry.tracing import RequestTrace, Tracing


@dataclass(slots=True)
class Pipeline:
    """Implements the ext_proc server's `RequestHandler`. reads_usage: responses are read for what engines report."""

    preparation: Preparation
    decider: Decider
    clock: Callable[[], float]
    reads_usage: bool = False
    tracing: Tracing | None = None

    async def route(self, arrival: Arrival) -> Routed | Refused:
        """Decide where a request goes. Cancelling it means that the client has left."""
        if self.tracing is None:
            return await self._route(arrival, None)
        trace = self.tracing.begin(arrival.headers)
        error: str | None = "cancelled"
        try:
            answer = await self._route(arrival, trace)
            error = answer.reason if isinstance(answer, Refused) else None
        finally:
            trace.end(error)
        if isinstance(answer, Refused):
            return answer
        return replace(answer, set_headers=(*answer.set_headers, *trace.headers))

    async def _route(self, arrival: Arrival, trace: RequestTrace | None) -> Routed | Refused:
        prepared = await self.preparation.prepare(arrival)
        if isinstance(prepared, Refused):
            return prepared
        if trace is not None:
            trace.stages(prepared.stages)
        answer = await self._decide(prepared)
        if trace is not None and answer.facts is not None:
            trace.stages(answer.facts.stages)
            outcome = answer.reason if isinstance(answer, Refused) else "dispatched"
            trace.decided(prepared, answer.facts, outcome)
        if isinstance(answer, Refused):
            return answer
        return Routed(
            endpoint=answer.endpoint,
            exchange=self._exchange(prepared, answer),
            set_headers=answer.set_headers,
            # In shadow mode the request goes on as it came.
            remove_headers=prepared.hints.consumed_headers if answer.endpoint is not None else (),
            body=_body(arrival, prepared) if answer.endpoint is not None else None,
            response_headers=self._cookie(arrival, prepared) if answer.endpoint is not None else (),
        )

    def _cookie(self, arrival: Arrival, prepared: Prepared) -> tuple[tuple[str, str], ...]:
        """What tells the client the id of its new session."""
        source, session = self.preparation.sessions, prepared.demand.session
        if not prepared.new_session or source is None or session is None:
            return ()
        return (("set-cookie", source.set_cookie(session[1], arrival.headers)),)

    async def _decide(self, prepared: Prepared) -> Placed | Refused:
        future: asyncio.Future[Placed | Refused] = asyncio.get_running_loop().create_future()

        def tell(answer: Answer) -> None:
            if future.done():
                never_taken(answer)
            elif isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)

        leave = self.decider.begin(prepared, tell)
        try:
            return await future
        except asyncio.CancelledError:
            leave()
            if not future.cancelled():
                never_taken(future.exception() or future.result())
            raise

    def _exchange(self, prepared: Prepared, placed: Placed) -> Exchange:
        if placed.progress is None:
            return Unfollowed()
        reads = self.reads_usage and prepared.observes_response
        return Followed(placed.progress, self.clock, UsageReader() if reads else None)


def _body(arrival: Arrival, prepared: Prepared) -> bytes | None:
    """The body under the model that it goes on with; None: as it came."""
    if not prepared.renamed or prepared.model is None:
        return None
    return with_model(arrival.body, prepared.model, prepared.renamed)
