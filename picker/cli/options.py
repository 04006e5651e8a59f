"""Command-line options made from the settings: one flag a setting, in panels as the settings are grouped."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from picker.settings import Setting, SettingsError, all_settings, load_settings

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="PICKER_CONFIG", help="YAML file with settings.", metavar="FILE"),
]


def fail(message: str, code: int = 1) -> typer.Exit:
    """Say why on standard error; raise what this returns."""
    for line in message.splitlines():
        typer.echo(f"picker: {line}", err=True)
    return typer.Exit(code)


def http_url(text: str) -> str:
    """Checks an option as it is read."""
    if not text.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{text!r} does not begin with http:// or https://")
    return text


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes --config and a flag for each setting, and gets the settings that they make. Its other
    parameters are options of its own.
    """
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    def run(config: Path | None, **flags: Any) -> None:
        options = {parameter.name: flags.pop(parameter.name) for parameter in own}
        given = {
            setting.key: _text(value)
            for setting in all_settings()
            if (value := flags.get(_parameter(setting))) is not None
        }
        try:
            settings = load_settings(config, os.environ, given)
        except SettingsError as error:
            raise fail(str(error), 2) from None
        command(settings, **options)

    parameters = [_keyword("config", ConfigOption), *own]
    parameters += [_keyword(_parameter(setting), _option(setting)) for setting in all_settings()]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation
    )


def _parameter(setting: Setting) -> str:
    return "_".join(setting.path)


def _option(setting: Setting) -> Any:
    text = setting.description + (f" [default: {setting.default}]" if setting.default else "")
    panel = ".".join(setting.path[:-1])
    if setting.is_flag:
        names = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"
        return Annotated[
            bool | None, typer.Option(names, help=text, rich_help_panel=panel, show_default=False)
        ]
    option = typer.Option(
        setting.flag, help=text, metavar=setting.kind, rich_help_panel=panel, show_default=False
    )
    return Annotated[str | None, option]


def _text(value: str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else value
