"""URLs of Redis: all their parts, none of their secrets, and what is wrong with them."""

from pathlib import Path

import msgspec
import pytest

from dsuf.errors import CommandError
from dsuf.kv.directory.address import RedisAddress, parse_address
from tests.certificates import make_certificates

PLAIN = RedisAddress(kind="single", hosts=(("h", 6379),), shown="redis://h")


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("redis://h", {}),
        ("redis://h:7000/3", {"hosts": (("h", 7000),), "database": 3}),
        ("redis://:s@h", {"password": "s"}),
        ("redis://u:s@h", {"user": "u", "password": "s"}),
        ("redis://u%40x:p%3A%2F%3F%23@h/1", {"user": "u@x", "password": "p:/?#", "database": 1}),
        ("redis://u:a@b@h", {"user": "u", "password": "a@b"}),
        ("redis://[::1]:7000", {"hosts": (("::1", 7000),)}),
        ("redis://[fe80::1%eth0]", {"hosts": (("fe80::1%eth0", 6379),)}),
        ("rediss://h?check_host=no", {"tls": True, "check_host": False}),
        (
            "redis+sentinel://u:s@a,b:7000,[::1]/fleet/2?sentinel_password=z&sentinel_user=y",
            {
                "kind": "sentinel", "hosts": (("a", 26379), ("b", 7000), ("::1", 26379)), "service": "fleet",
                "database": 2, "user": "u", "password": "s", "sentinel_user": "y", "sentinel_password": "z",
            },
        ),
        ("rediss+sentinel://a/fleet", {"kind": "sentinel", "hosts": (("a", 26379),), "service": "fleet", "tls": True}),
        ("redis+cluster://a:1,b:2", {"kind": "cluster", "hosts": (("a", 1), ("b", 2))}),
        ("rediss+cluster://a", {"kind": "cluster", "hosts": (("a", 6379),), "tls": True}),
    ],
)  # fmt: skip
def test_parts(url: str, parts: dict[str, object]) -> None:
    address = parse_address(url)
    expected = msgspec.structs.replace(PLAIN, **{"hosts": (("h", 6379),), **parts, "shown": address.shown})
    assert address == expected
    for secret in (address.password, address.sentinel_password):
        assert secret is None or secret not in address.shown.partition("://")[2]


def test_what_is_shown() -> None:
    assert parse_address("redis://u:geheim@h:7000/3").shown == "redis://h:7000/3"
    shown = parse_address("rediss+sentinel://u:geheim@a:1,b:2/s/1?sentinel_password=auch").shown
    assert shown == "rediss+sentinel://a:1,b:2/s/1"


def test_password_and_authority_from_elsewhere(tmp_path: Path) -> None:
    ca = make_certificates(tmp_path).ca
    address = parse_address("rediss://h", password="from file", ca_file=ca, prefix="fleet-2")
    assert (address.password, address.ca_file, address.prefix) == ("from file", str(ca), "fleet-2")
    assert parse_address("redis://:own@h", password="from file").password == "own"
    assert parse_address("redis://h", ca_file=ca).ca_file is None


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "redis://"),
        ("h:6379", "redis://"),
        ("http://h", "redis://"),
        ("redis+other://h", "redis://"),
        ("redis://", "redis://"),
        ("redis://h:70000", "host:port"),
        ("redis://h:x", "host:port"),
        ("redis://h:0", "host:port"),
        ("redis://h ", "host:port"),
        ("redis:///3", "host:port"),
        ("redis://a,b", "several hosts"),
        ("redis://h/x", "database"),
        ("redis://h/1/2", "database"),
        ("redis://h/-1", "database"),
        ("redis+sentinel://h", "service"),
        ("redis+sentinel://h/s/x", "database"),
        ("redis+cluster://h/1", "no databases"),
        ("redis://h?db=1", "unknown option 'db'"),
        ("rediss://h?check_host=maybe", "check_host"),
        ("rediss://h?ca_file=/nowhere", "no such file"),
        ("redis://h?ca_file=/nowhere", "rediss"),
        ("rediss://h?key_file=/proc/self/status", "needs a cert_file"),
        ("rediss://h?ca_file=/proc/self/status", "ca_file: cannot be used"),
        ("rediss://h?cert_file=/proc/self/status", "cert_file: cannot be used"),
        ("redis://u@h", "without a password"),
    ],
)
def test_what_is_wrong(url: str, says: str) -> None:
    with pytest.raises(CommandError, match="redis_url") as caught:
        parse_address(url)
    assert says in str(caught.value)


def test_errors_tell_no_secret() -> None:
    for url in ("redis://u:geheim@h:x", "redis://u:geheim@h/x", "redes://u:geheim@h", "redis://u:ge heim@h?x=1"):
        with pytest.raises(CommandError) as caught:
            parse_address(url)
        assert "heim" not in str(caught.value)


@pytest.mark.parametrize("password", ["ge/heim", "ge?heim", "ge?heim=1", "/heim?heim", "%2/heim"])
def test_a_password_that_is_not_encoded_is_not_shown(password: str) -> None:
    with pytest.raises(CommandError, match="written %2F") as caught:
        parse_address(f"redis://u:{password}@h:6379/0")
    assert "heim" not in str(caught.value)


@pytest.mark.parametrize("prefix", ["", "a b", "{a}", "a" * 65])
def test_prefixes_that_would_not_do(prefix: str) -> None:
    with pytest.raises(CommandError, match="redis_prefix"):
        parse_address("redis://h", prefix=prefix)
