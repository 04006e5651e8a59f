"""A recording of a real vLLM, played into the index: every request's cached tokens are predicted.

The surprises that the recording's README lists are asserted one by one.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from picker.kvcache.engine_blocks import EngineBlocks
from picker.kvcache.events import BlockRemoved, BlockStored, Event, decode_batch
from picker.kvcache.index import KvIndex
from picker.kvcache.keys import block_keys
from picker.kvcache.matching import Tier
from picker.kvcache.replay import is_end, parse_message
from picker.kvcache.stream import EventStream

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-0.32"
SIZE = 32


@cache
def records(name: str = "recording.jsonl") -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(line) for line in (GOLDEN / name).read_text().splitlines())


def messages(name: str = "recording.jsonl") -> list[tuple[int, bytes]]:
    return [
        (record["seq"], base64.b64decode(record["payload_b64"]))
        for record in records(name)
        if record["kind"] == "event"
    ]


def events(*, first: int = 0, last: int = 10_000) -> Iterator[Event]:
    """All events of the messages first..last."""
    for seq, payload in messages():
        if first <= seq <= last:
            yield from decode_batch(payload).events


def request(name: str) -> dict[str, Any]:
    return next(record for record in records() if record.get("id") == name)


class Player:
    """The recorded engine as slot 0, followed by a stream as in production."""

    def __init__(self) -> None:
        self.index = KvIndex()
        self.blocks = EngineBlocks(0, self.index)
        self.stream = EventStream(self.blocks, can_replay=True)

    def matched(self, record: dict[str, Any]) -> int:
        """Blocks of the request's prompt that the index has now."""
        keys = block_keys(record["prompt_token_ids"], SIZE, salt=record["body"].get("cache_salt"))
        match = self.index.find_matches(keys, 1).get(0)
        return match.blocks if match else 0

    def predict(self, record: dict[str, Any]) -> int:
        """Cached tokens: the engine always computes the last token, so at most the whole blocks before it."""
        usable = (len(record["prompt_token_ids"]) - 1) // SIZE
        return min(self.matched(record), usable) * SIZE

    def play(self, record: dict[str, Any]) -> None:
        assert record["kind"] == "event"
        assert self.stream.live(record["seq"], base64.b64decode(record["payload_b64"])) is None


@cache
def predictions() -> dict[str, int]:
    """Request -> prediction at the time when it was sent. `busy-*` are sent at once, before their events."""
    player, made = Player(), {}
    for record in records():
        if record["kind"] == "event":
            player.play(record)
        elif record["kind"] == "request":
            made[record["id"]] = player.predict(record)
    assert player.stream.stats.malformed_events == player.stream.stats.unknown_events == 0
    return made


REQUESTS = [record for record in records() if record["kind"] == "request"] if GOLDEN.exists() else []


@pytest.mark.parametrize("record", REQUESTS, ids=lambda record: record["id"])
def test_cached_tokens_are_predicted(record: dict[str, Any]) -> None:
    """Exactly, for every request but one. The `busy-*` ones too: they are sent together, with nothing of theirs
    cached, and the engine reports 0 for each, preempted ones included.
    """
    predicted = predictions()[record["id"]]
    if record["id"] == "after-reset":
        # The engine has emptied its cache and not said so yet: it will with the events of this very request.
        assert (predicted, record["cached_tokens"]) == (160, 0)
    else:
        assert predicted == record["cached_tokens"]


def test_the_recording_is_whole() -> None:
    assert len(REQUESTS) == 37
    assert [seq for seq, _payload in messages()] == list(range(344))


def test_a_full_hit_and_a_short_prompt_make_no_event() -> None:
    for name in (
        "repeat",
        "short-no-full-block",
        "salt-a-repeat",
        "continue-generated",
        "before-reset-repeat",
    ):
        record = request(name)
        made = [
            other
            for other in records()
            if other["kind"] == "event" and record["t"] <= other["t"] <= record["t_end"]
        ]
        assert made == []


def test_an_aligned_repeat_computes_its_last_block_again_and_stores_it_again() -> None:
    player = Player()
    for record in records():
        if record.get("seq") == 2:
            break
        if record["kind"] == "event":
            player.play(record)
    repeat = request("aligned-repeat")
    assert (player.matched(repeat), player.predict(repeat)) == (3, 64)
    (before,), (after,) = events(first=1, last=1), events(first=2, last=2)
    assert isinstance(before, BlockStored)
    assert isinstance(after, BlockStored)
    assert after.block_hashes == before.block_hashes[-1:]


def test_generated_tokens_fill_blocks_too() -> None:
    """25 prompt and 200 generated tokens: a message per block as it fills, the first of both kinds of token."""
    record = request("long-generation")
    stores = list(events(first=15, last=21))
    assert [len(event.block_hashes) for event in stores if isinstance(event, BlockStored)] == [1] * 7
    history = record["prompt_token_ids"] + record["output_token_ids"]
    player = Player()
    for other in records():
        if other["kind"] == "event" and other["seq"] <= 21:
            player.play(other)
    keys = block_keys(history, SIZE)
    assert player.index.find_matches(keys, 1)[0].device == 7 == len(history) // SIZE


def test_a_salt_is_in_the_first_blocks_extra_keys_only_and_separates() -> None:
    names: dict[int, list[int]] = {}
    for seq, salted in ((0, False), (12, True), (13, True)):
        (event,) = events(first=seq, last=seq)
        assert isinstance(event, BlockStored)
        assert [bool(extra) for extra in event.extra_keys] == [salted] + [False] * 4
        names[seq] = event.block_hashes
    assert not set(names[0]) & set(names[12])
    assert not set(names[12]) & set(names[13])
    assert predictions()["salt-a"] == predictions()["salt-b"] == 0


def test_evictions_come_before_the_store_in_the_same_message_and_name_one_block_each() -> None:
    for seq in (23, 24):
        kinds = [type(event).__name__ for event in events(first=seq, last=seq)]
        stores = kinds.index("BlockStored")
        assert stores > 0
        assert set(kinds[:stores]) == {"BlockRemoved"}
        assert set(kinds[stores:]) == {"BlockStored"}
    assert {len(event.block_hashes) for event in events() if isinstance(event, BlockRemoved)} == {1}


def test_evicted_blocks_come_back_under_the_same_hashes() -> None:
    (first,), (again,) = events(first=0, last=0), list(events(first=25, last=25))[-1:]
    assert isinstance(first, BlockStored)
    assert isinstance(again, BlockStored)
    assert again.block_hashes == first.block_hashes


def test_one_hash_is_live_twice_and_no_count_is_ever_negative() -> None:
    live: Counter[int] = Counter()
    most_copies = most_blocks = 0
    stored_blocks = 0
    for event in events():
        if isinstance(event, BlockStored):
            live.update(event.block_hashes)
            stored_blocks += len(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            live.subtract(event.block_hashes)
            assert min(live.values()) >= 0
        else:
            live.clear()
        most_copies, most_blocks = max(most_copies, *live.values(), 0), max(most_blocks, live.total())
    assert (most_copies, most_blocks) == (2, 79)
    assert stored_blocks + len(block_keys(request("cold")["prompt_token_ids"], SIZE)) == 494


def test_a_set_of_hashes_would_be_wrong_here() -> None:
    """The count matters: without it the index loses blocks that the engine still has."""
    counted, single = KvIndex(), KvIndex()
    truth, plain = EngineBlocks(0, counted), EngineBlocks(0, single, counted=False)
    fewer = 0
    for event in events():
        truth.apply([event])
        plain.apply([event])
        fewer += len(single) < len(counted)
    assert fewer > 0


def test_the_index_never_misses_a_removal() -> None:
    player = Player()
    for record in records():
        if record["kind"] == "event":
            player.play(record)
            assert len(player.index) <= 79
    stats = player.blocks.stats
    assert (stats.unknown_removals, stats.parked, stats.odd_sized, stats.ignored_groups) == (0, 0, 0, 0)


def test_a_reset_is_published_only_with_the_next_request() -> None:
    control = next(record for record in records() if record["kind"] == "control")
    after = request("after-reset")
    assert not [r for r in records() if r["kind"] == "event" and control["t"] <= r["t"] < after["t"]]
    assert [type(event).__name__ for event in events(first=343)] == ["AllBlocksCleared", "BlockStored"]


def test_busy_requests_share_the_cache_without_a_gap_or_a_wrong_block() -> None:
    """Their events are mixed, so no request's own are told apart. What is asserted of them: each is predicted 0 as
    reported (above), and when all have finished, the index has of each prompt and output a prefix without a gap,
    and in all no more than the engine's 79 blocks.
    """
    player = Player()
    for record in records():
        if record["kind"] == "event" and record["seq"] <= 341:
            player.play(record)
    busy = [record for record in REQUESTS if record["id"].startswith("busy-")]
    assert len(busy) == 12
    kept = 0
    for record in busy:
        keys = block_keys(record["prompt_token_ids"] + record["output_token_ids"], SIZE)
        present = [player.index.holds(0, key, Tier.DEVICE) for key in keys]
        assert present == sorted(present, reverse=True)
        kept += sum(present)
    assert 0 < kept <= 79


def replays(name: str = "recording.jsonl") -> dict[str, list[list[bytes]]]:
    return {
        record["id"]: [[base64.b64decode(frame) for frame in reply] for reply in record["reply_frames_b64"]]
        for record in records(name)
        if record["kind"] == "replay"
    }


def test_replies_are_read_and_equal_what_came_live() -> None:
    live = dict(messages())
    *replies, end = replays()["replay-tail"]
    assert is_end(end)
    assert not any(is_end(reply) for reply in replies)
    assert [parse_message(reply) for reply in replies] == [(seq, live[seq]) for seq in range(338, 344)]
    (only,) = replays()["replay-beyond-end"]
    assert is_end(only)


def test_a_gap_in_the_recording_is_filled_from_its_replay() -> None:
    player, lossy = Player(), Player()
    for record in records():
        if record["kind"] == "event":
            player.play(record)
            if record["seq"] < 338:
                lossy.play(record)
    seq, payload = messages()[-1]
    assert lossy.stream.live(seq, payload) == 338
    for reply in replays()["replay-tail"][:-1]:
        lossy.stream.replayed(*parse_message(reply))
    assert lossy.stream.replay_ended() is None
    prompt = request("after-reset")
    assert lossy.matched(prompt) == player.matched(prompt) == 5
    assert len(lossy.index) == len(player.index)
    assert lossy.stream.stats.losses == 0


def test_a_restart_starts_over() -> None:
    """The new process counts from 0 with the same hashes. Asked for the old one's next message, it only says end."""
    player = Player()
    for record in records():
        if record["kind"] == "event":
            player.play(record)
    after = records("recording-after-restart.jsonl")
    answers = replays("recording-after-restart.jsonl")
    assert [
        [is_end(reply) for reply in answers[name]] for name in ("replay-empty", "replay-stale-start")
    ] == [[True], [True]]
    assert [is_end(reply) for reply in answers["replay-from-0"]] == [False, True]
    first = next(record for record in after if record["kind"] == "request")
    # Reconnected: is it the same process? It has nothing from 343 on, so it is not, and is asked for everything.
    assert player.stream.connected() == 343
    assert player.stream.replay_ended() == 0
    assert player.stream.replay_ended() is None
    assert (len(player.index), player.predict(first), first["cached_tokens"]) == (0, 0, 0)
    ((seq, payload),) = messages("recording-after-restart.jsonl")
    assert player.stream.live(seq, payload) is None
    assert (seq, player.matched(first), player.stream.stats.restarts) == (0, 5, 1)


def test_a_restart_is_seen_without_a_reconnection_too() -> None:
    player = Player()
    for record in records():
        if record["kind"] == "event":
            player.play(record)
    ((seq, payload),) = messages("recording-after-restart.jsonl")
    assert player.stream.live(seq, payload) is None
    assert (len(player.index), player.stream.stats.restarts, player.stream.stats.duplicates) == (5, 1, 0)
