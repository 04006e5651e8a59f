"""The allow-list that a data plane may send along with a request: the subset hint of the endpoint picker protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"

# An entry is `ip:port`, `[ipv6]:port` or a bare address; nothing longer is one.
_MAX_ENTRY = 300


def subset_hint(metadata: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The endpoints that may be chosen, from a request's filter metadata (namespace -> struct as plain values).

    None: the key is absent, any endpoint will do. An empty tuple: it is there and admits none. The value is a list
    of strings or one comma-joined string; entries that are not text are left out.
    """
    namespace = metadata.get(SUBSET_NAMESPACE)
    if not isinstance(namespace, Mapping) or SUBSET_KEY not in namespace:
        return None
    value = namespace[SUBSET_KEY]
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        return ()
    texts = (item.strip() for item in items if isinstance(item, str))
    return tuple(dict.fromkeys(text for text in texts if 0 < len(text) <= _MAX_ENTRY))
