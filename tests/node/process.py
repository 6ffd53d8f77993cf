"""A server in a process of its own, whose output can be read."""

import http.client
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.node.rig import write_script

ROOT = Path(__file__).parents[2]


class Process:
    """A running server; `output` collects what it printed."""

    def __init__(self, arguments: Sequence[str]) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DSUF_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dsuf", "serve", "--port", "0", *arguments],
            cwd=ROOT, env=clean, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.output = ""
        self.url = ""

    def wait_ready(self) -> None:
        """Read the output up to the line that says so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if found := re.search(r"http://\S+:\d+", line):
                self.url = self.url or found[0]
            if line.startswith("ready in"):
                return
        raise AssertionError(f"the server ended: {self.output}")

    def get(self, path: str) -> Any:
        """The JSON under `path`."""
        with urllib.request.urlopen(self.url + path, timeout=60) as reply:
            return json.load(reply)

    def stream(self, text: str, **fields: object) -> http.client.HTTPResponse:
        """An open stream that answers `text`."""
        body = {"model": "deepseek-flash", "stream": True, "messages": [{"role": "user", "content": text}]}
        body |= {"thinking": {"type": "disabled"}} | fields
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        reply: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=120)
        return reply


@contextmanager
def serving(*arguments: str) -> Iterator[Process]:
    """A ready server."""
    process = Process(arguments)
    try:
        process.wait_ready()
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def serving_script(model: Path, folder: Path, rules: Sequence[dict[str, object]], *arguments: str) -> Any:
    """A ready server with a script."""
    script = write_script(folder, rules)
    return serving("--engine", "scripted", "--script", str(script), "--model", str(model), *arguments)
