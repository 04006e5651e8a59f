"""`picker explain-policy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from picker.cli.options import fail
from picker.policy import PolicyError, load_policy
from picker.policy.explain import explain_policy
from picker.settings import Settings


def explain(
    policy: Annotated[Path, typer.Argument(help="The policy YAML.", exists=True, dir_okay=False)],
    endpoints: Annotated[int, typer.Option(help="How many endpoints the pool has.", min=1)] = 1,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(help="Token budget of each engine, for thresholds that are a part of it.", min=1),
    ] = None,
    route_timeout: Annotated[
        float | None, typer.Option(help="The gateway's route timeout in seconds.", min=0)
    ] = None,
) -> None:
    """Say in words and numbers what a policy will do: shares, waits, limits, and what may surprise.

    The settings are taken as they are unless set.
    """
    try:
        read = load_policy(policy.read_text(encoding="utf-8"), str(policy))
    except PolicyError as error:
        raise fail(str(error), 2) from None
    except UnicodeError:
        raise fail(f"{policy}: not UTF-8 text", 2) from None
    page = explain_policy(
        read,
        endpoints,
        max_num_batched_tokens,
        route_timeout=route_timeout,
        default_wait=Settings().queue.max_wait,
    )
    typer.echo(page, nl=False)
