"""`picker status`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from picker.api.v1 import introspection_pb2 as pb
from picker.api.v1 import introspection_pb2_grpc as pb_grpc
from picker.cli.options import fail


def status(
    address: Annotated[
        str, typer.Option(help="Where the Introspection API listens.", envvar="PICKER_ADDRESS")
    ] = "127.0.0.1:9091",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the admin token.", exists=True, dir_okay=False)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.1)] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the pool, the queues and their deficits of a running picker."""
    metadata = (("authorization", f"Bearer {token_file.read_text().strip()}"),) if token_file else ()
    try:
        with grpc.insecure_channel(address) as channel:
            stub = pb_grpc.IntrospectionStub(channel)
            queues = stub.GetQueues(pb.GetQueuesRequest(), metadata=metadata, timeout=timeout)
            pool = stub.GetPool(pb.GetPoolRequest(), metadata=metadata, timeout=timeout)
    except grpc.RpcError as error:
        raise fail(f"{address}: {error.details() or error.code().name}") from None
    if as_json:
        typer.echo(json.dumps({"pool": as_data(pool), "queues": as_data(queues)}, indent=2))
        return
    # Nobody reads a table that is cut off in a file or a pipe.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(queue_table(queues), pool_table(pool))


def queue_table(queues: pb.Queues) -> Table:
    table = Table(title="Classes", title_justify="left", box=None, header_style="dim")
    table.add_column("class", no_wrap=True)
    for name in (
        "weight",
        "share",
        "entitled",
        "waiting",
        "tokens",
        "oldest",
        "credit",
        "turns",
        "sent",
        "dropped",
    ):
        table.add_column(name, justify="right")
    for each in queues.classes:
        table.add_row(
            each.name,
            f"{each.weight_share:.0%}",
            f"{each.recent_share:.0%}" if each.HasField("recent_share") else "-",
            f"{each.recent_entitlement:.0%}" if each.HasField("recent_entitlement") else "-",
            f"{each.waiting_requests:,}",
            f"{each.waiting_tokens:,}",
            f"{each.oldest_wait:.1f} s" if each.waiting_requests else "-",
            f"{each.deficit:,}",
            f"{each.deficit / each.quantum:.2f}" if each.quantum else "-",
            f"{each.dispatched_requests:,}",
            f"{sum(each.dropped.values()):,}",
        )
    return table


def pool_table(pool: pb.Pool) -> Table:
    title = f"\nPool: {len(pool.endpoints)} endpoints" + ("" if pool.synced else ", not in sync yet")
    table = Table(title=title, title_justify="left", box=None, header_style="dim")
    for name in ("endpoint", "address", "state"):
        table.add_column(name)
    for name in ("prefill", "running", "KV in use", "cached blocks"):
        table.add_column(name, justify="right")
    table.add_column("taints")
    for each in pool.endpoints:
        table.add_row(
            each.name,
            each.address,
            "not ready" if not each.ready else "cordoned" if each.cordoned else "ready",
            f"{each.prefill_tokens:,}",
            f"{each.running:,}" + (f" + {each.foreign:,}" if each.foreign else ""),
            f"{each.kv_usage:.0%}" if each.HasField("kv_usage") else "-",
            f"{each.cached_blocks:,}" if each.HasField("cached_blocks") else "-",
            ", ".join(each.taints),
        )
    return table


def as_data(message: Message) -> dict[str, Any]:
    """A message as plain data with the names of its fields, numbers as numbers, and null for what is absent."""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [as_data(item) if field.message_type is not None else item for item in value]
    return value if not field.has_presence or message.HasField(field.name) else None
