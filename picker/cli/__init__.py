"""The command `picker`. Each subcommand is imported when it is called, so that help comes at once."""

from __future__ import annotations

import importlib
import signal
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from picker import __version__

# name -> (where it is, what it does in a few words)
COMMANDS = {
    "serve": ("picker.cli.serve:serve", "Answer a gateway's questions: the endpoint picker itself."),
    "check": (
        "picker.cli.check:check",
        "Validate settings, policy and pool together, and warn of surprises.",
    ),
    "explain-policy": ("picker.cli.explain:explain", "Say in words and numbers what a policy will do."),
    "status": (
        "picker.cli.status:status",
        "Show the pool, the queues and their deficits of a running picker.",
    ),
    "taint": ("picker.cli.taint:taint", "Taint a pod, or take a taint off it."),
    "demo": (
        "picker.simulation.demo:demo_command",
        "See weighted shares on this machine: mock engines, Picker and a real Envoy.",
    ),
    "mock-engine": (
        "picker.simulation.mock_command:mock_engine_command",
        "Run a mock vLLM server, without a GPU.",
    ),
    "simulate": (
        "picker.simulation.experiments.simulate_command:simulate",
        "Try policies on a workload in virtual time.",
    ),
    "study": (
        "picker.simulation.studies.study_command:study",
        "Repeat the studies that Picker's claims rest on.",
    ),
    "record": (
        "picker.cli.record:record",
        "Record the requests of a running picker.",
    ),
    "replay": (
        "picker.simulation.replay_command:replay_command",
        "Send the requests of a recording to a live gateway.",
    ),
    "reference": (
        "picker.cli.reference:reference",
        "Print the reference of settings, metrics or the policy.",
    ),
}


class LazyGroup(TyperGroup):
    """Knows its commands by name; imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What help needs of a command, without importing it."""
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, _load(str(name)), rest


def _load(name: str) -> Any:
    module, _, function = COMMANDS[name][0].partition(":")
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    single.command(name)(getattr(importlib.import_module(module), function))
    return typer.main.get_command(single)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="An endpoint picker for LLM inference: weighted shares of uncached-token work, decided before the queue.",
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"picker {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print it."),
) -> None:
    pass


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 called wrongly, 130 told to stop."""
    # As Ctrl-C: what was started ends, and what was gathered is kept. `serve` has a way of its own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app(prog_name="picker")
    except (OSError, UnicodeError) as error:
        # A file or an address that somebody named, where the command has no better words.
        named = getattr(error, "filename", None)
        reason = getattr(error, "strerror", None) or error
        sys.exit(f"picker: {named}: {reason}" if named is not None else f"picker: {reason}")
