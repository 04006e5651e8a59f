"""`picker taint`: taints on pods, as `kubectl taint` has them on nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from picker.cli.options import fail
from picker.policy.constraints import Taint
from picker.pool.kube.errors import ApiError
from picker.pool.kube.pod_table import TAINTS

Taints = tuple[Taint, ...]

_CONFLICT = 409
_ATTEMPTS = 5


def taint(
    pod: Annotated[str, typer.Argument(help="The pod's name.")],
    edits: Annotated[
        list[str],
        typer.Argument(
            help="`key[=value]:effect` to add; `key:effect-` or `key-` to remove.", metavar="TAINT..."
        ),
    ],
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="The pod's namespace.")] = "default",
    kubeconfig: Annotated[
        Path | None,
        typer.Option(help="Kubeconfig file.", envvar="KUBECONFIG", exists=True, dir_okay=False),
    ] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig.")] = None,
) -> None:
    """Taint a pod, or take a taint off it: requests that do not tolerate it are kept away.

    The taints are written to the pod's annotation, where every picker of its pool sees them; they go with the
    pod. Effects: NoSchedule (repels), PreferNoSchedule (costs more), NoExecute (also refuses who waits for it). The
    endpoints of a pool file have theirs in that file.

        picker taint llama-7fq2x maintenance:NoSchedule

        picker taint llama-7fq2x maintenance-
    """
    try:
        edited((), edits)
    except ValueError as error:
        raise fail(str(error), 2) from None
    try:
        result = asyncio.run(_edit(pod, namespace, edits, kubeconfig or _usual_kubeconfig(), context))
    except ApiError as error:
        raise fail(f"pod {namespace}/{pod}: {error}") from None
    typer.echo(f"{namespace}/{pod}: {', '.join(map(str, result)) or 'no taints'}")


def edited(taints: Taints, edits: Sequence[str]) -> Taints:
    """The taints after the edits, in order. Adding replaces one of the same key and effect. Raises ValueError."""
    for edit in edits:
        if edit.endswith("-"):
            key, _, effect = edit[:-1].partition(":")
            if not key or "=" in key:
                raise ValueError(f"{edit!r}: to remove a taint, name its key: key- or key:effect-")
            taints = tuple(each for each in taints if each.key != key or effect not in ("", each.effect))
        else:
            new = Taint.parse(edit)
            kept = (each for each in taints if (each.key, each.effect) != (new.key, new.effect))
            taints = (*kept, new)
    return tuple(sorted(taints))


def annotated(annotation: str) -> Taints:
    """The taints of an annotation; what cannot be read is left out, as it has no effect."""
    found = []
    for text in filter(None, map(str.strip, annotation.split(","))):
        try:
            found.append(Taint.parse(text))
        except ValueError:
            typer.echo(f"picker: dropping an unreadable taint: {text!r}", err=True)
    return tuple(found)


async def _edit(
    pod: str, namespace: str, edits: Sequence[str], kubeconfig: Path | None, context: str | None
) -> Taints:
    # The Kubernetes client takes a second to import; wrong calls are told before.
    from picker.pool.kube.api import KubeApi
    from picker.pool.kube.errors import UnusableCredentials

    try:
        api = await KubeApi.connect(kubeconfig, context)
    except UnusableCredentials as error:
        raise fail(str(error)) from None
    try:
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        for attempt in range(_ATTEMPTS):
            metadata = (await api.request("GET", path))["metadata"]
            taints = edited(annotated((metadata.get("annotations") or {}).get(TAINTS, "")), edits)
            try:
                await api.request(
                    "PATCH",
                    path,
                    body=_patch(metadata["resourceVersion"], taints),
                    content_type="application/merge-patch+json",
                )
            except ApiError as error:
                if error.status != _CONFLICT or attempt == _ATTEMPTS - 1:
                    raise
            else:
                break
        return taints
    finally:
        await api.close()


def _patch(version: str, taints: Taints) -> dict[str, Any]:
    """With the version that was read: a change in between is a conflict, and not lost."""
    text = ",".join(map(str, taints)) or None
    return {"metadata": {"resourceVersion": version, "annotations": {TAINTS: text}}}


def _usual_kubeconfig() -> Path | None:
    path = Path.home() / ".kube" / "config"
    return path if path.exists() else None
