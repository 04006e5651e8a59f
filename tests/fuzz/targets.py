"""What is fuzzed: every place where bytes of others come in. Each target takes any bytes, and lets nothing out but
what its boundary promises; an AssertionError or any other exception is a find."""

# ruff: noqa: PT017  # these are no tests: what an error says is checked where it is taken
from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct

from picker.extproc.conversation import Ask, Conversation, ConversationLimits, ProtocolError
from picker.extproc.handler import Refused, Routed
from picker.extproc.messages import plain_metadata
from picker.extproc.usage import UsageReader
from picker.kvcache.discovery import DiscoveryError, parse_sources
from picker.kvcache.engine_blocks import EngineBlocks
from picker.kvcache.index import KvIndex
from picker.kvcache.replay import BadFrames, parse_message
from picker.kvcache.stream import EventStream
from picker.policy import PolicyError, load_policy
from picker.policy.explain import explain_policy
from picker.pool.endpoint import EngineKind
from picker.pool.metrics_text import parse_engine_report
from picker.pool.static_file import PoolFileError, parse_pool_file
from picker.requests import BadRequest, BodyLimits, HintTrust, Trust, parse_hints, parse_request, subset_hint
from picker.requests.subset import SUBSET_KEY, SUBSET_NAMESPACE
from picker.rpc import ByteBudget
from picker.tokens.count import EstimateReason, estimate
from tests.support import messages
from tests.support.handlers import RecordedExchange

ROOT = Path(__file__).parents[2]
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/x")
CODINGS = ("", "", "", "gzip", "deflate", "zstd")
LIMITS = BodyLimits(max_body_bytes=1 << 20, max_expanded_bytes=1 << 20)
TRUSTING = HintTrust(**dict.fromkeys(HintTrust.model_fields, Trust.ACCEPT))


@dataclass(frozen=True, slots=True)
class Target:
    """`seeds` are good inputs to start from, `words` what such inputs are made of."""

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]
    words: tuple[bytes, ...] = field(default=())


def request_body(data: bytes) -> None:
    """The first byte chooses the route and the coding."""
    if not data:
        return
    path = PATHS[data[0] % len(PATHS)]
    coding = CODINGS[data[0] // len(PATHS) % len(CODINGS)]
    headers = [("content-encoding", coding)] if coding else []
    try:
        request = parse_request("POST", path, headers, data[1:], LIMITS)
    except BadRequest as error:
        assert error.status in (400, 413, 415)
        assert error.message.isprintable()
        return
    assert estimate(request, EstimateReason.NO_TOKENIZER).count >= 1
    assert request.size_bytes <= LIMITS.max_expanded_bytes


def kv_frames(data: bytes) -> None:
    """Messages for one engine, live or replayed, each with a byte that says how and two for its length."""
    index = KvIndex(max_blocks=2000)
    blocks = EngineBlocks(0, index)
    stream = EventStream(blocks, can_replay=True)
    stream.connected()
    for number, (how, payload) in enumerate(_pieces(data)):
        try:
            message = parse_message([b"kv", (number % 7 + how % 3).to_bytes(8, "big"), payload])
        except BadFrames:
            continue
        (stream.replayed if stream.replaying and how & 4 else stream.live)(*message)
        if how & 8:
            stream.replay_ended()
    with suppress(BadFrames):
        parse_message([piece for _, piece in _pieces(data)])
    assert index.blocks_of(0) <= len(index) <= 2000
    blocks.close()
    assert len(index) == 0


def metrics_text(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    for kind in (None, *EngineKind):
        for rank in (None, 1):
            report = parse_engine_report(text, kind, rank, 0.0)
            assert report.running is None or report.running >= 0
            assert report.waiting is None or report.waiting >= 0
            assert report.kv_usage is None or 0 <= report.kv_usage <= 1
            assert report.block_size is None or report.block_size > 0


def policy_yaml(data: bytes) -> None:
    try:
        policy = load_policy(data.decode("utf-8", "replace"))
    except PolicyError as error:
        assert str(error).strip()
        return
    explain_policy(policy, 3)
    for policy_class in policy.classes():
        assert policy_class.quantum >= 1


def pool_yaml(data: bytes) -> None:
    try:
        specs = parse_pool_file(data.decode("utf-8", "replace"))
    except PoolFileError as error:
        assert str(error).strip()
        return
    assert len({spec.uid for spec in specs}) == len(specs)
    assert all(1 <= spec.port <= 65535 for spec in specs)


def subset(data: bytes) -> None:
    """As JSON, and as the protobuf Struct that a gateway sends."""
    values = []
    with suppress(ValueError, RecursionError):
        values.append({SUBSET_NAMESPACE: {SUBSET_KEY: json.loads(data)}})
    with suppress(DecodeError):
        values.append(plain_metadata({SUBSET_NAMESPACE: Struct.FromString(data)}))
    values.append({SUBSET_NAMESPACE: {SUBSET_KEY: data.decode("latin-1")}})
    for metadata in values:
        found = subset_hint(metadata)
        assert found is None or all(entry and entry == entry.strip() for entry in found)
        _hints([], {"picker": metadata[SUBSET_NAMESPACE]})


def hint_headers(data: bytes) -> None:
    """Lines of `name: value`."""
    pairs = (line.partition(": ") for line in data.decode("latin-1").split("\n"))
    headers = [(name.lower(), value) for name, _, value in pairs]
    _hints(headers, {})
    _hints(headers, {"picker": dict(headers) | {name[9:]: value for name, value in headers}})


def _hints(headers: list[tuple[str, str]], metadata: dict[str, object]) -> None:
    try:
        hints = parse_hints(headers, metadata, TRUSTING)
    except BadRequest as error:
        assert error.status == 400
        assert error.message.isprintable()
        return
    assert hints.ttl is None or 0 <= hints.ttl < float("inf")
    assert hints.priority is None or abs(hints.priority) <= 1e6


def ext_proc_messages(data: bytes) -> None:
    """A stream's messages, each with two bytes for its length; whatever comes is decided at once."""
    budget = ByteBudget(100_000)
    conversation = Conversation(ConversationLimits(max_body_bytes=50_000), budget)
    for how, piece in _pieces(data):
        try:
            event = conversation.receive(ProcessingRequest.FromString(piece), 0.0)
        except DecodeError:
            break
        except ProtocolError:
            if conversation.undecided:
                conversation.refuse(Refused(500, "protocol", "protocol"))
            break
        if isinstance(event, Ask):
            _hints(event.arrival.headers, event.arrival.metadata)
            if how & 1:
                conversation.forward(Routed("10.0.0.1:80", RecordedExchange()))
            else:
                conversation.refuse(Refused(429, "full", "full", 1.0))
        while (reply := conversation.next_reply()) is not None:
            reply.SerializeToString()
    conversation.close()
    assert budget.stats.held_bytes == 0


def response_usage(data: bytes) -> None:
    reader = UsageReader()
    for _, piece in _pieces(data):
        reader.feed(piece)
    found = reader.usage()
    if found is not None:
        reported = (found.prompt_tokens, found.cached_tokens, found.output_tokens)
        assert all(value is None or value >= 0 for value in reported)


def event_sources(data: bytes) -> None:
    try:
        sources = parse_sources(data, "10.0.0.1")
    except DiscoveryError:
        return
    assert all(source.events.startswith("tcp://") for source in sources.values())


def _pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(a byte, what follows it) again and again; the length is in two more bytes."""
    at = 0
    while at + 3 <= len(data):
        size = int.from_bytes(data[at + 1 : at + 3], "big")
        yield data[at], data[at + 3 : at + 3 + size]
        at += 3 + size


def _joined(pieces: Iterator[bytes] | list[bytes]) -> bytes:
    return b"".join(
        bytes([how % 256]) + len(piece).to_bytes(2, "big") + piece for how, piece in zip(count(1), pieces)
    )


def _body_seeds() -> Iterator[bytes]:
    message = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    bodies = [
        {"model": "m", "prompt": "hello", "max_tokens": 5, "stream": True, "cache_salt": "s"},
        {"model": "m", "prompt": [1, 2, 3], "truncate_prompt_tokens": 2},
        {"prompt": [[1], [2, 3]]},
        {"messages": [message], "tools": [tool], "chat_template_kwargs": {"a": 1}},
        {"input": "text", "instructions": "be brief"},
        {"input": [{"type": "message", "role": "user", "content": "x"}], "tools": [tool]},
        {"system": "s", "messages": [message], "max_tokens": 3},
    ]
    for body in bodies:
        for route in range(len(PATHS)):
            yield bytes([route]) + json.dumps(body).encode()


def _kv_seeds() -> Iterator[bytes]:
    stored = ["BlockStored", [1, 2], None, list(range(32)), 16, None, "GPU"]
    mapped = {
        "type": "BlockStored",
        "block_hashes": [b"\x01" * 32],
        "parent_block_hash": 2,
        "token_ids": list(range(16)),
        "block_size": 16,
        "extra_keys": [["x", ["img", 3]]],
        "lora_name": "a",
    }
    batches = [
        [0.0, [stored, ["BlockRemoved", [1], "GPU"], ["AllBlocksCleared"]], 0],
        [0.0, [mapped, {"type": "BlockRemoved", "block_hashes": [2]}, {"type": "Other"}], None],
    ]
    for batch in batches:
        payload = msgspec.msgpack.encode(batch)
        yield _joined([payload])
        yield _joined([payload] * 4)


def _metrics_seeds() -> Iterator[bytes]:
    for name in ("metrics.txt", "metrics-busy.txt"):
        lines = (ROOT / "tests/golden/vllm-0.32" / name).read_bytes().splitlines()
        yield b"\n".join(line for line in lines if b"vllm:" in line and not line.startswith(b"#"))[:4000]
    yield b'sglang:num_running_reqs{tp_rank="0",dp_rank="1"} 3\nsglang:token_usage{dp_rank="1"} 0.5\n'
    yield b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b"} 1.7e9\n'


def _policy_seeds() -> Iterator[bytes]:
    for path in sorted((ROOT / "tests/policy").glob("*.yaml")):
        yield path.read_bytes()


def _pool_seeds() -> Iterator[bytes]:
    yield (
        b"endpoints:\n  - {name: a, address: '10.0.0.1:8000', taints: ['gpu=old:NoSchedule'],\n"
        b"     labels: {x: y}, kv_events: 'tcp://10.0.0.1:5557', block_size: 16}\n"
        b"  - {name: b, address: '[fd00::5]:8000', ranks: 2, metrics: false}\n"
    )


def _subset_seeds() -> Iterator[bytes]:
    yield b'["10.0.0.1:80", "", 7, "[fd00::5]:8000"]'
    yield b"10.0.0.1:80,10.0.0.2:80"
    struct = Struct()
    struct.update({SUBSET_KEY: ["10.0.0.1:80", 5, None, {"a": [1]}], "priority": 3})
    yield struct.SerializeToString()


def _hint_seeds() -> Iterator[bytes]:
    yield (
        b"x-picker-policy-class: premium\nx-picker-priority: 5\nx-picker-endpoint: 10.0.0.1:80\nx-picker-rank: 1\n"
        b"x-picker-tolerations: gpu=old:NoSchedule,a\nx-picker-required-taints: a=b\nx-picker-ttl-ms: 500\n"
        b"x-picker-preferred-taints: a=-3,b=c=1.5\nx-picker-allowed-endpoints: a,b\nx-picker-tenant: t\n"
    )


def _message_seeds() -> Iterator[bytes]:
    headers = messages.request_headers(
        headers=[("content-type", "application/json")], metadata={"picker": {"pin": "a"}}
    )
    body = messages.request_body(b'{"prompt": "x"}', end=True)
    answers = [
        messages.response_headers(),
        messages.response_body(b"data", end=False),
        messages.response_trailers(),
    ]
    yield _joined([each.SerializeToString() for each in (headers, body, *answers)])
    yield _joined([messages.request_headers(end=True).SerializeToString()])
    yield _joined([each.SerializeToString() for each in (headers, messages.request_trailers())])


def _usage_seeds() -> Iterator[bytes]:
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    yield _joined([b"data: " + json.dumps({"usage": usage}).encode(), b"\n\ndata: [DONE]\n\n"])


def _source_seeds() -> Iterator[bytes]:
    yield b'{"0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://0.0.0.0:5558"}, "1": {"endpoint": "tcp://h:1"}}'


JSON_WORDS = (
    b"null",
    b"NaN",
    b"1e999",
    b"-1",
    b"18446744073709551616",
    b'"\\ud83d"',
    b"[[",
    b'{"a":',
    b"\xff",
)
YAML_WORDS = (
    b"&a ",
    b"*a",
    b"<<: ",
    b"!!python/object:os.system ",
    b"? ",
    b": ",
    b"- ",
    b"{",
    b"\t",
    b"|\n",
    b".inf",
)

TARGETS = {
    "request_body": Target(request_body, _body_seeds, JSON_WORDS),
    "kv_frames": Target(
        kv_frames, _kv_seeds, (b"\xdd\xff\xff\xff\xff", b"\x91" * 50, b"\xc0", b"\xcf" + b"\xff" * 8)
    ),
    "metrics_text": Target(
        metrics_text, _metrics_seeds, (b"NaN", b"+Inf", b"-1", b"{", b"}", b'"', b"\\", b"#")
    ),
    "policy_yaml": Target(policy_yaml, _policy_seeds, YAML_WORDS),
    "pool_yaml": Target(pool_yaml, _pool_seeds, YAML_WORDS),
    "subset": Target(subset, _subset_seeds, JSON_WORDS),
    "hint_headers": Target(hint_headers, _hint_seeds, (b"nan", b"inf", b"1e400", b",,", b"=", b":", b"\x00")),
    "ext_proc_messages": Target(ext_proc_messages, _message_seeds),
    "response_usage": Target(response_usage, _usage_seeds, (b'"usage": {', *JSON_WORDS)),
    "event_sources": Target(event_sources, _source_seeds, (b"tcp://", *JSON_WORDS)),
}
