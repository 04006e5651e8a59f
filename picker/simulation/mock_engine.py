"""A mock of one vLLM server: its HTTP surface, prefix cache, KV events and metrics, without a GPU.

It answers with readable noise, at the pace of `EngineModel`: prompts are prefilled in order of arrival at a
given rate of uncached tokens, a bounded number of requests run at once, and the rest wait inside.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
from aiohttp import web

from picker.rpc import address_of
from picker.simulation.engine_loop import EngineLoop, Generation
from picker.simulation.engine_model import EngineModel, EngineShape, Job, StepCost
from picker.simulation.kv_publisher import KvPublisher
from picker.simulation.mock_metrics import EngineMetrics, ServedStats
from picker.simulation.prompts import DEFAULT_TOKENIZER, PromptEncoder, PromptError
from picker.simulation.token_blocks import EventRecorder, TokenTable

if TYPE_CHECKING:
    from multidict import CIMultiDictProxy

VERSION = "0.32.0"
_CLIENT_GONE = 499
_MAX_BODY = 128 * 1024 * 1024
_UNRECORDED = ("/metrics", "/health", "/ping", "/version", "/kv_event_sources")


@dataclass(frozen=True, slots=True)
class MockEngineSettings:
    """One server. Port 0 takes a free one; times are in seconds, rates in tokens a second."""

    host: str = "127.0.0.1"
    port: int = 0
    model: str = "tiny"
    # Answers carry it as `x-inference-pod`, as llm-d's simulator names its pods; real vLLM sends no such thing.
    name: str | None = None
    tokenizer: Path = DEFAULT_TOKENIZER
    max_model_len: int = 32_768
    block_size: int = 16
    num_blocks: int = 8192
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    prefill_rate: float = 20_000.0
    iteration_time: float = 0.005
    decode_time: float = 0.0
    kv_events: bool = True
    kv_port: int = 0
    replay_port: int = 0
    event_buffer: int = 10_000
    rank: int = 0
    default_max_tokens: int = 16
    # How many of the requests served last are remembered, for tests and demos to look at.
    remember: int = 10_000
    shutdown_grace: float = 1.0

    def __post_init__(self) -> None:
        if self.prefill_rate <= 0 or self.iteration_time <= 0 or self.decode_time < 0:
            raise ValueError("prefill_rate and iteration_time must be positive, decode_time not negative")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a started engine listens. Without KV events the last two are None."""

    http: str
    kv_events: str | None
    kv_replay: str | None

    @property
    def url(self) -> str:
        return f"http://{self.http}"


@dataclass(slots=True)
class Served:
    """A request that has arrived. `arrival` and `completion` count from 0; `completion` None: not over yet.

    `status` 499 stands for a client that went away.
    """

    arrival: int
    method: str
    path: str
    headers: CIMultiDictProxy[str]
    body_sha256: str
    body_bytes: int
    completion: int | None = None
    status: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def request_id(self) -> str | None:
        return self.headers.get("x-request-id")


class ApiError(Exception):
    """An answer in vLLM's error shape."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind

    def response(self) -> web.Response:
        error = {"message": str(self), "type": self.kind, "param": None, "code": self.status}
        return _json({"error": error}, self.status)


@dataclass(slots=True)
class _Call:
    """A completions or chat request, understood."""

    chat: bool
    identifier: str
    prompts: list[list[int]]
    outputs: list[list[int]]
    salt: str | None
    stream: bool
    include_usage: bool
    return_ids: bool
    served: Served
    created: int = field(default_factory=lambda: int(time.time()))


_SERVED: web.RequestKey[Served] = web.RequestKey("served", Served)


class MockEngine:
    """`async with MockEngine(settings) as engine:` serves until the block ends; see `addresses`, `served`."""

    def __init__(self, settings: MockEngineSettings | None = None) -> None:
        self.settings = settings = settings or MockEngineSettings()
        self.served: deque[Served] = deque(maxlen=settings.remember)
        self.addresses = Addresses("", None, None)
        recorder = EventRecorder()
        shape = EngineShape(
            settings.block_size, settings.num_blocks, settings.max_num_seqs, settings.max_num_batched_tokens
        )
        cost = StepCost(
            base=settings.iteration_time,
            prefill_token=1.0 / settings.prefill_rate,
            decode_sequence=settings.decode_time,
        )
        self.model = EngineModel(shape, cost, recorder)
        self.max_model_len = min(settings.max_model_len, shape.capacity_tokens)
        self._prompts = PromptEncoder(settings.tokenizer)
        self._publisher = (
            KvPublisher(
                settings.host,
                settings.kv_port,
                settings.replay_port,
                rank=settings.rank,
                buffer=settings.event_buffer,
            )
            if settings.kv_events
            else None
        )
        publish = self._publisher.publish if self._publisher else lambda _: None
        self._loop = EngineLoop(self.model, recorder, publish)
        self._stats = ServedStats()
        self._metrics = EngineMetrics(self.model, self._stats, settings.model, settings.rank)
        self._arrivals = itertools.count()
        self._completions = itertools.count()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> Addresses:
        """Listen. Raises OSError when the HTTP port is taken, zmq.ZMQError when a KV port is."""
        settings = self.settings
        self._runner = web.AppRunner(
            self._application(),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=settings.shutdown_grace,
        )
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, settings.host, settings.port, backlog=4096)
            await site.start()
            host, port = self._runner.addresses[0][:2]
            http = address_of(host, port)
            if self._publisher is not None:
                self._publisher.start(topic=f"kv@{http}@{settings.model}")
        except BaseException:
            await self._runner.cleanup()
            raise
        publisher = self._publisher
        self.addresses = Addresses(
            http,
            publisher.endpoint if publisher else None,
            publisher.replay_endpoint if publisher else None,
        )
        self._loop.start()
        return self.addresses

    async def stop(self) -> None:
        """Stop listening, give open requests the grace, then drop them."""
        if self._runner is not None:
            await self._runner.cleanup()
        await self._loop.stop()
        if self._publisher is not None:
            await self._publisher.close()

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._record])
        app.add_routes(
            [
                web.post("/v1/completions", self._completions_route),
                web.post("/v1/chat/completions", self._chat_route),
                web.post("/tokenize", self._tokenize),
                web.post("/reset_prefix_cache", self._reset),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/ping", self._health),
                web.get("/version", self._version),
                web.get("/load", self._load),
                web.get("/metrics", self._scrape),
                web.get("/kv_event_sources", self._sources),
            ]
        )
        return app

    @web.middleware
    async def _record(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Remember what arrived and how it ended, and turn errors into vLLM's."""
        if request.path in _UNRECORDED:
            return await handler(request)
        served = Served(next(self._arrivals), request.method, request.path, request.headers, "", 0)
        request[_SERVED] = served
        self.served.append(served)
        try:
            body = await request.read()
            served.body_sha256, served.body_bytes = hashlib.sha256(body).hexdigest(), len(body)
            response = await self._answer(request, handler)
            served.status = served.status or response.status
            return response
        except asyncio.CancelledError:
            served.status = _CLIENT_GONE
            raise
        finally:
            served.completion = next(self._completions)

    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except PromptError as error:
            return ApiError(400, str(error)).response()
        except ApiError as error:
            return error.response()
        except web.HTTPException as error:
            return _json({"detail": error.reason}, error.status)

    # -- inference ----------------------------------------------------------------------------------------

    async def _completions_route(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        return await self._generate(request, body, self._prompts.completion(body.get("prompt")), chat=False)

    async def _chat_route(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        return await self._generate(request, body, [self._prompts.chat(body)], chat=True)

    async def _generate(
        self, request: web.Request, body: dict[str, Any], prompts: list[list[int]], *, chat: bool
    ) -> web.StreamResponse:
        call = self._understand(request, body, prompts, chat)
        jobs = [
            Job(
                TokenTable(prompt + output, self.settings.block_size, call.salt),
                len(prompt),
                len(output),
            )
            for prompt, output in zip(call.prompts, call.outputs, strict=True)
        ]
        started = time.monotonic()
        reason = "abort"
        try:
            async with self._loop.generate(jobs) as generations:
                response = await (
                    self._stream(request, call, generations, started)
                    if call.stream
                    else self._whole(call, generations, started)
                )
            reason = "abort" if call.served.status == _CLIENT_GONE else "length"
        finally:
            self._stats.finished[reason] += len(jobs)
        if not response.prepared:
            response.headers.update(self._own_headers(request))
        return response

    def _own_headers(self, request: web.Request) -> dict[str, str]:
        headers = {} if self.settings.name is None else {"x-inference-pod": self.settings.name}
        if "x-request-id" in request.headers:
            headers["X-Request-Id"] = request.headers["x-request-id"]
        return headers

    def _understand(
        self, request: web.Request, body: dict[str, Any], prompts: list[list[int]], chat: bool
    ) -> _Call:
        settings = self.settings
        if body.get("model", settings.model) != settings.model:
            raise ApiError(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        tokens = body.get("max_completion_tokens") or body.get("max_tokens")
        if tokens is None:
            tokens = settings.default_max_tokens
        if type(tokens) is not int or tokens < 1:
            raise ApiError(400, f"max_tokens must be a positive integer, got {tokens!r}")
        longest = max(map(len, prompts))
        if longest + tokens > self.max_model_len:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens. However, you "
                f"requested {longest + tokens} tokens ({longest} in the messages, {tokens} in the completion).",
            )
        salt = body.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise ApiError(400, "cache_salt must be a non-empty string")
        served = request[_SERVED]
        options = body.get("stream_options")
        name = served.request_id or hashlib.sha256(f"{id(self)}/{served.arrival}".encode()).hexdigest()[:32]
        return _Call(
            chat=chat,
            identifier=f"{'chatcmpl' if chat else 'cmpl'}-{name}",
            prompts=prompts,
            outputs=[self._prompts.noise(prompt, tokens) for prompt in prompts],
            salt=salt,
            stream=body.get("stream") is True,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
            return_ids=body.get("return_token_ids") is True,
            served=served,
        )

    async def _whole(self, call: _Call, generations: list[Generation], started: float) -> web.Response:
        await asyncio.gather(*(self._drain(generation, started) for generation in generations))
        usage = self._account(call, generations)
        choices = []
        for index, (prompt, output) in enumerate(zip(call.prompts, call.outputs, strict=True)):
            text = self._prompts.decode(output)
            choice: dict[str, object] = {"index": index, "finish_reason": "length", "logprobs": None}
            if call.chat:
                choice["message"] = {"role": "assistant", "content": text}
            else:
                choice["text"] = text
            if call.return_ids:
                choice |= {"prompt_token_ids": prompt, "token_ids": output}
            choices.append(choice)
        kind = "chat.completion" if call.chat else "text_completion"
        return _json({**self._envelope(call, kind), "choices": choices, "usage": usage})

    async def _drain(self, generation: Generation, started: float) -> None:
        first = True
        async for _ in generation:
            if first:
                self._metrics.time_to_first_token.observe(time.monotonic() - started)
                first = False

    async def _stream(
        self, request: web.Request, call: _Call, generations: list[Generation], started: float
    ) -> web.StreamResponse:
        # As in vLLM the headers go out at once, long before the first token of a request that has to wait.
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", **self._own_headers(request)}
        )
        try:
            await response.prepare(request)
            await self._write_stream(response, call, generations, started)
        except* ConnectionError:
            # Leaving the block that called this aborts the jobs; there is nobody left to tell.
            call.served.status = _CLIENT_GONE
        return response

    async def _write_stream(
        self, response: web.StreamResponse, call: _Call, generations: list[Generation], started: float
    ) -> None:
        lock = asyncio.Lock()
        async with asyncio.TaskGroup() as choices:
            for index, generation in enumerate(generations):
                choices.create_task(self._stream_choice(response, lock, call, index, generation, started))
        usage = self._account(call, generations)
        if call.include_usage:
            await response.write(_event({**self._chunk_envelope(call), "choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()

    async def _stream_choice(
        self,
        response: web.StreamResponse,
        lock: asyncio.Lock,
        call: _Call,
        index: int,
        generation: Generation,
        started: float,
    ) -> None:
        output, sent = call.outputs[index], 0
        envelope = self._chunk_envelope(call)
        async for tokens in generation:
            fresh = output[sent:tokens]
            choice: dict[str, object] = {"index": index, "logprobs": None}
            text = self._prompts.decode(fresh)
            if call.chat:
                choice["delta"] = {"content": text} if sent else {"role": "assistant", "content": text}
            else:
                choice["text"] = text
            choice["finish_reason"] = "length" if tokens == len(output) else None
            if call.return_ids:
                choice["token_ids"] = fresh
                if not sent:
                    choice["prompt_token_ids"] = call.prompts[index]
            if not sent:
                self._metrics.time_to_first_token.observe(time.monotonic() - started)
            sent = tokens
            async with lock:
                await response.write(_event({**envelope, "choices": [choice]}))

    def _account(self, call: _Call, generations: list[Generation]) -> dict[str, object]:
        prompt = sum(map(len, call.prompts))
        output = sum(map(len, call.outputs))
        cached = sum(generation.job.cached_tokens or 0 for generation in generations)
        call.served.prompt_tokens, call.served.cached_tokens = prompt, cached
        self._stats.prompt_tokens += prompt
        self._stats.cached_prompt_tokens += cached
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _envelope(self, call: _Call, kind: str) -> dict[str, object]:
        return {"id": call.identifier, "object": kind, "created": call.created, "model": self.settings.model}

    def _chunk_envelope(self, call: _Call) -> dict[str, object]:
        return self._envelope(call, "chat.completion.chunk" if call.chat else "text_completion")

    # -- the rest -----------------------------------------------------------------------------------------

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if "messages" in body:
            ids = self._prompts.chat(body)
        elif isinstance(body.get("prompt"), str):
            ids = self._prompts.text(body["prompt"], special=body.get("add_special_tokens", True) is True)
        else:
            raise ApiError(400, "either prompt (a string) or messages is required")
        return _json({"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids})

    async def _reset(self, _: web.Request) -> web.Response:
        return _json({"success": self.model.cache.reset()})

    async def _models(self, _: web.Request) -> web.Response:
        model = {
            "id": self.settings.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": self.settings.model,
            "parent": None,
            "max_model_len": self.max_model_len,
        }
        return _json({"object": "list", "data": [model]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": VERSION})

    async def _load(self, _: web.Request) -> web.Response:
        return _json({"server_load": len(self.model.running) + len(self.model.waiting)})

    async def _scrape(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.render(),
            headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"},
        )

    async def _sources(self, _: web.Request) -> web.Response:
        if self._publisher is None:
            return _json({})
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": _anywhere(self._publisher.endpoint),
            "replay_endpoint": _anywhere(self._publisher.replay_endpoint),
            "buffer_steps": self.settings.event_buffer,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": self._publisher.topic,
        }
        return _json({str(self.settings.rank): source})

    async def _body(self, request: web.Request) -> dict[str, Any]:
        try:
            body = msgspec.json.decode(await request.read())
        except msgspec.DecodeError as error:
            raise ApiError(400, f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object")
        return body


def _anywhere(address: str) -> str:
    """With a wildcard for the host, as a vLLM that binds its sockets is configured."""
    return f"tcp://*:{address.rpartition(':')[2]}"


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
