"""Costs of tokenizing: what a seen prefix saves, and what many large prompts do to the event loop.

    python -m tests.benchmarks.bench_tokens [MODEL_DIRECTORY]

Without a directory the small tokenizer that ships with the simulation is used. Figures are of this machine and this
moment: the ratios count, and a loop's lag only beside that of the idle loop measured just before.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from picker.app import App
from picker.extproc.handler import Arrival, Routed
from picker.extproc.pipeline import Pipeline
from picker.extproc.preparation import Preparation
from picker.pool.endpoint import EndpointSpec
from picker.requests import InferenceRequest, Route, TextPrompts
from picker.settings import Settings
from picker.settings.model import QueueSettings
from picker.tokens import TokenBudget, Tokenizers

SHIPPED = Path(__file__).parents[2] / "picker" / "simulation" / "tokenizer"
PROMPT_BYTES = 220_000
CONCURRENT = 150
ROUNDS = 7


def prose(seed: int, size: int = PROMPT_BYTES) -> str:
    """Text of made-up words, `size` bytes long; another seed gives other text."""
    source = random.Random(seed)
    syllables = ["ba", "den", "ko", "li", "mer", "no", "pra", "shu", "ti", "vel", "wo", "zan"]
    words = ["".join(source.choices(syllables, k=source.randint(1, 4))) for _ in range(3000)]
    pieces: list[str] = []
    length = 0
    while length < size:
        piece = source.choice(words) + source.choice((" ", " ", " ", " ", ", ", ". ", ".\n"))
        pieces.append(piece)
        length += len(piece)
    return "".join(pieces)[:size]


def request(text: str) -> InferenceRequest:
    return InferenceRequest(Route.COMPLETIONS, "m", TextPrompts((text,)), size_bytes=len(text))


def service(model: Path) -> Tokenizers:
    return Tokenizers({"m": model}, TokenBudget(seconds=600.0))


async def seen_prefix(model: Path) -> None:
    """One 220 KB prompt: encoded by the library alone, by Picker unseen, and with its first 90 % seen before."""
    library = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    alone, unseen, seen = [], [], []
    for round_ in range(ROUNDS):
        tokens = service(model)
        await tokens.load()
        shared = prose(round_)[: PROMPT_BYTES * 9 // 10]
        first, second = (shared + prose(1000 * side + round_)[: PROMPT_BYTES // 10] for side in (1, 2))
        start = time.perf_counter()
        whole = library.encode_batch_fast([second], add_special_tokens=True)[0].ids
        alone.append(time.perf_counter() - start)
        start = time.perf_counter()
        await tokens.tokenize(request(first))
        unseen.append(time.perf_counter() - start)
        start = time.perf_counter()
        counted = await tokens.tokenize(request(second))
        seen.append(time.perf_counter() - start)
        assert counted.ids[0].tolist() == whole, "the cache must be exact"
        await tokens.close()
    base = statistics.median(alone)
    for name, times in (("library alone", alone), ("Picker, unseen", unseen), ("Picker, 90 % seen", seen)):
        middle = statistics.median(times)
        print(f"220 KB prompt, {name:18}{middle * 1e3:8.1f} ms, {middle / base:6.1%} of the library's time")


async def loop_lag(model: Path, *, warm: bool) -> None:
    """How late the event loop gets while 150 prompts of 220 KB are tokenized at once."""
    tokens = service(model)
    await tokens.load()
    shared = prose(1)[: PROMPT_BYTES * 9 // 10]
    texts = [
        (shared if warm else prose(seed)[: PROMPT_BYTES * 9 // 10]) + prose(5000 + seed, PROMPT_BYTES // 10)
        for seed in range(CONCURRENT)
    ]
    if warm:
        await tokens.tokenize(request(texts[0]))
    gc.collect()
    watcher = LagWatcher()
    start = time.perf_counter()
    counts = await asyncio.gather(*(tokens.tokenize(request(text)) for text in texts))
    took = time.perf_counter() - start
    assert not any(count.estimated for count in counts)
    seen = "90 % seen" if warm else "all unseen"
    print(f"{CONCURRENT} prompts at once, {seen}: {took:6.2f} s, loop lag {watcher.stop()}")
    await tokens.close()


class LagWatcher:
    """Wakes up every millisecond and notes how late it was."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            self._lags.append(time.perf_counter() - start - 0.001)

    def stop(self) -> str:
        self._task.cancel()
        lags = sorted(self._lags)
        shares = (
            (name, lags[int(len(lags) * share)])
            for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))
        )
        return ", ".join(f"{name} {lag * 1e3:.1f} ms" for name, lag in (*shares, ("max", lags[-1])))


async def whole_path(model: Path) -> None:
    """How late the loop gets while 150 unseen prompts of 220 KB go all the way: read, tokenized, hashed, decided.

    The longest turn is in processor time of the loop's thread, which a busy machine stretches less than the clock.
    """
    # Without the library `fastokens` the last of them waits longer than a queue would let it.
    app = App(Settings(queue=QueueSettings(max_wait=None)))
    app.pool.replace(
        EndpointSpec(f"pod-{n}", f"pod-{n}", f"10.0.0.{n}", 8000, ask_kv_events=False) for n in range(8)
    )
    tokens = service(model)
    await tokens.load()
    pipeline = Pipeline(Preparation(tokens, app.pool), app.deciding, app.clock)
    arrivals = [_arrival(prose(20_000 + seed), app.clock()) for seed in range(CONCURRENT)]
    await pipeline.route(_arrival("warm", app.clock()))
    gc.collect()
    watcher = LagWatcher()
    with longest_turn() as longest:
        start = time.perf_counter()
        answers = await asyncio.gather(*(pipeline.route(arrival) for arrival in arrivals))
        took = time.perf_counter() - start
    assert all(isinstance(answer, Routed) for answer in answers)
    lag = watcher.stop()
    print(f"{CONCURRENT} requests at once, decided: {took:6.2f} s, loop lag {lag}")
    print(f"the longest turn of the loop took {longest[0] * 1e3:.1f} ms of its thread")
    await tokens.close()


def _arrival(prompt: str, now: float) -> Arrival:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    return Arrival("POST", "/v1/completions", "x", [], body, True, {}, now, True)


@contextmanager
def longest_turn() -> Iterator[list[float]]:
    """The longest that one turn of the running loop took, all its callbacks together, in processor seconds."""
    loop: Any = asyncio.get_running_loop()
    turn, longest = loop._run_once, [0.0]

    def timed() -> None:
        before = time.thread_time()
        turn()
        longest[0] = max(longest[0], time.thread_time() - before)

    loop._run_once = timed
    yield longest
    loop._run_once = turn


async def idle_lag() -> None:
    """The lag of a loop that has nothing to do: what the machine itself adds."""
    watcher = LagWatcher()
    await asyncio.sleep(5.0)
    print(f"idle loop for 5 s: loop lag {watcher.stop()}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=SHIPPED)
    model = parser.parse_args().model
    print(f"tokenizer: {'the one that Picker ships' if model == SHIPPED else model}")
    await seen_prefix(model)
    await idle_lag()
    await loop_lag(model, warm=True)
    await loop_lag(model, warm=False)
    await whole_path(model)


if __name__ == "__main__":
    asyncio.run(main())
