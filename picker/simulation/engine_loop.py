"""The engine model in real time: one task that runs its steps and hands tokens to whoever waits for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from picker.simulation.engine_model import EngineModel, Job
from picker.simulation.token_blocks import CacheEvent, EventRecorder

# A loop that has fallen further behind than this (a stopped process, a starved CPU) forgets the difference
# and does not race through steps to catch up.
_MAX_LAG = 0.25


class Generation:
    """One job's output as it appears. Iterate it once: each item is the number of tokens so far."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._tokens = 0
        self._changed = asyncio.Event()

    def advance(self, tokens: int) -> None:
        if tokens != self._tokens:
            self._tokens = tokens
            self._changed.set()

    async def __aiter__(self) -> AsyncIterator[int]:
        seen = 0
        while seen < self.job.output_tokens:
            await self._changed.wait()
            self._changed.clear()
            if self._tokens > seen:
                seen = self._tokens
                yield seen


class EngineLoop:
    """Drives a model from `start` to `stop`. `publish` gets the KV events of each step, after the step."""

    def __init__(
        self, model: EngineModel, recorder: EventRecorder, publish: Callable[[Sequence[CacheEvent]], None]
    ) -> None:
        self.model = model
        self._recorder = recorder
        self._publish = publish
        self._work = asyncio.Event()
        self._generations: dict[Job, Generation] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @contextlib.asynccontextmanager
    async def generate(self, jobs: Sequence[Job]) -> AsyncIterator[list[Generation]]:
        """Queue jobs in this order. Leaving the block aborts those that are not finished.

        Raises ValueError, with nothing queued, if one could never fit.
        """
        submitted: list[Job] = []
        try:
            for job in jobs:
                self.model.submit(job)
                submitted.append(job)
                self._generations[job] = Generation(job)
            self._work.set()
            yield [self._generations[job] for job in jobs]
        finally:
            for job in submitted:
                self.model.abort(job)
                self._generations.pop(job, None)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        ready_at = loop.time()
        while True:
            step = self.model.begin(ready_at, limit=1)
            if step is None:
                self._work.clear()
                await self._work.wait()
                ready_at = loop.time()
                continue
            await asyncio.sleep(step.ends - loop.time())
            outcome = self.model.end(step)
            # In this order, so that the index can learn of a prefill no later than the client does.
            self._publish(self._recorder.take())
            for job in (*self.model.decoding(), *outcome.finished):
                if job in self._generations:
                    self._generations[job].advance(self.model.generated(job))
            ready_at = max(step.ends, loop.time() - _MAX_LAG)
