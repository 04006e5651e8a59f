"""Picker's own gRPC API, compiled from `protos/picker/` when Picker is built or installed."""
