"""Readers whose tokens the API server knows; its HTTP surface is a stand-in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration

from picker.admin.token_review import TokenReview
from picker.api.v1 import introspection_pb2 as pb
from picker.api.v1 import introspection_pb2_grpc as pb_grpc
from picker.pool.kube.api import KubeApi

from .conftest import Admin, Get

PROMETHEUS = "system:serviceaccount:monitoring:prometheus"


@dataclass
class Reviewer:
    """The API server: `users` by token. It takes questions with its `own` token only."""

    users: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    own: str = "picker"
    knows_audiences: bool = True
    broken: bool = False
    port: int = 0
    now: float = 0.0
    held: str = "picker"  # the token that Picker has in hand
    renewed: str = "picker"  # and what its file says

    async def review(self, request: web.Request) -> web.Response:
        if self.broken:
            return web.json_response({"kind": "Status", "message": "no"}, status=500)
        if request.headers.get("Authorization") != f"Bearer {self.own}":
            return web.json_response({"kind": "Status", "message": "who?"}, status=401)
        question = await request.json()
        self.asked.append(question)
        spec = question["spec"]
        user = self.users.get(spec["token"])
        status: dict[str, Any] = {"authenticated": user is not None}
        if user is not None:
            status["user"] = {key: user[key] for key in ("username", "groups") if key in user}
            if "audiences" in spec and self.knows_audiences:
                status["audiences"] = [each for each in spec["audiences"] if each in user["audiences"]]
                status["authenticated"] = bool(status["audiences"])
        return web.json_response(question | {"status": status}, status=201)

    async def connect(self) -> KubeApi:
        configuration = Configuration(host=f"http://127.0.0.1:{self.port}")
        configuration.api_key = {"BearerToken": f"Bearer {self.held}"}

        async def reload() -> None:
            configuration.api_key = {"BearerToken": f"Bearer {self.renewed}"}

        return KubeApi(configuration, reload)

    def reader(self, *names: str, audiences: tuple[str, ...] = ()) -> TokenReview:
        return TokenReview(self.connect, names or (PROMETHEUS,), audiences, clock=lambda: self.now)


@pytest.fixture
async def reviewer() -> AsyncIterator[Reviewer]:
    reviewer = Reviewer(
        {"good": {"username": PROMETHEUS, "groups": ["system:authenticated"], "audiences": ["picker"]}}
    )
    app = web.Application()
    app.router.add_post("/apis/authentication.k8s.io/v1/tokenreviews", reviewer.review)
    async with TestServer(app) as server:
        assert server.port is not None
        reviewer.port = server.port
        yield reviewer


@pytest.fixture
async def review(reviewer: Reviewer) -> AsyncIterator[TokenReview]:
    review = reviewer.reader()
    yield review
    await review.close()


async def test_who_is_on_the_list_is_admitted_by_name_or_group(reviewer: Reviewer) -> None:
    reviewer.users |= {
        "another": {"username": "system:serviceaccount:x:y", "groups": ["system:authenticated"]},
        "operator": {"username": "jane", "groups": ["sre", 5]},
        "odd": {"username": None, "groups": "sre"},
    }
    review = reviewer.reader(PROMETHEUS, "sre")
    admitted = {
        token: await review.admits(token) for token in (*reviewer.users, "unknown", "", "x" * 20_000, "é")
    }
    assert [token for token, yes in admitted.items() if yes] == ["good", "operator"]
    assert review.stats.answers == {"admitted": 2, "refused": 3, "failed": 0}
    assert reviewer.asked[0]["spec"] == {"token": "good"}
    await review.close()


async def test_an_answer_is_remembered_for_a_while(reviewer: Reviewer, review: TokenReview) -> None:
    for _ in range(3):
        assert await review.admits("good")
        assert not await review.admits("bad")
    assert len(reviewer.asked) == 2
    del reviewer.users["good"]
    reviewer.now += 9.0
    assert await review.admits("good")
    reviewer.now += 1.1
    assert not await review.admits("good")


async def test_a_flood_of_tokens_is_not_remembered_without_bound(
    reviewer: Reviewer, review: TokenReview
) -> None:
    for number in range(300):
        assert not await review.admits(f"token {number}")
    assert len(review._known) == 256
    assert not await review.admits("token 299")
    assert len(reviewer.asked) == 300


async def test_an_audience_must_be_said_by_the_server(reviewer: Reviewer) -> None:
    reviewer.users["elsewhere"] = {"username": PROMETHEUS, "audiences": ["vault"]}
    review = reviewer.reader(audiences=("picker",))
    assert await review.admits("good")
    assert not await review.admits("elsewhere")
    reviewer.knows_audiences = False
    reviewer.now += 60
    assert not await review.admits("good"), "nobody has looked at its audience"
    await review.close()


async def test_what_cannot_be_asked_is_not_admitted_and_not_remembered(
    reviewer: Reviewer, review: TokenReview
) -> None:
    reviewer.broken = True
    assert not await review.admits("good")
    reviewer.broken = False
    assert await review.admits("good")
    assert review.stats.answers == {"admitted": 1, "refused": 0, "failed": 1}


async def test_a_rotated_token_of_our_own_is_read_again(reviewer: Reviewer, review: TokenReview) -> None:
    reviewer.own = reviewer.renewed = "next"
    assert await review.admits("good")


async def test_a_cluster_that_is_not_there(reviewer: Reviewer) -> None:
    async def connect() -> KubeApi:
        raise OSError("no service account")

    review = TokenReview(connect, (PROMETHEUS,), clock=lambda: 0.0)
    assert not await review.admits("good")
    assert review.stats.answers["failed"] == 1
    await review.close()


async def test_both_servers_heed_it_beside_the_token_file(
    admin: Admin, get: Get, reviewer: Reviewer, review: TokenReview, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("static\n")
    await admin.serve(token_file=token_file, review=review)
    for token, status in (("good", 200), ("static", 200), ("bad", 401), ("", 401)):
        async with get("/status", Authorization=f"Bearer {token}") as answer:
            assert answer.status == status, token
    async with get("/status") as answer:
        assert answer.status == 401
    async with get("/metrics") as answer:
        assert answer.status == 200
    async with grpc.aio.insecure_channel(await admin.serve_grpc(review=review)) as channel:
        stub = pb_grpc.IntrospectionStub(channel)
        await stub.GetPool(pb.GetPoolRequest(), metadata=(("authorization", "Bearer good"),))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetPool(pb.GetPoolRequest(), metadata=(("authorization", "Bearer static"),))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "static" not in json.dumps([each["spec"]["token"] for each in reviewer.asked[:2]])
