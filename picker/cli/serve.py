"""`picker serve`."""

from __future__ import annotations

import asyncio
import logging
import signal

from picker import garbage
from picker.app import App
from picker.cli.check import settings_warnings
from picker.cli.options import fail, with_settings
from picker.policy import PolicyError
from picker.pool.static_file import PoolFileError
from picker.settings import Settings, SettingsError
from picker.telemetry import configure_logging

log = logging.getLogger("picker.serve")


def _serve(settings: Settings) -> None:
    """Answer a gateway's questions: the endpoint picker itself.

    Every option is also a key of the `--config` file (`--extproc-port` is `extproc.port`) and an environment
    variable (`PICKER_EXTPROC__PORT`). A flag wins over the environment, which wins over the file. SIGTERM drains:
    not ready at once, and the end when nobody is left or `queue.drain_grace` is over.
    """
    lines = configure_logging(settings.log.level, settings.log.format)
    try:
        app = App(settings)
    except (PolicyError, PoolFileError, SettingsError) as error:
        raise fail(str(error), 2) from None
    app.telemetry.sources.stats["log"] = lines
    for warning in settings_warnings(settings):
        logging.getLogger("picker.settings").warning("%s", warning)
    try:
        failed = asyncio.run(_run(app))
    except OSError as error:
        raise fail(str(error)) from None
    if failed:
        raise fail("a background task failed; the log says which")


async def _run(app: App) -> bool:
    """Serve until told to stop; True if that is because something failed."""
    asked = asyncio.Event()
    hurried = asyncio.Event()

    def stop() -> None:
        (hurried if asked.is_set() else asked).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    # Where this fails the process ends, and with it whatever has been started.
    await app.start()
    garbage.expect_little()
    try:
        await _first(asked.wait(), app.failed.wait())
        if asked.is_set():
            log.info("draining")
            await _first(app.drain(), hurried.wait(), app.failed.wait())
    finally:
        await app.stop()
    return app.failed.is_set()


async def _first(*waits: object) -> None:
    """Until one of them is over; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


serve = with_settings(_serve)
