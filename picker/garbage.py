"""Python's garbage collector, told what kind of process this is."""

from __future__ import annotations

import gc

# Requests make no cycles, so hardly anything is ever found. But what some dozens of requests in flight hold together is
# more than the 700 objects after which Python looks by default: it looked 35 times a second at 700 requests/s, for 4 %
# of the processor's time. What really stays of a request are a few objects, so this is once in several seconds.
_OBJECTS_BETWEEN_COLLECTIONS = 10_000


def expect_little() -> None:
    """To be called once everything is made that stays for good: no collection has to walk that again, each of which
    would hold up every request.
    """
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *gc.get_threshold()[1:])
    gc.collect()
    gc.freeze()
