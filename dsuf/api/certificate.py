"""The server's certificate, for HTTPS without a proxy in front."""

import ssl
from pathlib import Path

from dsuf.errors import CommandError


class Certificate:
    """A certificate and its key as a TLS context (1.2 or newer); `load` takes them from their files, again when asked:
    connections that are made from then on get the new ones. Raises `CommandError`; what was there before then stays."""

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        self.cert_file, self.key_file = cert_file, key_file
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self.load()

    def load(self) -> None:
        """Read both files, and use them if they belong together."""
        self._read_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # a pair that fails half-way would leave half of it
        self._read_into(self.context)

    def _read_into(self, context: ssl.SSLContext) -> None:
        """Load the pair; a key with a passphrase is refused, since nobody is there to type it."""
        try:
            context.load_cert_chain(self.cert_file, self.key_file, password=_refuse_to_type)
        except (OSError, ValueError) as error:  # an `SSLError` is an `OSError`
            reason = getattr(error, "strerror", None) or str(error)
            raise CommandError(f"tls_cert_file, tls_key_file: {' '.join(str(reason).split())}") from error


def _refuse_to_type() -> str:
    """No passphrase."""
    raise ValueError("the key has a passphrase; give one without")
