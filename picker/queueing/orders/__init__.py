"""The orders that ship with Picker, by their policy names."""

from picker.queueing.orders.cache_affinity import CacheAffinityQueue
from picker.queueing.orders.edf import EarliestDeadlineQueue
from picker.queueing.orders.fcfs import FcfsQueue
from picker.queueing.orders.priority import PriorityQueue
from picker.queueing.orders.wspt import WsptQueue
from picker.queueing.request_queue import RequestQueue

__all__ = [
    "CacheAffinityQueue",
    "EarliestDeadlineQueue",
    "FcfsQueue",
    "PriorityQueue",
    "WsptQueue",
    "order_named",
]


def order_named(policy: str) -> type[RequestQueue]:
    """The order with this policy name. ValueError when nobody has that name."""
    order = RequestQueue.orders.get(policy)
    if order is None:
        known = ", ".join(sorted(RequestQueue.orders))
        raise ValueError(f"unknown queue policy {policy!r}; known are {known}")
    return order
