"""Certificates for tests: an authority, and what it signed for the loopback address. Made by the openssl program."""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class Certificates(NamedTuple):
    """Files in PEM: the authority, a certificate that it signed for 127.0.0.1 and localhost, and its key."""

    ca: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path, *, name: str = "dsuf-test") -> Certificates:
    """Make all of them in `folder`; skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl program to make certificates")
    made = Certificates(folder / "ca.pem", folder / "node.pem", folder / "node.key")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    _run("req", "-x509", *curve, "-keyout", folder / "ca.key", "-out", made.ca, "-subj", f"/CN={name}-ca")
    _run(
        "req", "-x509", *curve, "-keyout", made.key, "-out", made.certificate, "-subj", f"/CN={name}",
        "-CA", made.ca, "-CAkey", folder / "ca.key", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
        "-addext", "basicConstraints=critical,CA:FALSE",
    )  # fmt: skip
    return made


def _run(*arguments: str | Path) -> None:
    """Run openssl."""
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
