"""Certificates on both sides, in place of the secret or beside it."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from dsuf.kv.transport.hello import Credentials
from dsuf.kv.transport.peer import PeerGiver
from tests.kv.rig import ids
from tests.kv.transport.rig import SECRET, Remote
from tests.toy import make_turn

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of both nodes, from one authority."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(text: str) -> None:
        subprocess.run(["openssl", *text.split()], cwd=folder, check=True, capture_output=True)

    curve = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    openssl(f"req -x509 {curve} -keyout ca.key -out ca.pem -days 2 -subj /CN=authority")
    for name in ("near", "far"):
        openssl(f"req {curve} -keyout {name}.key -out {name}.csr -subj /CN={name}")
        openssl(f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out {name}.pem -days 2")
    return folder


def credentials(folder: Path, name: str, secret: bytes) -> Credentials:
    """What the node of that certificate shows and verifies."""
    contexts = []
    for purpose in (ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH):
        context = ssl.create_default_context(purpose, cafile=str(folder / "ca.pem"))
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
        context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
        contexts.append(context)
    return Credentials(secret, *contexts)


class Certified(Remote):
    """A pair whose near node has the certificate of `near`."""

    def __init__(self, folder: Path, near: str, secret: bytes) -> None:
        super().__init__(deadline_s=5)
        self.credentials = credentials(folder, "far", secret)
        self.shown = credentials(folder, near, secret)

    def make_peer(self, **options: object) -> PeerGiver:
        """Dials with what the near node shows."""
        self.credentials = self.shown
        return super().make_peer(**options)


@pytest.mark.parametrize("secret", [b"", SECRET.secret], ids=["alone", "and secret"])
async def test_certificates_open(folder: Path, secret: bytes) -> None:
    async with Certified(folder, "near", secret) as pair:
        pair.shown.check()
        restored, _ = await pair.run(make_turn("a", ids(100)))
        assert restored.peer_tokens == 99


async def test_a_certificate_of_another_node_does_not(folder: Path) -> None:
    async with Certified(folder, "far", b"") as pair:
        restored, _ = await pair.run(make_turn("a", ids(100)))
        assert restored.peer_tokens == 0
        assert pair.server.refused == 1


async def test_no_tls_no_entry(folder: Path) -> None:
    async with Certified(folder, "near", SECRET.secret) as pair:
        pair.credentials = SECRET
        peer = Remote.make_peer(pair)
        with pytest.raises(ConnectionError):
            await peer.offer(make_turn("a", ids(20)), 0, compute=False)
        await peer.close()
