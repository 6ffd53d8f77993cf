"""A public load generator, guidellm, against a server of this checkout with the embedded model.

It is no dependency: install it anywhere (`python3 -m venv /somewhere; /somewhere/bin/pip install guidellm`) and name
its program. Conversations of several turns, at several numbers of streams; its report becomes a file of ours,
`bench/results/guidellm.json`.

    python bench/public.py /somewhere/bin/guidellm [--streams 1 4] [--requests 24]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import publish
from bench.server import serve
from dsuf.checkpoint.synthetic import ensure_embedded

PERCENTILES = ("p50", "p90", "p99")
FIGURES = {"first_token_ms": "time_to_first_token_ms", "gap_ms": "inter_token_latency_ms"}


def write_scenario(folder: Path, url: str, args: argparse.Namespace, tokenizer: Path) -> Path:
    """What guidellm shall do, in its own words."""
    spec = {
        "backend": {
            "kind": "openai_http", "target": url, "model": "deepseek-flash",
            "extras": {"body": {"thinking": {"type": "disabled"}}},
        },
        "tokenizer": {"kind": "hf_auto", "model": str(tokenizer)},
        "data": [
            {"kind": "synthetic_text", "prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens,
             "turns": args.turns},
        ],
        "profile": {"kind": "concurrent"},
        "constraints": [{"kind": "max_requests", "count": args.requests}],
        "outputs": [{"kind": "json", "path": str(folder / "report.json")}],
    }  # fmt: skip
    runs = [{"profile.streams": streams} for streams in args.streams]
    path = folder / "scenario.json"
    path.write_text(json.dumps({"metadata": {"name": "dsuf"}, "spec": spec, "benchmarks": runs}))
    return path


def read_report(report: Mapping[str, Any], version: str) -> list[dict[str, object]]:
    """Lines of our table from guidellm's report: one for each number of streams."""
    rows = []
    for benchmark in report["benchmarks"]:
        metrics = benchmark["metrics"]
        totals = metrics["request_totals"]
        row: dict[str, object] = {
            "generator": version,
            "streams": benchmark["config"]["strategy"]["streams"],
            "requests": totals["total"],
            "whole": totals["successful"],
            "errors": totals["errored"],
        }
        for name, theirs in FIGURES.items():
            found = metrics[theirs]["successful"]["percentiles"]
            row |= {f"{name}_{percentile}": found[percentile] for percentile in PERCENTILES}
        row["tokens_per_s"] = metrics["output_tokens_per_second"]["successful"]["mean"]
        row["prompt_tokens"] = metrics["prompt_token_count"]["successful"]["total_sum"]
        row["completion_tokens"] = metrics["output_token_count"]["successful"]["total_sum"]
        rows.append(row)
    return rows


def run(guidellm: Path, scenario: Path) -> str:
    """Run it, with its output on ours; its version. Raises `CalledProcessError`."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONPATH", None)
    command = [str(guidellm), "run", "--config", str(scenario), "--disable-progress"]
    subprocess.run(command, check=True, env=environment)
    shown = subprocess.run([str(guidellm), "--version"], check=True, env=environment, capture_output=True, text=True)
    return f"guidellm {shown.stdout.split()[-1]}"


def main() -> int:
    """Run and publish; 1 if a request was not answered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("guidellm", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--requests", type=int, default=24, help="for each number of streams")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = ensure_embedded(Path(folder) / "model")
        with serve(Path(folder) / "server.log", "--model", str(model)) as server:
            version = run(args.guidellm, write_scenario(Path(folder), server.url, args, model))
        rows = read_report(json.loads((Path(folder) / "report.json").read_text()), version)
    publish("guidellm", rows)
    return 1 if any(row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
