"""One serving engine as a queueing model: continuous batching with chunked prefill, as vLLM schedules.

Time advances in iterations. One iteration computes one token for every decoding request and, with what is
left of the token budget, chunks of prompts in order of arrival. A prompt that ends in an iteration gives its
first token at the end of it. KV memory is a `BlockCache`; when it runs out, the request admitted last goes
back to the head of the queue and starts over (vLLM's recompute preemption).

Sans-IO: the caller begins a step, waits for its duration in whatever time it lives in, and ends it. The mock
engine waits in real time, one iteration a step; the simulator in virtual time, and there a step with nothing
but decoding in it spans many iterations, so that the cost of a long generation is a few steps.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from picker.simulation.block_cache import BlockCache, BlockTable, CacheListener


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The limits of an engine, by vLLM's names. `num_blocks` counts the reserved block."""

    block_size: int = 64
    num_blocks: int = 4803
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192

    @property
    def capacity_tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_size


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds that one iteration takes: a sum of terms, each linear in what the iteration computes.

    `prefill_attention` is for one prompt token attending to one token before it, `decode_context` for one
    token of context of one decoding request (reading its KV), `decode_sequence` for one decoding request.
    """

    base: float = 0.0
    prefill_token: float = 0.0
    prefill_attention: float = 0.0
    decode_sequence: float = 0.0
    decode_context: float = 0.0

    def seconds(self, prefill: int, attention: float, sequences: int, context: int) -> float:
        return (
            self.base
            + self.prefill_token * prefill
            + self.prefill_attention * attention
            + self.decode_sequence * sequences
            + self.decode_context * context
        )


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


class Job:
    """One request inside an engine. `cached_tokens` is None until it is first admitted."""

    __slots__ = (
        "_decoding_since",
        "_epoch",
        "_generated",
        "_order",
        "cached_tokens",
        "computed",
        "output_tokens",
        "phase",
        "preemptions",
        "prompt_tokens",
        "table",
        "target",
    )

    def __init__(self, table: BlockTable, prompt_tokens: int, output_tokens: int) -> None:
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a job has at least one prompt token and one output token")
        self.table = table
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.phase = Phase.WAITING
        self.cached_tokens: int | None = None
        # Of the `target` tokens that have to be computed before the next output token, `computed` are.
        self.computed = 0
        self.target = prompt_tokens
        self.preemptions = 0
        self._generated = 0
        self._decoding_since = 0
        self._epoch = 0
        self._order = 0


@dataclass(slots=True)
class Step:
    """What the engine is computing: `iterations` equal ones from `started` on."""

    started: float
    iteration_seconds: float
    iterations: int
    chunks: list[tuple[Job, int]]
    prefill_tokens: int

    @property
    def ends(self) -> float:
        return self.started + self.iterations * self.iteration_seconds

    def cut(self, now: float) -> bool:
        """End with the iteration that is under way at `now`. True if that is earlier than before."""
        under_way = max(1, math.ceil((now - self.started) / self.iteration_seconds))
        if under_way >= self.iterations:
            return False
        self.iterations = under_way
        return True


@dataclass(frozen=True, slots=True)
class Outcome:
    """`prefilled`: gave their first token, or the first after a preemption. `finished`: gave their last."""

    prefilled: list[Job]
    finished: list[Job]


@dataclass(slots=True)
class EngineStats:
    """Monotonic counters, in vLLM's sense of each."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    # Tokens after the first of their answer, and the seconds that they came after the one before.
    inter_tokens: int = 0
    inter_token_seconds: float = 0.0
    preemptions: int = 0
    aborted: int = 0
    busy_seconds: float = 0.0


@dataclass(slots=True, order=True)
class _Due:
    """An iteration at which a decoding job needs attention. Stale once the job's epoch has moved on."""

    iteration: int
    order: int
    epoch: int
    job: Job = field(compare=False)


class EngineModel:
    """The scheduler of one engine. At most one step is under way at a time."""

    def __init__(self, shape: EngineShape, cost: StepCost, listener: CacheListener | None = None) -> None:
        self.shape = shape
        self.cost = cost
        self.cache = BlockCache(shape.num_blocks, shape.block_size, listener)
        self.stats = EngineStats()
        self.waiting: deque[Job] = deque()
        # In order of admission; the last one is the victim of a preemption.
        self.running: dict[Job, None] = {}
        self._prefilling: dict[Job, None] = {}
        self._decoding = 0
        self._context = 0
        self._iteration = 0
        self._orders = 0
        # The head of the queue that did not fit, and the free blocks at that time.
        self._blocked: tuple[Job | None, int] = (None, 0)
        self._growths: list[_Due] = []
        self._finishes: list[_Due] = []

    def submit(self, job: Job) -> None:
        """Queue a job. Raises ValueError if it could never fit."""
        if job.prompt_tokens + job.output_tokens > self.shape.capacity_tokens:
            raise ValueError(
                f"{job.prompt_tokens} prompt and {job.output_tokens} output tokens "
                f"exceed the {self.shape.capacity_tokens} tokens of KV cache"
            )
        self._orders += 1
        job._order = self._orders
        self.waiting.append(job)

    def abort(self, job: Job) -> None:
        """Drop a job, wherever it is. Its slot and blocks are free at once; a finished one is left alone."""
        if job.phase is Phase.DONE:
            return
        if job.phase is Phase.WAITING:
            self.waiting.remove(job)
        else:
            self._leave(job)
        job.phase = Phase.DONE
        self.stats.aborted += 1

    def generated(self, job: Job) -> int:
        """Output tokens that a job has so far, including those of iterations that have ended."""
        if job.phase is Phase.DECODE:
            return job._generated + self._iteration - job._decoding_since
        return job._generated

    def decoding(self) -> Iterator[Job]:
        """The jobs that give a token with each iteration, in order of admission."""
        return (job for job in self.running if job.phase is Phase.DECODE)

    def begin(self, now: float, limit: int | None = None) -> Step | None:
        """Schedule the next step, of at most `limit` iterations. None when there is nothing to do."""
        preempted = self._grow_decoding()
        chunks: list[tuple[Job, int]] = []
        attention = 0.0
        budget = self.shape.max_num_batched_tokens - self._decoding
        for job in [*self._prefilling]:
            if budget <= 0:
                break
            if job.phase is not Phase.PREFILL:
                continue
            chunk = min(budget, job.target - job.computed)
            if self._grow_or_preempt(job, job.computed + chunk):
                chunks.append((job, chunk))
                budget -= chunk
                self._blocked = (None, 0)
            else:
                preempted = True
        if not preempted:
            self._admit(budget, chunks)
        # A job that was scheduled and then preempted for an earlier one does not run.
        chunks = [(job, chunk) for job, chunk in chunks if job.phase is Phase.PREFILL]
        if not self.running:
            return None
        for job, chunk in chunks:
            attention += chunk * (job.computed + chunk / 2)
        prefill = sum(chunk for _, chunk in chunks)
        seconds = self.cost.seconds(prefill, attention, self._decoding, self._context)
        # After a preemption nobody is admitted in the same iteration, but perhaps in the next.
        iterations = 1 if chunks or preempted else self._uneventful(limit)
        return Step(now, seconds, iterations, chunks, prefill)

    def end(self, step: Step) -> Outcome:
        """Account for a step that has run (perhaps cut short)."""
        self._iteration += step.iterations
        decoded = self._decoding * step.iterations
        self._context += decoded
        self.stats.generated_tokens += decoded
        self.stats.inter_tokens += decoded
        self.stats.inter_token_seconds += decoded * step.iteration_seconds
        self.stats.prefill_tokens += step.prefill_tokens
        self.stats.busy_seconds += step.iterations * step.iteration_seconds
        finished = self._finish_decoding()
        prefilled: list[Job] = []
        for job, chunk in step.chunks:
            if job.phase is not Phase.PREFILL:
                continue
            job.computed += chunk
            if job.computed == job.target:
                prefilled.append(job)
                self.stats.generated_tokens += 1
                job._generated += 1
                if job._generated == job.output_tokens:
                    self._leave(job)
                    job.phase = Phase.DONE
                    finished.append(job)
                else:
                    self._start_decoding(job)
        return Outcome(prefilled, finished)

    def _grow_decoding(self) -> bool:
        """Make room for the tokens of the next iteration. True if that cost somebody a preemption."""
        before = self.stats.preemptions
        iteration = self._iteration + 1
        while self._growths and self._growths[0].iteration <= iteration:
            due = heapq.heappop(self._growths)
            job = due.job
            if due.epoch != job._epoch:
                continue
            tokens = job.target + iteration - job._decoding_since
            if self._grow_or_preempt(job, tokens):
                self._expect_growth(job, tokens)
        return self.stats.preemptions != before

    def _grow_or_preempt(self, job: Job, tokens: int) -> bool:
        while not self.cache.grow(job.table, tokens):
            victim = next(reversed(self.running))
            self._preempt(victim)
            if victim is job:
                return False
        return True

    def _preempt(self, job: Job) -> None:
        job._generated = self.generated(job)
        self._leave(job)
        job.phase = Phase.WAITING
        job.target = job.prompt_tokens + job._generated
        job.computed = 0
        job.preemptions += 1
        self.stats.preemptions += 1
        self.waiting.appendleft(job)

    def _admit(self, budget: int, chunks: list[tuple[Job, int]]) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.shape.max_num_seqs:
            job = self.waiting[0]
            if self._still_blocked(job):
                return
            matched = self.cache.reusable(job.table.keys, job.target)
            # The whole prompt has to fit, though only its first chunk is given blocks now.
            if not self.cache.fits(job.table, matched, job.target):
                self._blocked = (job, self.cache.free_blocks)
                return
            cached = matched * self.shape.block_size
            chunk = min(budget, job.target - cached)
            self.cache.start(job.table, matched, cached + chunk)
            self._blocked = (None, 0)
            self.waiting.popleft()
            self.running[job] = None
            self._prefilling[job] = None
            job.phase = Phase.PREFILL
            job.computed = cached
            if job.cached_tokens is None:
                job.cached_tokens = cached
            self.stats.prefix_queries += job.target
            self.stats.prefix_hits += cached
            chunks.append((job, chunk))
            budget -= chunk

    def _still_blocked(self, job: Job) -> bool:
        """Whether a job that did not fit cannot fit now: nothing was freed, and no prompt went on since."""
        blocked, free = self._blocked
        return job is blocked and self.cache.free_blocks <= free

    def _uneventful(self, limit: int | None) -> int:
        """How many iterations can pass before a job finishes or needs a block."""
        bounds = [] if limit is None else [limit]
        self._drop_stale(self._finishes)
        self._drop_stale(self._growths)
        if self._finishes:
            bounds.append(self._finishes[0].iteration - self._iteration)
        if self._growths:
            bounds.append(self._growths[0].iteration - self._iteration - 1)
        return min(bounds)

    def _drop_stale(self, heap: list[_Due]) -> None:
        while heap and heap[0].epoch != heap[0].job._epoch:
            heapq.heappop(heap)

    def _start_decoding(self, job: Job) -> None:
        del self._prefilling[job]
        job.phase = Phase.DECODE
        job._epoch += 1
        job._decoding_since = self._iteration
        self._decoding += 1
        self._context += job.target
        last = self._iteration + job.output_tokens - job._generated
        heapq.heappush(self._finishes, _Due(last, job._order, job._epoch, job))
        self._expect_growth(job, job.target)

    def _expect_growth(self, job: Job, tokens: int) -> None:
        """Note when a job that holds `tokens` tokens next starts a block or fills one up."""
        size = self.shape.block_size
        into_block = tokens % size
        ahead = 1 if into_block == 0 else size - into_block
        iteration = job._decoding_since + tokens + ahead - job.target
        heapq.heappush(self._growths, _Due(iteration, job._order, job._epoch, job))

    def _finish_decoding(self) -> list[Job]:
        finished: list[Job] = []
        while self._finishes and self._finishes[0].iteration <= self._iteration:
            due = heapq.heappop(self._finishes)
            if due.epoch != due.job._epoch:
                continue
            due.job._generated = due.job.output_tokens
            self._leave(due.job)
            due.job.phase = Phase.DONE
            finished.append(due.job)
        return finished

    def _leave(self, job: Job) -> None:
        """Take a job out of the batch and give back its blocks."""
        if job.phase is Phase.DECODE:
            self._decoding -= 1
            self._context -= job.target + self._iteration - job._decoding_since
        else:
            del self._prefilling[job]
        job._epoch += 1
        del self.running[job]
        self.cache.release(job.table)
