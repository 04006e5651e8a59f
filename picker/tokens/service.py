"""Tokens for requests, within a budget: `Tokenizers` is what the rest of Picker uses."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from msgspec.structs import replace

from picker.requests import ChatPrompt, InferenceRequest, TextPrompts, TokenPrompts
from picker.tokens.budget import TokenBudget
from picker.tokens.chunks import ChunkCache
from picker.tokens.conversation import UnsupportedContent
from picker.tokens.count import EstimateReason, TokenCount, estimate, text_bytes
from picker.tokens.model import Abandoned, ModelTokenizer, NoTemplate, truncate
from picker.tokens.sandbox import TemplateFailed, TemplateOverLimit, TemplateTimeout

_Ids: TypeAlias = "tuple[array[int], ...]"
_Entry = TypeVar("_Entry")

logger = logging.getLogger(__name__)

ANY_MODEL = "*"
"""The model name whose directory serves every name that has none of its own."""


@dataclass(slots=True)
class TokenStats:
    """Counters of one `Tokenizers`; all only grow, except `in_flight` and `cache_bytes`."""

    exact: int = 0
    """Requests counted exactly."""
    estimated: dict[EstimateReason, int] = field(default_factory=lambda: dict.fromkeys(EstimateReason, 0))
    """Requests that went on with an estimate, by reason."""
    late: int = 0
    """Results that came after their request had gone on; they still filled the cache."""
    breaker_opened: int = 0
    loads: int = 0
    load_failures: int = 0
    in_flight: int = 0
    """Requests waiting for a worker or being worked on."""
    cache_hits: int = 0
    """Parts of prompts found in the cache."""
    cache_misses: int = 0
    cache_evictions: int = 0
    cache_bytes: int = 0


@dataclass(slots=True)
class _Model:
    """One model directory: its tokenizer once loaded, and how it has been doing.

    A load sets `tokenizer` and `retry_at` from its thread; everything else is the event loop's.
    """

    directory: Path
    tokenizer: ModelTokenizer | None = None
    loading: Future[None] | None = None
    retry_at: float = float("-inf")
    timeouts: int = 0
    closed_until: float = float("-inf")
    logged_at: dict[EstimateReason, float] = field(default_factory=dict)


# A chat template may run this long on the event loop before it is sent to a worker.
_INLINE_TEMPLATE_SECONDS = 0.02

_LOG_EVERY_SECONDS = 60.0


class Tokenizers:
    """Tokenizers by model name, with a shared cache and a small pool of worker threads.

    Belongs to one event loop; nothing that it does there takes long. `clock` gives seconds, `observe` is told the
    seconds that each request waited for its tokens. `template_defaults`: by the same names as the models, what the
    engine adds for the chat template where the request does not.
    """

    def __init__(
        self,
        models: Mapping[str, str | Path],
        budget: TokenBudget | None = None,
        *,
        template_defaults: Mapping[str, Mapping[str, Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        observe: Callable[[float], None] | None = None,
    ) -> None:
        self.budget = budget or TokenBudget()
        # The library's own threads would compete with the event loop; here requests are what is done side by side.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._cache = ChunkCache(self.budget.cache_bytes)
        by_directory = {Path(directory): _Model(Path(directory)) for directory in models.values()}
        self._models = {name: by_directory[Path(directory)] for name, directory in models.items()}
        self._template_defaults = dict(template_defaults or {})
        self._workers = ThreadPoolExecutor(self.budget.threads, thread_name_prefix="tokens")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="tokens-load")
        self._clock = clock
        self._observe = observe
        self._stats = TokenStats()
        self._late_lock = threading.Lock()

    @property
    def stats(self) -> TokenStats:
        self._stats.cache_hits = self._cache.hits
        self._stats.cache_misses = self._cache.misses
        self._stats.cache_evictions = self._cache.evictions
        self._stats.cache_bytes = self._cache.size_bytes
        return self._stats

    async def load(self) -> dict[str, bool]:
        """Load every model's tokenizer; per name, whether it is there. Meant for start-up, outside any budget."""
        for model in self._models.values():
            if model.tokenizer is None and self._clock() >= model.retry_at:
                await asyncio.wrap_future(self._start_loading(model))
        return {name: model.tokenizer is not None for name, model in self._models.items()}

    async def tokenize(self, request: InferenceRequest) -> TokenCount:
        """The tokens of a request: exact where they can be had within the budget, else an estimate.

        Raises nothing but CancelledError.
        """
        started = self._clock()
        result = await self._ids_or_reason(request)
        if self._observe is not None:
            self._observe(self._clock() - started)
        if isinstance(result, EstimateReason):
            self._stats.estimated[result] += 1
            return estimate(request, result)
        self._stats.exact += 1
        return TokenCount.exact(result)

    async def close(self) -> None:
        """Let go of the worker threads; work that runs is left to end by itself."""
        for pool in (self._workers, self._loader):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _ids_or_reason(self, request: InferenceRequest) -> _Ids | EstimateReason:
        prompt = request.prompt
        if prompt is None:
            return EstimateReason.NO_PROMPT
        if isinstance(prompt, TokenPrompts):
            return truncate(prompt.prompts, prompt.truncation)
        size = request.size_bytes or text_bytes(request)
        if size > self.budget.max_bytes:
            return EstimateReason.TOO_LARGE
        model = _named(self._models, request.model)
        if model is None or (model.tokenizer is None and self._clock() < model.retry_at):
            return EstimateReason.NO_TOKENIZER
        if self._clock() < model.closed_until:
            return EstimateReason.BREAKER_OPEN
        if isinstance(prompt, ChatPrompt) and (defaults := _named(self._template_defaults, request.model)):
            prompt = replace(prompt, template_kwargs={**defaults, **prompt.template_kwargs})
        if model.tokenizer is not None and size <= self.budget.inline_bytes:
            try:
                return self._encode(model, prompt, _INLINE_TEMPLATE_SECONDS, lambda: False)
            except TemplateTimeout:
                pass
        return await self._in_worker(model, prompt)

    async def _in_worker(self, model: _Model, prompt: TextPrompts | ChatPrompt) -> _Ids | EstimateReason:
        """Do the work in a thread. A request that times out or is cancelled before its turn gives its place up. Work
        that has begun goes on after a timeout, to fill the cache, and stops soon after a cancellation."""
        job: Future[_Ids | EstimateReason] | None = None
        cancelled = False
        self._stats.in_flight += 1
        try:
            async with asyncio.timeout(self.budget.seconds):
                if model.tokenizer is None:
                    # Shielded: the load serves every request that waits for it.
                    await asyncio.shield(asyncio.wrap_future(self._start_loading(model)))
                if model.tokenizer is None:
                    return EstimateReason.NO_TOKENIZER
                job = self._workers.submit(self._work, model, prompt, lambda: cancelled)
                result = await asyncio.wrap_future(job)
        except TimeoutError:
            if job is not None and not job.cancelled():
                job.add_done_callback(self._count_late)
            self._count_timeout(model)
            return EstimateReason.TIMEOUT
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            self._stats.in_flight -= 1
        model.timeouts = 0
        return result

    def _work(
        self, model: _Model, prompt: TextPrompts | ChatPrompt, abandoned: Callable[[], bool]
    ) -> _Ids | EstimateReason:
        try:
            return self._encode(model, prompt, self.budget.template_seconds, abandoned)
        except TemplateTimeout as error:
            self._warn(model, EstimateReason.TEMPLATE_LIMIT, error)
            return EstimateReason.TEMPLATE_LIMIT

    def _encode(
        self,
        model: _Model,
        prompt: TextPrompts | ChatPrompt,
        template_seconds: float,
        abandoned: Callable[[], bool],
    ) -> _Ids | EstimateReason:
        """Every way to fail but slowness of the template becomes a reason. Runs on the loop or in a worker."""
        assert model.tokenizer is not None
        try:
            return model.tokenizer.encode_prompt(
                prompt,
                template_seconds=template_seconds,
                template_characters=self.budget.template_characters,
                abandoned=abandoned,
            )
        except TemplateTimeout:
            raise
        except Abandoned:
            return EstimateReason.TIMEOUT
        except NoTemplate:
            return EstimateReason.NO_TEMPLATE
        except UnsupportedContent:
            return EstimateReason.MULTIMODAL
        except TemplateOverLimit as error:
            self._warn(model, EstimateReason.TEMPLATE_LIMIT, error)
            return EstimateReason.TEMPLATE_LIMIT
        except TemplateFailed as error:
            self._warn(model, EstimateReason.TEMPLATE_ERROR, error)
            return EstimateReason.TEMPLATE_ERROR
        except Exception as error:
            # The library's own exceptions have no common type of their own, and none may stop a request.
            self._warn(model, EstimateReason.TOKENIZER_ERROR, error)
            return EstimateReason.TOKENIZER_ERROR

    def _warn(self, model: _Model, reason: EstimateReason, error: Exception) -> None:
        """Say what failed, at most once a minute for each model and reason: the counter has the rest."""
        now = self._clock()
        if now >= model.logged_at.get(reason, float("-inf")) + _LOG_EVERY_SECONDS:
            model.logged_at[reason] = now
            logger.warning(
                "%s: %s: %s", model.directory, reason, ascii(f"{type(error).__name__}: {error}"[:300])
            )

    def _count_timeout(self, model: _Model) -> None:
        model.timeouts += 1
        if model.timeouts >= self.budget.breaker_timeouts:
            # Half open once the time is over: a single further timeout opens it again.
            model.timeouts = self.budget.breaker_timeouts - 1
            model.closed_until = self._clock() + self.budget.breaker_seconds
            self._stats.breaker_opened += 1
            logger.warning("%s: tokenizing keeps timing out; estimating for a while", model.directory)

    def _count_late(self, _: Future[_Ids | EstimateReason]) -> None:
        with self._late_lock:
            self._stats.late += 1

    def _start_loading(self, model: _Model) -> Future[None]:
        if model.loading is None or model.loading.done():
            self._stats.loads += 1
            model.loading = self._loader.submit(self._load, model)
        return model.loading

    def _load(self, model: _Model) -> None:
        try:
            model.tokenizer = ModelTokenizer(model.directory, self._cache)
        except Exception as error:
            # Missing, unreadable or unfit files: all mean estimates until the next try.
            model.retry_at = self._clock() + self.budget.load_retry_seconds
            self._stats.load_failures += 1
            logger.error(
                "%s: no tokenizer: %s", model.directory, ascii(f"{type(error).__name__}: {error}"[:300])
            )


def _named(entries: Mapping[str, _Entry], name: str | None) -> _Entry | None:
    """By exact name; SGLang's `base:adapter` goes by its base; else what is for any model."""
    names = () if name is None else (name, name.partition(":")[0])
    return next((entries[each] for each in (*names, ANY_MODEL) if each in entries), None)
