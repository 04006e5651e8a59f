"""`picker check`."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer

from picker.admin.access import is_loopback
from picker.cli.options import fail, with_settings
from picker.cli.surprises import surprises
from picker.policy import Policy, PolicyError, load_policy
from picker.policy.advice import policy_warnings
from picker.pool.endpoint import EndpointSpec
from picker.pool.static_file import PoolFileError, parse_pool_file
from picker.requests.hints import HintTrust, Trust
from picker.settings import Settings

# Hints by which a client could get more than its share, or steer where it goes.
_POWERFUL = (
    "policy_class",
    "priority",
    "strict_priority",
    "pin",
    "rank",
    "tolerations",
    "allow_list",
    "fairness_id",
)


def _check(
    settings: Settings,
    route_timeout: Annotated[
        float | None, typer.Option(help="The gateway's route timeout in seconds.", min=0)
    ] = None,
) -> None:
    """Validate settings, policy and pool together, and warn of what will surprise.

    Takes the same options as `picker serve`, listens on nothing and asks no engine. Exit code 2 when something is
    wrong, 0 also when there are warnings.
    """
    endpoints, problems = _endpoints(settings)
    policy, more = _policy(settings)
    if problems + more:
        raise fail("\n".join(problems + more), 2)
    warnings = [*settings_warnings(settings), *_pool_warnings(settings, endpoints)]
    if policy is not None:
        warnings += policy_warnings(
            policy,
            max(1, len(endpoints)),
            route_timeout,
            max_num_batched_tokens=_budget(endpoints),
            default_wait=settings.queue.max_wait,
        )
        warnings += surprises(settings, policy, endpoints, route_timeout)
    for warning in warnings:
        typer.echo(f"warning: {warning}")
    classes = len(list(policy.classes())) if policy else 1
    typer.echo(
        f"ok: {_many(classes, 'class', 'es')}, {_many(len(endpoints), 'endpoint')}, {_many(len(warnings), 'warning')}"
    )


def _endpoints(settings: Settings) -> tuple[list[EndpointSpec], list[str]]:
    if settings.pool.file is None:
        return [], []
    try:
        return parse_pool_file(_read(settings.pool.file), str(settings.pool.file)), []
    except PoolFileError as error:
        return [], [str(error)]


def _policy(settings: Settings) -> tuple[Policy | None, list[str]]:
    if settings.policy.file is None:
        return None, []
    try:
        text = _read(settings.policy.file)
        return load_policy(text, str(settings.policy.file), max_classes=settings.policy.max_classes), []
    except PolicyError as error:
        return None, [str(error)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise fail(f"{path}: cannot be read: {error.strerror}", 2) from None
    except UnicodeError:
        raise fail(f"{path}: not UTF-8 text", 2) from None


def settings_warnings(settings: Settings) -> Iterator[str]:
    """What in the settings alone will surprise."""
    accepted = [name for name in _POWERFUL if _accepts(settings.policy.hints, name)]
    if accepted:
        yield f"any client can set {', '.join(accepted)} by a header (policy.hints)"
    tokens = settings.admin.token_file or settings.admin.token_review.names
    if not is_loopback(settings.admin.host) and not tokens:
        yield "admin.host is beyond loopback and there is no admin.token_file: only metrics and health are served"
    if settings.sessions.cookie is not None:
        yield (
            "sessions.cookie is set only by responses that the gateway sends through Picker, which the Envoy of the"
            " chart does not do: there, only a header can say the session"
        )
    if settings.policy.file is None:
        yield "there is no policy.file: all requests share one class"
    if not settings.tokens.models:
        yield "there is no tokens.models: prompts are estimated by their size, and caches are not looked at"
    tls = settings.extproc.tls
    for key, file in (
        ("admin.token_file", settings.admin.token_file),
        ("extproc.tls.cert_file", tls.cert_file),
        ("extproc.tls.key_file", tls.key_file),
        ("extproc.tls.client_ca_file", tls.client_ca_file),
        ("pool.kubernetes.kubeconfig", settings.pool.kubernetes.kubeconfig),
    ):
        if file is not None and not file.is_file():
            yield f"{key}: there is no file {file}"
    for model, directory in settings.tokens.models.items():
        if not (directory / "tokenizer.json").is_file():
            yield f"tokens.models: {directory} of {model} has no tokenizer.json"
    for model in settings.tokens.chat_template_kwargs:
        if model not in settings.tokens.models and "*" not in settings.tokens.models:
            yield f"tokens.chat_template_kwargs: {model} has no tokenizer under tokens.models"


def _accepts(trust: HintTrust, hint: str) -> bool:
    return getattr(trust, hint) is Trust.ACCEPT


def _pool_warnings(settings: Settings, endpoints: list[EndpointSpec]) -> Iterator[str]:
    if settings.pool.kubernetes.name is None:
        if settings.pool.file is None:
            yield "there is neither pool.file nor pool.kubernetes.name: every request will get 503"
        elif not endpoints:
            yield f"{settings.pool.file} has no endpoints: every request will get 503"
    silent = [spec.name for spec in endpoints if spec.metrics_url is None]
    if silent:
        yield f"not scraped, so their load is only what Picker sends them: {', '.join(silent[:8])}"
    names = [spec.address for spec in endpoints if not _is_ip(spec.address)]
    if names:
        yield f"Envoy sends requests to IP addresses only, and resolves no names: {', '.join(names[:8])}"


def _is_ip(address: str) -> bool:
    try:
        ip_address(address)
    except ValueError:
        return False
    return True


def _budget(endpoints: list[EndpointSpec]) -> int | None:
    known = {spec.max_num_batched_tokens for spec in endpoints if spec.max_num_batched_tokens}
    return min(known, default=None)


def _many(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count != 1 else ''}"


check = with_settings(_check)
