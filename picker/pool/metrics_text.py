"""Reads the few figures that routing needs out of an engine's Prometheus text, and none of the rest.

A vLLM page has about 600 lines and a dozen matter: names are searched for, and only their lines read.

How several series of one metric become one figure:
- counts (running, waiting, blocks, hits, queries) and seconds are summed over data-parallel ranks and models;
- KV usage is the maximum over ranks: the fullest rank is the one that preempts first;
- a value that is NaN, infinite, negative or no number makes the figure unknown (None), never 0: the rest of a
  sum would look like a load that nobody reported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from picker.pool.endpoint import EngineKind, EngineReport

# Where each engine serves its metrics unless told otherwise.
METRICS_PATH = {
    EngineKind.VLLM: "/metrics",
    EngineKind.SGLANG: "/metrics",
    EngineKind.TRTLLM: "/prometheus/metrics",
}

# Sums above this are no counts; it also keeps int() of a float exact.
_LARGEST = 2.0**53
# The labels in braces, with whatever is quoted taken whole; possessive, so that no text makes them slow.
_BRACES = re.compile(r'\{((?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*+")*+)\}')
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]++|\\.)*+)"')
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class _Series:
    """One line: its labels as written, and its value or None if that is no finite number from 0 up."""

    braced: str
    value: float | None

    def labels(self) -> dict[str, str]:
        pairs = _LABEL.findall(self.braced)
        if "\\" in self.braced:
            return {name: _ESCAPE.sub(_unescape, value) for name, value in pairs}
        return dict(pairs)


@dataclass(frozen=True, slots=True)
class _Metric:
    """A metric by name, or only those of its series that have one certain label."""

    name: str
    label: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What an engine calls its figures. Of several names the first one present counts (newest first)."""

    rank_label: str
    running: tuple[_Metric, ...]
    waiting: tuple[_Metric, ...]
    kv_usage: tuple[_Metric, ...]
    hits: tuple[_Metric, ...] = ()
    queries: tuple[_Metric, ...] = ()
    block_size: tuple[_Metric, ...] = ()
    num_blocks: tuple[_Metric, ...] = ()
    # The sum and the count of a histogram: seconds between the tokens of an answer.
    inter_token_seconds: tuple[_Metric, ...] = ()
    inter_tokens: tuple[_Metric, ...] = ()
    # A metric that carries the block size and the number of blocks as labels.
    cache_info: str | None = None
    lora_info: str | None = None


def _triton(family: str, label: str, value: str) -> _Metric:
    return _Metric(f"nv_trt_llm_{family}", (label, value))


_VOCABULARIES = {
    EngineKind.VLLM: _Vocabulary(
        rank_label="engine",
        running=(_Metric("vllm:num_requests_running"),),
        waiting=(_Metric("vllm:num_requests_waiting"),),
        kv_usage=(_Metric("vllm:kv_cache_usage_perc"), _Metric("vllm:gpu_cache_usage_perc")),
        hits=(_Metric("vllm:prefix_cache_hits_total"),),
        queries=(_Metric("vllm:prefix_cache_queries_total"),),
        inter_token_seconds=(
            _Metric("vllm:inter_token_latency_seconds_sum"),
            _Metric("vllm:time_per_output_token_seconds_sum"),
        ),
        inter_tokens=(
            _Metric("vllm:inter_token_latency_seconds_count"),
            _Metric("vllm:time_per_output_token_seconds_count"),
        ),
        cache_info="vllm:cache_config_info",
        lora_info="vllm:lora_requests_info",
    ),
    EngineKind.SGLANG: _Vocabulary(
        rank_label="dp_rank",
        running=(_Metric("sglang:num_running_reqs"),),
        waiting=(_Metric("sglang:num_queue_reqs"),),
        kv_usage=(_Metric("sglang:token_usage"),),
        hits=(_Metric("sglang:cached_tokens_total"),),
        queries=(_Metric("sglang:prompt_tokens_total"),),
        block_size=(_Metric("sglang:page_size"),),
        num_blocks=(_Metric("sglang:num_pages"),),
        inter_token_seconds=(_Metric("sglang:inter_token_latency_seconds_sum"),),
        inter_tokens=(_Metric("sglang:inter_token_latency_seconds_count"),),
    ),
    # The names of trtllm-serve, then those of Triton's TensorRT-LLM backend.
    EngineKind.TRTLLM: _Vocabulary(
        rank_label="dp_rank",
        running=(
            _Metric("trtllm_num_requests_running"),
            _triton("request_metrics", "request_type", "scheduled"),
        ),
        waiting=(
            _Metric("trtllm_num_requests_waiting"),
            _triton("request_metrics", "request_type", "waiting"),
        ),
        kv_usage=(
            _Metric("trtllm_kv_cache_utilization"),
            _triton("kv_cache_block_metrics", "kv_cache_block_type", "fraction"),
        ),
        block_size=(
            _Metric("trtllm_kv_cache_tokens_per_block"),
            _triton("kv_cache_block_metrics", "kv_cache_block_type", "tokens_per"),
        ),
        num_blocks=(
            _Metric("trtllm_kv_cache_max_blocks"),
            _triton("kv_cache_block_metrics", "kv_cache_block_type", "max"),
        ),
        # One for each request: its mean.
        inter_token_seconds=(_Metric("trtllm_time_per_output_token_seconds_sum"),),
        inter_tokens=(_Metric("trtllm_time_per_output_token_seconds_count"),),
    ),
}


def parse_engine_report(text: str, kind: EngineKind | None, rank: int | None, now: float) -> EngineReport:
    """The figures in one scrape, taken at `now`. Never raises, whatever the text.

    `kind` is tried first; where it is None or the text has none of its names, the engine is detected. `rank`
    None means that the endpoint is all of the process behind this page. With a rank, only that data-parallel
    rank's series count; a page that knows a single rank is that rank's own, whatever number it has there.
    """
    found = detect_engine(text, kind)
    if found is None:
        return EngineReport(at=now)
    page = _Page("\n" + text, _VOCABULARIES[found], rank)
    names = page.vocabulary
    cache_block_size, cache_blocks = page.cache_info()
    adapters, max_adapters = page.adapters()
    return EngineReport(
        at=now,
        running=_count(page.combined(names.running, math.fsum)),
        waiting=_count(page.combined(names.waiting, math.fsum)),
        kv_usage=_fraction(page.combined(names.kv_usage, max)),
        block_size=cache_block_size or _positive(page.combined(names.block_size, max)),
        num_blocks=cache_blocks or _positive(page.combined(names.num_blocks, math.fsum)),
        adapters=adapters,
        max_adapters=max_adapters,
        prefix_hits=page.combined(names.hits, math.fsum),
        prefix_queries=page.combined(names.queries, math.fsum),
        inter_token_seconds=page.combined(names.inter_token_seconds, math.fsum),
        inter_tokens=page.combined(names.inter_tokens, math.fsum),
    )


def detect_engine(text: str, likely: EngineKind | None = None) -> EngineKind | None:
    """Whose metrics these are: `likely`'s if the text has its load figures, else the first with them."""
    kinds = list(EngineKind) if likely is None else [likely, *(kind for kind in EngineKind if kind != likely)]
    for kind in kinds:
        names = _VOCABULARIES[kind]
        if any(metric.name in text for metric in (*names.running, *names.waiting, *names.kv_usage)):
            return kind
    return None


class _Page:
    """One scrape, read for one engine kind and one rank (None: all)."""

    def __init__(self, text: str, vocabulary: _Vocabulary, rank: int | None) -> None:
        self.vocabulary = vocabulary
        self._text = text
        self._rank = rank

    def combined(self, metrics: Iterable[_Metric], combine: Callable[[list[float]], float]) -> float | None:
        """One figure from all series of the first metric that is there; None if any of them is bad."""
        for metric in metrics:
            series = self._of_rank(self._series(metric.name))
            if metric.label is not None:
                key, wanted = metric.label
                series = [one for one in series if one.labels().get(key) == wanted]
            if series:
                values = [one.value for one in _totals(series)]
                known = [value for value in values if value is not None]
                return combine(known) if len(known) == len(values) else None
        return None

    def cache_info(self) -> tuple[int | None, int | None]:
        """(block size in tokens, blocks) from the labels of the information metric; engines that disagree on
        the block size give None for it."""
        name = self.vocabulary.cache_info
        series = self._of_rank(self._series(name)) if name else []
        labels = [one.labels() for one in series]
        sizes = {_label_number(one, "block_size") for one in labels}
        blocks = [_label_number(one, "num_gpu_blocks") for one in labels]
        known = [count for count in blocks if count is not None]
        return (
            sizes.pop() if len(sizes) == 1 else None,
            sum(known) if known and len(known) == len(blocks) else None,
        )

    def adapters(self) -> tuple[frozenset[str], int | None]:
        """(LoRA adapters that run or wait, how many may be loaded). The engine leaves old series behind and
        stamps each with its time as the value, so the latest is the truth."""
        name = self.vocabulary.lora_info
        series = [one for one in self._series(name) if one.value is not None] if name else []
        if not series:
            return frozenset(), None
        latest = max(series, key=lambda one: one.value or 0.0).labels()
        listed = ",".join(latest.get(key, "") for key in ("running_lora_adapters", "waiting_lora_adapters"))
        names = frozenset(part.strip() for part in listed.split(",")) - {""}
        return names, _label_number(latest, "max_lora")

    def _series(self, name: str) -> list[_Series]:
        found: list[_Series] = []
        text, needle = self._text, "\n" + name
        start = text.find(needle)
        while start != -1:
            after = start + len(needle)
            if text[after : after + 1] in ("{", " ", "\t"):
                found.append(_read(text, after))
            start = text.find(needle, after)
        return found

    def _of_rank(self, series: list[_Series]) -> list[_Series]:
        if self._rank is None or not series:
            return series
        ranks = [one.labels().get(self.vocabulary.rank_label) for one in series]
        if None not in ranks and len(set(ranks)) == 1:
            return series
        return [one for one, rank in zip(series, ranks, strict=True) if rank == str(self._rank)]


def _read(text: str, start: int) -> _Series:
    """The rest of a line after its metric name: optional labels in braces, value, optional time stamp."""
    braces = _BRACES.match(text, start)
    if braces is None and text[start] == "{":
        return _Series("", None)
    at = braces.end() if braces else start
    end = text.find("\n", at)
    fields = text[at : end if end != -1 else len(text)].split(None, 1)
    return _Series(braces[1] if braces else "", _number(fields[0]) if fields else None)


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def _totals(series: list[_Series]) -> list[_Series]:
    """Without SGLang's breakdown by priority (its total is the series whose priority is empty), and with the
    tensor and pipeline ranks of one data-parallel rank, which all report the same requests, as one."""
    if not any("priority" in one.braced or "tp_rank" in one.braced for one in series):
        return series
    largest: dict[tuple[tuple[str, str], ...], _Series] = {}
    labelled = [(one, one.labels()) for one in series]
    totals = [pair for pair in labelled if not pair[1].get("priority")] or labelled
    for one, labels in totals:
        group = tuple(sorted(item for item in labels.items() if item[0] not in _MODEL_PARALLEL))
        largest[group] = _larger(largest.get(group, one), one)
    return list(largest.values())


_MODEL_PARALLEL = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})


def _larger(left: _Series, right: _Series) -> _Series:
    if left.value is None or right.value is None:
        return _Series(left.braced, None)
    return left if left.value >= right.value else right


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value <= _LARGEST else None


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)


def _positive(value: float | None) -> int | None:
    return int(value) if value is not None and value >= 1 else None


def _fraction(value: float | None) -> float | None:
    return value if value is not None and value <= 1.0 else None


def _label_number(labels: Mapping[str, str], label: str) -> int | None:
    """A label whose value is a positive whole number; engines also write Python's `None` there."""
    value = labels.get(label, "")
    return int(value) or None if value.isascii() and value.isdigit() and len(value) <= 15 else None
