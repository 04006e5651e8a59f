"""Settings: where they come from, which one wins, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from picker.settings import Settings, SettingsError, all_settings, load_settings


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "picker.yaml"
    path.write_text("extproc:\n  port: 1\n  total_body_limit: 1MiB\nadmin:\n  port: 2\n")
    return path


def failure(**sources: object) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(**sources)  # type: ignore[arg-type]
    return str(caught.value)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_defaults_need_no_source() -> None:
    assert load_settings() == Settings()


def test_flag_wins_over_environment_wins_over_file(config: Path) -> None:
    environ = {"PICKER_EXTPROC__PORT": "10", "PICKER_ADMIN__PORT": "20"}
    settings = load_settings(config, environ, {"extproc.port": "100"})
    assert (settings.extproc.port, settings.admin.port) == (100, 20)
    assert settings.extproc.total_body_limit == 1024**2


def test_every_setting_can_be_set_from_the_environment_and_by_flag() -> None:
    # One by one, so that rules between settings do not interfere: each must take its own default back in.
    for setting in all_settings():
        if setting.default:
            assert load_settings(environ={setting.env: setting.default}) == Settings(), setting.env
            assert load_settings(flags={setting.key: setting.default}) == Settings(), setting.flag


def test_a_list_is_a_list_in_the_file_and_has_commas_elsewhere(tmp_path: Path) -> None:
    tls = "extproc: {tls: {mode: files, cert_file: a, key_file: b, client_ca_file: c, client_names: [x, y]}}"
    file = write(tmp_path / "tls.yaml", tls)
    assert load_settings(file).extproc.tls.client_names == ("x", "y")
    environ = {"PICKER_EXTPROC__TLS__CLIENT_NAMES": "gateway.example, other.example"}
    assert load_settings(file, environ).extproc.tls.client_names == ("gateway.example", "other.example")


def test_a_session_header_is_named_as_headers_arrive_and_names_serve_something() -> None:
    flags = {"sessions.affinity": "prefer", "sessions.header": "X-Chat-ID", "sessions.cookie": "Picker"}
    settings = load_settings(flags=flags)
    assert (settings.sessions.header, settings.sessions.cookie) == ("x-chat-id", "Picker")
    assert "no effect while affinity is off" in failure(flags={"sessions.header": "x-chat"})
    for name in ("a b", "a=b", "a;", "x" * 129, "é"):
        assert "sessions-cookie" in failure(flags={**flags, "sessions.cookie": name})


def test_a_check_of_clients_that_would_not_take_place_is_refused(tmp_path: Path) -> None:
    """Whoever asks for client certificates must not get a port that anybody may use."""
    ca = {"extproc.tls.mode": "self-signed", "extproc.tls.client_ca_file": "ca.crt"}
    assert "client_ca_file is for mode `files`" in failure(flags=ca)
    names = {"extproc.tls.mode": "files", "extproc.tls.cert_file": "a", "extproc.tls.key_file": "b"}
    assert "client_names needs client_ca_file" in failure(flags=names | {"extproc.tls.client_names": "x"})


def test_every_setting_is_described_and_named_once() -> None:
    settings = list(all_settings())
    assert all(len(setting.description) > 10 for setting in settings)
    for names in ([s.key for s in settings], [s.env for s in settings], [s.flag for s in settings]):
        assert len(set(names)) == len(names)


def test_what_kubernetes_sets_for_a_service_called_picker_is_not_ours() -> None:
    environ = {"PICKER_PORT": "tcp://10.0.0.1:9002", "PICKER_EXTPROC_PORT": "tcp://10.0.0.1:9002"}
    assert load_settings(environ=environ) == Settings()


def test_maps_from_text(tmp_path: Path) -> None:
    expected = {"a": Path("/models/a"), "b": Path("/models/b")}
    for text in ("a=/models/a, b=/models/b", '{"a": "/models/a", "b": "/models/b"}'):
        assert load_settings(environ={"PICKER_TOKENS__MODELS": text}).tokens.models == expected
    kwargs = '{"m": {"enable_thinking": false, "depth": 2}}'
    tokens = load_settings(environ={"PICKER_TOKENS__CHAT_TEMPLATE_KWARGS": kwargs}).tokens
    assert tokens.chat_template_kwargs == {"m": {"enable_thinking": False, "depth": 2}}


def test_an_optional_setting_is_cleared_by_null_or_nothing(tmp_path: Path) -> None:
    config = write(tmp_path / "c.yaml", "policy: {file: p.yaml}\nqueue: {max_wait: 5}\n")
    settings = load_settings(config, {"PICKER_POLICY__FILE": "", "PICKER_QUEUE__MAX_WAIT": "null"})
    assert (settings.policy.file, settings.queue.max_wait) == (None, None)


def test_text_that_looks_like_a_number_stays_text() -> None:
    assert load_settings(flags={"pool.kubernetes.name": "0123"}).pool.kubernetes.name == "0123"


def test_paths_in_the_file_are_meant_from_where_the_file_is(tmp_path: Path) -> None:
    config = write(tmp_path / "c.yaml", "policy: {file: policy.yaml}\n")
    assert load_settings(config).policy.file == tmp_path / "policy.yaml"
    assert load_settings(config, {"PICKER_POLICY__FILE": "mine.yaml"}).policy.file == Path("mine.yaml")


def test_unknown_keys_are_named_with_their_line_and_the_nearest_key(tmp_path: Path) -> None:
    config = write(tmp_path / "c.yaml", "extproc:\n  prot: 1\nadmni: {}\n")
    first, second = failure(config=config).splitlines()
    assert first == f"{config}:2: extproc.prot: no such setting; did you mean port?"
    assert second == f"{config}:3: admni: no such setting; did you mean admin?"


def test_unknown_variables_are_errors() -> None:
    text = failure(environ={"PICKER_EXTPROC__PROT": "1"})
    assert text == "PICKER_EXTPROC__PROT: no such setting; did you mean PICKER_EXTPROC__PORT?"


def test_a_wrong_value_is_blamed_on_where_it_came_from(config: Path) -> None:
    assert failure(environ={"PICKER_EXTPROC__PORT": "x"}).startswith("PICKER_EXTPROC__PORT: ")
    assert failure(flags={"extproc.port": "70000"}).startswith("--extproc-port: ")
    config.write_text("extproc:\n  port: x\n")
    assert failure(config=config).startswith(f"{config}:2: extproc.port: ")


@pytest.mark.parametrize("text", ["- 1\n", "just text", "a: [", "a: 1\na: 2\n", "extproc: 3\n", "\x00"])
def test_a_file_that_is_not_settings_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    config = write(tmp_path / "c.yaml", text)
    assert failure(config=config).startswith(str(config))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in failure(config=tmp_path / "missing.yaml")


def test_an_empty_file_is_no_settings(tmp_path: Path) -> None:
    assert load_settings(write(tmp_path / "c.yaml", "# nothing yet\n")) == Settings()


def test_rules_between_settings(tmp_path: Path) -> None:
    assert "two sources" in failure(flags={"pool.file": "p.yaml", "pool.kubernetes.name": "pool"})
    assert "needs cert_file" in failure(flags={"extproc.tls.mode": "files"})


def test_a_flag_does_not_reach_another_group_through_an_alias(tmp_path: Path) -> None:
    config = write(tmp_path / "c.yaml", "extproc: &shared {port: 5}\nadmin: *shared\n")
    settings = load_settings(config, flags={"admin.port": "6"})
    assert (settings.extproc.port, settings.admin.port) == (5, 6)
