"""Version 1 of the API. The modules beside this one are generated; see setup.py."""

try:
    from picker.api.v1 import introspection_pb2 as _generated  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "Picker's gRPC API has not been compiled in this checkout: run `pip install -e .` "
        "or `python setup.py build_protos`"
    ) from error
