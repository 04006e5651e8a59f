"""Premium and regular traffic through the real Envoy: the shares that clients see are the shares configured."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

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
]


def policy(quanta: tuple[int, int], threshold: int) -> str:
    classes = "".join(
        f"  - {{name: {name}, quantum: {quantum}, prefill_busy_threshold: {threshold},"
        f" policy_family: {name}, cache_bucket: any}}\n"
        for name, quantum in zip(("premium", "regular"), quanta, strict=True)
    )
    return (
        "default_policy_family: regular\n"
        "uncached_isl_buckets: [{min_tokens: 0, bucket: any}]\n"
        f"policy_classes:\n{classes}"
    )


async def completions_in_order(stack: Stack, prompt_tokens: int) -> list[str]:
    """Release 320 + 320 distinct prompts together, alternating; the classes in order of completion."""
    gate, order = asyncio.Event(), []

    async def one(number: int, name: str) -> None:
        await gate.wait()
        answer = await stack.complete([number + 1] * prompt_tokens, headers={CLASS_HEADER: name})
        assert answer["status"] == 200, answer
        order.append(name)

    tasks = [
        asyncio.create_task(one(number, ("premium", "regular")[number % 2])) for number in range(2 * EACH)
    ]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks)
    return order


@pytest.mark.parametrize(("quanta", "prompt_tokens", "threshold", "premium"), CASES)
async def test_premium_gets_its_share(
    tmp_path: Path, quanta: tuple[int, int], prompt_tokens: int, threshold: int, premium: range
) -> None:
    engine = MockEngineSettings(
        max_num_seqs=4, prefill_rate=prompt_tokens * 200.0, num_blocks=40_000, max_num_batched_tokens=8192
    )
    async with running_stack(tmp_path, [engine], policy=policy(quanta, threshold)) as stack:
        order = await completions_in_order(stack, prompt_tokens)
        await stack.settled()
        first = order[:EACH]
        assert first.count("premium") in premium
        assert first.count("regular") >= 48
        load = stack.app.ledger.load(0)
        assert (load.running, load.prefill_tokens) == (0, 0)
