from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.pool.fake_kube import FakeKube


@pytest.fixture
async def kube() -> AsyncIterator[FakeKube]:
    fake = FakeKube()
    await fake.server.start_server()
    yield fake
    await fake.stop()
