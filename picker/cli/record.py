"""`picker record`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import aiohttp
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from picker.cli.options import fail, http_url

_ERR = Console(stderr=True)
# The picker gives a sign of life every few seconds.
_SILENCE = 30.0
# One request's line: a million tokens are 16,000 hashes.
_LONGEST_LINE = 1024 * 1024


def record(
    out: Annotated[Path, typer.Option(help="File to write; it must not exist yet.", dir_okay=False)],
    admin: Annotated[
        str,
        typer.Option(
            help="Where the picker's admin port listens.", envvar="PICKER_ADMIN_URL", callback=http_url
        ),
    ] = "http://127.0.0.1:9090",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the admin token.", exists=True, dir_okay=False)
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop after so long.", min=0.1)] = None,
    requests: Annotated[int | None, typer.Option(help="Stop after so many requests.", min=1)] = None,
) -> None:
    """Record the requests of a running picker, until --seconds, --requests or Ctrl-C.

    A line for each request that ends or is refused: when it came, how long it and its answer were, its class, and keyed
    hashes of its blocks and its tenant. No prompt can be read from it. `picker simulate` and `picker replay` take the
    file. A picker that records always (`telemetry.record_file`) writes the same.

        picker record --admin http://127.0.0.1:9090 --seconds 3600 --out arrivals.jsonl
    """
    token = token_file.read_text(encoding="utf-8").strip() if token_file else None
    progress = Progress()
    try:
        with (
            out.open("x", encoding="utf-8", buffering=1) as file,
            Live(get_renderable=progress.text, console=_ERR, transient=True),
        ):
            asyncio.run(_record(admin.rstrip("/"), token, seconds, requests, file.write, progress))
    except FileExistsError:
        raise fail(f"{out} exists; name another file", 2) from None
    except KeyboardInterrupt:
        pass
    except OSError as error:
        raise fail(f"{out}: {error.strerror}") from None
    except RecordingFailed as error:
        if not progress.requests:
            out.unlink()
        raise fail(f"{admin}: {error}") from None
    lost = f"; {progress.lost:,} were missed" if progress.lost else ""
    typer.echo(f"{progress.requests:,} requests in {out}{lost}")


class RecordingFailed(Exception):
    """Why nothing more can be recorded."""


@dataclass(slots=True)
class Progress:
    """What has been written so far. `lost`: requests that the picker could not tell of in time."""

    requests: int = 0
    lost: int = 0
    answered: bool = False
    began: float = field(default_factory=time.monotonic)

    def text(self) -> Text:
        lost = f", {self.lost:,} missed" if self.lost else ""
        return Text(f"{time.monotonic() - self.began:,.0f} s, {self.requests:,} requests{lost}")


async def _record(
    admin: str,
    token: str | None,
    seconds: float | None,
    requests: int | None,
    write: Callable[[str], object],
    progress: Progress,
) -> None:
    """Write lines until it is enough. Raises RecordingFailed."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=_SILENCE)
    try:
        async with (
            asyncio.timeout(seconds),
            aiohttp.ClientSession(timeout=timeout, headers=headers, read_bufsize=_LONGEST_LINE) as session,
            session.get(f"{admin}/recording") as answer,
        ):
            progress.answered = True
            if answer.status != 200:
                raise RecordingFailed(await _reason(answer))
            async for line in answer.content:
                if not line.strip():
                    continue
                write(line.decode())
                progress.requests += 1
                progress.lost += json.loads(line).get("lost", 0)
                if progress.requests == requests:
                    return
    except TimeoutError as error:
        if isinstance(error, aiohttp.ServerTimeoutError):
            raise RecordingFailed("it has fallen silent") from None
        if not progress.answered:
            raise RecordingFailed("it did not answer in that time") from None
        return
    except (aiohttp.ClientError, ValueError) as error:
        raise RecordingFailed(str(error) or type(error).__name__) from None
    raise RecordingFailed("it has ended the recording")


async def _reason(answer: aiohttp.ClientResponse) -> str:
    """What the picker says of why not."""
    try:
        return str(json.loads(await answer.text())["error"])
    except (KeyError, TypeError, ValueError):
        return f"status {answer.status}"
