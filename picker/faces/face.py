"""All of Picker that turns to the gateway, on one port, in whatever process."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from math import ceil
from typing import TYPE_CHECKING, Any

from picker import __version__
from picker.extproc.access_log import AccessLogService, AccessLogStats
from picker.extproc.conversation import ConversationLimits
from picker.extproc.handover import Decider, PoolShape
from picker.extproc.health import HealthService, HealthState
from picker.extproc.pipeline import Pipeline
from picker.extproc.preparation import Preparation
from picker.extproc.server import ExtProcServer
from picker.extproc.tls import file_context, fixed_context, self_signed
from picker.policy.rewrites import ModelRewrites
from picker.requests import SessionSource
from picker.rpc import ByteBudget, RpcServer
from picker.settings import Settings, SettingsError
from picker.settings.model import SessionSettings, TelemetrySettings, TlsSettings
from picker.tokens import TokenBudget, Tokenizers

if TYPE_CHECKING:
    from picker.telemetry.tracing import Tracing

log = logging.getLogger(__name__)

# Faces that share a port are given connections, not streams, and at random. So that none is left out for long, as is
# one that has just been started, connections are renewed after so many seconds; streams that are open go on.
# The server must not limit the streams of a connection to have more of them: what a gateway opens before it has heard
# of the limit would be refused. That is for the gateway's own configuration.
_CONNECTION_SECONDS = 60
# Seconds; what Envoy is asked for must be below its `max_message_timeout`, and the chart's is above this.
_LONGEST_HOLD = 600.0


class Face:
    """The ext_proc server with what it needs to read requests, and the access log's and the health service.

    `decider` decides, `logged` hears of the entries of the gateway's access log: the
    request's id, and whether the client got an answer that is no error. shares_port:
    other faces listen there too.
    """

    def __init__(
        self,
        settings: Settings,
        decider: Decider,
        pool: PoolShape,
        health: HealthState,
        logged: Callable[[str, bool], None],
        clock: Callable[[], float],
        *,
        shares_port: bool = False,
    ) -> None:
        self._settings = settings.extproc
        self._shares_port = shares_port
        self._health = health
        self.tokenizers = Tokenizers(
            settings.tokens.models,
            TokenBudget(
                threads=settings.tokens.threads,
                seconds=settings.tokens.timeout,
                max_bytes=settings.tokens.max_prompt_bytes,
                template_seconds=settings.tokens.template_timeout,
                template_characters=settings.tokens.max_template_characters,
                cache_bytes=settings.tokens.cache,
            ),
            template_defaults=settings.tokens.chat_template_kwargs,
        )
        self.pipeline = Pipeline(
            preparation=Preparation(
                self.tokenizers,
                pool,
                body_limits=settings.requests,
                trust=settings.policy.hints,
                sessions=_session_source(settings.sessions),
            ),
            decider=decider,
            clock=clock,
            reads_usage=settings.extproc.observe == "usage",
            tracing=_tracing(settings.telemetry),
        )
        names = frozenset(settings.extproc.tls.client_names)
        self.extproc = ExtProcServer(
            self.pipeline,
            limits=ConversationLimits(
                max_body_bytes=settings.requests.max_body_bytes,
                max_header_bytes=settings.extproc.max_header_bytes,
                buffered_hold=settings.queue.max_wait or _LONGEST_HOLD,
                refuses=not settings.extproc.shadow,
            ),
            budget=ByteBudget(max_bytes=settings.extproc.total_body_limit),
            max_streams=settings.extproc.max_streams,
            client_names=names,
            clock=clock,
        )
        self.access_log = AccessLogService(
            lambda request_id, status: logged(request_id, 0 < status < 400),
            client_names=names,
        )

    def take_rewrites(self, rules: ModelRewrites) -> None:
        """From now on requests go on under other models' names by these rules."""
        self.pipeline.preparation.rewriting.rules = rules

    @property
    def open_streams(self) -> int:
        return self.extproc.stats.active_streams

    @property
    def log_stats(self) -> AccessLogStats:
        return self.access_log.stats

    def sources(self) -> dict[str, Any]:
        """The counters of the rooms in here."""
        return {
            "extproc": self.extproc.stats,
            "bodies": self.extproc.budget.stats,
            "access_log": self.access_log.stats,
            "tokens": lambda: self.tokenizers.stats,
            "rewriting": self.pipeline.preparation.rewriting.stats,
        }

    async def serve(self) -> int:
        """Listen, and say on which port. Raises OSError when it is taken. Tokenizers load afterwards."""
        self._server = RpcServer(
            max_message_bytes=self.extproc.max_message_bytes,
            budget=self.extproc.budget,
            connection_seconds=_CONNECTION_SECONDS if self._shares_port else None,
        )
        self.extproc.add_to(self._server)
        self.access_log.add_to(self._server)
        HealthService(self._health).add_to(self._server)
        port = await self._server.listen(
            self._settings.host,
            self._settings.port,
            tls=_tls(self._settings.tls),
            shared=self._shares_port,
        )
        self._loading = asyncio.create_task(self._load_tokenizers())
        return port

    async def stop(self) -> None:
        """End what is open, within a second, and let go of everything."""
        await self._server.stop(grace=1.0)
        self._loading.cancel()
        await self.tokenizers.close()
        if self.pipeline.tracing is not None:
            # It sends what has not been sent, and waits for that.
            await asyncio.to_thread(self.pipeline.tracing.close)

    async def _load_tokenizers(self) -> None:
        for model, loaded in (await self.tokenizers.load()).items():
            log.log(
                logging.INFO if loaded else logging.ERROR,
                "tokenizer of %s: %s",
                model,
                "loaded" if loaded else "not loaded, prompts are estimated by size",
            )


def _tls(settings: TlsSettings) -> ssl.SSLContext | None:
    """Raises OSError when the files cannot be read or are of no use."""
    if settings.mode == "off":
        return None
    if settings.mode == "self-signed":
        return fixed_context(self_signed())
    assert settings.cert_file is not None
    assert settings.key_file is not None
    try:
        return file_context(settings.cert_file, settings.key_file, settings.client_ca_file)
    except ValueError as error:
        raise OSError(f"TLS with {settings.cert_file} and {settings.key_file}: {error}") from error


def _session_source(settings: SessionSettings) -> SessionSource | None:
    if settings.affinity == "off":
        return None
    return SessionSource(settings.header, settings.cookie, cookie_age=ceil(settings.ttl))


def _tracing(settings: TelemetrySettings) -> Tracing | None:
    if not settings.tracing:
        return None
    try:
        from picker.telemetry.tracing import Tracing
    # Another package has a folder of that name, so that it is not the module that is not found.
    except ImportError as error:
        raise SettingsError(
            f"telemetry.tracing needs the extra `otel` (pip install opentelemetry-sdk): {error}"
        ) from None
    return Tracing(settings.trace_ratio, __version__)
