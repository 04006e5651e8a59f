"""gRPC over HTTP/2, served on the event loop's own thread.

What stands on the way of every request is served here: the h2 library speaks HTTP/2 without any IO, and this room adds
the loop's sockets and the five bytes before each gRPC message. `grpc.aio` has threads of its own that wake the loop for
each step of a call: a bare echo by it costs 1.7 times what this does (`python -m tests.benchmarks.bench_extproc`).
"""

from picker.rpc.budget import BudgetStats, ByteBudget
from picker.rpc.call import Call, Method, Receiver, Status
from picker.rpc.server import RpcServer, address_of

__all__ = ["BudgetStats", "ByteBudget", "Call", "Method", "Receiver", "RpcServer", "Status", "address_of"]
