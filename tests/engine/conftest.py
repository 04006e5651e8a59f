"""Every test here talks to a real vLLM, and is skipped where it cannot be had or Envoy is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from picker.simulation.envoy import EnvoyUnavailable, envoy_binary
from tests.engine.environment import CannotInstall, ensure, versions
from tests.engine.model import FULL, write_model
from tests.engine.vllm import CannotStart, Vllm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print at once, past pytest's capture: installing and starting take minutes."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def tell(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", end="", flush=True)

    return tell


@pytest.fixture(scope="session")
def engine_python(say: Callable[[str], None]) -> Path:
    """The Python that has vLLM."""
    try:
        envoy_binary()
        python = ensure(say)
    except (CannotInstall, EnvoyUnavailable) as error:
        say(f"SKIPPED: {error}")
        pytest.skip(str(error))
    say(versions(python))
    return python


@pytest.fixture(scope="session")
def vllm(
    engine_python: Path, tmp_path_factory: pytest.TempPathFactory, say: Callable[[str], None]
) -> Iterator[Vllm]:
    """The engine that the tests share. A test that stops it starts it again."""
    directory = tmp_path_factory.mktemp("vllm")
    engine = Vllm(engine_python, write_model(directory / "model", FULL), directory / "vllm.log")
    say("vLLM: starting, half a minute or more ...")
    try:
        engine.start()
    except CannotStart as error:
        # It could be installed: that it does not run is a failure to look at, no reason to skip.
        pytest.fail(str(error))
    yield engine
    engine.kill()
