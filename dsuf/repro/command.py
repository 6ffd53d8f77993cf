"""Ask for the Tetris again and again, and say how fast it came.

Works with any server that speaks OpenAI's Chat Completions; --base-url is what its SDKs are given. A key is taken from
--api-key or OPENAI_API_KEY. Exits with 1 if a reply broke off, or is no whole HTML page; with 2 if the server cannot be
asked.
"""

import argparse
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from dsuf.errors import CommandError
from dsuf.repro.connection import RunFailed, Server, read_base_url
from dsuf.repro.figures import Range, Run, find_ranges, read_run

PROMPT = "implement the tetris game. output HTML code directly - no explanation."


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. `failures` are what went wrong, by number of the run from 1; such a run that still came to
    its end stands among the `runs` as well."""

    base_url: str
    model: str
    prompt: str
    runs: list[Run]
    failures: dict[int, str]
    ranges: dict[str, Range]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `dsuf repro`."""
    parser.add_argument("--base-url", metavar="URL", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    parser.add_argument("--runs", metavar="N", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    parser.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY")
    parser.add_argument("--thinking", action="store_true", help="think first, sampled, as the API does by default")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=16_384, help="default: %(default)s")
    parser.add_argument("--timeout-s", metavar="S", type=float, default=600.0, help="of a run; default: %(default)s")
    parser.add_argument("--plain", action="store_true", help="send no field that only some servers know")


def run(args: argparse.Namespace) -> int:
    """Run them all; raises `CommandError` where the server cannot be asked."""
    for name in ("runs", "max_tokens", "timeout_s"):
        if getattr(args, name) <= 0:
            raise CommandError(f"--{name.replace('_', '-')} {getattr(args, name)}: more than 0 is needed")
    key = args.api_key if args.api_key is not None else os.environ.get("OPENAI_API_KEY", "")
    server = Server(base=read_base_url(args.base_url), key=key)
    model = args.model or server.find_model()
    body = make_body(model, thinks=args.thinking, plain=args.plain, max_tokens=args.max_tokens)
    runs: list[Run] = []
    failures: dict[int, str] = {}
    for number in range(1, args.runs + 1):
        line = _run_once(server, body, args.timeout_s, number, runs, failures)
        if not args.json:
            print(line, flush=True)
    ranges = find_ranges(runs)
    if args.json:
        outcome = Outcome(
            base_url=server.url, model=model, prompt=PROMPT, runs=runs, failures=failures, ranges=ranges
        )  # fmt: skip
        print(msgspec.json.format(msgspec.json.encode(outcome), indent=2).decode())
    else:
        print(describe_ranges(runs, ranges), end="")
    return 1 if failures else 0


def make_body(model: str, *, thinks: bool, plain: bool, max_tokens: int) -> dict[str, Any]:
    """The request. Without thinking it is greedy; a server that thinks samples in any case."""
    options: dict[str, Any] = {"include_usage": True}
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "stream": True}
    if not thinks:
        body["temperature"] = 0
    if not plain:
        body["thinking"] = {"type": "enabled" if thinks else "disabled"}
        options["continuous_usage_stats"] = True
    return body | {"max_tokens": max_tokens, "stream_options": options}


def describe_run(run: Run) -> str:
    """The line of a run."""
    speed = "" if run.tokens_per_s is None else f" at {run.tokens_per_s:,.0f} tokens/s"
    trouble = f"; {run.trouble}" if run.trouble else ""
    return f"{run.tokens:,} tokens{speed} (first token after {run.first_token_s:.2f} s){trouble}"


def describe_ranges(runs: list[Run], ranges: Mapping[str, Range]) -> str:
    """A line for each figure."""
    note = "" if all(run.steps_told for run in runs) else " (a step is an event: the server tells no steps)"
    rows = (
        ("tokens/s", "tokens_per_s", ",.0f", ""), ("step time", "step_ms", ".2f", " ms" + note),
        ("accepted tokens a step", "accepted_tokens_per_step", ".2f", note),
    )  # fmt: skip
    return "".join(
        f"{label + ':':24}{ranges[name].least:{form}} to {ranges[name].most:{form}}{unit}\n"
        for label, name, form, unit in rows
        if name in ranges
    )


def _run_once(
    server: Server, body: Mapping[str, Any], timeout_s: float, number: int, runs: list[Run], failures: dict[int, str]
) -> str:
    """Run number `number`, kept in `runs` or `failures`; its line."""
    try:
        made = read_run(server.stream(body, timeout_s))
    except RunFailed as error:
        failures[number] = str(error)
        return f"failed: {error}"
    runs.append(made)
    if made.trouble:
        failures[number] = made.trouble
    return describe_run(made)
