"""The real client asks the shipped model for lines of files: it must run its tool, and its answer hold the line.

python -m bench.nano.client PACK [--files 10] [--base-url http://127.0.0.1:8000]
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.nano.data.draw import Draw
from bench.nano.data.lines import FILE_QUESTIONS, File, draw_file
from bench.nano.data.package import Package
from bench.report import publish
from bench.server import serve

DSH = Path(__file__).parents[2] / "tests" / "clients" / "dsh.py"
SEED = 11
LINES = (3, 12)
RUN_LIMIT_S = 280.0


def ask(url: str, file: File, key: str, wanted: str) -> dict[str, object]:
    """One run of the client in a folder that holds `file`."""
    question = FILE_QUESTIONS[0].format(path=file.path, key=key)
    with tempfile.TemporaryDirectory(prefix="dsuf-files-") as folder:
        path = Path(folder) / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text + "\n")
        command = [sys.executable, str(DSH), "--base-url", url, "--folder", folder, "--expect", wanted]
        started_s = time.monotonic()
        run = subprocess.run(
            [*command, "--timeout", str(RUN_LIMIT_S), question], capture_output=True, text=True, check=False
        )
    print(f"{question}\n  exit {run.returncode}, answer {run.stdout.strip()!r}", flush=True)
    return {
        "file": file.path, "lines": len(file.lines), "right": run.returncode == 0, "exit": run.returncode,
        "seconds": time.monotonic() - started_s,
    }  # fmt: skip


@contextlib.contextmanager
def reach(url: str | None) -> Iterator[str]:
    """The server at `url`, or one of this checkout with its defaults."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder) / "server.log") as server:
        yield server.url


def main() -> int:
    """Ask and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, help="package that has the words for names and lines")
    parser.add_argument("--files", type=int, default=10, help="different files (default: %(default)s)")
    parser.add_argument("--base-url", help="a running server; without one it starts its own")
    args = parser.parse_args()
    draw, rows = Draw(Package.load(args.pack), f"{SEED}/client", held=True), []
    with reach(args.base_url) as url:
        for _ in range(args.files):
            file = draw_file(draw, draw.random.randint(*LINES))
            line = draw.random.choice(file.lines)
            rows.append(ask(url, file, line.key, line.text.split(": ", 1)[1]))
    publish("nano-client", rows)
    return 0 if sum(bool(row["right"]) for row in rows) >= 0.8 * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
