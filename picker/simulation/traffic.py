"""Classes of traffic with shared prefixes, and an HTTP client that sends them and times the answers."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

ENDPOINT_HEADER = "x-inference-pod"


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """How the requests of one class look. Lengths are in tokens.

    Each prompt is one of `groups` prefixes, which differ between classes, and a tail of its own. `weight` is
    the class's part of an open loop's arrivals.
    """

    name: str
    weight: float = 1.0
    groups: int = 4
    prefix_tokens: int = 512
    tail_tokens: int = 256
    max_tokens: int = 8
    stream: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """One request to send. The prompt is token ids, so that its length is exact."""

    traffic_class: str
    prompt: Sequence[int]
    max_tokens: int
    stream: bool
    headers: Mapping[str, str]


@dataclass(slots=True)
class Record:
    """What became of one request. Times are seconds on one monotonic clock; None: it did not come to that.

    `due` is when it was to be sent: an open loop measures from there, so that a client which falls behind
    does not hide the wait. `first_token` is the first event of a stream. `status` None: no answer, see `error`.
    """

    traffic_class: str
    due: float
    sent: float
    first_token: float | None = None
    done: float | None = None
    status: int | None = None
    endpoint: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.done is not None

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.due


@dataclass(slots=True)
class Result:
    """All records, in order of completion, and the clock when sending began and when the last one ended."""

    records: list[Record] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0

    def of(self, traffic_class: str) -> list[Record]:
        return [record for record in self.records if record.traffic_class == traffic_class]

    @property
    def statuses(self) -> dict[str, int]:
        """How many records ended how: by status, or by kind of error."""
        return dict(Counter(str(record.status or record.error) for record in self.records))

    @property
    def hit_share(self) -> float:
        """Cached part of all prompt tokens, as the engines reported it."""
        prompt = sum(record.prompt_tokens for record in self.records)
        return sum(record.cached_tokens for record in self.records) / prompt if prompt else 0.0


def percentile(values: Iterable[float], fraction: float) -> float | None:
    """The nearest-rank percentile; None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else None


def requests(traffic_class: TrafficClass, vocabulary: int, seed: int) -> Iterator[Request]:
    """Requests of a class without end. The same arguments give the same requests."""
    source = random.Random(f"{seed}/{traffic_class.name}")
    identifiers = range(2, vocabulary)
    prefixes = [
        source.choices(identifiers, k=traffic_class.prefix_tokens)
        for _ in range(max(1, traffic_class.groups))
    ]
    while True:
        tail = source.choices(identifiers, k=traffic_class.tail_tokens)
        yield Request(
            traffic_class.name,
            [*source.choice(prefixes), *tail],
            traffic_class.max_tokens,
            traffic_class.stream,
            traffic_class.headers,
        )


def poisson(
    classes: Sequence[TrafficClass], rate: float, vocabulary: int, seed: int
) -> Iterator[tuple[float, Request]]:
    """Arrivals without end, `rate` a second in all, mixed by weight: seconds from the start, and the request."""
    source = random.Random(f"{seed}/arrivals")
    streams = [requests(each, vocabulary, seed) for each in classes]
    weights = [each.weight for each in classes]
    at = 0.0
    while True:
        at += source.expovariate(rate)
        yield at, next(source.choices(streams, weights)[0])


class TrafficClient:
    """Sends completions requests to one address. `async with` it; nothing is retried."""

    def __init__(self, url: str, model: str, *, timeout: float = 300.0) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, request: Request, due: float | None = None) -> Record:
        """Send one request and follow its answer to the end. Never raises for what the other side does."""
        assert self._session is not None, "the client is not entered"
        now = time.monotonic()
        record = Record(request.traffic_class, now if due is None else due, now)
        headers = {"Content-Type": "application/json", **request.headers}
        try:
            async with self._session.post(self._url, data=self._body(request), headers=headers) as response:
                record.status = response.status
                record.endpoint = response.headers.get(ENDPOINT_HEADER)
                if response.content_type == "text/event-stream":
                    await self._follow(response, record)
                else:
                    answer = await response.read()
                    record.first_token = time.monotonic()
                    if response.status == 200:
                        _take_usage(record, msgspec.json.decode(answer))
            record.done = time.monotonic()
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            record.error = type(error).__name__
        return record

    async def open_loop(
        self,
        arrivals: Iterable[tuple[float, Request]],
        on_record: Callable[[Record], None] = lambda _: None,
        *,
        duration: float | None = None,
    ) -> Result:
        """Send each request at its time, however many are still open; then wait for all answers."""
        result = Result(started=time.monotonic())

        async def one(request: Request, due: float) -> None:
            record = await self.send(request, due)
            result.records.append(record)
            on_record(record)

        async with asyncio.TaskGroup() as tasks:
            for at, request in arrivals:
                if duration is not None and at >= duration:
                    break
                due = result.started + at
                await asyncio.sleep(due - time.monotonic())
                tasks.create_task(one(request, due))
        result.ended = time.monotonic()
        return result

    async def closed_loop(
        self,
        sources: Iterable[tuple[Iterator[Request], int]],
        on_record: Callable[[Record], None] = lambda _: None,
        *,
        duration: float | None = None,
        total: int | None = None,
    ) -> Result:
        """Keep a number of requests of each source open until the time or the total is used up.

        Open requests are followed to their end. At least one of `duration` (seconds) and `total` is needed.
        """
        if duration is None and total is None:
            raise ValueError("a closed loop needs a duration or a total")
        result = Result(started=time.monotonic())
        until = None if duration is None else result.started + duration
        tickets = itertools.count() if total is None else iter(range(total))

        async def one_client(source: Iterator[Request]) -> None:
            while (until is None or time.monotonic() < until) and next(tickets, None) is not None:
                record = await self.send(next(source))
                result.records.append(record)
                on_record(record)
                if record.status != 200:
                    # A refusal comes at once: do not answer it with a flood.
                    await asyncio.sleep(0.1)

        async with asyncio.TaskGroup() as clients:
            for source, concurrency in sources:
                for _ in range(concurrency):
                    clients.create_task(one_client(source))
        result.ended = time.monotonic()
        return result

    def _body(self, request: Request) -> bytes:
        body: dict[str, object] = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
        }
        if request.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(body)

    async def _follow(self, response: aiohttp.ClientResponse, record: Record) -> None:
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if record.first_token is None:
                record.first_token = time.monotonic()
            if b'"usage"' in line:
                _take_usage(record, msgspec.json.decode(line.removeprefix(b"data: ")))


def _take_usage(record: Record, answer: Any) -> None:
    usage = answer.get("usage") or {}
    record.prompt_tokens = usage.get("prompt_tokens", 0)
    record.output_tokens = usage.get("completion_tokens", 0)
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
