"""The commands, in this process: what they print, and their exit codes (0 done, 1 failed, 2 called wrongly)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from picker import __version__
from picker.cli import COMMANDS, app
from picker.settings import all_settings

POLICY = """
default_policy_family: standard
uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
policy_classes:
  - {name: standard, policy_family: standard, cache_bucket: all, quantum: 100, prefill_busy_threshold: 1000}
"""


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"} | (env or {}))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_there_and_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0, result.output
    assert f" {command} [OPTIONS]" in result.output


def test_the_list_of_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert all(command in result.output for command in COMMANDS)


def test_version() -> None:
    assert run("--version").output == f"picker {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["nope"], ["serve", "--nope"], ["check", "--extproc-port"], ["reference"]]
)
def test_wrong_calls_exit_with_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_help_of_serve_has_every_setting_in_the_panel_of_its_group() -> None:
    output = run("serve", "--help").output
    for setting in all_settings():
        assert setting.flag in output
        assert f" {'.'.join(setting.path[:-1])} " in output


def test_check_of_good_files(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "pool.yaml").write_text("endpoints: [{name: a, address: '10.0.0.1:8000'}]\n")
    config = tmp_path / "picker.yaml"
    config.write_text("policy: {file: policy.yaml}\npool: {file: pool.yaml}\n")
    result = run("check", "--config", str(config))
    assert result.exit_code == 0, result.output
    assert "ok: 1 class, 1 endpoint," in result.output
    assert run("check", env={"PICKER_CONFIG": str(config)}).output == result.output


def test_check_names_the_file_and_line_of_each_problem(tmp_path: Path) -> None:
    policy, pool = tmp_path / "policy.yaml", tmp_path / "pool.yaml"
    policy.write_text(POLICY.replace("quantum", "quantums"))
    pool.write_text("endpoints: [{name: a, address: nowhere}]\n")
    result = run("check", "--policy-file", str(policy), "--pool-file", str(pool))
    assert result.exit_code == 2
    assert f"{policy}:5" in result.stderr
    assert f"{pool}:1" in result.stderr


def test_check_warns_of_what_clients_can_do_and_of_a_closed_admin_port() -> None:
    result = run("check", "--policy-hints-pin", "accept", "--admin-host", "0.0.0.0")
    assert result.exit_code == 0
    assert "any client can set pin by a header" in result.output
    assert "only metrics and health are served" in result.output


SURPRISING = """
default_policy_family: standard
uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
policy_classes:
  - {name: standard, policy_family: standard, cache_bucket: all, quantum: 100, prefill_busy_threshold: 1000,
     request_queue_limit_per_worker: 50}
  - {name: open, policy_family: open, cache_bucket: all, quantum: 100}
  - {name: lost, policy_family: lost, cache_bucket: all, quantum: 100, prefill_busy_threshold: 1000,
     max_queue_wait: 20, allowed_endpoints: {gpu: none}}
  - {name: few, policy_family: few, cache_bucket: all, quantum: 100, kv_usage_busy_threshold: 0.9,
     request_queue_limit_per_worker: 60, allowed_endpoints: {gpu: h100}}
"""


@pytest.fixture
def surprising(tmp_path: Path) -> list[str]:
    (tmp_path / "policy.yaml").write_text(SURPRISING)
    (tmp_path / "pool.yaml").write_text(
        "endpoints: [{name: a, address: '10.0.0.1:8000', labels: {gpu: h100}, metrics: false},"
        " {name: b, address: '10.0.0.2:8000'}]\n"
    )
    return [
        "check",
        "--policy-file",
        str(tmp_path / "policy.yaml"),
        "--pool-file",
        str(tmp_path / "pool.yaml"),
    ]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "open: can never queue"),
        ([], "lost: no endpoint of the pool may take its requests (not_selected): they get 503"),
        ([], "few: kv_usage_busy_threshold has no effect: none of its endpoints is scraped"),
        ([], "few: its queue limits count all 2 endpoints of the pool, of which it may use 1"),
        (["--policy-hints-policy-class", "ignore"], "no request can say its class"),
        (["--extproc-max-streams", "200"], "max_streams 200 binds before the classes' queue limits"),
        (
            ["--route-timeout", "60"],
            "standard, few: queue.max_wait 60 s is not below the route's timeout of 60 s",
        ),
        (["--route-timeout", "15"], "lost: max_queue_wait 20 s is not below the route's timeout of 15 s"),
    ],
)
def test_check_sees_settings_policy_and_pool_together(
    surprising: list[str], flags: list[str], expected: str
) -> None:
    result = run(*surprising, *flags)
    assert result.exit_code == 0, result.output
    assert expected in result.output


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (("prefill", "decode"), None),
        (("decode", "decode"), "disaggregation: by llm-d.ai/role no endpoint prefills"),
        (
            ("prefill", "prefill"),
            "disaggregation: by llm-d.ai/role no endpoint decodes: every request gets 503",
        ),
    ],
)
def test_check_sees_whether_somebody_has_each_role(
    tmp_path: Path, roles: tuple[str, str], expected: str | None
) -> None:
    policy, pool = tmp_path / "policy.yaml", tmp_path / "pool.yaml"
    policy.write_text("disaggregation: {}\nselection: {}\n")
    entries = (
        f"{{name: e{number}, address: '10.0.0.{number}:80', labels: {{llm-d.ai/role: {role}}}}}"
        for number, role in enumerate(roles)
    )
    pool.write_text(f"endpoints: [{', '.join(entries)}]\n")
    result = run("check", "--policy-file", str(policy), "--pool-file", str(pool))
    assert result.exit_code == 0, result.output
    assert expected in result.output if expected else "disaggregation" not in result.output


def test_check_says_that_a_gateway_resolves_no_names(tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text("endpoints: [{name: a, address: 'vllm:8000'}, {name: b, address: '10.0.0.1:8000'}]")
    result = run("check", "--pool-file", str(pool))
    assert "resolves no names: vllm" in result.output.replace("\n", " ")


def test_check_says_that_a_cookie_needs_responses() -> None:
    flags = ["--sessions-affinity", "prefer", "--sessions-cookie", "picker"]
    assert "only a header can say the session" in run("check", *flags).output
    assert "only a header" not in run("check", *flags[:2], "--sessions-header", "x-chat").output


@pytest.mark.parametrize(
    "absent", ["no request can say its class", "max_streams", "queue.max_wait", "the client gives up"]
)
def test_check_is_silent_where_there_is_nothing_to_say(surprising: list[str], absent: str) -> None:
    assert absent not in run(*surprising, "--route-timeout", "61").output


@pytest.mark.parametrize("command", ["check", "serve"])
def test_wrong_settings_are_blamed_without_a_traceback(command: str, tmp_path: Path) -> None:
    for arguments, expected in (
        (["--extproc-port", "70000"], "--extproc-port: "),
        (["--config", str(tmp_path / "missing.yaml")], "missing.yaml"),
        (["--policy-file", str(tmp_path / "missing.yaml")], "missing.yaml"),
    ):
        result = run(command, *arguments)
        assert result.exit_code == 2, result.output
        assert expected in result.stderr
        assert "Traceback" not in result.output


def test_explain_policy(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    result = run("explain-policy", str(policy), "--endpoints", "4")
    assert result.exit_code == 0
    assert "standard" in result.output
    policy.write_text("nonsense: 1\n")
    result = run("explain-policy", str(policy))
    assert result.exit_code == 2
    assert f"{policy}:1" in result.stderr


def test_status_of_nobody_is_a_failure_in_one_line() -> None:
    result = run("status", "--address", "127.0.0.1:1", "--timeout", "1")
    assert result.exit_code == 1
    assert result.stderr.startswith("picker: 127.0.0.1:1: ")
    assert len(result.stderr.splitlines()) == 1


def test_reference() -> None:
    assert "| `picker_queue_requests` | gauge |" in run("reference", "metrics").output
    assert "| `port` | number | `9002` |" in run("reference", "settings").output
    assert "`quantum`" in run("reference", "policy").output


def test_status_json_is_json(tmp_path: Path) -> None:
    from picker.api.v1 import introspection_pb2 as pb
    from picker.cli.status import as_data

    queues = pb.Queues(classes=[pb.PolicyClass(name="a", quantum=2**40, dropped={"deadline": 1})])
    data = json.loads(json.dumps(as_data(queues)))
    assert data["classes"][0]["quantum"] == 2**40
    assert data["classes"][0]["dropped"] == {"deadline": 1}
    assert data["classes"][0]["recent_share"] is None
