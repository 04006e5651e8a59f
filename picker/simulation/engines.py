"""Engines that the simulator knows, with where their constants come from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from picker.simulation.engine_model import EngineShape, StepCost
from picker.simulation.replay import Pod


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """An engine on some hardware. `delivery` is the seconds from a routing decision to the engine's queue."""

    name: str
    shape: EngineShape
    cost: StepCost
    delivery: float = 0.0

    def pods(self, number: int, block_size: int | None = None) -> list[Pod]:
        """That many equal pods. Another block size keeps the capacity in tokens."""
        shape = self.shape
        if block_size is not None and block_size != shape.block_size:
            blocks = shape.capacity_tokens // block_size + 1
            shape = replace(shape, block_size=block_size, num_blocks=blocks)
        return [Pod(index, shape, self.cost) for index in range(number)]


# Qwen3-32B on two H100, tensor parallel: the pods of llm-d's published ladder, fitted to it.
# Taken from its report: 307,328 tokens of KV, chunks of 8,192 tokens, and a prefill rate between 15,928
# tokens/s (its recipe) and 20,480 (one chunk in 0.40 s). From the model's shape: attention doubles what a prompt
# token costs at about 30,000 tokens before it (64 layers of 8,192 query values against 64 GFLOP a token).
# Fitted to its time between tokens (20 to 30 ms idle, 44 to 47 ms under load): the base, and what a token of context
# costs. The latter is below what reading 256 KiB from memory takes (52 ns at 75 % of 6.7 TB/s); the ladder's
# requests share 83 % of their context with others on the pod. `delivery` is what is left of its TTFT of
# 0.16 s where nothing queues and 99 % is cached.
_PREFILL_TOKEN = 1 / 17_000
QWEN3_32B_2XH100 = EngineProfile(
    "qwen3-32b-2xh100",
    EngineShape(block_size=64, num_blocks=307_328 // 64 + 1, max_num_seqs=1024, max_num_batched_tokens=8192),
    StepCost(
        base=0.020,
        prefill_token=_PREFILL_TOKEN,
        prefill_attention=_PREFILL_TOKEN / 30_000,
        decode_sequence=0.00003,
        decode_context=26e-9,
    ),
    delivery=0.08,
)
PROFILES = {profile.name: profile for profile in (QWEN3_32B_2XH100,)}
