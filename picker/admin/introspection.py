"""The Introspection service of `protos/picker/v1`, over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from picker.admin.access import Access
from picker.admin.server import MAX_DECISIONS
from picker.admin.views import Views, decision_view
from picker.api.v1 import introspection_pb2 as pb
from picker.api.v1 import introspection_pb2_grpc as pb_grpc
from picker.rpc import address_of
from picker.telemetry import Telemetry

_DEFAULT_LIMIT = 50


class IntrospectionServer:
    """A gRPC server of its own, for `picker status` and other tools."""

    def __init__(self, telemetry: Telemetry, views: Views, access: Access) -> None:
        self._server = grpc.aio.server(
            interceptors=[_Guard(access)], options=[("grpc.so_reuseport", 0)], maximum_concurrent_rpcs=256
        )
        pb_grpc.add_IntrospectionServicer_to_server(_Introspection(telemetry, views), self._server)

    async def start(self, host: str, port: int) -> int:
        """Listen; 0 takes a free port. Returns the port. Raises OSError."""
        try:
            bound = self._server.add_insecure_port(address_of(host, port))
        except RuntimeError:
            raise OSError(
                f"cannot listen on {address_of(host, port)} (admin.grpc_port): is it taken?"
            ) from None
        await self._server.start()
        return bound

    async def stop(self) -> None:
        await self._server.stop(grace=None)


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Turns every call away that `Access` does."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        metadata = dict(handler_call_details.invocation_metadata or ())
        authorization = metadata.get("authorization")
        refusal = await self._access.refusal(authorization if isinstance(authorization, str) else None)
        if refusal is None:
            return await continuation(handler_call_details)
        return _refuse(refusal)


def _refuse(reason: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

    return grpc.unary_unary_rpc_method_handler(refuse)


class _Introspection(pb_grpc.IntrospectionServicer):
    def __init__(self, telemetry: Telemetry, views: Views) -> None:
        self._telemetry = telemetry
        self._views = views

    async def GetPool(self, request: pb.GetPoolRequest, context: Any) -> pb.Pool:
        return pb.Pool(**self._views.pool())

    async def GetQueues(self, request: pb.GetQueuesRequest, context: Any) -> pb.Queues:
        return pb.Queues(**self._views.queues())

    async def ListDecisions(self, request: pb.ListDecisionsRequest, context: Any) -> pb.Decisions:
        limit = min(request.limit or _DEFAULT_LIMIT, MAX_DECISIONS)
        return pb.Decisions(**self._views.decisions(limit, request.policy_class))

    async def GetDecision(self, request: pb.GetDecisionRequest, context: Any) -> pb.Decision:
        found = self._views.decision(request.id)
        if found is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such decision, or it is too long ago")
        return pb.Decision(**found)  # type: ignore[arg-type]

    async def WatchDecisions(
        self, request: pb.WatchDecisionsRequest, context: Any
    ) -> AsyncIterator[pb.Decision]:
        watcher = self._telemetry.decisions.watch()
        missed = 0
        # Tells the client that nothing is missed from here on.
        await context.send_initial_metadata(())
        try:
            async for record, more in watcher:
                missed += more
                if not request.policy_class or record.policy_class == request.policy_class:
                    yield pb.Decision(**decision_view(record), missed=missed)
                    missed = 0
        finally:
            watcher.close()
