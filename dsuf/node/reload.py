"""What a running node reads again: the keys of its file and its certificate, when they change or when SIGHUP comes."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dsuf.api.certificate import Certificate
from dsuf.api.keyring import Key, Keyring, gather_keys
from dsuf.config import Settings
from dsuf.errors import CommandError
from dsuf.observe.log import log_event

LOOK_S = 2.0

State = tuple[tuple[int, int, int] | None, ...]
"""Of each file its inode, size and time of change; None of one that is not there."""


class Reload:
    """The parts of a node that its files define: `keys`, and `certificate` where there is one.

    `trouble` says what could not be read again, None while all is well: what was read before then stays in force, also
    where a file has gone or was emptied, so that no mistake opens the server or closes it.
    """

    def __init__(self, settings: Settings) -> None:
        self.trouble: str | None = None
        self._settings = settings
        self._asked = asyncio.Event()
        self._state = _look_at(self._files)
        self.keys = Keyring(self._gather(), settings.admin_keys)
        self.certificate = _open_certificate(settings)

    def ask(self) -> None:
        """Read everything again, changed or not."""
        self._asked.set()

    async def run(self, look_s: float = LOOK_S) -> None:
        """Look every `look_s`, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(look_s):
                    await self._asked.wait()
            except TimeoutError:
                if not self._files:
                    continue
            asked = self._asked.is_set()
            self._asked.clear()
            state = await asyncio.to_thread(_look_at, self._files)
            if asked or state != self._state:
                self._state = state
                await self._read()

    async def _read(self) -> None:
        """Read again; the log has how many keys there are now, and never one of them."""
        try:
            keys = await asyncio.to_thread(self._gather)
            if self.certificate is not None:
                await asyncio.to_thread(self.certificate.load)
        except CommandError as error:
            self.trouble = str(error)
            log_event("reading again failed", level="error", reason=str(error))
            return
        self.trouble = None
        self.keys.replace(keys)
        log_event("read again", keys=len(keys), certificate=self.certificate is not None)

    def _gather(self) -> list[Key]:
        """All keys that the settings name."""
        settings = self._settings
        bounds = Key(text="", concurrent=settings.key_concurrent, per_minute=settings.key_per_minute)
        return gather_keys(settings.api_keys, settings.api_key_file, bounds)

    @property
    def _files(self) -> Sequence[Path]:
        """The files that are watched."""
        named = (self._settings.api_key_file, self._settings.tls_cert_file, self._settings.tls_key_file)
        return [file for file in named if file is not None]


def _open_certificate(settings: Settings) -> Certificate | None:
    """The certificate of the settings."""
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return None
    return Certificate(settings.tls_cert_file, settings.tls_key_file)


def _look_at(files: Sequence[Path], stat: Callable[[Path], os.stat_result] = os.stat) -> State:
    """What tells a changed file from an unchanged one."""
    found: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            seen = stat(file)
            found.append((seen.st_ino, seen.st_size, seen.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)
