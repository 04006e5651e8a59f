"""What a request costs in Picker's own process between its arrival and its answer, everything on but the gRPC face.

Three classes, 64 endpoints with KV events' blocks in the index, tokens by the shipped tokenizer, decisions recorded.
CPU time of the process by request, the least of several repeats; the face itself is bench_extproc's.
"""

from __future__ import annotations

import asyncio
import json
import time

from picker.app import App
from picker.extproc.handler import Arrival, Routed
from picker.kvcache.keys import block_keys
from picker.policy import load_policy
from picker.pool.endpoint import EndpointSpec
from picker.settings import Settings
from picker.simulation.prompts import DEFAULT_TOKENIZER

ENDPOINTS, REPEATS, REQUESTS = 64, 7, 200
HEADERS = [("content-type", "application/json"), ("user-agent", "bench"), ("x-request-id", "abc")]
POLICY = """
default_policy_family: standard
uncached_isl_buckets: [{min_tokens: 0, bucket: any}]
policy_classes:
""" + "".join(
    f"  - {{name: {name}, policy_family: {name}, cache_bucket: any, quantum: {quantum},"
    " prefill_busy_threshold: 1000000}\n"
    for name, quantum in (("premium", 4096), ("standard", 1024), ("batch", 256))
)


def new_app(endpoints: int = ENDPOINTS) -> App:
    app = App(Settings.model_validate({"tokens": {"models": {"*": DEFAULT_TOKENIZER}}}))
    app.scraper.update = lambda specs: None  # type: ignore[method-assign]
    app.queue.reload(load_policy(POLICY), app.clock())
    app.pool.replace(
        EndpointSpec(uid=str(n), name=f"pod-{n}", address=f"10.0.0.{n + 1}", port=8000, block_size=16)
        for n in range(endpoints)
    )
    for slot in range(endpoints):
        keys = block_keys(range(slot * 1000, slot * 1000 + 16_000), 16)
        app.index.add(slot, keys, parent=0)
    return app


def prompt(size: int, serial: int) -> str:
    """About `size` bytes of which the first tenth differs from every other prompt's."""
    head = f"{serial:08d} " * (size // 90 + 1)
    return (head + "a plain sentence of the kind that people write. " * (size // 48 + 1))[:size]


async def one(app: App, body: bytes) -> None:
    arrival = Arrival("POST", "/v1/completions", "x", HEADERS, body, True, {}, app.clock(), True)
    routed = await app.faces.pipeline.route(arrival)
    assert isinstance(routed, Routed), routed
    routed.exchange.response_headers(200, [], None)
    routed.exchange.finished(True)


async def cost(app: App, size: int, *, repeated: bool) -> float:
    """Seconds of CPU by request; the prompts are all different, or all the same."""
    best = float("inf")
    requests = max(3, min(REQUESTS, 2_000_000 // size))
    for repeat in range(REPEATS):
        serials = [0 if repeated else repeat * requests + n + 1 for n in range(requests)]
        bodies = [
            json.dumps({"model": "m", "prompt": prompt(size, n), "max_tokens": 1}).encode() for n in serials
        ]
        await one(app, bodies[0])
        started = time.process_time()
        for body in bodies:
            await one(app, body)
        best = min(best, (time.process_time() - started) / requests)
    return best


async def main() -> None:
    app = new_app()
    await app.faces.tokenizers.load()
    print(f"{ENDPOINTS} endpoints, {len(app.index):,} blocks in the index, 3 classes")
    print(f"{'prompt':>10}  {'all different':>14}  {'all the same':>14}")
    for size in (300, 16_000, 220_000):
        fresh = await cost(app, size, repeated=False)
        again = await cost(app, size, repeated=True)
        print(f"{size:>8} B  {fresh * 1e6:>11.0f} us  {again * 1e6:>11.0f} us")
    await app.faces.tokenizers.close()


if __name__ == "__main__":
    asyncio.run(main())
