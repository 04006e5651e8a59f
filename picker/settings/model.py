"""The settings, in groups: each with its default, its bounds and what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    field_validator,
    model_validator,
)

from picker.requests.hints import HintTrust
from picker.requests.limits import BodyLimits

Port = Annotated[int, Field(ge=0, le=65535)]
# What RFC 9110 calls a token: the name of a header or of a cookie.
SessionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}$")]


class Section(BaseModel):
    """A group of settings; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class TlsSettings(Section):
    mode: Literal["off", "self-signed", "files"] = Field(
        "off",
        description="`self-signed` makes a certificate at start, for gateways that do not verify it.",
    )
    cert_file: Path | None = Field(
        None, description="PEM certificate chain, for mode `files`; followed as it changes."
    )
    key_file: Path | None = Field(None, description="PEM private key, for mode `files`.")
    client_ca_file: Path | None = Field(
        None, description="Ask clients for a certificate that this PEM bundle vouches for, and refuse others."
    )

    client_names: tuple[str, ...] = Field(
        (),
        description="Of these names a client's certificate must carry one: its subject alternative names, or its"
        " common name where it has none. Needs client_ca_file.",
    )

    @model_validator(mode="after")
    def _files_are_named(self) -> TlsSettings:
        if self.mode == "files" and not (self.cert_file and self.key_file):
            raise ValueError("mode `files` needs cert_file and key_file")
        if self.mode != "files" and (self.cert_file or self.key_file):
            raise ValueError("cert_file and key_file are for mode `files`")
        if self.mode != "files" and self.client_ca_file:
            raise ValueError("client_ca_file is for mode `files`")
        if self.client_names and not self.client_ca_file:
            raise ValueError("client_names needs client_ca_file: an unverified name is worth nothing")
        return self


class ExtProcSettings(Section):
    """The gRPC face that the gateway talks to."""

    host: str = Field("0.0.0.0", description="Address to listen on.")
    port: Port = Field(9002, description="Port of the ext_proc service; 0 takes a free one.")
    health_port: Port = Field(9003, description="Port of the gRPC health service; 0 takes a free one.")
    workers: PositiveInt = Field(
        1,
        le=64,
        description="Processes that read requests, beside the one that decides; they share the port, and the limits of"
        " streams, bodies and tokenizing are divided among them. 1: a single process does both. The gateway has to open"
        " many connections, as each goes to one process: limit the streams of a connection there.",
    )
    total_body_limit: ByteSize = Field(
        ByteSize(1024**3),
        gt=0,
        description="Bytes of all bodies held at once, those that are still coming included; past it new requests get"
        " 503.",
    )
    max_header_bytes: ByteSize = Field(
        ByteSize(256 * 1024), gt=0, description="Bytes of a request's headers; past it the answer is 431."
    )
    choices: PositiveInt = Field(
        1,
        description="Endpoints named in the answer, in order of preference. More than 1 only for gateways that walk"
        " such a list; the Envoy of the chart takes the first.",
    )
    max_streams: PositiveInt = Field(20_000, description="Requests open at once; past it new ones get 503.")
    shadow: bool = Field(
        False,
        description="Decide, record and count, but let the gateway route as it would without Picker: "
        "name no endpoint, refuse nothing, hold nothing.",
    )
    observe: Literal["off", "usage"] = Field(
        "off",
        description="`usage` also reads responses, where they pass through, for the tokens reported.",
    )
    tls: TlsSettings = TlsSettings()


class TokenReviewSettings(Section):
    """Readers by their Kubernetes tokens: the API server says whose they are. Needs credentials that may create
    TokenReviews."""

    names: tuple[str, ...] = Field(
        (),
        description="Users and groups that may read, as `system:serviceaccount:monitoring:prometheus`. Without any,"
        " the API server is not asked.",
    )
    audiences: tuple[str, ...] = Field(
        (), description="Their tokens must be for one of these audiences; by default for the API server."
    )
    ttl: PositiveFloat = Field(10.0, description="Seconds that an answer is remembered.")

    @model_validator(mode="after")
    def _audiences_are_of_somebody(self) -> TokenReviewSettings:
        if self.audiences and not self.names:
            raise ValueError("audiences needs names: any token of the cluster is for somebody")
        return self


class AdminSettings(Section):
    """Metrics, health, the dashboard and the Introspection API."""

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. Beyond loopback, all but metrics and health need a token.",
    )
    port: Port = Field(9090, description="HTTP port; 0 takes a free one.")
    grpc_port: Port = Field(9091, description="Port of the Introspection API; 0 takes a free one.")
    token_file: Path | None = Field(None, description="File with the bearer token that readers must send.")
    public_metrics: bool = Field(True, description="Serve /metrics without the token.")
    token_review: TokenReviewSettings = TokenReviewSettings()


class PolicySettings(Section):
    """The policy file and who may say which class a request belongs to."""

    file: Path | None = Field(None, description="The policy YAML. Without one there is one class, `default`.")
    reload_interval: PositiveFloat = Field(2.0, description="Seconds between looks for a new version.")
    max_classes: PositiveInt = Field(
        256, description="Classes of one profile; a policy with more is refused."
    )
    hints: HintTrust = HintTrust()


class PodSettings(Section):
    """What holds for pods that do not say otherwise in their annotations `picker.dev/...`."""

    engine: Literal["vllm", "sglang", "trtllm"] = Field("vllm", description="The engine in the pods.")
    kv_events_port: Port | None = Field(5557, description="Port of the KV events; null: ask each engine.")
    kv_replay_port: Port | None = Field(
        5558,
        description="Port that replays missed KV events; null, and with several target ports: none.",
    )
    block_size: PositiveInt | None = Field(
        None, description="Tokens in a KV block, until the engine has said it."
    )
    max_num_batched_tokens: PositiveInt | None = Field(
        None, description="Token budget of an engine's iteration, for thresholds that are a part of it."
    )


class WatchSettings(Section):
    """How the API server is followed. Seconds."""

    silence: PositiveFloat = Field(
        60.0, description="A connection on which nothing was heard for this long is given up as broken."
    )
    list_timeout: PositiveFloat = Field(30.0, description="Longest wait for a list.")
    first_backoff: PositiveFloat = Field(0.2, description="Pause after a failure; doubles with each more.")
    max_backoff: PositiveFloat = Field(30.0, description="Longest such pause.")
    absent_retry: PositiveFloat = Field(
        60.0, description="Pause between looks for optional resources that the cluster does not have."
    )
    page_size: PositiveInt = Field(250, description="Objects asked for at once in a list.")


class LeaseSettings(Section):
    """The election of one leader. Seconds."""

    duration: PositiveFloat = Field(
        15.0, ge=1, description="A leader that was not heard of for this long is followed by another."
    )
    retry_period: PositiveFloat = Field(2.0, description="Pause between looks at the Lease.")
    request_timeout: PositiveFloat = Field(5.0, description="Longest wait for an answer about the Lease.")

    @model_validator(mode="after")
    def _outlasts_a_failure(self) -> LeaseSettings:
        if not self.duration > 2 * self.request_timeout + self.retry_period:
            raise ValueError("duration must be above 2 * request_timeout + retry_period")
        return self


class KubernetesSettings(Section):
    name: str | None = Field(None, description="The InferencePool to serve; turns the Kubernetes source on.")
    namespace: str | None = Field(None, description="Its namespace; by default the picker's own.")
    node_taints: bool = Field(False, description="Also take taints from the pods' nodes.")
    leader_election: bool = Field(False, description="Only the holder of the pool's Lease is ready.")
    pod: str | None = Field(
        None,
        description="The picker's own pod. While it leads it carries the label `picker.dev/leader`, for a Service to"
        " select. Only with leader_election.",
    )
    kubeconfig: Path | None = Field(
        None, description="How to reach the API server from outside; by default as a pod inside."
    )
    context: str | None = Field(None, description="The context in it; by default the current one.")
    pods: PodSettings = PodSettings()
    watch: WatchSettings = WatchSettings()
    lease: LeaseSettings = LeaseSettings()


class PoolSettings(Section):
    """Where the endpoints come from, and how their engines are asked."""

    file: Path | None = Field(None, description="Static pool YAML. Read anew when it changes.")
    kubernetes: KubernetesSettings = KubernetesSettings()
    max_endpoints: PositiveInt = Field(4096, description="Endpoints past this number are left out.")
    scrape_interval: PositiveFloat = Field(1.0, description="Seconds between scrapes of an engine.")
    scrape_timeout: PositiveFloat = Field(1.0, description="Seconds to wait for a scrape.")
    stale_after: PositiveFloat = Field(
        5.0,
        description="An engine unheard for so many seconds gets no request while another is heard; one that"
        " lets nobody connect, at once.",
    )

    overload_waiting: PositiveInt | None = Field(
        None,
        description="An engine in which so many requests wait by its own report gets none while another that may take"
        " them has less; until no more than half as many do. Null: it is only dearer.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> PoolSettings:
        if self.file is not None and self.kubernetes.name is not None:
            raise ValueError("file and kubernetes.name are two sources; a pool has one")
        return self


class TokenSettings(Section):
    """Tokenizers and the bounds of their work."""

    models: dict[str, Path] = Field(
        {}, description="Directory with tokenizer.json by model name; `*` stands for every other model."
    )
    chat_template_kwargs: dict[str, dict[str, JsonValue]] = Field(
        {},
        description="What a model's engines are started with as `--default-chat-template-kwargs`, by the same names; a"
        " request's own come first.",
    )
    threads: PositiveInt = Field(4, description="Threads that tokenize.")
    timeout: PositiveFloat = Field(2.0, description="Seconds for one prompt; past it, its size is estimated.")
    max_prompt_bytes: ByteSize = Field(
        ByteSize(8 * 1024**2), gt=0, description="Longer prompts are estimated by their size."
    )
    template_timeout: PositiveFloat = Field(
        2.0, description="Seconds for one chat template; past it, the prompt's size is estimated."
    )
    max_template_characters: PositiveInt = Field(
        16 * 1024**2, description="Characters that a chat template may write, or make in one step."
    )
    cache: ByteSize = Field(ByteSize(128 * 1024**2), description="Bytes of the tokenization cache.")


class KvCacheSettings(Section):
    """The index of what each engine has cached."""

    max_blocks: PositiveInt = Field(4_000_000, description="Blocks in the index; past it the oldest go.")
    predicted_ttl: PositiveFloat = Field(
        120.0,
        description="Seconds that a prediction lives for an engine without KV events.",
    )
    bridge_ttl: PositiveFloat = Field(
        10.0,
        description="The same for an engine with KV events: until the event must have come, counted from when the"
        " prefill booked there should be done.",
    )
    discover: bool = Field(
        True,
        description="Ask a vLLM (0.31 or newer) where it publishes its KV events, if nobody says so.",
    )


class QueueSettings(Section):
    """Bounds of the waiting room."""

    max_wait: PositiveFloat | None = Field(
        60.0,
        description="Longest wait in seconds where a class sets no max_queue_wait; null: for ever. A gateway that sends"
        " bodies BUFFERED is asked to hold each request this long (null: 600), so there no class may wait longer.",
    )
    max_lanes: PositiveInt = Field(1024, description="Distinct sets of constraints that may wait at once.")
    max_tenants: PositiveInt = Field(4096, description="Tenants told apart in a class; the rest share.")
    assumed_prefill_rate: PositiveFloat = Field(
        2000.0,
        description="Tokens a second that endpoints are taken to prefill while none has been timed. A prompt counts as"
        " read after twice the time that its endpoint should take, if nothing has told of it before.",
    )
    longest_request: PositiveFloat = Field(
        7200.0,
        description="Seconds after its dispatch at which a request counts as over, if nothing has told of its end.",
    )
    drain_grace: NonNegativeFloat = Field(
        30.0, description="Seconds between SIGTERM and the end, for what waits and runs to finish."
    )
    drain_notice: NonNegativeFloat = Field(
        5.0, description="Of drain_grace, what even an idle picker stays for: until every gateway knows."
    )
    drain_after_gateway: bool = Field(
        False,
        description="Within drain_grace, stay until the gateway's access log has ended: for a gateway that stops"
        " together with Picker, as in one pod.",
    )


class SessionSettings(Section):
    """Sending the requests of a session where the last one went: what is known of it lasts beyond the caches."""

    affinity: Literal["off", "prefer", "sticky"] = Field(
        "off",
        description="`prefer`: leaving the session's endpoint costs `selection.session_tokens` of the policy, so it is"
        " left when it is worth it. `sticky`: it is left only when it cannot take the request.",
    )
    header: SessionName | None = Field(
        None,
        description="Request header that says the session, beside those of known agents (the hint `session`).",
    )
    cookie: SessionName | None = Field(
        None,
        description="Cookie that says the session, and that Picker sets where none is said. Needs a gateway that sends"
        " responses through Picker; the Envoy of the chart does not.",
    )
    ttl: PositiveFloat = Field(1800.0, description="Seconds without a request after which one is forgotten.")
    max_sessions: PositiveInt = Field(
        100_000, description="Sessions remembered; past it those used least lately go."
    )

    @field_validator("header")
    @classmethod
    def _as_headers_arrive(cls, header: str | None) -> str | None:
        return header.lower() if header is not None else None

    @model_validator(mode="after")
    def _names_serve_something(self) -> SessionSettings:
        if self.affinity == "off" and (self.header or self.cookie):
            raise ValueError("header and cookie have no effect while affinity is off")
        return self


class LogSettings(Section):
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="`debug` writes one line for each decision."
    )
    format: Literal["auto", "json", "console"] = Field(
        "auto", description="`auto`: console on a terminal, else json."
    )
    decisions_per_second: NonNegativeFloat = Field(
        1.0, description="At level info, at most this many decisions a second are written."
    )


class TelemetrySettings(Section):
    tracing: bool = Field(
        False, description="Send OpenTelemetry spans; needs the extra `otel` and heeds the OTEL_ variables."
    )
    trace_ratio: float = Field(0.01, ge=0, le=1, description="Part of the requests to trace.")
    decisions: NonNegativeInt = Field(1000, description="Decisions kept for the dashboard and the API.")
    record_file: Path | None = Field(
        None,
        description="Append a line for each request to this file, for `picker simulate` and `picker replay`: lengths,"
        " class and keyed hashes of blocks, no prompts. `picker record` writes the same for a while.",
    )
    record_limit: ByteSize = Field(ByteSize(1024**3), gt=0, description="Most bytes of that file.")


class Settings(Section):
    """All of it."""

    extproc: ExtProcSettings = ExtProcSettings()
    requests: BodyLimits = BodyLimits()
    admin: AdminSettings = AdminSettings()
    policy: PolicySettings = PolicySettings()
    pool: PoolSettings = PoolSettings()
    tokens: TokenSettings = TokenSettings()
    kvcache: KvCacheSettings = KvCacheSettings()
    queue: QueueSettings = QueueSettings()
    sessions: SessionSettings = SessionSettings()
    log: LogSettings = LogSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
