"""Engine metrics as text: which series count, how they combine, and what is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from picker.pool.endpoint import EngineKind, EngineReport
from picker.pool.metrics_text import detect_engine, parse_engine_report

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-0.32"


def read(text: str, kind: EngineKind | None = EngineKind.VLLM, rank: int | None = None) -> EngineReport:
    return parse_engine_report(text, kind, rank, 5.0)


def test_a_real_vllm_page_under_load() -> None:
    assert read((GOLDEN / "metrics-busy.txt").read_text()) == EngineReport(
        at=5.0,
        running=3,
        waiting=9,
        kv_usage=pytest.approx(63 / 79),
        block_size=32,
        num_blocks=80,
        prefix_hits=1216.0,
        prefix_queries=7325.0,
        inter_token_seconds=6.82464576300481,
        inter_tokens=3061.0,
    )


def test_a_real_vllm_page_at_rest() -> None:
    report = read((GOLDEN / "metrics.txt").read_text(), kind=None)
    assert (report.running, report.waiting, report.kv_usage) == (0, 0, 0.0)
    assert (report.prefix_hits, report.prefix_queries) == (1216.0, 2454.0)


TWO_ENGINES = [
    'vllm:num_requests_running{engine="0",model_name="m"} 7.0',
    'vllm:num_requests_running{engine="1",model_name="m"} 0.0',
    'vllm:num_requests_waiting{engine="0",model_name="m"} 3.0',
    'vllm:num_requests_waiting{engine="1",model_name="m"} 5.0',
    'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 100.0',
    'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.9',
    'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1',
    'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0',
    'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="50"} 1.0',
]


@pytest.mark.parametrize("lines", [TWO_ENGINES, TWO_ENGINES[::-1]], ids=["in order", "reversed"])
def test_several_engines_in_one_process_are_summed(lines: list[str]) -> None:
    report = read("\n".join(lines))
    assert (report.running, report.waiting, report.kv_usage) == (7, 8, 0.9)
    assert (report.block_size, report.num_blocks) == (16, 150)


def test_several_model_names_are_summed() -> None:
    report = read("\n".join(TWO_ENGINES + [line.replace('"m"', '"n"') for line in TWO_ENGINES[:4]]))
    assert (report.running, report.waiting) == (14, 16)


def test_a_rank_reads_its_own_series() -> None:
    zero, one = (read("\n".join(TWO_ENGINES), rank=rank) for rank in (0, 1))
    assert (zero.running, zero.waiting, zero.kv_usage, zero.num_blocks) == (7, 3, 0.9, 100)
    assert (one.running, one.waiting, one.kv_usage, one.num_blocks) == (0, 5, 0.1, 50)


def test_a_rank_with_a_page_of_its_own_reads_it_whatever_its_number_there() -> None:
    # Each rank served by a process of its own: the process knows itself as engine 0, or by its global number.
    for number in ("0", "11"):
        assert read(f'vllm:num_requests_running{{engine="{number}"}} 4', rank=3).running == 4


def test_figures_that_cannot_be_told_apart_by_rank_are_unknown_to_a_rank() -> None:
    assert read("\n".join(TWO_ENGINES), rank=7).running is None
    assert read('vllm:num_requests_running{model_name="m"} 4', rank=0).running is None


@pytest.mark.parametrize("bad", ["NaN", "+Inf", "-Inf", "-1", "x", "", "0x10", "1e300", "1 2 3 nonsense"])
def test_a_bad_value_is_unknown_and_spoils_the_sum(bad: str) -> None:
    good = 'vllm:num_requests_running{engine="0"} 7\nvllm:num_requests_waiting 2'
    report = read(f'{good}\nvllm:num_requests_running{{engine="1"}} {bad}')
    assert report.running == (8 if bad.startswith("1 ") else None)
    assert report.waiting == 2


def test_a_usage_that_is_no_fraction_is_unknown() -> None:
    assert read("vllm:kv_cache_usage_perc 1.0").kv_usage == 1.0
    assert read("vllm:kv_cache_usage_perc 87.5").kv_usage is None


def test_absent_figures_are_unknown() -> None:
    assert read("vllm:num_requests_running 1") == EngineReport(at=5.0, running=1)


def test_an_older_name_serves_where_the_new_one_is_absent() -> None:
    assert read("vllm:gpu_cache_usage_perc 0.25").kv_usage == 0.25
    both = "vllm:gpu_cache_usage_perc 0.25\nvllm:kv_cache_usage_perc 0.5"
    assert read(both).kv_usage == 0.5


def test_names_in_comments_and_longer_names_do_not_count() -> None:
    name = "vllm:num_requests_running"
    text = f"# HELP {name} 5\n# TYPE {name} gauge\n{name}_x 9"
    assert read(text).running is None


def test_label_values_may_hold_braces_quotes_and_other_labels_names() -> None:
    tricky = r'vllm:num_requests_running{model_name="a}\"b,engine=\"7\" 9",engine="1"} 3 1700000000000'
    other = 'vllm:num_requests_running{model_name="b",engine="2"} 4'
    assert read(f"{tricky}\n{other}").running == 7
    assert read(f"{tricky}\n{other}", rank=1).running == 3
    assert read(f"{tricky}\n{other}", rank=7).running is None


def test_python_values_in_labels_are_unknown() -> None:
    text = 'vllm:num_requests_running 1\nvllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1'
    report = read(text)
    assert (report.block_size, report.num_blocks) == (None, None)


def test_engines_that_disagree_on_the_block_size() -> None:
    text = "\n".join(
        [*TWO_ENGINES, 'vllm:cache_config_info{block_size="32",engine="2",num_gpu_blocks="None"} 1']
    )
    assert (read(text).block_size, read(text).num_blocks) == (None, None)


def test_the_latest_lora_series_counts() -> None:
    old = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="gone",waiting_lora_adapters=""} 1.7e9'
    new = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a, b",waiting_lora_adapters="c"} 1.8e9'
    for lines in ([old, new], [new, old]):
        report = read("\n".join(["vllm:num_requests_running 1", *lines]))
        assert (report.adapters, report.max_adapters) == (frozenset("abc"), 4)


SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",tp_rank="0"} 2.0
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",tp_rank="1"} 2.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified",model_name="m",tp_rank="2"} 5.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",priority="",tp_rank="0"} 3.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",priority="1",tp_rank="0"} 1.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",priority="9",tp_rank="0"} 2.0
sglang:num_queue_reqs{dp_rank="1",model_name="m",priority="",tp_rank="2"} 4.0
sglang:token_usage{dp_rank="0",model_name="m",tp_rank="0"} 0.5
sglang:token_usage{dp_rank="1",model_name="m",tp_rank="2"} 0.75
sglang:page_size{dp_rank="0",model_name="m",tp_rank="0"} 64.0
sglang:page_size{dp_rank="1",model_name="m",tp_rank="2"} 64.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 10.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 5.0
sglang:prompt_tokens_total{model_name="m"} 100.0
"""


def test_sglang_sums_ranks_but_neither_tensor_ranks_nor_priorities() -> None:
    report = read(SGLANG, EngineKind.SGLANG)
    assert (report.running, report.waiting, report.kv_usage, report.block_size) == (7, 7, 0.75, 64)
    assert (report.prefix_hits, report.prefix_queries) == (15.0, 100.0)


def test_an_sglang_rank_reads_its_own_series() -> None:
    report = read(SGLANG, EngineKind.SGLANG, rank=1)
    assert (report.running, report.waiting, report.kv_usage) == (5, 4, 0.75)


def test_trtllm_serve_and_triton() -> None:
    serve = """\
trtllm_num_requests_waiting{model_name="m"} 3
trtllm_num_requests_running{model_name="m"} 2
trtllm_kv_cache_utilization{model_name="m"} 0.5
trtllm_kv_cache_tokens_per_block{model_name="m"} 32
trtllm_kv_cache_max_blocks{model_name="m"} 1000
"""
    triton = """\
nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 3
nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 2
nv_trt_llm_request_metrics{model="m",request_type="max",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m"} 0.5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="m"} 32
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m"} 1000
"""
    for text in (serve, triton):
        assert read(text, EngineKind.TRTLLM) == EngineReport(
            at=5.0, running=2, waiting=3, kv_usage=0.5, block_size=32, num_blocks=1000
        )


def test_the_engine_is_detected_where_the_source_is_silent_or_wrong() -> None:
    assert read(SGLANG, kind=None) == read(SGLANG, kind=EngineKind.TRTLLM) == read(SGLANG, EngineKind.SGLANG)
    assert detect_engine("http_requests_total 5") is None
    assert read("<html>no metrics here</html>", kind=None) == EngineReport(at=5.0)


@pytest.mark.parametrize(
    ("histogram", "kind"),
    [
        ("vllm:inter_token_latency_seconds", EngineKind.VLLM),
        ("vllm:time_per_output_token_seconds", EngineKind.VLLM),
        ("sglang:inter_token_latency_seconds", EngineKind.SGLANG),
        ("trtllm_time_per_output_token_seconds", EngineKind.TRTLLM),
    ],
)
def test_every_engines_inter_token_times(histogram: str, kind: EngineKind) -> None:
    running = {
        EngineKind.VLLM: "vllm:num_requests_running",
        EngineKind.SGLANG: "sglang:num_running_reqs",
        EngineKind.TRTLLM: "trtllm_num_requests_running",
    }
    lines = [
        f'{histogram}_bucket{{model_name="m",le="0.1"}} 1',
        f'{histogram}_sum{{model_name="m"}} 2.5',
        f'{histogram}_count{{model_name="m"}} 100',
        f'{running[kind]}{{model_name="m"}} 1',
    ]
    report = read("\n".join(lines), kind)
    assert (report.inter_token_seconds, report.inter_tokens) == (2.5, 100.0)


def test_the_time_between_tokens_is_that_of_the_rank() -> None:
    lines = list(TWO_ENGINES)
    for rank, seconds in enumerate((1.0, 4.0)):
        lines += [
            f'vllm:inter_token_latency_seconds_sum{{engine="{rank}"}} {seconds}',
            f'vllm:inter_token_latency_seconds_count{{engine="{rank}"}} 100',
        ]
    reports = [read("\n".join(lines), rank=rank) for rank in (None, 0, 1)]
    assert [each.inter_token_seconds for each in reports] == [5.0, 1.0, 4.0]
    assert [each.inter_tokens for each in reports] == [200.0, 100.0, 100.0]


names = st.sampled_from(
    [
        "vllm:num_requests_running",
        "vllm:cache_config_info",
        "vllm:lora_requests_info",
        "sglang:num_queue_reqs",
    ]
)
noise = st.text('{}"\\=,#\n\t 019.eE+-_abNnI\u0660\x00', max_size=60)


@given(
    st.lists(st.one_of(noise, st.tuples(names, noise).map("".join)), max_size=12).map("\n".join),
    st.none() | st.sampled_from(EngineKind),
    st.none() | st.integers(0, 3),
)
@example('vllm:cache_config_info{block_size="\u00b2"} 1\nvllm:num_requests_running 1', EngineKind.VLLM, None)
def test_no_text_makes_it_raise_or_report_nonsense(
    text: str, kind: EngineKind | None, rank: int | None
) -> None:
    report = read(text, kind, rank)
    for count in (report.running, report.waiting, report.block_size, report.num_blocks, report.prefix_hits):
        assert count is None or count >= 0
    assert report.kv_usage is None or 0.0 <= report.kv_usage <= 1.0


@given(
    st.integers(0, 1_000), st.integers(0, 1_000), st.text(max_size=20).filter(lambda name: "\n" not in name)
)
def test_any_label_value_reads_back(first: int, second: int, model: str) -> None:
    quoted = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    text = "\n".join(
        f'vllm:num_requests_running{{model_name="{quoted}",engine="{engine}"}} {value}.0'
        for engine, value in enumerate((first, second))
    )
    assert [read(text, rank=rank).running for rank in (None, 0, 1)] == [first + second, first, second]
