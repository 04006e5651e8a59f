"""`picker mock-engine`."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import zmq
from rich.console import Console

from picker.simulation.mock_engine import Addresses, MockEngine, MockEngineSettings
from picker.simulation.prompts import DEFAULT_TOKENIZER

_DEFAULTS = MockEngineSettings()


def mock_engine_command(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _DEFAULTS.host,
    port: Annotated[int, typer.Option(help="HTTP port; 0 takes a free one.", min=0, max=65535)] = 8000,
    model: Annotated[str, typer.Option(help="The served model's name.")] = _DEFAULTS.model,
    tokenizer: Annotated[
        Path,
        typer.Option(
            help="Directory with tokenizer.json and tokenizer_config.json (for the chat template).",
            exists=True,
            file_okay=False,
        ),
    ] = DEFAULT_TOKENIZER,
    max_num_seqs: Annotated[
        int, typer.Option(help="Requests that run at once; the rest wait inside.", min=1)
    ] = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Token budget of one iteration: longer prompts go in chunks.", min=1)
    ] = _DEFAULTS.max_num_batched_tokens,
    max_model_len: Annotated[
        int, typer.Option(help="Longest prompt and output together, in tokens.", min=2)
    ] = _DEFAULTS.max_model_len,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.", min=1)] = _DEFAULTS.block_size,
    num_blocks: Annotated[
        int, typer.Option(help="KV blocks in all; one is reserved, as in vLLM.", min=2)
    ] = _DEFAULTS.num_blocks,
    prefill_rate: Annotated[
        float, typer.Option(help="Uncached prompt tokens computed in a second.", min=1.0)
    ] = _DEFAULTS.prefill_rate,
    iteration_time: Annotated[
        float, typer.Option(help="Seconds for one token of every running request.", min=0.0001)
    ] = _DEFAULTS.iteration_time,
    decode_time: Annotated[
        float, typer.Option(help="Seconds that each decoding request adds to an iteration.", min=0.0)
    ] = _DEFAULTS.decode_time,
    kv_events: Annotated[bool, typer.Option(help="Publish KV events over ZMQ.")] = True,
    kv_port: Annotated[
        int, typer.Option(help="Port of the KV events; 0 takes a free one.", min=0, max=65535)
    ] = 5557,
    replay_port: Annotated[
        int, typer.Option(help="Port that replays missed KV events; 0 takes a free one.", min=0, max=65535)
    ] = 5558,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the addresses as one JSON line.")
    ] = False,
) -> None:
    """Run a mock vLLM server: OpenAI API, KV events and metrics, without a GPU.

    Answers are readable noise. What is real is everything that a router sees: token ids, a prefix cache with
    block-wise LRU eviction, `cached_tokens` in the usage, the queue inside, and a pace that follows the
    uncached tokens. Start several, list them in a pool file, and try a policy:

        picker mock-engine --port 8001 --kv-port 5557 --replay-port 5558

        curl localhost:8001/v1/completions -d '{"model": "tiny", "prompt": "A short walk", "max_tokens": 8}'
    """
    settings = MockEngineSettings(
        host=host,
        port=port,
        model=model,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefill_rate=prefill_rate,
        iteration_time=iteration_time,
        decode_time=decode_time,
        kv_events=kv_events,
        kv_port=kv_port,
        replay_port=replay_port,
        remember=0,
        shutdown_grace=30.0,
    )
    try:
        asyncio.run(_serve(settings, json_output))
    except (OSError, zmq.ZMQError) as error:
        raise typer.BadParameter(
            f"cannot listen: {error}. Choose other ports, or 0 for free ones", param_hint="--port"
        ) from error


async def _serve(settings: MockEngineSettings, json_output: bool) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    async with MockEngine(settings) as engine:
        _announce(engine.addresses, settings, json_output)
        await stopping.wait()
        # A second signal ends the process at once instead of waiting for open requests.
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(name)


def _announce(addresses: Addresses, settings: MockEngineSettings, json_output: bool) -> None:
    if json_output:
        print(msgspec.json.encode(addresses).decode(), flush=True)
        return
    console = Console(highlight=False)
    console.print(f"serving [bold]{settings.model}[/] on {addresses.url}")
    if addresses.kv_events is not None:
        console.print(f"KV events on {addresses.kv_events}, replay on {addresses.kv_replay}")
