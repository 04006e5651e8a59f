"""The orders that ship with Picker. Importing this package makes them known by their policy names."""

from picker.queueing.orders.cache_affinity import CacheAffinityQueue
from picker.queueing.orders.edf import EarliestDeadlineQueue
from picker.queueing.orders.fcfs import FcfsQueue
from picker.queueing.orders.priority import PriorityQueue
from picker.queueing.orders.wspt import WsptQueue

__all__ = ["CacheAffinityQueue", "EarliestDeadlineQueue", "FcfsQueue", "PriorityQueue", "WsptQueue"]
