"""The mock engine's `/metrics`: the figures that Picker and its dashboards read, by vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from picker.simulation.engine_model import EngineModel

# vLLM's own buckets for the time to first token, in seconds.
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")


@dataclass(slots=True)
class ServedStats:
    """Counters of requests rather than of the model."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISHED_REASONS, 0))


class EngineMetrics(Collector):
    """Reads the model at scrape time; only the histogram is kept as it happens."""

    def __init__(self, model: EngineModel, served: ServedStats, model_name: str, rank: int) -> None:
        self._model = model
        self._served = served
        self._labels = {"engine": str(rank), "model_name": model_name}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.time_to_first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "Time to first token in seconds.",
            list(self._labels),
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        ).labels(**self._labels)

    def render(self) -> bytes:
        """The page in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        model, served, stats = self._model, self._served, self._model.stats
        yield self._gauge("num_requests_running", "Requests in execution batches.", len(model.running))
        yield self._gauge("num_requests_waiting", "Requests waiting.", len(model.waiting))
        by_reason = {"capacity": len(model.waiting), "deferred": 0}
        yield self._family(
            GaugeMetricFamily, "num_requests_waiting_by_reason", "Waiting.", "reason", by_reason
        )
        yield self._gauge("kv_cache_usage_perc", "KV cache held by requests, 0 to 1.", model.cache.usage)
        yield self._cache_config()
        yield self._counter("prefix_cache_queries", "Tokens looked up.", stats.prefix_queries)
        yield self._counter("prefix_cache_hits", "Tokens found.", stats.prefix_hits)
        yield self._counter("prompt_tokens", "Prompt tokens.", served.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Cached prompt tokens.", served.cached_prompt_tokens)
        yield self._counter("generation_tokens", "Generated tokens.", stats.generated_tokens)
        yield self._inter_token_times()
        yield self._counter("num_preemptions", "Preemptions.", stats.preemptions)
        yield self._family(
            CounterMetricFamily, "request_success", "Finished requests.", "finished_reason", served.finished
        )

    def _inter_token_times(self) -> Metric:
        """Their sum and count are all that anybody reads: one bucket."""
        stats = self._model.stats
        family = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Seconds between tokens.", labels=list(self._labels)
        )
        buckets = [("+Inf", float(stats.inter_tokens))]
        family.add_metric(list(self._labels.values()), buckets, stats.inter_token_seconds)
        return family

    def _cache_config(self) -> Metric:
        shape = self._model.shape
        labels = {
            **self._labels,
            "block_size": str(shape.block_size),
            "enable_prefix_caching": "True",
            "num_gpu_blocks": str(shape.num_blocks),
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "The cache's configuration.", labels=list(labels)
        )
        family.add_metric(list(labels.values()), 1.0)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: dict[str, int],
    ) -> Metric:
        family = kind(f"vllm:{name}", text, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family
