"""Say how much memory serving takes on GPUs that need not be there, and whether it fits.

The budget of each GPU and of the host, for a number of streams that all may reach the context: weights by part, Engram
tables, pages and slots of the caches, workspaces. For one GPU it is what the engine allocates, exact but for an
allowance for the driver; for more it is what the split over ranks gives each. Then the largest context and the most
streams that would fit. Exit code 1: it does not fit.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import msgspec

from dsuf.checkpoint.config import load_config
from dsuf.checkpoint.forms import RELEASED
from dsuf.config import Settings
from dsuf.cuda.budget import Budget, Demand, plan_budget
from dsuf.cuda.caches import PAGE_TOKENS
from dsuf.errors import CommandError

MIB = 1 << 20
MOST_STREAMS = 4096


class Gpu(msgspec.Struct, frozen=True):
    """A kind of GPU: its memory as the driver reports it, and how many one host has."""

    memory_bytes: int
    per_host: int


GPUS = {
    "h100": Gpu(81_559 * MIB, 8),
    "h200": Gpu(143_771 * MIB, 8),
    "b200": Gpu(183_359 * MIB, 8),
    "b300": Gpu(275_040 * MIB, 8),
    "gb300": Gpu(284_208 * MIB, 4),
}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, as `--json` prints it."""

    gpu: str
    demand: Demand
    gpu_parts: dict[str, int]
    gpu_bytes: int
    gpu_memory_bytes: int
    host_parts: dict[str, int]
    host_bytes: int
    host_memory_bytes: int | None
    fits: bool
    most_streams: int
    longest_context_tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `dsuf plan`."""
    parser.add_argument("--gpu", required=True, choices=sorted(GPUS), help="the kind of GPU")
    parser.add_argument("--tp", metavar="N", type=int, default=1, help="GPUs that share the model (default: 1)")
    parser.add_argument("--context", metavar="N", type=int, default=1 << 20, help="longest prompt and answer together, "
                        "in tokens (default: 1048576)")  # fmt: skip
    parser.add_argument("--streams", metavar="N", type=int, default=1, help="turns at the same time (default: 1)")
    parser.add_argument("--drafts", metavar="N", type=int, default=5, help="draft tokens a step; 0: the draft head is "
                        "not loaded (default: 5)")  # fmt: skip
    parser.add_argument("--engram", choices=("card", "host"), default="host", help="where the Engram tables are: on "
                        "the GPUs, or in pinned host memory (default)")  # fmt: skip
    chunk = Settings().prefill_chunk_tokens
    parser.add_argument("--prefill-chunk-tokens", metavar="N", type=int, default=chunk, help="prompt tokens a step "
                        f"(default: {chunk})")  # fmt: skip
    parser.add_argument("--host-gb", metavar="N", type=float, help="memory of the host in GB; without it the host is "
                        "not judged")  # fmt: skip
    parser.add_argument("--config", metavar="FILE", type=Path, default=RELEASED / "config.json", help="whose sizes "
                        "(default: the released ones)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object, in bytes and tokens, instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the plan; 0 if it fits, 1 if not. Raises `CommandError` or `CheckpointError` for what cannot be planned."""
    _check(args)
    demand = Demand(
        ranks=args.tp, context_tokens=args.context, streams=args.streams, drafts=args.drafts,
        engram_on_host=args.engram == "host", prefill_chunk_tokens=args.prefill_chunk_tokens,
    )  # fmt: skip
    plan = make_plan(args.config, args.gpu, demand, None if args.host_gb is None else int(args.host_gb * 1e9))
    print(msgspec.json.format(msgspec.json.encode(plan), indent=1).decode() if args.json else format_plan(plan))
    return 0 if plan.fits else 1


def _check(args: argparse.Namespace) -> None:
    """Raise `CommandError` for a number that is out of its range."""
    per_host = GPUS[args.gpu].per_host
    if not 1 <= args.tp <= per_host:
        raise CommandError(f"--tp is {args.tp}; a host with {args.gpu} has 1 to {per_host} GPUs")
    for flag, value, most in (
        ("--context", args.context, None), ("--streams", args.streams, MOST_STREAMS),
        ("--prefill-chunk-tokens", args.prefill_chunk_tokens, 1 << 20),
    ):  # fmt: skip
        if value < 1 or (most is not None and value > most):
            raise CommandError(f"{flag} is {value}; it must be at least 1" + (f" and at most {most}" if most else ""))
    if args.drafts < 0:
        raise CommandError(f"--drafts is {args.drafts}; it must be at least 0")
    if args.host_gb is not None and not 0 < args.host_gb < 1e9:
        raise CommandError(f"--host-gb is {args.host_gb:g}; it must be over 0")


def make_plan(config_path: Path, gpu: str, demand: Demand, host_memory_bytes: int | None) -> Plan:
    """The plan for `demand` on GPUs of the kind `gpu`."""
    config, memory = load_config(config_path), GPUS[gpu].memory_bytes

    def fits(budget: Budget) -> bool:
        return budget.gpu_bytes <= memory and (host_memory_bytes is None or budget.host_bytes <= host_memory_bytes)

    def fits_streams(streams: int) -> bool:
        return fits(plan_budget(config, msgspec.structs.replace(demand, streams=streams)))

    def fits_pages(pages: int) -> bool:
        tokens = min(pages * PAGE_TOKENS, config.max_seq_len)
        return fits(plan_budget(config, msgspec.structs.replace(demand, context_tokens=tokens)))

    budget = plan_budget(config, demand)
    pages = search_largest(fits_pages, -(-config.max_seq_len // PAGE_TOKENS))
    return Plan(
        gpu=gpu, demand=demand, gpu_parts=dict(budget.gpu), gpu_bytes=budget.gpu_bytes, gpu_memory_bytes=memory,
        host_parts=dict(budget.host), host_bytes=budget.host_bytes, host_memory_bytes=host_memory_bytes,
        fits=fits(budget), most_streams=search_largest(fits_streams, MOST_STREAMS),
        longest_context_tokens=min(pages * PAGE_TOKENS, config.max_seq_len),
    )  # fmt: skip


def search_largest(good: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that is `good`, 0 if 1 is not; what is good stays so for every smaller number."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def format_plan(plan: Plan) -> str:
    """The table, and what follows from it, for people."""
    d = plan.demand
    drafts = f"{d.drafts} drafts a step" if d.drafts else "no drafts"
    turns = "1 stream" if d.streams == 1 else f"{d.streams:,} streams"
    head = f"{d.ranks} x {plan.gpu}, {turns} of {d.context_tokens:,} tokens, {drafts}, Engram tables "
    lines = [head + ("in host memory" if d.engram_on_host else "on the GPUs"), "", "each GPU"]
    lines += _table(plan.gpu_parts, plan.gpu_bytes, plan.gpu_memory_bytes)
    lines += ["", "host", *_table(plan.host_parts, plan.host_bytes, plan.host_memory_bytes)]
    lines += ["", "it fits" if plan.fits else "IT DOES NOT FIT"]
    lines.append(_outlook("this many streams", f"a context of up to {plan.longest_context_tokens:,} tokens",
                          plan.longest_context_tokens))  # fmt: skip
    lines.append(_outlook("this context", f"up to {plan.most_streams:,} streams at a time", plan.most_streams))
    return "\n".join(lines)


def _table(parts: dict[str, int], total: int, memory: int | None) -> list[str]:
    """Parts, their sum, and what is left of `memory` where that is known; GB are 10^9 bytes."""
    rows = [*parts.items(), ("all", total)]
    if memory is not None:
        rows += [("there is", memory), ("left", memory - total)]
    return [f"  {name:24} {size / 1e9:10.3f} GB" for name, size in rows]


def _outlook(given: str, answer: str, number: int) -> str:
    return f"with {given}: {answer}" if number else f"with {given}: nothing fits"
