"""The commands of `kubectl picker`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf.json_format import ParseDict
from rich.console import Console
from rich.table import Table

from picker.api.v1 import introspection_pb2 as pb
from picker.cli.options import fail
from picker.cli.status import pool_table, queue_table
from picker.cli.taint import annotated, edited
from picker.kubectl.cluster import Annotations, Cluster, Where
from picker.kubectl.running import in_cluster
from picker.policy import Policy, PolicyError, load_policy
from picker.policy.advice import policy_warnings
from picker.policy.reload import diff_policies
from picker.pool.kube.pod_table import CORDONED, TAINTS
from picker.settings import Settings

app = typer.Typer(
    name="kubectl picker",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Look at a picker in a cluster, and steer its pods and its policy.",
)
policy_app = typer.Typer(no_args_is_help=True, help="Check, compare and apply a policy file.")
app.add_typer(policy_app, name="policy")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PolicyFile = Annotated[Path, typer.Argument(help="The policy YAML.", exists=True, dir_okay=False)]
PodArgument = Annotated[str, typer.Argument(help="The engine's pod.")]
ConfigMapOption = Annotated[
    str | None,
    typer.Option("--config-map", help="Its ConfigMap; by default the one that Picker has mounted."),
]
POLL_SECONDS = 0.5


@app.callback()
def _where(
    context: typer.Context,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="As for kubectl.")] = None,
    kube_context: Annotated[str | None, typer.Option("--context", help="As for kubectl.")] = None,
    kubeconfig: Annotated[Path | None, typer.Option(help="As for kubectl.")] = None,
    release: Annotated[
        str | None, typer.Option(help="The Helm release, where a namespace has several pickers.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Reach the admin port at host:port, as of a port-forward, not by the API server."),
    ] = None,
    admin_port: Annotated[int, typer.Option(help="The admin port of Picker's pod.")] = 9090,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the admin token.", exists=True, dir_okay=False)
    ] = None,
    token_secret: Annotated[
        str | None,
        typer.Option(help="Secret with the admin token: NAME or NAME/KEY.", envvar="PICKER_TOKEN_SECRET"),
    ] = None,
) -> None:
    context.obj = Where(
        kubeconfig, kube_context, namespace, release, address, admin_port, token_file, token_secret
    )


# Looking


@app.command()
def status(context: typer.Context, as_json: JsonOption = False) -> None:
    """The classes and the endpoints, as `picker status` shows them."""
    found = _status(context)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    Console().print(_queues(found), _pool(found))


@app.command()
def queues(context: typer.Context, as_json: JsonOption = False) -> None:
    """The classes: weights, shares, who waits and for how long."""
    found = _status(context)
    if as_json:
        typer.echo(json.dumps(found["queues"], indent=2))
        return
    Console().print(_queues(found))


@app.command()
def endpoints(context: typer.Context, as_json: JsonOption = False) -> None:
    """The endpoints: state, load, cache and taints."""
    found = _status(context)
    if as_json:
        typer.echo(json.dumps(found["pool"], indent=2))
        return
    Console().print(_pool(found))


@app.command()
def explain(
    context: typer.Context,
    request_id: Annotated[str, typer.Argument(help="As in the header x-picker-request-id and in the log.")],
    as_json: JsonOption = False,
) -> None:
    """Why a request went where it went, or nowhere."""
    found = in_cluster(context.obj, lambda cluster: cluster.admin(f"/decisions/{request_id}"))
    if found is None:
        raise fail(f"no decision {request_id}, or it is too long ago")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    console = Console()
    for text in _explained(found):
        console.print(text)


def _status(context: typer.Context) -> dict[str, Any]:
    found: dict[str, Any] | None = in_cluster(context.obj, lambda cluster: cluster.admin("/status"))
    if not isinstance(found, dict) or not {"queues", "pool"} <= found.keys():
        raise fail("what answers there is no picker's admin port")
    return found


def _queues(found: dict[str, Any]) -> Table:
    return queue_table(ParseDict(found["queues"], pb.Queues(), ignore_unknown_fields=True))


def _pool(found: dict[str, Any]) -> Table:
    return pool_table(ParseDict(found["pool"], pb.Pool(), ignore_unknown_fields=True))


def _explained(decision: dict[str, Any]) -> list[str | Table]:
    went = decision["chosen"] or f"nowhere: {decision['outcome']}"
    lines: list[str | Table] = [
        f"{decision['id']} went to {went}",
        f"class {decision['policy_class']}, model {decision['model'] or '-'}, waited {decision['wait']:.3f} s",
        f"{decision['prompt_tokens']:,} prompt tokens{' (estimated)' * decision['estimated']}, "
        f"{decision['cached_tokens']:,} cached, charged {decision['cost']:,}",
    ]
    if decision["candidates"]:
        table = Table(box=None, header_style="dim")
        table.add_column("candidate")
        for name in ("cost", "cached"):
            table.add_column(name, justify="right")
        table.add_column("made of")
        for each in decision["candidates"]:
            terms = ", ".join(f"{name} {value:,.0f}" for name, value in each["terms"].items() if value)
            table.add_row(each["name"], f"{each['total']:,.0f}", f"{each['cached_tokens']:,}", terms)
        lines.append(table)
    lines += [f"not {each['name']}: {each['reason']}" for each in decision["rejected"]]
    return lines


# Pods


@app.command()
def taint(
    context: typer.Context,
    pod: PodArgument,
    edits: Annotated[
        list[str],
        typer.Argument(
            help="`key[=value]:effect` to add; `key:effect-` or `key-` to remove.", metavar="TAINT..."
        ),
    ],
) -> None:
    """Add taints to a pod, or take them away; requests keep to them at once."""
    try:
        edited((), edits)
    except ValueError as error:
        raise fail(str(error), 2) from None

    def change(annotations: Annotations) -> Annotations:
        taints = edited(annotated(annotations.get(TAINTS) or ""), edits)
        return {TAINTS: ",".join(map(str, taints)) or None}

    written = in_cluster(context.obj, lambda cluster: cluster.annotate(pod, change))
    carried = (written["metadata"].get("annotations") or {}).get(TAINTS)
    typer.echo(f"pod/{pod}: {carried or 'no taints'}")


@app.command()
def drain(
    context: typer.Context,
    pod: PodArgument,
    undo: Annotated[bool, typer.Option("--undo", help="Let requests come again.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for what runs there.", min=0.0)] = 600.0,
) -> None:
    """Keep new requests away from a pod, and wait for those that run there. The pod itself is left alone."""

    async def work(cluster: Cluster) -> int:
        found = await cluster.annotate(pod, lambda _: {CORDONED: None if undo else "true"})
        if undo:
            return 0
        deadline = time.monotonic() + timeout
        while running := await _running(cluster, found["metadata"]["uid"]):
            if time.monotonic() >= deadline:
                return running
            await asyncio.sleep(POLL_SECONDS)
        return 0

    left = in_cluster(context.obj, work)
    if left:
        raise fail(f"pod/{pod} gets nothing new, but after {timeout:.0f} s {left} requests still run there")
    typer.echo(f"pod/{pod} {'takes requests again' if undo else 'drained'}")


async def _running(cluster: Cluster, uid: str) -> int:
    """Requests that run or wait at the pod, by Picker's count or the engine's; at least 1 until Picker knows that
    nothing new may go there."""
    pool = (await cluster.admin("/status"))["pool"]
    count = 0
    for endpoint in pool["endpoints"]:
        if endpoint["uid"].startswith(f"{uid}:"):
            ours = endpoint["running"] + endpoint["foreign"]
            engines = (endpoint["engine_running"] or 0) + (endpoint["engine_waiting"] or 0)
            count += max(ours, engines, 0 if endpoint["cordoned"] or not endpoint["ready"] else 1)
    return count


# Policies


@policy_app.command("check")
def check_policy(context: typer.Context, file: PolicyFile) -> None:
    """Say whether a policy file is valid, and what in it will surprise."""
    _, policy = _read(file)
    for warning in policy_warnings(policy, 1, None, default_wait=Settings().queue.max_wait):
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(f"ok: {len(list(policy.classes()))} classes")


@policy_app.command("diff")
def diff_policy(context: typer.Context, file: PolicyFile, config_map: ConfigMapOption = None) -> None:
    """What would change if the file were applied. Exit code 1 if anything would."""
    _, policy = _read(file)

    async def work(cluster: Cluster) -> tuple[str, str]:
        name = config_map or await cluster.policy_config_map()
        return name, await cluster.policy_text(name)

    name, text = in_cluster(context.obj, work)
    try:
        difference = diff_policies(load_policy(text, name), policy)
    except PolicyError as error:
        raise fail(f"the policy in the cluster is not valid: {error}", 2) from None
    typer.echo(str(difference))
    raise typer.Exit(1 if difference else 0)


@policy_app.command("apply")
def apply_policy(context: typer.Context, file: PolicyFile, config_map: ConfigMapOption = None) -> None:
    """Put a valid policy file into Picker's ConfigMap.

    Helm 4 then says that it conflicts: `helm upgrade --force-conflicts` (or `rollback`) puts back what its values say.
    """
    text, _ = _read(file)

    async def work(cluster: Cluster) -> str:
        name = config_map or await cluster.policy_config_map()
        await cluster.write_policy(name, text)
        return name

    name = in_cluster(context.obj, work)
    typer.echo(f"configmap/{name} applied; Picker takes it up when the kubelet has, in about a minute")


def _read(file: Path) -> tuple[str, Policy]:
    try:
        text = file.read_text(encoding="utf-8")
        return text, load_policy(text, str(file))
    except PolicyError as error:
        raise fail(str(error), 2) from None
    except UnicodeError:
        raise fail(f"{file}: not UTF-8 text", 2) from None


_EVERYWHERE = {"-n", *(f"--{name}" for name in ("namespace", "context", "kubeconfig", "release"))}
_EVERYWHERE |= {f"--{name}" for name in ("address", "admin-port", "token-file", "token-secret")}


def hoisted(arguments: list[str]) -> list[str]:
    """The options that every command has, to the front: kubectl's own may stand anywhere, too."""
    first: list[str] = []
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            rest += [argument, *remaining]
        elif argument in _EVERYWHERE:
            first += [argument, *(value for value in [next(remaining, None)] if value is not None)]
        else:
            (first if argument.partition("=")[0] in _EVERYWHERE else rest).append(argument)
    return first + rest


def main() -> None:
    """Exit codes: 0 done, 1 failed (or, for `policy diff`, different), 2 called wrongly."""
    app(hoisted(sys.argv[1:]), prog_name="kubectl picker")
