"""`Tokenizers`: exact counts within a budget, estimates with a reason beyond it."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from picker.requests import ChatPrompt, InferenceRequest, Prompt, Route, TextPrompts, TokenPrompts, Truncation
from picker.tokens import ANY_MODEL, EstimateReason, TokenBudget, TokenCount, Tokenizers
from picker.tokens.model import ModelTokenizer
from tests.tokens.models import save

Directory = Callable[[str], Path]

PROSE = "It was a mild day, with a soft wind from the west and no rain at all. " * 200
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class GatedTokenizer(ModelTokenizer):
    """Waits for `gate` before each prompt, and notes the thread that each ran on."""

    gate = threading.Event()
    threads: list[str]

    def encode_prompt(
        self, prompt: TextPrompts | TokenPrompts | ChatPrompt, **options: Any
    ) -> tuple[array[int], ...]:
        self.threads.append(threading.current_thread().name)
        self.gate.wait(30)
        return super().encode_prompt(prompt, **options)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> type[GatedTokenizer]:
    GatedTokenizer.gate = threading.Event()
    GatedTokenizer.threads = []
    monkeypatch.setattr("picker.tokens.service.ModelTokenizer", GatedTokenizer)
    return GatedTokenizer


def text(value: str, model: str | None = "m") -> InferenceRequest:
    return InferenceRequest(Route.COMPLETIONS, model, TextPrompts((value,)), size_bytes=len(value))


def chat(*messages: dict[str, Any], **options: Any) -> InferenceRequest:
    return InferenceRequest(Route.CHAT, "m", ChatPrompt(messages, **options))


USER = {"role": "user", "content": "hi"}


async def tokenize(
    request: InferenceRequest, directory: Path | None, **budget: Any
) -> tuple[TokenCount, Tokenizers]:
    tokens = Tokenizers({"m": directory} if directory else {}, TokenBudget(**{"seconds": 30.0} | budget))
    try:
        return await tokens.tokenize(request), tokens
    finally:
        await tokens.close()


async def test_a_batch_has_the_ids_of_each_prompt(
    model_directory: Directory, trained: Callable[[str], Tokenizer]
) -> None:
    prompts = ("the wind", "and the rain", "")
    request = InferenceRequest(Route.COMPLETIONS, "m", TextPrompts(prompts))
    count, tokens = await tokenize(request, model_directory("llama3_like"))
    assert [ids.tolist() for ids in count.ids] == [
        trained("llama3_like").encode(prompt).ids for prompt in prompts
    ]
    assert count.count == sum(map(len, count.ids))
    assert (count.estimated, count.reason, tokens.stats.exact) == (False, None, 1)


async def test_ids_are_used_as_given() -> None:
    prompts = (array("I", [5, 6, 7]), array("I", [2**32 - 1]))
    request = InferenceRequest(Route.COMPLETIONS, "unknown", TokenPrompts(prompts))
    assert (await tokenize(request, None))[0] == TokenCount(prompts, 4)
    cut = InferenceRequest(Route.COMPLETIONS, None, TokenPrompts(prompts, Truncation(2)))
    assert (await tokenize(cut, None))[0].ids == (array("I", [6, 7]), array("I", [2**32 - 1]))


@pytest.mark.parametrize("name", ["m", "m:adapter", "other", None])
async def test_one_directory_can_serve_any_name(name: str | None, model_directory: Directory) -> None:
    tokens = Tokenizers({ANY_MODEL: model_directory("byte_bpe"), "m": model_directory("llama3_like")})
    try:
        count = await tokens.tokenize(text("a", name))
    finally:
        await tokens.close()
    begins_with_bos = count.ids[0][0] == 0
    assert begins_with_bos is (name in ("m", "m:adapter"))


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (None, EstimateReason.NO_PROMPT),
        (TextPrompts(("a\ud83db",)), EstimateReason.TOKENIZER_ERROR),
        (ChatPrompt((USER,), own_template=True), EstimateReason.NO_TEMPLATE),
        (ChatPrompt((USER,), continue_final_message=True), EstimateReason.TEMPLATE_ERROR),
        (ChatPrompt(({"role": "assistant", "tool_calls": [5]},)), EstimateReason.TEMPLATE_ERROR),
        (
            ChatPrompt(({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},)),
            EstimateReason.MULTIMODAL,
        ),
    ],
)
async def test_what_cannot_be_counted_is_estimated(
    prompt: Prompt | None, reason: EstimateReason, model_directory: Directory
) -> None:
    request = InferenceRequest(Route.CHAT, "m", prompt, size_bytes=400)
    count, tokens = await tokenize(request, model_directory("byte_bpe"))
    assert (count.ids, count.estimated, count.reason) == ((), True, reason)
    assert count.count >= 1
    assert tokens.stats.estimated == dict.fromkeys(EstimateReason, 0) | {reason: 1}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, EstimateReason.NO_TEMPLATE),
        ("{% if %}", EstimateReason.TEMPLATE_ERROR),
        ("{{ messages | no_such_filter }}", EstimateReason.TEMPLATE_ERROR),
        ("{{ raise_exception('no') }}", EstimateReason.TEMPLATE_ERROR),
        ("{{ messages.pop() }}", EstimateReason.TEMPLATE_ERROR),
        ("{{ ''.__class__.__mro__ }}", EstimateReason.TEMPLATE_ERROR),
        ("{{ 'x' * 10 ** 9 }}", EstimateReason.TEMPLATE_ERROR),
        ("{% for i in range(2000) %}{{ 'x' * 10000 }}{% endfor %}", EstimateReason.TEMPLATE_LIMIT),
        (ENDLESS, EstimateReason.TEMPLATE_LIMIT),
    ],
)
async def test_templates_that_do_not_serve(
    template: str | None, reason: EstimateReason, tmp_path: Path, trained: Callable[[str], Tokenizer]
) -> None:
    directory = save(trained("byte_bpe"), tmp_path, template)
    count, _ = await tokenize(chat(USER), directory, template_seconds=0.1, template_characters=1 << 20)
    assert (count.reason, count.count >= 1) == (reason, True)


async def test_what_the_engine_adds_for_the_template_counts_where_the_request_says_nothing(
    tmp_path: Path, trained: Callable[[str], Tokenizer]
) -> None:
    template = "{{ 'yes' if enable_thinking else 'no' }} {{ style }} {{ messages[0].content }}"
    directory = save(trained("byte_bpe"), tmp_path, template)
    tokens = Tokenizers(
        {"m": directory, "*": directory},
        TokenBudget(seconds=30.0),
        template_defaults={"m": {"enable_thinking": False, "style": "brief"}},
    )

    async def ids(text: str) -> tuple[array[int], ...] | None:
        return (
            await tokens.tokenize(InferenceRequest(Route.COMPLETIONS, "m", TextPrompts((text,), False)))
        ).ids

    try:
        own = {"enable_thinking": True}
        for model, kwargs, rendered in (
            ("m", {}, "no brief hi"),
            ("m", own, "yes brief hi"),
            ("m:adapter", {}, "no brief hi"),
            ("other", own, "yes  hi"),
        ):
            request = InferenceRequest(Route.CHAT, model, ChatPrompt((USER,), template_kwargs=kwargs))
            assert (await tokens.tokenize(request)).ids == await ids(rendered), (model, kwargs)
    finally:
        await tokens.close()


async def test_a_model_with_nothing_to_add_has_not_what_is_added_for_the_others(
    tmp_path: Path, trained: Callable[[str], Tokenizer]
) -> None:
    directory = save(trained("byte_bpe"), tmp_path, "{{ style }} {{ messages[0].content }}")
    defaults: dict[str, dict[str, str]] = {"m": {}, "*": {"style": "brief"}}
    tokens = Tokenizers({"*": directory}, TokenBudget(seconds=30.0), template_defaults=defaults)
    try:
        for model, rendered in (("m", " hi"), ("other", "brief hi")):
            request = InferenceRequest(Route.CHAT, model, ChatPrompt((USER,)))
            text = InferenceRequest(Route.COMPLETIONS, model, TextPrompts((rendered,), False))
            assert (await tokens.tokenize(request)).ids == (await tokens.tokenize(text)).ids, model
    finally:
        await tokens.close()


async def test_texts_beyond_the_bound_are_not_tokenized(model_directory: Directory) -> None:
    count, _ = await tokenize(text(PROSE), model_directory("byte_bpe"), max_bytes=1000)
    assert (count.reason, count.count) == (EstimateReason.TOO_LARGE, len(PROSE) // 4)


async def test_a_failed_load_is_not_tried_again_at_once(
    tmp_path: Path, trained: Callable[[str], Tokenizer]
) -> None:
    clock = Clock()
    tokens = Tokenizers({"m": tmp_path / "model"}, TokenBudget(load_retry_seconds=60.0), clock=clock)
    try:
        for _ in range(20):
            assert (await tokens.tokenize(text("a"))).reason is EstimateReason.NO_TOKENIZER
        assert (tokens.stats.loads, tokens.stats.load_failures) == (1, 1)
        save(trained("byte_bpe"), tmp_path / "model")
        assert (await tokens.tokenize(text("a"))).estimated
        clock.now += 60.0
        assert not (await tokens.tokenize(text("a"))).estimated
        assert (tokens.stats.loads, tokens.stats.load_failures) == (2, 1)
    finally:
        await tokens.close()


async def test_many_requests_wait_for_one_load(model_directory: Directory) -> None:
    tokens = Tokenizers({"m": model_directory("byte_bpe")}, TokenBudget(seconds=30.0))
    try:
        counts = await asyncio.gather(*(tokens.tokenize(text("the wind")) for _ in range(10)))
    finally:
        await tokens.close()
    assert tokens.stats.loads == 1
    assert not any(count.estimated for count in counts)


@pytest.mark.parametrize("broken", ["{", "[]", "{}"])
async def test_a_broken_directory_gives_estimates(broken: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(broken)
    count, tokens = await tokenize(text("a"), tmp_path)
    assert (count.reason, tokens.stats.load_failures) == (EstimateReason.NO_TOKENIZER, 1)


async def test_loading_ahead_says_what_is_there(model_directory: Directory, tmp_path: Path) -> None:
    tokens = Tokenizers({"a": model_directory("byte_bpe"), "b": tmp_path})
    try:
        assert await tokens.load() == {"a": True, "b": False}
        assert await tokens.load() == {"a": True, "b": False}
        assert tokens.stats.loads == 2
    finally:
        await tokens.close()


async def test_small_prompts_take_no_thread_and_large_ones_do(
    model_directory: Directory, gated: type[GatedTokenizer]
) -> None:
    gated.gate.set()
    tokens = Tokenizers({"m": model_directory("byte_bpe")}, TokenBudget(seconds=30.0, inline_bytes=100))
    try:
        await tokens.load()
        await tokens.tokenize(text("x" * 100))
        await tokens.tokenize(text("x" * 101))
    finally:
        await tokens.close()
    assert [name.startswith("tokens") for name in gated.threads] == [False, True]


async def test_a_slow_template_leaves_the_event_loop(
    tmp_path: Path, trained: Callable[[str], Tokenizer]
) -> None:
    slow = (
        "{% for i in range(99999) %}{% if i is odd %}{% endif %}{{ messages[0].content[:0] }}{% endfor %}end"
    )
    directory = save(trained("byte_bpe"), tmp_path, slow)
    count, tokens = await tokenize(chat(USER), directory, template_seconds=30.0)
    assert not count.estimated
    assert tokens.stats.estimated == dict.fromkeys(EstimateReason, 0)


async def settled(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_after_a_timeout_the_result_still_fills_the_cache(
    model_directory: Directory, gated: type[GatedTokenizer], trained: Callable[[str], Tokenizer]
) -> None:
    tokens = Tokenizers({"m": model_directory("byte_bpe")}, TokenBudget(seconds=0.05, threads=1))
    try:
        await tokens.load()
        count = await tokens.tokenize(text(PROSE))
        assert (count.reason, count.count) == (EstimateReason.TIMEOUT, len(PROSE) // 4)
        assert tokens.stats.in_flight == 0
        gated.gate.set()
        await settled(lambda: tokens.stats.late == 1)
        missed = tokens.stats.cache_misses
        tokens.budget = TokenBudget(seconds=30.0)
        again = await tokens.tokenize(text(PROSE))
        assert again.ids[0].tolist() == trained("byte_bpe").encode(PROSE).ids
        assert tokens.stats.cache_misses == missed
        assert tokens.stats.cache_hits > 0
    finally:
        await tokens.close()


async def test_who_times_out_before_its_turn_gives_its_place_up(
    model_directory: Directory, gated: type[GatedTokenizer]
) -> None:
    tokens = Tokenizers({"m": model_directory("byte_bpe")}, TokenBudget(seconds=0.05, threads=1))
    try:
        await tokens.load()
        counts = await asyncio.gather(*(tokens.tokenize(text(PROSE)) for _ in range(4)))
        assert {count.reason for count in counts} == {EstimateReason.TIMEOUT}
        gated.gate.set()
        await settled(lambda: tokens.stats.late == 1)
    finally:
        await tokens.close()
    assert len(gated.threads) == 1


async def test_who_leaves_before_its_turn_gives_its_place_up(
    model_directory: Directory, gated: type[GatedTokenizer]
) -> None:
    tokens = Tokenizers({"m": model_directory("byte_bpe")}, TokenBudget(seconds=30.0, threads=1))
    try:
        await tokens.load()
        first, second, third = (asyncio.create_task(tokens.tokenize(text(PROSE))) for _ in range(3))
        await settled(lambda: len(gated.threads) == 1)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert tokens.stats.in_flight == 2
        gated.gate.set()
        assert not (await first).estimated
        assert not (await third).estimated
    finally:
        await tokens.close()
    assert (len(gated.threads), tokens.stats.in_flight) == (2, 0)


async def test_work_for_who_has_left_stops(model_directory: Directory, gated: type[GatedTokenizer]) -> None:
    tokens = Tokenizers({"m": model_directory("byte_bpe")}, TokenBudget(seconds=30.0, threads=1))
    try:
        await tokens.load()
        task = asyncio.create_task(tokens.tokenize(text(PROSE)))
        await settled(lambda: len(gated.threads) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gated.gate.set()
        assert not (await tokens.tokenize(text("the wind " * 400))).estimated
        assert tokens.stats.cache_bytes < len(PROSE)
    finally:
        await tokens.close()


async def test_timeouts_in_a_row_open_the_breaker(
    model_directory: Directory, gated: type[GatedTokenizer]
) -> None:
    clock = Clock()
    budget = TokenBudget(seconds=0.02, threads=1, breaker_timeouts=3, breaker_seconds=10.0)
    tokens = Tokenizers({"m": model_directory("byte_bpe")}, budget, clock=clock)
    try:
        await tokens.load()
        reasons = [(await tokens.tokenize(text(PROSE))).reason for _ in range(5)]
        assert reasons == [EstimateReason.TIMEOUT] * 3 + [EstimateReason.BREAKER_OPEN] * 2
        clock.now += 10.0
        reasons = [(await tokens.tokenize(text(PROSE))).reason for _ in range(2)]
        assert reasons == [EstimateReason.TIMEOUT, EstimateReason.BREAKER_OPEN]
        assert tokens.stats.breaker_opened == 2
        clock.now += 10.0
        gated.gate.set()
        tokens.budget = budget.model_copy(update={"seconds": 30.0})
        assert not (await tokens.tokenize(text(PROSE))).estimated
        gated.gate.clear()
        tokens.budget = budget
        reasons = [(await tokens.tokenize(text(PROSE))).reason for _ in range(3)]
        assert reasons == [EstimateReason.TIMEOUT] * 3
    finally:
        gated.gate.set()
        await tokens.close()


async def test_a_shared_prefix_is_tokenized_once(
    model_directory: Directory, trained: Callable[[str], Tokenizer]
) -> None:
    tokens = Tokenizers({"m": model_directory("llama3_like")}, TokenBudget(seconds=30.0))
    try:
        await tokens.tokenize(text(PROSE + "one end"))
        cold = tokens.stats.cache_misses
        other = PROSE + "another end, and a longer one."
        count = await tokens.tokenize(text(other))
        assert tokens.stats.cache_misses - cold <= 1
        assert tokens.stats.cache_hits >= cold - 1
        assert count.ids[0].tolist() == trained("llama3_like").encode(other).ids
    finally:
        await tokens.close()


async def test_the_cache_is_bounded_and_can_be_off(model_directory: Directory) -> None:
    for cache_bytes in (0, 20_000):
        tokens = Tokenizers(
            {"m": model_directory("byte_bpe")}, TokenBudget(seconds=30.0, cache_bytes=cache_bytes)
        )
        try:
            for start in range(5):
                assert not (await tokens.tokenize(text(PROSE[start:]))).estimated
        finally:
            await tokens.close()
        assert tokens.stats.cache_bytes <= cache_bytes


async def test_waits_are_observed(model_directory: Directory) -> None:
    waits: list[float] = []
    clock = Clock()
    tokens = Tokenizers({"m": model_directory("byte_bpe")}, clock=clock, observe=waits.append)
    try:
        await tokens.tokenize(text("a"))
        await tokens.tokenize(text("a", "unknown"))
    finally:
        await tokens.close()
    assert waits == [0.0, 0.0]
