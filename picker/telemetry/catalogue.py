"""Every metric that Picker exports, in one place. The table in this folder's README.md is made from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from picker.telemetry.sources import ClassStats, EndpointStats


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A name (counters end in `_total`), what it counts, and the names of its labels."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClassMetric:
    """A number of each policy class; None: no sample."""

    metric: Metric
    read: Callable[[ClassStats], float | None]


@dataclass(frozen=True, slots=True)
class EndpointMetric:
    """A number of each endpoint; None: no sample."""

    metric: Metric
    read: Callable[[EndpointStats], float | None]


@dataclass(frozen=True, slots=True)
class RoomMetric:
    """A field of a room's stats object; where it is a dict, its keys are the values of the one label."""

    metric: Metric
    room: str
    field: str


@dataclass(frozen=True, slots=True)
class HistogramMetric:
    """Durations observed as they happen."""

    metric: Metric
    buckets: tuple[float, ...]


_CLASS = ("policy_class",)
_ENDPOINT = ("endpoint", "address", "rank")


def _of_class(name: str, kind: Kind, help: str, read: Callable[[ClassStats], float | None]) -> ClassMetric:
    return ClassMetric(Metric(name, kind, help, _CLASS), read)


def _of_endpoint(name: str, help: str, read: Callable[[EndpointStats], float | None]) -> EndpointMetric:
    return EndpointMetric(Metric(name, _kind(name), help, _ENDPOINT), read)


def _of_room(room: str, field: str, name: str, help: str, label: str | None = None) -> RoomMetric:
    return RoomMetric(Metric(name, _kind(name), help, (label,) if label else ()), room, field)


def _kind(name: str) -> Kind:
    return Kind.COUNTER if name.endswith("_total") else Kind.GAUGE


CLASS_METRICS = (
    _of_class("picker_queue_requests", Kind.GAUGE, "Requests that wait.", lambda c: c.waiting_requests),
    _of_class("picker_queue_tokens", Kind.GAUGE, "Prompt tokens that wait.", lambda c: c.waiting_tokens),
    _of_class(
        "picker_queue_cached_tokens",
        Kind.GAUGE,
        "Of the prompt tokens that wait, those that an endpoint had cached on arrival.",
        lambda c: c.waiting_cached_tokens,
    ),
    _of_class(
        "picker_queue_oldest_wait_seconds",
        Kind.GAUGE,
        "How long the request has waited that has waited longest.",
        lambda c: c.oldest_wait,
    ),
    _of_class(
        "picker_queue_fill_ratio",
        Kind.GAUGE,
        "Used part of the fullest of the class's queue limits; at 1 new requests are refused.",
        lambda c: c.fill,
    ),
    _of_class("picker_class_quantum_tokens", Kind.GAUGE, "The class's quantum.", lambda c: c.quantum),
    _of_class(
        "picker_class_deficit_tokens",
        Kind.GAUGE,
        "Credit that the class has in hand for its next requests.",
        lambda c: c.deficit,
    ),
    _of_class(
        "picker_dispatched_requests_total",
        Kind.COUNTER,
        "Requests sent to an endpoint.",
        lambda c: c.dispatched_requests,
    ),
    _of_class(
        "picker_dispatched_cost_tokens_total",
        Kind.COUNTER,
        "What the class was charged: uncached tokens of its dispatched requests, at least one each.",
        lambda c: c.dispatched_cost,
    ),
    _of_class(
        "picker_cancelled_requests_total",
        Kind.COUNTER,
        "Requests whose client went away while they waited.",
        lambda c: c.cancelled,
    ),
    _of_class(
        "picker_shared_lane_requests_total",
        Kind.COUNTER,
        "Requests that waited in the common lane: the class had as many lanes as it may have.",
        lambda c: c.shared_lane,
    ),
    _of_class(
        "picker_shared_tenant_requests_total",
        Kind.COUNTER,
        "Requests that shared the turns of one tenant: the class told as many apart as it may.",
        lambda c: c.shared_tenant,
    ),
)

DROPPED = Metric(
    "picker_dropped_requests_total", Kind.COUNTER, "Requests refused, by reason.", ("policy_class", "reason")
)
BLOCKED = Metric(
    "picker_class_blocked_seconds_total",
    Kind.COUNTER,
    "Time that the class had requests waiting and sent none, by what it waited for.",
    ("policy_class", "reason"),
)
SHARE = Metric(
    "picker_class_share_ratio",
    Kind.GAUGE,
    "The class's part of the work dispatched in the window; no sample when there was none.",
    ("policy_class", "window"),
)
ENTITLEMENT = Metric(
    "picker_class_entitlement_ratio",
    Kind.GAUGE,
    "The part of that work that the weights entitle the class to, counting it only while it had work.",
    ("policy_class", "window"),
)

ENDPOINT_METRICS = (
    _of_endpoint("picker_endpoint_ready", "1 when the endpoint takes requests.", lambda e: e.ready),
    _of_endpoint(
        "picker_endpoint_booked_prefill_tokens",
        "Uncached tokens sent there that are not yet known to be read.",
        lambda e: e.prefill_tokens,
    ),
    _of_endpoint(
        "picker_endpoint_booked_requests", "Requests sent there that have not ended.", lambda e: e.running
    ),
    _of_endpoint(
        "picker_endpoint_foreign_requests",
        "Requests that the engine reports beyond our own.",
        lambda e: e.foreign,
    ),
    _of_endpoint(
        "picker_endpoint_engine_running_requests",
        "Running requests as the engine reports them.",
        lambda e: e.engine_running,
    ),
    _of_endpoint(
        "picker_endpoint_engine_waiting_requests",
        "Waiting requests as the engine reports them.",
        lambda e: e.engine_waiting,
    ),
    _of_endpoint(
        "picker_endpoint_kv_usage_ratio",
        "Part of the KV cache that requests hold, as the engine reports it.",
        lambda e: e.kv_usage,
    ),
    _of_endpoint(
        "picker_endpoint_cached_blocks",
        "Blocks of the endpoint's cache that the index knows.",
        lambda e: e.cached_blocks,
    ),
    _of_endpoint(
        "picker_endpoint_report_age_seconds", "Time since the engine was last heard.", lambda e: e.report_age
    ),
    _of_endpoint(
        "picker_endpoint_prompt_tokens_total",
        "Prompt tokens of the requests sent there.",
        lambda e: e.prompt_tokens,
    ),
    _of_endpoint(
        "picker_endpoint_predicted_cached_tokens_total",
        "Of these, tokens that it was believed to have cached.",
        lambda e: e.predicted_cached_tokens,
    ),
    _of_endpoint(
        "picker_endpoint_reported_cached_tokens_total",
        "Cached tokens as the engine reported them, where responses are read.",
        lambda e: e.reported_cached_tokens,
    ),
    _of_endpoint(
        "picker_endpoint_timed_requests_total",
        "Requests whose time to the first token was both predicted and observed.",
        lambda e: e.timed_requests,
    ),
    _of_endpoint(
        "picker_endpoint_predicted_ttft_seconds_total",
        "Sum of their predicted times: the tokens ahead by the endpoint's learned rate.",
        lambda e: e.predicted_ttft,
    ),
    _of_endpoint(
        "picker_endpoint_observed_ttft_seconds_total",
        "Sum of the times from decision until a KV event or the first byte of the answer showed the prefill done.",
        lambda e: e.observed_ttft,
    ),
)

POOL_SYNCED = Metric("picker_pool_synced", Kind.GAUGE, "1 once the pool's source has spoken.")
POOL_ENDPOINTS = Metric("picker_pool_endpoints", Kind.GAUGE, "Endpoints in the pool.")

ROOM_METRICS = (
    _of_room("extproc", "streams", "picker_extproc_streams_total", "Requests that the gateway asked about."),
    _of_room("extproc", "active_streams", "picker_extproc_active_streams", "Streams that are open."),
    _of_room("extproc", "routed", "picker_extproc_routed_total", "Requests answered with an endpoint."),
    _of_room(
        "extproc", "refused", "picker_extproc_refused_total", "Requests answered with an error.", "reason"
    ),
    _of_room("extproc", "given_up", "picker_extproc_given_up_total", "Clients that left without an answer."),
    _of_room("extproc", "protocol_errors", "picker_extproc_protocol_errors_total", "Impossible messages."),
    _of_room("extproc", "internal_errors", "picker_extproc_internal_errors_total", "Faults of Picker's own."),
    _of_room("bodies", "held_bytes", "picker_bodies_held_bytes", "Request bodies in memory."),
    _of_room("bodies", "peak_bytes", "picker_bodies_peak_bytes", "The most that request bodies ever took."),
    _of_room(
        "bodies", "refusals", "picker_bodies_refused_total", "Requests refused for want of that memory."
    ),
    _of_room(
        "access_log", "active_streams", "picker_access_log_streams", "Open streams of the gateway's log."
    ),
    _of_room("access_log", "entries", "picker_access_log_entries_total", "Entries of the gateway's log."),
    _of_room(
        "access_log",
        "without_request_id",
        "picker_access_log_unmarked_total",
        "Entries of requests that Picker did not route.",
    ),
    _of_room("exchanges", "open", "picker_open_requests", "Routed requests that have not ended."),
    _of_room("exchanges", "ended_by_stream", "picker_ended_by_stream_total", "Ends seen on the stream."),
    _of_room("exchanges", "ended_by_access_log", "picker_ended_by_access_log_total", "Ends told by the log."),
    _of_room("exchanges", "never_sent", "picker_never_sent_total", "Decisions that the gateway never got."),
    _of_room(
        "exchanges",
        "prefills_by_kv_event",
        "picker_prefills_by_kv_event_total",
        "Prefills whose end a KV event told of first.",
    ),
    _of_room(
        "exchanges",
        "prefills_by_time",
        "picker_prefills_by_time_total",
        "Prefills that count as over because they should be and nothing told of them.",
    ),
    _of_room(
        "exchanges",
        "given_up",
        "picker_requests_given_up_total",
        "Requests that count as over because of queue.longest_request.",
    ),
    _of_room("requests", "prompt_tokens", "picker_prompt_tokens_total", "Prompt tokens dispatched."),
    _of_room(
        "requests",
        "cached_tokens",
        "picker_predicted_cached_tokens_total",
        "Of these, tokens that the chosen endpoint was believed to have cached.",
    ),
    _of_room(
        "requests",
        "reported_cached_tokens",
        "picker_reported_cached_tokens_total",
        "Cached tokens as engines reported them in their responses.",
    ),
    _of_room(
        "requests",
        "prediction_error_tokens",
        "picker_cached_tokens_prediction_error_total",
        "Sum of the differences, either way, between predicted and reported cached tokens.",
    ),
    _of_room("ledger", "booked", "picker_ledger_bookings_total", "Requests booked on an endpoint."),
    _of_room("ledger", "released", "picker_ledger_releases_total", "Bookings that ended by a signal."),
    _of_room("ledger", "reaped", "picker_ledger_reaped_total", "Bookings that no signal ended."),
    _of_room("ledger", "moved", "picker_ledger_moved_total", "Bookings that the gateway served elsewhere."),
    _of_room("pool", "changes", "picker_pool_changes_total", "Changes of the pool's membership."),
    _of_room(
        "pool", "overloads", "picker_pool_overloads_total", "Times that an engine was found overloaded."
    ),
    _of_room("pool", "over_limit", "picker_pool_over_limit_total", "Endpoints left out: the pool was full."),
    _of_room("pool_file", "loaded", "picker_pool_file_loads_total", "Versions of the pool file taken up."),
    _of_room("pool_file", "refused", "picker_pool_file_refusals_total", "Versions of the pool file refused."),
    _of_room("kube_watch", "events", "picker_kube_events_total", "Events of the API server's watches."),
    _of_room("kube_watch", "faults", "picker_kube_faults_total", "Watches and lists that failed.", "fault"),
    _of_room(
        "kube",
        "bad_annotations",
        "picker_kube_bad_annotations",
        "Pods' annotations that cannot be read.",
    ),
    _of_room(
        "kube",
        "last_sync_age",
        "picker_kube_last_sync_age_seconds",
        "Time since the API server last showed that the state is current.",
    ),
    _of_room("scraper", "scrapes", "picker_scrapes_total", "Looks at an engine's metrics that went well."),
    _of_room("scraper", "failures", "picker_scrape_failures_total", "Looks that did not.", "reason"),
    _of_room(
        "scraper", "stale", "picker_scrape_stale_endpoints", "Scraped endpoints without recent figures."
    ),
    _of_room("policy_file", "loaded", "picker_policy_loads_total", "Versions of the policy taken up."),
    _of_room("policy_file", "refused", "picker_policy_refusals_total", "Versions of the policy refused."),
    _of_room("kv_index", "stored", "picker_kv_index_stored_blocks_total", "Blocks added."),
    _of_room("kv_index", "removed", "picker_kv_index_removed_blocks_total", "Blocks removed."),
    _of_room(
        "kv_index", "evicted", "picker_kv_index_evicted_blocks_total", "Blocks dropped for want of room."
    ),
    _of_room(
        "kv_index", "cleared", "picker_kv_index_clears_total", "Times that a whole cache was forgotten."
    ),
    _of_room(
        "kv_streams", "live", "picker_kv_messages_total", "Messages of KV events, as they were published."
    ),
    _of_room("kv_streams", "replayed", "picker_kv_replayed_messages_total", "Messages of replays."),
    _of_room("kv_streams", "gaps", "picker_kv_gaps_total", "Times that a sequence of messages had a gap."),
    _of_room("kv_streams", "missed", "picker_kv_missed_messages_total", "Messages in those gaps."),
    _of_room("kv_streams", "replays", "picker_kv_replays_total", "Replays asked for."),
    _of_room(
        "kv_streams", "replay_failures", "picker_kv_replay_failures_total", "Replays that gave not all."
    ),
    _of_room(
        "kv_streams",
        "losses",
        "picker_kv_losses_total",
        "Times that an endpoint's entries were dropped because events are lost for good.",
    ),
    _of_room("kv_streams", "restarts", "picker_kv_engine_restarts_total", "Restarts of engines."),
    _of_room("kv_streams", "bad_frames", "picker_kv_bad_messages_total", "Messages that could not be read."),
    _of_room(
        "kv_streams", "malformed_events", "picker_kv_malformed_events_total", "Events that could not be."
    ),
    _of_room(
        "kv_asking",
        "answers",
        "picker_kv_sources_asked_total",
        "Times that an engine was asked where it publishes its KV events, by what came of it.",
        "answer",
    ),
    _of_room(
        "kv_asking", "targets", "picker_kv_sources_asked", "Engines whose KV events have to be asked for."
    ),
    _of_room("kv_blocks", "events", "picker_kv_events_total", "Events applied."),
    _of_room(
        "kv_blocks", "parked", "picker_kv_parked_blocks_total", "Blocks whose parent was not known yet."
    ),
    _of_room("kv_blocks", "adopted", "picker_kv_adopted_blocks_total", "Of these, those whose parent came."),
    _of_room("kv_blocks", "abandoned", "picker_kv_abandoned_blocks_total", "Of these, those given up."),
    _of_room(
        "kv_blocks", "odd_sized", "picker_kv_odd_blocks_total", "Blocks of another size than the engine's."
    ),
    _of_room(
        "kv_blocks", "overflow", "picker_kv_overflow_blocks_total", "Blocks over the limit of an engine."
    ),
    _of_room(
        "predicted_index",
        "predicted",
        "picker_predicted_blocks_total",
        "Blocks predicted from our own routing.",
    ),
    _of_room(
        "predicted_index",
        "retracted",
        "picker_predicted_retracted_blocks_total",
        "Predictions taken back: their requests never reached the engine.",
    ),
    _of_room(
        "predicted_index", "expired", "picker_predicted_expired_blocks_total", "Predictions that ran out."
    ),
    _of_room(
        "rewriting",
        "requests",
        "picker_model_rewrites_total",
        "Requests that a rewrite rule applied to, by the model that they went on with.",
        "model",
    ),
    _of_room(
        "disaggregation",
        "requests",
        "picker_disaggregated_requests_total",
        "Requests of profiles with disaggregation, by where their prompts were read: apart, or (short,"
        " no_prefill_endpoint) by the endpoint that decodes.",
        "prefill",
    ),
    _of_room("sessions", "known", "picker_sessions", "Sessions whose endpoint is remembered."),
    _of_room("sessions", "started", "picker_sessions_started_total", "Sessions that began."),
    _of_room(
        "sessions", "kept", "picker_session_requests_kept_total", "Requests sent where their session was."
    ),
    _of_room(
        "sessions", "moved", "picker_session_requests_moved_total", "Requests sent elsewhere than that."
    ),
    _of_room(
        "sessions",
        "ended",
        "picker_sessions_ended_total",
        "Sessions forgotten: finished by a request, expired, or evicted for others.",
        "cause",
    ),
    _of_room(
        "accuracy",
        "verdicts",
        "picker_cached_tokens_verdicts_total",
        "Times that a model's predictions began to differ from what engines reported, by cause.",
        "cause",
    ),
    _of_room("tokens", "exact", "picker_tokenized_prompts_total", "Prompts counted exactly."),
    _of_room(
        "tokens",
        "estimated",
        "picker_estimated_prompts_total",
        "Prompts whose tokens were estimated by their size, by reason.",
        "reason",
    ),
    _of_room("tokens", "in_flight", "picker_tokenizing_prompts", "Prompts with the tokenizing threads now."),
    _of_room(
        "tokens", "late", "picker_tokenized_late_total", "Counts that came when nobody waited any more."
    ),
    _of_room("tokens", "cache_hits", "picker_token_cache_hits_total", "Parts of prompts found in the cache."),
    _of_room(
        "tokens", "cache_misses", "picker_token_cache_misses_total", "Parts of prompts not found there."
    ),
    _of_room(
        "tokens", "cache_evictions", "picker_token_cache_evictions_total", "Parts dropped for want of room."
    ),
    _of_room("tokens", "cache_bytes", "picker_token_cache_bytes", "Size of the tokenization cache."),
    _of_room(
        "tokens", "load_failures", "picker_tokenizer_load_failures_total", "Tokenizers that did not load."
    ),
    _of_room(
        "token_review",
        "answers",
        "picker_token_reviews_total",
        "Readers' tokens shown to the API server, by what came of it.",
        "answer",
    ),
    _of_room("lease", "leading", "picker_leader", "1 while this picker holds the Lease."),
    _of_room("lease", "started", "picker_lease_acquisitions_total", "Times that this picker began to lead."),
    _of_room("lease", "stopped", "picker_lease_losses_total", "Times that it ceased to."),
    _of_room("lease", "failures", "picker_lease_failures_total", "Calls about the Lease that failed."),
    _of_room(
        "fairness",
        "rounds",
        "picker_fairness_gap_rounds",
        "By how many rounds one waiting class is ahead of another beyond its weight.",
    ),
    _of_room("fairness", "bound", "picker_fairness_bound_rounds", "The most that this gap may be."),
    _of_room(
        "fairness_worst",
        "rounds",
        "picker_fairness_worst_gap_rounds",
        "The gap that came closest to its bound since the start.",
    ),
    _of_room("fairness_worst", "bound", "picker_fairness_worst_bound_rounds", "The bound of that gap."),
    _of_room("recording", "written", "picker_recorded_requests_total", "Requests written to the recording."),
    _of_room(
        "recording", "lost", "picker_unrecorded_requests_total", "Requests left out: file full, or disk slow."
    ),
    _of_room("recording", "bytes", "picker_recording_bytes", "Size of the recording."),
    _of_room("faces", "running", "picker_faces", "Processes that serve the gateway beside this one."),
    _of_room(
        "faces",
        "restarts",
        "picker_face_restarts_total",
        "Times that one ended by itself and was started again.",
    ),
    _of_room("face", "cpu_seconds", "picker_faces_cpu_seconds_total", "Processor time of these processes."),
    _of_room("log", "lost_lines", "picker_log_lost_lines_total", "Log lines that could not be written."),
    _of_room("loop", "lag", "picker_event_loop_lag_seconds", "Longest delay of the event loop of late."),
    _of_room("loop", "tasks", "picker_event_loop_tasks", "Tasks on the event loop."),
)

_WAITS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STAGES = (
    0.00001,
    0.000025,
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
)

QUEUE_WAIT = HistogramMetric(
    Metric("picker_queue_wait_seconds", Kind.HISTOGRAM, "From a request's arrival to its dispatch.", _CLASS),
    _WAITS,
)
STAGE = HistogramMetric(
    Metric(
        "picker_stage_seconds",
        Kind.HISTOGRAM,
        "Time of one request in one stage; tokenize renders chat templates too, select is a part of queue.",
        ("stage",),
    ),
    _STAGES,
)
DECISION = HistogramMetric(
    Metric(
        "picker_decision_seconds", Kind.HISTOGRAM, "Time of a dispatched request in all stages but the queue."
    ),
    _STAGES,
)
HISTOGRAMS = (QUEUE_WAIT, STAGE, DECISION)

STAGES = ("parse", "tokenize", "hash", "lookup", "queue", "select", "reply")

CATALOGUE: tuple[Metric, ...] = (
    *(entry.metric for entry in CLASS_METRICS),
    DROPPED,
    BLOCKED,
    SHARE,
    ENTITLEMENT,
    *(entry.metric for entry in HISTOGRAMS),
    *(entry.metric for entry in ENDPOINT_METRICS),
    POOL_SYNCED,
    POOL_ENDPOINTS,
    *(entry.metric for entry in ROOM_METRICS),
)


def metrics_reference() -> str:
    """The catalogue as a table."""
    rows = ["| metric | type | labels | what it says |", "| --- | --- | --- | --- |"]
    for metric in CATALOGUE:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows) + "\n"
