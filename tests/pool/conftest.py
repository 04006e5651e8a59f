from __future__ import annotations

import ssl
from collections.abc import AsyncIterator

import pytest

from tests.pool.fake_kube import FakeKube

_TLS = ssl.create_default_context()


@pytest.fixture
async def kube(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeKube]:
    # The client makes a TLS context even for plain HTTP, and reading the system's certificates takes 0.1 s.
    monkeypatch.setattr(ssl, "create_default_context", lambda **_: _TLS)
    fake = FakeKube()
    await fake.server.start_server()
    yield fake
    await fake.stop()
