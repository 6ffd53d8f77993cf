"""Settings: what wins, what is refused and in which words, and that flags, file and help come from one list."""

import argparse
import re
import tomllib
from pathlib import Path

import pytest

from dsuf.config import REDACTED, Settings, add_flags, describe, list_settings, load_settings
from dsuf.errors import CommandError


def write(folder: Path, text: str) -> Path:
    """A settings file."""
    path = folder / "dsuf.toml"
    path.write_text(text)
    return path


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = write(tmp_path, 'port = 1\nmax_turns = 2\nhost = "::1"\nclamp_max_tokens = false\n')
    loaded = load_settings({"port": "3", "config": "ignored"}, {"DSUF_PORT": "4", "DSUF_MAX_TURNS": "5"}, file)
    assert (loaded.port, loaded.max_turns, loaded.host, loaded.clamp_max_tokens) == (3, 5, "::1", False)
    assert loaded.queue_limit == Settings().queue_limit
    assert load_settings() == Settings()
    others = {"DSUF_GOLDEN": "/g", "DSUF_SM": "sm_90a", "DSUF_NO_SETUP": "1", "DSUF_PYTHON": "p", "PORT": "1"}
    assert load_settings({}, others) == Settings()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"DSUF_PORT": "70000"}, ["port", "'70000'", "environment", "a whole number <= 65535"]),
        ({"DSUF_PORT": "http"}, ["port", "'http'", "expected a whole number"]),
        ({"DSUF_PORT": "1_0"}, ["port", "'1_0'", "expected a whole number"]),
        ({"DSUF_HOST": ""}, ["host", "''", "not empty"]),
        ({"DSUF_ENGINE": "gpu"}, ["engine", "'gpu'", "auto, reference, scripted, cuda"]),
        ({"DSUF_ROLE": "all"}, ["role", "all", "both, prefill, decode"]),
        ({"DSUF_DECODE_GAP_S": "0"}, ["decode_gap_s", "expected a number >= 0.01"]),
        ({"DSUF_DECODE_GAP_S": "soon"}, ["decode_gap_s", "expected a number"]),
        ({"DSUF_AUDIT_SHARE": "1.5"}, ["audit_share", "<= 1"]),
        ({"DSUF_ENGINE": "scripted"}, ["script"]),
        ({"DSUF_SCRIPT": "/nowhere.json"}, ["script", "nowhere", "scripted"]),
        ({"DSUF_ENGINE": "scripted", "DSUF_SCRIPT": "/nowhere.json"}, ["script", "no such file"]),
        ({"DSUF_MODEL": "/nowhere"}, ["model", "/nowhere", "no such directory"]),
        ({"DSUF_CLAMP_MAX_TOKENS": "maybe"}, ["clamp_max_tokens", "'maybe'", "expected true or false"]),
        ({"DSUF_DRAIN_S": "inf"}, ["drain_s", "finite"]),
        ({"DSUF_STEP_DEADLINE_S": "0"}, ["step_deadline_s", ">= 0.1"]),
        ({"DSUF_KEEPALIVE_S": "0.000001"}, ["keepalive_s", ">= 0.05"]),
        ({"DSUF_BODY_TIMEOUT_S": "1e-9"}, ["body_timeout_s", ">= 0.1"]),
        ({"DSUF_WRITE_TIMEOUT_S": "0.001"}, ["write_timeout_s", ">= 0.1"]),
        ({"DSUF_API_KEY_FILE": "/nowhere"}, ["api_key_file", "/nowhere"]),
        ({"DSUF_CACHE_DIR": "~nosuchuser/x"}, ["cache_dir", "'~nosuchuser/x'", "home folder"]),
        ({"DSUF_MODEL": "m" * 5000}, ["model", "no such directory"]),
        ({"DSUF_ENGINE": "scripted", "DSUF_SCRIPT": "s" * 5000}, ["script", "no such file"]),
        ({"DSUF_HOST": "\udcff"}, ["host", "'\\udcff'", "address"]),
        ({"DSUF_HOST": "a b"}, ["host", "'a b'"]),
        ({"DSUF_MAX_TURN": "3"}, ["DSUF_MAX_TURN", "did you mean 'DSUF_MAX_TURNS'"]),
        ({"DSUF_CACHE_SIZE": "3"}, ["DSUF_CACHE_SIZE", "did you mean 'DSUF_CACHE_"]),
        ({"DSUF_CONTEXT_LENGTH": "3"}, ["did you mean 'DSUF_CONTEXT_TOKENS'"]),
    ],
)
def test_a_wrong_value_is_named(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(CommandError) as refused:
        load_settings({}, environ)
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("text", ["port = 1.5", "host = 3", "api_keys = 3", "api_keys = [3]", "clamp_max_tokens = 7"])
def test_what_is_expected_is_said_in_words(text: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError) as refused:
        load_settings(toml_path=write(tmp_path, text))
    assert re.search("expected (a whole number|text|a list|true or false)", str(refused.value))
    assert not re.search(r"\b(int|str|float|bool|array|null)\b|`", str(refused.value))


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="unknown setting 'max_turn'; did you mean 'max_turns'"):
        load_settings(toml_path=write(tmp_path, "max_turn = 3"))
    with pytest.raises(CommandError, match="not valid TOML"):
        load_settings(toml_path=write(tmp_path, "max_turns ="))
    with pytest.raises(CommandError, match="cannot be read"):
        load_settings(toml_path=tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((f'{name} = "a\\u0000b"', [name, "NUL"]) for name in ("cache_dir", "model", "script", "api_key_file")),
        ('host = "a\\u0000b"', ["host", "'a\\x00b'"]),
        ('host = "a\\nb"', ["host", "'a\\nb'"]),
        ("port = " + "[" * 3000, ["dsuf.toml", "nested too deeply"]),
        ("port = " + "9" * 5000, ["dsuf.toml", "not valid TOML"]),
    ],
)
def test_a_hostile_file_is_one_line(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(CommandError) as refused:
        load_settings(toml_path=write(tmp_path, text))
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)


def test_keys_are_never_shown(tmp_path: Path) -> None:
    loaded = load_settings({"api_keys": "sk-one, sk-two"})
    assert loaded.api_keys == ("sk-one", "sk-two")
    assert "sk-" not in describe(loaded) and describe(loaded).count(REDACTED) == 2
    with pytest.raises(CommandError) as refused:
        load_settings(toml_path=write(tmp_path, "api_keys = [17, 'sk-secret']"))
    assert "sk-secret" not in str(refused.value)


def test_how_clients_are_let_in_fits_together() -> None:
    assert load_settings({"cors_origins": "https://a.org, http://localhost:3000"}).cors_origins == (
        "https://a.org", "http://localhost:3000",
    )  # fmt: skip
    for origin in ("a.org", "https://a.org/", "https://a.org/x", "null", "https://"):
        with pytest.raises(CommandError, match="is no origin"):
            load_settings({"cors_origins": origin})
    with pytest.raises(CommandError, match="HTTPS needs both"):
        load_settings({"tls_cert_file": "cert.pem"})


def test_admin_keys_are_as_secret_as_others(tmp_path: Path) -> None:
    loaded = load_settings({"admin_keys": "sk-root", "api_keys": "sk-one"})
    assert loaded.admin_keys == ("sk-root",)
    assert "sk-" not in describe(loaded) and describe(loaded).count(REDACTED) == 2
    with pytest.raises(CommandError, match=r"admin_keys: .* put the key itself there"):
        load_settings({"admin_keys": REDACTED})
    with pytest.raises(CommandError, match=r"admin_keys = .*an entry is empty"):
        load_settings({"admin_keys": "sk-root,"})


@pytest.mark.parametrize("text", ["", " ", ",", "sk-one,", "sk-one, ,sk-two"])
def test_an_empty_key_is_refused_and_opens_no_server(text: str, tmp_path: Path) -> None:
    file = write(tmp_path, f"api_keys = {text.split(',')}")
    for flags, environ, path in (({"api_keys": text}, {}, None), ({}, {"DSUF_API_KEYS": text}, None), ({}, {}, file)):
        with pytest.raises(CommandError, match=r"api_keys = .*an entry is empty") as refused:
            load_settings(flags, environ, path)
        assert "sk-" not in str(refused.value) and "\n" not in str(refused.value)


def test_keys_of_a_list_are_stripped_and_none_is_no_check(tmp_path: Path) -> None:
    assert load_settings(toml_path=write(tmp_path, 'api_keys = [" sk-one ", "sk-one"]')).api_keys == ("sk-one",)
    assert load_settings(toml_path=write(tmp_path, "api_keys = []")).api_keys == ()


def test_a_printed_configuration_with_keys_waits_for_them(tmp_path: Path) -> None:
    text = describe(load_settings({"api_keys": "sk-one,sk-two"}))
    with pytest.raises(CommandError, match="put the key itself there"):
        load_settings(toml_path=write(tmp_path, text))
    assert load_settings(toml_path=write(tmp_path, text.replace(REDACTED, "sk-new"))).api_keys == ("sk-new",)
    assert "# 2 set and not shown" in text and "not shown" not in describe(Settings())


def test_the_printed_configuration_can_be_read_again(tmp_path: Path) -> None:
    (tmp_path / 'od"d ☃').mkdir()
    loaded = load_settings({"model": str(tmp_path / 'od"d ☃'), "drain_s": "2.5", "clamp_max_tokens": "false"})
    text = describe(loaded)
    assert load_settings(toml_path=write(tmp_path, text)) == loaded
    assert set(tomllib.loads(text)) <= {setting.name for setting in list_settings()}


def test_every_setting_has_a_flag_with_its_help() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    shown = " ".join(parser.format_help().split())
    for setting in list_settings():
        assert setting.flag in shown and setting.help.split()[0] in shown
        assert setting.help and not setting.help.endswith(".")
    assert vars(parser.parse_args([])) == {}
    given = vars(parser.parse_args(["--queue-limit", "7", "--no-clamp-max-tokens"]))
    loaded = load_settings(given)
    assert (loaded.queue_limit, loaded.clamp_max_tokens) == (7, False)


FLEET = {"redis_url": "redis://h", "peer_secret": "0123456789abcdef"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"redis_url": "redis://h"}, "peer_secret: a fleet needs one"),
        ({"peer_secret": "short"}, "peer_secret: 5 characters, at least 16"),
        ({"peer_secret": "s" * 16, "peer_secret_file": "/x"}, "one of them is enough"),
        ({"advertise": "nowhere"}, "advertise = 'nowhere': expected host:port"),
        ({"advertise": "http://h:8100"}, "advertise = 'http://h:8100': expected host:port"),
        ({"advertise": "[]:8100"}, "advertise = '[]:8100': expected host:port"),
        ({"advertise": "h:\u0663\u0663"}, "expected host:port"),
        (FLEET | {"control_host": "0.0.0.0"}, "advertise = '': expected the host:port under which peers reach"),
        (FLEET | {"advertise": "[::]:8100"}, "advertise = '[::]:8100': expected the host:port under which"),
        (FLEET | {"role": "decode", "cache_bytes": "0"}, "cache_bytes = 0: with role = 'decode'"),
        (FLEET | {"role": "prefill", "cache_bytes": "0"}, "cache_bytes = 0: with role = 'prefill'"),
        ({"node_id": 65 * "x"}, "expected 64 characters at most"),
        ({"node_id": "a/b"}, "node_id = 'a/b'"),
    ],
)
def test_what_a_fleet_needs(flags: dict[str, str], said: str) -> None:
    """Settings of a fleet that do not fit together are refused in one line."""
    with pytest.raises(CommandError, match=re.escape(said)):
        load_settings(flags)


@pytest.mark.parametrize("advertise", ["h:1", "node-1.peers.dsuf.svc:8100", "[fe80::1%eth0]:8100", "fd00::1:8100"])
def test_where_peers_may_reach_a_node(advertise: str) -> None:
    assert load_settings({**FLEET, "control_host": "0.0.0.0", "advertise": advertise}).advertise == advertise


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:hunter/2@h",
        "redis://u:hunter?2@h",
        "redis://u:a@hunter2@h",
        "redis+sentinel://h/s?sentinel_password=hunter@2&check_host=no",
    ],
)
def test_no_part_of_a_password_is_printed(url: str) -> None:
    shown = describe(load_settings({**FLEET, "redis_url": url}))
    assert "hunter" not in shown and "2@" not in shown and "@2" not in shown


def test_secrets_of_a_fleet_are_not_printed() -> None:
    """Neither the peers' secret nor Redis' password; what is printed in their place is refused when read."""
    given = {"redis_url": "redis://me:hunter2@host:1/0", "peer_secret": "0123456789abcdef"}
    text = describe(load_settings(given))
    assert "hunter2" not in text and "0123456789abcdef" not in text
    shown = tomllib.loads(text)
    assert shown["redis_url"] == f"redis://me:{REDACTED}@host:1/0"
    for name in given:
        with pytest.raises(CommandError, match=f"{name}: .*print-config"):
            load_settings({**given, name: shown[name]})
