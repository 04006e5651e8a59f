"""The sockets of one engine: ZMQ SUB for its live events, DEALER for replays. No threads and no tasks.

Reading goes by ZMQ's file descriptor on the event loop, without a future per message, so that a flood of
events costs little more than applying them. Reconnecting is left to ZMQ.
"""

from __future__ import annotations

from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from picker.kvcache.pump import Pump, SocketReader, Turnstile
from picker.kvcache.replay import BadFrames, Message, ReplayRequest, parse_message
from picker.kvcache.stream import EventStream


@dataclass(frozen=True, slots=True)
class SubscriberLimits:
    """Times are in seconds."""

    replay_idle: float = 2.0  # for the next answer to a replay request
    reconnect_first: float = 0.1
    reconnect_longest: float = 5.0
    heartbeat: float = 10.0
    queued_messages: int = 10_000
    queued_replies: int = 100_000
    message_bytes: int = 256 * 1024 * 1024


class KvSubscriber:
    """Follows one engine from the moment that it is made, on the running event loop, until `close`.

    `address` and `replay_address` are ZMQ addresses; a `*` in `address` means that the engine connects to us.
    The stream says when to ask for a replay. Raises ZMQError for an address that ZMQ cannot use.
    """

    def __init__(
        self,
        stream: EventStream,
        address: str,
        replay_address: str | None,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        pump: Pump,
        replay_turns: Turnstile,
        limits: SubscriberLimits = SubscriberLimits(),
    ) -> None:
        self.stream = stream
        self.connected = False
        self._replay_address = replay_address
        self._context = context
        self._pump = pump
        self._turns = replay_turns
        self._limits = limits
        self._replay: ReplayRequest | None = None
        socket = self._live_socket()
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            if "*" in address:
                socket.bind(address)
            else:
                socket.connect(address)
        except zmq.ZMQError:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)
            raise
        self._monitor = SocketReader(monitor, pump, self._on_connection)
        self._live = SocketReader(socket, pump, self._on_live)

    @property
    def address(self) -> str:
        """Where the live events come from; the port is the real one where 0 or * was asked for."""
        return self._live.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Stop following. Nothing that is still in the sockets is applied."""
        if self._live.socket.closed:
            return
        self.connected = False
        self._live.socket.disable_monitor()
        self._monitor.close()
        self._live.close()
        if self._replay is not None:
            self._replay.close()

    def _live_socket(self) -> zmq.Socket[bytes]:
        limits = self._limits
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RCVHWM, limits.queued_messages)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.message_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, int(limits.reconnect_first * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(limits.reconnect_longest * 1000))
        # A pod that vanished without closing its connection would otherwise look merely quiet.
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(limits.heartbeat * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(limits.heartbeat * 3000))
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        return socket

    def _on_connection(self, frames: list[bytes]) -> None:
        self.connected = parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self.connected:
            self._follow(self.stream.connected())

    def _on_live(self, frames: list[bytes]) -> None:
        try:
            message = parse_message(frames)
        except BadFrames:
            self._on_bad_frames()
        else:
            self._follow(self.stream.live(*message))

    def _on_bad_frames(self) -> None:
        self.stream.stats.bad_frames += 1

    def _follow(self, start: int | None) -> None:
        """Do as the stream wants: ask for a replay from `start`, or be done with the one under way."""
        if self._live.socket.closed:
            # Applying the message made somebody close us.
            return
        if self._replay is not None and (start is not None or not self.stream.replaying):
            self._replay.close()
            self._replay = None
        if start is not None:
            self._ask(start)

    def _ask(self, start: int) -> None:
        assert self._replay_address is not None
        self._replay = ReplayRequest(
            self._replay_address,
            start,
            context=self._context,
            pump=self._pump,
            turns=self._turns,
            idle=self._limits.replay_idle,
            queued_replies=self._limits.queued_replies,
            on_message=self._on_reply,
            on_bad_frames=self._on_bad_frames,
            on_end=lambda: self._follow(self.stream.replay_ended()),
            on_failure=lambda: self._follow(self.stream.replay_failed()),
        )

    def _on_reply(self, message: Message) -> None:
        self._follow(self.stream.replayed(*message))
