"""The composition root: makes every room from the settings, wires them, runs and stops them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from picker import __version__
from picker.admin.access import Access
from picker.admin.introspection import IntrospectionServer
from picker.admin.server import AdminServer
from picker.admin.state import class_stats, endpoint_stats
from picker.admin.token_review import TokenReview
from picker.admin.views import Views
from picker.extproc.deciding import Deciding, DecidingSettings
from picker.extproc.dispatcher import Dispatcher
from picker.extproc.exchange import Exchanges, RoutedExchange
from picker.extproc.health import HealthService, HealthState
from picker.extproc.usage import Usage
from picker.faces.crew import Crew
from picker.faces.face import Face
from picker.kvcache.accuracy import AccuracyTracker, Cause
from picker.kvcache.asking import SourceAsking
from picker.kvcache.index import KvIndex
from picker.kvcache.predicted import CombinedIndex, PredictedIndex, Prediction
from picker.kvcache.sources import KvEvents
from picker.kvcache.sweeper import Sweeper
from picker.policy import Policy, PolicyError
from picker.policy.reload import PolicyFile, diff_policies
from picker.policy.rewrites import ModelRewrites
from picker.pool.calibration import Calibration
from picker.pool.endpoint import Endpoint, EndpointSpec, EngineKind, EngineReport
from picker.pool.kube.errors import UnusableCredentials
from picker.pool.ledger import Ledger
from picker.pool.pool import Pool, PoolChange
from picker.pool.scraper import Scraper, ScraperSettings
from picker.pool.static_file import PoolFileError, StaticPoolFile
from picker.queueing.admission import AdmissionQueue, QueueLimits
from picker.queueing.fairness import FairnessMeter
from picker.queueing.work import Outcome, Released, Work
from picker.rpc import ByteBudget, RpcServer
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Selector
from picker.selection.sessions import Sessions
from picker.settings import Settings, SettingsError
from picker.settings.model import ExtProcSettings, KubernetesSettings, PolicySettings, TelemetrySettings
from picker.telemetry import Telemetry
from picker.telemetry.recording import Recording

if TYPE_CHECKING:
    from picker.pool.kube.api import KubeApi
    from picker.pool.kube.membership import Membership, PoolMember

log = logging.getLogger(__name__)

# Blocks that an engine is taken to hold when it does not say.
_UNKNOWN_CAPACITY = 16_384
_HOUSEKEEPING_SECONDS = 0.5
_HEALTH_MESSAGE_BYTES = 4096
_HEALTH_HELD_BYTES = 1024 * 1024
# So many decisions are a few hundredths of a second; whoever else has something to do comes between.
_OUTCOMES_A_TURN = 256


@dataclass(frozen=True, slots=True)
class Addresses:
    """The ports that were bound; they differ from the settings where those say 0."""

    extproc: int
    health: int
    admin: int
    introspection: int


class App:
    """One Picker: `start`, then `stop`. Everything lives on the event loop that `start` runs on."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clock = time.monotonic
        self.health = HealthState(leader=not settings.pool.kubernetes.leader_election)
        self._build_state()
        self._build_faces()
        self._member: PoolMember | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed: asyncio.Event = asyncio.Event()

    def _build_state(self) -> None:
        """The deciding core and what it knows, without any IO."""
        settings = self.settings
        self.pool = Pool(
            max_endpoints=settings.pool.max_endpoints, overload_waiting=settings.pool.overload_waiting
        )
        self.ledger = Ledger()
        self.calibration = Calibration()
        self.accuracy = AccuracyTracker()
        self.index = KvIndex(settings.kvcache.max_blocks)
        self.predicted = PredictedIndex()
        # An engine that restarted or was reset has nothing of what was sent to it before either.
        self.index.on_cleared = self.predicted.drop
        self.sweeper = Sweeper(self.index.sweep, lambda limit: self.predicted.sweep(self.clock(), limit))
        self.index.on_fading = self.predicted.on_fading = self.sweeper.start
        self.kv_events: KvEvents[Endpoint] = KvEvents(
            self.index, on_block_size=lambda endpoint, size: self.pool.learn_block_size(endpoint, size)
        )
        self.kv_asking = SourceAsking(self.kv_events.told, self.kv_events.is_connected)
        self.scraper = Scraper(
            self._take_report,
            ScraperSettings(
                interval=settings.pool.scrape_interval,
                timeout=settings.pool.scrape_timeout,
                stale_after=settings.pool.stale_after,
            ),
            self.clock,
        )
        # Before the queue: it decides with what these have made of a change.
        self.pool.subscribe(self.ledger.pool_changed)
        self.pool.subscribe(self.calibration.pool_changed)
        self.pool.subscribe(self._follow_pool)
        self.sessions = Sessions(
            ttl=settings.sessions.ttl,
            max_sessions=settings.sessions.max_sessions,
            sticky=settings.sessions.affinity == "sticky",
        )
        self.selector = Selector(
            self.pool,
            self.ledger,
            CombinedIndex(self.index, self.predicted),
            self.calibration,
            sessions=self.sessions,
        )
        self.policy_file = _policy_file(settings.policy)
        policy = (self.policy_file and self.policy_file.load_if_changed()) or Policy.default()
        limits = QueueLimits(
            max_lanes=settings.queue.max_lanes,
            max_tenants=settings.queue.max_tenants,
            outcomes_a_poll=_OUTCOMES_A_TURN,
        )
        self.queue = AdmissionQueue(policy, self.selector, limits)
        self.fairness = FairnessMeter()

    def _build_faces(self) -> None:
        """What turns towards the gateway and the operator."""
        settings = self.settings
        self.telemetry = Telemetry(
            clock=self.clock,
            version=__version__,
            decisions=settings.telemetry.decisions,
            lines_per_second=settings.log.decisions_per_second,
        )
        self.selector.timer, self.selector.observe = time.perf_counter, self.telemetry.stages["select"]
        self.dispatcher = Dispatcher(self.queue, self.clock, self._tell)
        self.pool.subscribe(lambda change: self.dispatcher.kick())
        self.exchanges = Exchanges(
            self.pool,
            self.ledger,
            self.calibration,
            self.clock,
            self.dispatcher.kick,
            on_usage=self._take_usage,
            on_moved=self._take_move,
            on_never_sent=self.queue.withdraw,
            predicted=self.predicted,
            assumed_rate=settings.queue.assumed_prefill_rate,
            longest_request=settings.queue.longest_request,
        )
        self.index.on_stored = self.exchanges.block_stored
        self.recording = _recording(settings.telemetry, self.clock)
        self.exchanges.on_end = self._record_end
        self.deciding = Deciding(
            selector=self.selector,
            dispatcher=self.dispatcher,
            exchanges=self.exchanges,
            clock=self.clock,
            settings=DecidingSettings(
                max_wait=settings.queue.max_wait or inf,
                choices=settings.extproc.choices,
                shadow=settings.extproc.shadow,
            ),
            observe=self.telemetry.stages,
            on_sent=self._predict,
            on_cost=self.telemetry.metrics.decision,
        )
        # In this process, or as several processes beside it.
        self.faces: Face | Crew = (Face if settings.extproc.workers == 1 else Crew)(
            settings, self.deciding, self.pool, self.health, self.exchanges.logged, self.clock
        )
        self._cluster_rewrites = ModelRewrites()
        self._tell_rewrites()
        self._fill_sources()

    async def start(self) -> Addresses:
        """Listen on every port and follow every source. Raises OSError when a port is taken."""
        settings = self.settings
        ports = [await self.faces.serve(), await self._serve_health(settings.extproc)]
        review = _token_review(settings, self.clock)
        self._access = access = Access(settings.admin.host, settings.admin.token_file, review)
        if review is not None:
            self.telemetry.sources.stats["token_review"] = review.stats
        views = Views(self.telemetry, self.clock)
        self._admin = AdminServer(
            self.telemetry,
            views,
            access,
            ready=self._not_ready,
            public_metrics=settings.admin.public_metrics,
        )
        self._introspection = IntrospectionServer(self.telemetry, views, access)
        ports.append(await self._admin.start(settings.admin.host, settings.admin.port))
        ports.append(await self._introspection.start(settings.admin.host, settings.admin.grpc_port))
        self._spawn(self.telemetry.run())
        self._spawn(self._housekeeping())
        if self.policy_file is not None:
            self._spawn(self._follow_policy(self.policy_file))
        self._follow_source()
        addresses = Addresses(*ports)
        log.info("serving: %s", addresses)
        return addresses

    async def drain(self) -> None:
        """Say not ready, go on serving until nobody is left or the grace is over, then refuse who waits.

        Gateways hear of it after a while only, so for that long an empty picker is not done yet. Nor is it before the
        end of a gateway that stops along with it: clients may still send there.
        """
        self.health.update(draining=True)
        if self._member is not None:
            self._member.resign()
        deadline = self.clock() + self.settings.queue.drain_grace
        await asyncio.sleep(min(self.settings.queue.drain_notice, self.settings.queue.drain_grace))
        while self.clock() < deadline and (self.faces.open_streams or self._gateway_stays()):
            await asyncio.sleep(0.05)
        self.dispatcher.deliver(self.queue.shut_down(self.clock()))

    def _gateway_stays(self) -> bool:
        """Whether there is still a gateway that we are not to leave alone.

        It opens its log when its first request ends, and keeps it open; before that, the request speaks for it.
        """
        gateway = self.faces.log_stats
        return self.settings.queue.drain_after_gateway and (
            gateway.active_streams > 0 or (not gateway.entries and len(self.exchanges) > 0)
        )

    async def stop(self) -> None:
        """Stop at once what `drain` has left."""
        self.dispatcher.deliver(self.queue.shut_down(self.clock()))
        await self.faces.stop()
        await self._health_server.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._introspection.stop()
        await self._admin.stop()
        await self._access.close()
        self.dispatcher.close()
        await self.kv_asking.close()
        self.kv_events.close()
        await self.scraper.close()
        if self.recording is not None:
            await asyncio.to_thread(self.recording.close)

    async def _serve_health(self, settings: ExtProcSettings) -> int:
        self._health_server = RpcServer(
            max_message_bytes=_HEALTH_MESSAGE_BYTES, budget=ByteBudget(_HEALTH_HELD_BYTES)
        )
        HealthService(self.health).add_to(self._health_server)
        return await self._health_server.listen(settings.host, settings.health_port)

    def _not_ready(self) -> str | None:
        if self.health.ready:
            return None
        return "the pool has not been read yet" if not self.pool.synced else "following or draining"

    # --- sources ----------------------------------------------------------------------------------------

    def _follow_source(self) -> None:
        settings = self.settings.pool
        if settings.kubernetes.name is not None:
            self._spawn(self._follow_kubernetes())
        elif settings.file is not None:
            source = StaticPoolFile(settings.file)
            self.telemetry.sources.stats["pool_file"] = source.stats
            self._spawn(source.run(self._take_specs, _refuse_pool_file))
        else:
            log.warning("no pool: set pool.file or pool.kubernetes.name; every request will get 503")
            self._take_specs([])

    async def _follow_kubernetes(self) -> None:
        # Imported here: the Kubernetes client is large, and a static pool does without it.
        from picker.pool.kube.api import KubeApi
        from picker.pool.kube.membership import PoolMember

        settings = self.settings.pool.kubernetes
        api = await KubeApi.connect(settings.kubeconfig, settings.context)
        self._member = member = PoolMember(
            api,
            _membership(settings),
            on_specs=self._take_specs,
            on_priorities=self._take_priorities,
            on_rewrites=self._take_rewrites,
            on_leading=lambda leads: self.health.update(leader=leads),
            clock=self.clock,
        )
        sources = self.telemetry.sources.stats
        sources["kube"] = lambda: member.source.stats
        sources["kube_watch"] = lambda: member.source.stats.watches
        if member.elector is not None:
            sources["lease"] = member.elector.stats
        await member.run()

    def _take_rewrites(self, rewrites: ModelRewrites) -> None:
        self._cluster_rewrites = rewrites
        self._tell_rewrites()

    def _tell_rewrites(self) -> None:
        """The policy's rules go before those of the cluster's InferenceModelRewrites."""
        self.faces.take_rewrites(self.queue.policy.rewrites.then(self._cluster_rewrites))

    def _take_priorities(self, priorities: Mapping[str, int]) -> None:
        self.deciding.objectives = priorities

    def _take_specs(self, specs: list[EndpointSpec]) -> None:
        change = self.pool.replace(specs)
        self.health.update(synced=True)
        if change:
            log.info(
                "pool: %d endpoints (%d added, %d removed, %d changed)",
                len(self.pool),
                len(change.added),
                len(change.removed),
                len(change.changed),
            )

    def _follow_pool(self, change: PoolChange) -> None:
        for endpoint in change.removed:
            self.index.drop(endpoint.slot)
            self.predicted.drop(endpoint.slot)
        if not change.respecified:
            return
        self.kv_events.reconcile(self.pool)
        if self.settings.kvcache.discover:
            self.kv_asking.update(endpoint.spec for endpoint in self.pool)
        self.scraper.update(endpoint.spec for endpoint in self.pool)

    def _take_report(self, uid: str, report: EngineReport) -> None:
        endpoint = self.pool.report(uid, report)
        if endpoint is not None:
            self.ledger.correct(endpoint, report)
            self.calibration.inter_token.observe(endpoint.slot, report)
            self.queue.reported(endpoint)
            self.dispatcher.kick()

    # --- decisions --------------------------------------------------------------------------------------

    def _tell(self, outcome: Outcome) -> None:
        if isinstance(outcome, Released):
            self.telemetry.released(outcome)
        else:
            self.telemetry.dropped(outcome)
            self._record(outcome.work, outcome.reason)

    def _record_end(self, exchange: RoutedExchange) -> None:
        self._record(exchange.released.work, "dispatched", exchange.output_tokens)

    def _record(self, work: Work, outcome: str, output_tokens: int | None = None) -> None:
        live = self.telemetry.recording
        if self.recording is None and not live.wanted:
            return
        block_size = min(self.pool.block_sizes(), default=self.pool.default_block_size)
        live.take(work, outcome, output_tokens, block_size)
        if self.recording is not None:
            self.recording.take(work, outcome, output_tokens, block_size)

    def _predict(self, released: Released, prompt: PromptKeys) -> list[Prediction]:
        """Who reads the prompt will hold it soon, and who is handed it: a bridge until their events say so, or all
        there is without.
        """
        predictions = self._predict_at(released.decision.endpoint, prompt)
        if released.prefill is not None:
            predictions += self._predict_at(released.prefill.decision.endpoint, prompt)
        return predictions

    def _predict_at(self, endpoint: Endpoint, prompt: PromptKeys) -> list[Prediction]:
        settings = self.settings.kvcache
        has_events = self.kv_events.is_connected(endpoint.spec.uid)
        # The bridge has to reach to the end of the prefill, however long that has to wait.
        bridge = settings.bridge_ttl + self.selector.backlog_seconds(endpoint.slot)
        capacity = endpoint.report.num_blocks if endpoint.report else None
        return [
            self.predicted.predict(
                endpoint.slot,
                keys,
                self.clock(),
                ttl=bridge if has_events else settings.predicted_ttl,
                capacity=capacity or _UNKNOWN_CAPACITY,
            )
            for keys in prompt.blocks(endpoint.block_size or self.pool.default_block_size)
        ]

    def _take_move(self, released: Released, endpoint: Endpoint) -> list[Prediction]:
        """The gateway served a request elsewhere than where it was sent: its session and its blocks are there now."""
        session = released.work.demand.session
        if session is not None:
            self.sessions.served_by(session, endpoint.spec.uid)
        return self._predict_at(endpoint, released.work.demand.prompt)

    def _take_usage(self, released: Released, usage: Usage) -> None:
        """An engine has reported what a request came to: compare, and settle what was charged by estimate."""
        chosen, work = released.decision.chosen, released.work
        if usage.output_tokens is not None:
            self.queue.settle(work, usage.output_tokens)
        if (
            usage.cached_tokens is None
            or len(work.demand.prompt.lengths) != 1
            or released.prefill is not None
        ):
            # Of a batch, engines report the cached tokens of the last prompt only; of a prompt that was read
            # elsewhere, all that they were handed.
            return
        held = released.decision.held_tokens
        self.telemetry.reported(held, usage.cached_tokens)
        self.exchanges.accounts.of(chosen.endpoint).reported_cached_tokens += usage.cached_tokens
        verdict = self.accuracy.observe(
            work.model,
            predicted=held,
            reported=usage.cached_tokens,
            block_size=chosen.endpoint.block_size or self.pool.default_block_size,
        )
        if verdict is not None and verdict.cause is not Cause.NONE:
            log.warning("cached tokens of model %r: %s", work.model, verdict.explanation)

    # --- background -------------------------------------------------------------------------------------

    async def _follow_policy(self, file: PolicyFile) -> None:
        while True:
            await asyncio.sleep(self.settings.policy.reload_interval)
            try:
                policy = await asyncio.to_thread(file.load_if_changed)
            except PolicyError as error:
                log.error("the new policy is refused, the old one stays: %s", error)
                continue
            if policy is not None:
                log.info("new policy: %s", diff_policies(self.queue.policy, policy))
                self.dispatcher.deliver(self.queue.reload(policy, self.clock()))
                self._tell_rewrites()

    async def _housekeeping(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)
            self.sweeper.start()
            self.sessions.expire(self.clock())
            self.exchanges.expire(self.clock())
            self.pool.mark_stale(self.scraper.stale())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, UnusableCredentials):
                log.critical("%s; stopping", error)
            else:
                log.critical("a background task failed; stopping", exc_info=error)
            self.failed.set()

    def _fill_sources(self) -> None:
        sources = self.telemetry.sources
        sources.classes = lambda: class_stats(self.queue, self.clock())
        sources.endpoints = lambda: endpoint_stats(
            self.pool, self.ledger, self.index, self.exchanges.accounts, self.clock()
        )
        sources.synced = lambda: self.pool.synced
        sources.stats |= {
            "exchanges": self.exchanges.stats,
            "fairness": lambda: self.fairness.sample(self.queue.flows()),
            "fairness_worst": lambda: self.fairness.worst,
            "ledger": self.ledger.stats,
            "pool": self.pool.stats,
            "scraper": lambda: self.scraper.stats,
            "sessions": self.sessions.stats,
            "disaggregation": self.queue.disaggregation.stats,
            "kv_index": self.index.stats,
            "predicted_index": self.predicted.stats,
            "kv_asking": self.kv_asking.stats,
            "kv_sources": self.kv_events.stats,
            "kv_streams": self.kv_events.stream_stats,
            "kv_blocks": self.kv_events.block_stats,
            "accuracy": self.accuracy.stats,
        }
        sources.stats |= self.faces.sources()
        if self.recording is not None:
            sources.stats["recording"] = self.recording.stats
        if self.policy_file is not None:
            sources.stats["policy_file"] = self.policy_file.stats


def _token_review(settings: Settings, clock: Callable[[], float]) -> TokenReview | None:
    review, cluster = settings.admin.token_review, settings.pool.kubernetes
    if not review.names:
        return None

    async def connect() -> KubeApi:
        from picker.pool.kube.api import KubeApi

        return await KubeApi.connect(cluster.kubeconfig, cluster.context)

    return TokenReview(connect, review.names, review.audiences, clock=clock, ttl=review.ttl)


def _policy_file(settings: PolicySettings) -> PolicyFile | None:
    return PolicyFile(settings.file, max_classes=settings.max_classes) if settings.file else None


def _recording(settings: TelemetrySettings, clock: Callable[[], float]) -> Recording | None:
    if settings.record_file is None:
        return None
    try:
        return Recording(settings.record_file, settings.record_limit, clock)
    except OSError as error:
        raise SettingsError(f"telemetry.record_file: {settings.record_file}: {error.strerror}") from None


def _membership(settings: KubernetesSettings) -> Membership:
    from picker.pool.kube.membership import Membership
    from picker.pool.kube.pod_table import PodDefaults
    from picker.pool.kube.watch import WatchSettings
    from picker.pool.lease import LeaseSettings

    assert settings.name is not None
    return Membership(
        pool=settings.name,
        namespace=settings.namespace,
        pod=settings.pod,
        node_taints=settings.node_taints,
        defaults=PodDefaults(**dict(settings.pods) | {"engine": EngineKind(settings.pods.engine)}),
        watch=WatchSettings(**dict(settings.watch)),
        lease=LeaseSettings(**dict(settings.lease)) if settings.leader_election else None,
    )


def _refuse_pool_file(error: PoolFileError) -> None:
    log.error("the new pool file is refused, the old one stays: %s", error)
