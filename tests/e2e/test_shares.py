"""Premium and regular traffic through the real Envoy: the shares that clients see are the shares configured."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from picker.pool.endpoint import EngineReport
from picker.simulation.mock_engine import MockEngineSettings
from tests.e2e.stack import Stack, running_stack

pytestmark = pytest.mark.e2e

EACH = 320
CLASS_HEADER = "x-picker-policy-class"

# quanta, prompt tokens, busy threshold, premium's completions among the first 320
CASES = [
    pytest.param((512, 128), 512, 1536, range(240, 273), id="512:128 at 512 tokens"),
    pytest.param((512, 512), 512, 1536, range(140, 181), id="equal quanta"),
    pytest.param((4096, 1024), 512, 1536, range(240, 273), id="4096:1024 at 512 tokens"),
    pytest.param((512, 128), 128, 384, range(240, 273), id="512:128 at 128 tokens"),
    pytest.param((2048, 512), 256, 768, range(240, 273), id="2048:512 at 256 tokens"),
]


def policy(quanta: tuple[int, int], threshold: int) -> str:
    classes = "".join(
        f"  - {{name: {name}, quantum: {quantum}, prefill_busy_threshold: {threshold},"
        f" kv_usage_busy_threshold: 0.9, policy_family: {name}, cache_bucket: any}}\n"
        for name, quantum in zip(("premium", "regular"), quanta, strict=True)
    )
    return (
        "default_policy_family: regular\n"
        "uncached_isl_buckets: [{min_tokens: 0, bucket: any}]\n"
        f"policy_classes:\n{classes}"
    )


def engine_says(stack: Stack, kv_usage: float) -> None:
    """As a scrape would; nothing else scrapes here."""
    [endpoint] = stack.app.pool
    report = EngineReport(at=stack.app.clock(), running=0, waiting=0, kv_usage=kv_usage)
    stack.app._take_report(endpoint.spec.uid, report)


async def completions_in_order(stack: Stack, prompt_tokens: int) -> list[str]:
    """320 + 320 distinct prompts, alternating, before an engine that is full until all have arrived; the classes in
    order of completion.
    """
    order = []

    async def one(number: int, name: str) -> None:
        answer = await stack.complete([number + 1] * prompt_tokens, headers={CLASS_HEADER: name})
        assert answer["status"] == 200, answer
        order.append(name)

    engine_says(stack, 1.0)
    tasks = [
        asyncio.create_task(one(number, ("premium", "regular")[number % 2])) for number in range(2 * EACH)
    ]
    async with asyncio.timeout(60):
        while len(stack.app.queue) < len(tasks):
            await asyncio.sleep(0.01)
    engine_says(stack, 0.0)
    await asyncio.gather(*tasks)
    return order


@pytest.mark.parametrize(("quanta", "prompt_tokens", "threshold", "premium"), CASES)
async def test_premium_gets_its_share(
    tmp_path: Path, quanta: tuple[int, int], prompt_tokens: int, threshold: int, premium: range
) -> None:
    engine = MockEngineSettings(
        max_num_seqs=4, prefill_rate=prompt_tokens * 400.0, num_blocks=40_000, max_num_batched_tokens=8192
    )
    settings = {"pool": {"scrape_interval": 3600, "stale_after": 3600}, "queue": {"max_wait": None}}
    yaml = policy(quanta, threshold)
    async with running_stack(tmp_path, [engine], policy=yaml, settings=settings) as stack:
        order = await completions_in_order(stack, prompt_tokens)
        await stack.settled()
        first = order[:EACH]
        assert first.count("premium") in premium
        assert first.count("regular") >= 48
        load = stack.app.ledger.load(0)
        assert (load.running, load.prefill_tokens) == (0, 0)


async def test_shares_hold_for_sizes_from_32_to_32000_tokens(tmp_path: Path) -> None:
    """Log-normal prompts: while both classes wait, each is within the bound of the design of its share."""
    dice, quanta = random.Random(3), {"premium": 4096, "regular": 1024}
    engine = MockEngineSettings(
        max_num_seqs=4,
        prefill_rate=5e4,
        num_blocks=200_000,
        max_num_batched_tokens=65_536,
        max_model_len=65_536,
    )
    settings = {"queue": {"max_wait": None}}
    yaml = policy((4096, 1024), 8192)
    async with running_stack(tmp_path, [engine], policy=yaml, settings=settings) as stack:
        sizes = [round(min(32_000, max(32, dice.lognormvariate(6.5, 1.4)))) for _ in range(200)]
        answers = await asyncio.gather(
            *(
                stack.complete(
                    [number + 1] * size, headers={CLASS_HEADER: ("premium", "regular")[number % 2]}
                )
                for number, size in enumerate(sizes)
            )
        )
        assert {answer["status"] for answer in answers} == {200}
        released = [(each.policy_class, each.cost) for each in reversed(list(stack.app.telemetry.decisions))]
    # From where everybody had arrived to where one class has nothing left to wait.
    first = 40
    last = min(max(n for n, (name, _) in enumerate(released) if name == each) for each in quanta)
    served: dict[str, float] = dict.fromkeys(quanta, 0.0)
    for name, cost in released[first:last]:
        served[name] += cost / quanta[name]
    largest = max(sizes)
    assert abs(served["premium"] - served["regular"]) <= 2 + largest / 4096 + largest / 1024
    assert last - first >= 60
    assert served["premium"] >= 3
