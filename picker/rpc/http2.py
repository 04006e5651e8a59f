"""The h2 library, fitted to a server of many short calls: what it does anew for each, though nothing has changed, it
does once. No IO.
"""

from __future__ import annotations

from collections.abc import Iterable

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings
from hpack.hpack import Decoder
from hpack.struct import HeaderTuple
from hyperframe.frame import Frame

# h2 4 writes out each frame that comes for a logger, before it finds that there is none: an eighth of what it costs.
Frame.__repr__ = object.__repr__  # type: ignore[method-assign]

# Of the headers of a call, by HTTP/2's way of counting. What is announced is not heeded by all, and where h2 enforces a
# limit it is all calls of the connection that end: its own is only there to bound what is read.
HEADER_BYTES = 64 * 1024
_HEADER_BYTES_READ = 1024 * 1024
_NO_LIMIT = 2**31 - 1


def server_side(call_window: int) -> H2Connection:
    """A connection whose calls may each be sent so many bytes before more is asked for."""
    connection = _Connection(
        H2Configuration(
            client_side=False,
            header_encoding=None,
            # They tell which method is meant, and go nowhere.
            validate_inbound_headers=False,
            normalize_inbound_headers=False,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
    )
    connection.local_settings = Settings(
        client=False,
        initial_values={
            SettingCodes.INITIAL_WINDOW_SIZE: call_window,
            SettingCodes.MAX_CONCURRENT_STREAMS: _NO_LIMIT,
            SettingCodes.MAX_HEADER_LIST_SIZE: HEADER_BYTES,
        },
    )
    connection.decoder = _Decoder()
    return connection


class _Connection(H2Connection):
    """h2 counts the open streams by walking over all of them whenever one opens, and lets go of closed ones on the
    way. With thousands of requests held that would be all that a picker does, so it walks only once their number has
    doubled. The limit that h2 would check by the count is not announced: `ExtProcServer.max_streams` answers better.
    """

    MAX_CLOSED_STREAMS = 4096
    _walk_at = 64

    @property
    def open_inbound_streams(self) -> int:
        if len(self.streams) >= self._walk_at:
            self._walk_at = max(64, 2 * super().open_inbound_streams)
        return 0


class _Decoder(Decoder):
    """A gateway opens call after call with the same block of headers, which means the same as long as no block has
    changed the table that it refers to.
    """

    def __init__(self) -> None:
        super().__init__(_HEADER_BYTES_READ)
        self._block = b""
        self._meaning: Iterable[HeaderTuple] = ()
        self._state: tuple[object, ...] = ()

    def decode(self, data: bytes, raw: bool = False) -> Iterable[HeaderTuple]:
        if data == self._block and raw and self._is_state(self._state):
            return self._meaning
        before = self._current_state()
        headers = super().decode(data, raw)
        if raw and self._is_state(before):
            self._block, self._meaning, self._state = bytes(data), headers, before
        return headers

    def _current_state(self) -> tuple[object, ...]:
        """What is different after each change: an entry that is added is a new object, and comes first."""
        table = self.header_table
        entries = table.dynamic_entries
        return (entries[0] if entries else None, len(entries), table.maxsize, self.max_allowed_table_size)

    def _is_state(self, state: tuple[object, ...]) -> bool:
        current = self._current_state()
        return bool(state) and current[0] is state[0] and current[1:] == state[1:]
