"""The configuration of a standalone Envoy in front of Picker, for the demo, the tests and as the chart's model.

One listener takes client requests, asks Picker over ext_proc, and sends each to the address that Picker named in
`x-gateway-destination-endpoint`. The types of `envoy-data-plane` take about two seconds to import, so import this
module only where an Envoy is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog
from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
    ClusterLbPolicy,
    ClusterOriginalDstLbConfig,
)
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as Mutation
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    ApiVersion,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    Http2ProtocolOptions,
    SocketAddress,
    TransportSocket,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route.v3 import (
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.access_loggers.grpc.v3 import (
    CommonGrpcAccessLogConfig,
    HttpGrpcAccessLogConfig,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode as BodyMode
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpFilter,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import HeaderMutation
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import CommonTlsContext, UpstreamTlsContext
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions,
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any as PackedMessage

from picker.extproc.access_log import REQUEST_ID_HEADER
from picker.extproc.messages import DESTINATION_HEADER, LB_NAMESPACE
from picker.requests.hints import METADATA_NAMESPACE as HINT_NAMESPACE

SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_HEADER = "x-gateway-destination-endpoint-subset"

_UNLIMITED = 1_000_000
_PICKER = "picker"
_PODS = "pods"


class ResponseObservation(StrEnum):
    """How Picker learns what became of a request."""

    ACCESS_LOG = (
        "access_log"  # responses are not sent to Picker at all; Envoy's gRPC access log tells their end
    )
    STREAM = "stream"  # as gateways do it: every piece of the response passes through Picker


@dataclass(frozen=True, slots=True)
class EnvoyOptions:
    """What may differ between one standalone Envoy and another. Durations in seconds, sizes in bytes.

    `longest_wait` is the longest that Picker may hold a request: the idle timers are set above it, because they
    run while a request is held. `message_timeout` is armed in BUFFERED mode only, and Picker may extend it up to
    `max_message_timeout`. `standby_pickers` are asked when `picker` is not ready, which is looked at four times a
    second if there are any. `filters_before` are put between the connection manager and ext_proc.
    `streams_per_connection` has Envoy open another connection to Picker when one has so many streams.
    `strip_client_headers` False behaves as a gateway that lets clients name a destination, and that gives
    requests no id to join the access log on.
    """

    picker: tuple[str, int]
    standby_pickers: Sequence[tuple[str, int]] = ()
    picker_tls: bool = False
    listen: tuple[str, int] = ("127.0.0.1", 0)
    admin: tuple[str, int] = ("127.0.0.1", 0)
    observation: ResponseObservation = ResponseObservation.ACCESS_LOG
    request_body_mode: BodyMode = BodyMode.FULL_DUPLEX_STREAMED
    longest_wait: float = 600.0
    stream_idle_timeout: float | None = None
    message_timeout: float = 5.0
    max_message_timeout: float = 600.0
    access_log_flush: float = 0.05
    buffer_limit: int | None = None
    streams_per_connection: int | None = None
    strip_client_headers: bool = True
    filters_before: Sequence[HttpFilter] = ()


def bootstrap(options: EnvoyOptions) -> Bootstrap:
    """The whole configuration; `.to_json()` of it is what Envoy reads."""
    return Bootstrap(
        admin=Admin(address=_address(*options.admin)),
        static_resources=BootstrapStaticResources(
            listeners=[_listener(options)],
            clusters=[_pods_cluster(), _picker_cluster(options)],
        ),
    )


def _listener(options: EnvoyOptions) -> Listener:
    return Listener(
        name="requests",
        address=_address(*options.listen),
        per_connection_buffer_limit_bytes=options.buffer_limit,
        filter_chains=[
            FilterChain(
                filters=[
                    Filter(
                        name="envoy.filters.network.http_connection_manager",
                        typed_config=PackedMessage.pack(_connection_manager(options)),
                    )
                ]
            )
        ],
    )


def _connection_manager(options: EnvoyOptions) -> HttpConnectionManager:
    idle = options.stream_idle_timeout
    return HttpConnectionManager(
        stat_prefix="requests",
        route_config=_routes(),
        stream_idle_timeout=_seconds(2 * options.longest_wait if idle is None else idle),
        early_header_mutation_extensions=[_ingress_headers()] if options.strip_client_headers else [],
        access_log=[_access_log(options)] if options.observation is ResponseObservation.ACCESS_LOG else [],
        http_filters=[
            *options.filters_before,
            HttpFilter(
                name="envoy.filters.http.ext_proc", typed_config=PackedMessage.pack(_ext_proc(options))
            ),
            HttpFilter(name="envoy.filters.http.router", typed_config=PackedMessage.pack(Router())),
        ],
    )


def _routes() -> RouteConfiguration:
    no_limit = timedelta(0)
    to_pods = Route(
        match=RouteMatch(prefix="/"),
        # Answers of a model have no known longest time; the idle timer of the stream guards against silence.
        route=RouteAction(cluster=_PODS, timeout=no_limit),
    )
    return RouteConfiguration(
        name="requests", virtual_hosts=[VirtualHost(name="all", domains=["*"], routes=[to_pods])]
    )


def _ingress_headers() -> TypedExtensionConfig:
    """Before any filter: no client may name a destination, and each request gets a name that Envoy made.

    Picker reads the request id on arrival and the access log repeats it, so the two can be joined even for a
    request whose client left before Picker's own headers were applied.
    """
    mutations = HeaderMutation(
        mutations=[
            Mutation(remove=DESTINATION_HEADER),
            Mutation(remove=SUBSET_HEADER),
            Mutation(
                append=HeaderValueOption(
                    header=HeaderValue(key=REQUEST_ID_HEADER, value="%UNIQUE_ID%"),
                    append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
                )
            ),
        ]
    )
    return TypedExtensionConfig(
        name="envoy.http.early_header_mutation.header_mutation", typed_config=PackedMessage.pack(mutations)
    )


def _ext_proc(options: EnvoyOptions) -> ExternalProcessor:
    return ExternalProcessor(
        grpc_service=_picker_service(),
        failure_mode_allow=False,
        processing_mode=_processing_mode(options),
        message_timeout=_seconds(options.message_timeout),
        max_message_timeout=_seconds(options.max_message_timeout),
        metadata_options=MetadataOptions(
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(
                untyped=[LB_NAMESPACE, SUBSET_NAMESPACE, HINT_NAMESPACE]
            ),
            receiving_namespaces=MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE]),
        ),
    )


def _processing_mode(options: EnvoyOptions) -> ProcessingMode:
    send, skip = ProcessingModeHeaderSendMode.SEND, ProcessingModeHeaderSendMode.SKIP
    if options.observation is ResponseObservation.ACCESS_LOG:
        response_headers, response_body, response_trailers = skip, BodyMode.NONE, skip
    else:
        response_headers, response_body, response_trailers = send, BodyMode.FULL_DUPLEX_STREAMED, send
    return ProcessingMode(
        request_header_mode=send,
        request_body_mode=options.request_body_mode,
        request_trailer_mode=send,
        response_header_mode=response_headers,
        response_body_mode=response_body,
        response_trailer_mode=response_trailers,
    )


def _access_log(options: EnvoyOptions) -> AccessLog:
    config = HttpGrpcAccessLogConfig(
        common_config=CommonGrpcAccessLogConfig(
            log_name="picker",
            transport_api_version=ApiVersion.V3,
            grpc_service=_picker_service(),
            buffer_flush_interval=_seconds(options.access_log_flush),
        ),
        additional_request_headers_to_log=[REQUEST_ID_HEADER],
    )
    return AccessLog(name="envoy.access_loggers.http_grpc", typed_config=PackedMessage.pack(config))


def _picker_service() -> GrpcService:
    return GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=_PICKER))


def _pods_cluster() -> Cluster:
    """Whatever address the destination header names."""
    return Cluster(
        name=_PODS,
        type=ClusterDiscoveryType.ORIGINAL_DST,
        lb_policy=ClusterLbPolicy.CLUSTER_PROVIDED,
        connect_timeout=timedelta(seconds=5),
        original_dst_lb_config=ClusterOriginalDstLbConfig(
            use_http_header=True, http_header_name=DESTINATION_HEADER
        ),
        circuit_breakers=_no_circuit_breakers(),
    )


def _picker_cluster(options: EnvoyOptions) -> Cluster:
    several = bool(options.standby_pickers)
    protocol = HttpProtocolOptions(
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
            http2_protocol_options=Http2ProtocolOptions(max_concurrent_streams=options.streams_per_connection)
        )
    )
    return Cluster(
        name=_PICKER,
        type=ClusterDiscoveryType.STRICT_DNS,
        connect_timeout=timedelta(seconds=5),
        typed_extension_protocol_options={
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": PackedMessage.pack(protocol)
        },
        load_assignment=ClusterLoadAssignment(
            cluster_name=_PICKER,
            endpoints=[
                LocalityLbEndpoints(
                    lb_endpoints=[
                        LbEndpoint(endpoint=Endpoint(address=_address(host, port)))
                        for host, port in (options.picker, *options.standby_pickers)
                    ]
                )
            ],
        ),
        health_checks=[_readiness_check()] if several else [],
        # A follower is to be asked by nobody, not even when no leader is ready.
        common_lb_config=ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0.0))
        if several
        else None,
        transport_socket=_unverified_tls() if options.picker_tls else None,
        circuit_breakers=_no_circuit_breakers(),
    )


def _readiness_check() -> HealthCheck:
    return HealthCheck(
        # A busy machine is not a reason to leave the only picker that is ready; one that is gone is noticed at once.
        timeout=_seconds(5),
        interval=_seconds(0.25),
        no_traffic_interval=_seconds(0.25),
        unhealthy_threshold=1,
        healthy_threshold=1,
        grpc_health_check=HealthCheckGrpcHealthCheck(service_name="readiness"),
    )


def _unverified_tls() -> TransportSocket:
    """Encrypts without checking Picker's certificate, which may be self-signed."""
    context = UpstreamTlsContext(common_tls_context=CommonTlsContext(alpn_protocols=["h2"]))
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=PackedMessage.pack(context))


def _no_circuit_breakers() -> CircuitBreakers:
    """Picker's queue is the place that limits requests; Envoy's default of 1,024 would come before it."""
    return CircuitBreakers(
        thresholds=[
            CircuitBreakersThresholds(
                max_connections=_UNLIMITED,
                max_pending_requests=_UNLIMITED,
                max_requests=_UNLIMITED,
                max_retries=_UNLIMITED,
            )
        ]
    )


def _address(host: str, port: int) -> Address:
    return Address(socket_address=SocketAddress(address=host, port_value=port))


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)
