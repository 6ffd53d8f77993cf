"""Every case of a golden directory in order: integers and primitives, then each flavour with its model loaded once."""

from collections.abc import Callable, Container, Mapping

from dsuf.checkpoint.engram import EngramHash
from dsuf.checkpoint.shards import Checkpoint
from dsuf.checkpoint.token_map import TokenMap
from dsuf.golden.draft import DraftComparison
from dsuf.golden.folder import FLAVOURS, Case, Folder
from dsuf.golden.hashes import compare_hashes
from dsuf.golden.layout import CASES, missing_tensors
from dsuf.golden.primitives import compare_primitives
from dsuf.golden.report import Report
from dsuf.golden.session import Session
from dsuf.golden.stack import (
    compare_chunks,
    compare_decode,
    compare_greedy,
    compare_prefixes,
    compare_replay,
    compare_text,
)
from dsuf.golden.trace import TraceComparison
from dsuf.golden.whole import compare_whole
from dsuf.reference.arithmetic import ArithmeticName

_STACK_CASES: Mapping[str, Callable[[Session, Case], None]] = {
    "text_full": compare_text,
    "text_long": compare_text,
    "short": compare_prefixes,
    "decode": compare_decode,
    "greedy": compare_greedy,
    "dspark": lambda session, case: DraftComparison(session, case).run(),
}

_TRACES: Mapping[ArithmeticName, str] = {flavour: f"trace_{flavour}" for flavour in FLAVOURS}
_MODEL_CASES = (*_TRACES.values(), *_STACK_CASES)


def compare_folder(
    folder: Folder, report: Report, chosen: Container[str], flavours: Container[str], engine: str = "reference"
) -> None:
    """Compare the cases of `folder` named in `chosen`, in the `flavours` asked for, with what `engine` computes.

    Raises `CheckpointError`, and with `cuda` `CommandError` or `DeviceError` too.
    """
    if any(name in folder.cases and name in chosen for name in _MODEL_CASES):
        # Whatever is wrong with the checkpoint shall be known before the first row.
        with Checkpoint.open(folder.checkpoint) as checkpoint:
            EngramHash.from_config(checkpoint.config, TokenMap.from_tokenizer(folder.checkpoint / "tokenizer.json"))
    for name in CASES:
        if name not in folder.cases and name in chosen:
            report.set_apart(name, "", "", "absent")
        elif name in chosen:
            _name_missing(folder, report, folder.cases[name], flavours)
    if "engram_hash" in folder.cases and "engram_hash" in chosen:
        compare_hashes(report, folder)
    if engine == "cuda" and "primitives" in folder.cases and "primitives" in chosen:
        report.set_apart("primitives", "", "", "not compared", "reference only")
    elif "primitives" in folder.cases and "primitives" in chosen:
        compare_primitives(report, folder.cases["primitives"], folder.config)
    for flavour in (flavour for flavour in folder.flavours if flavour in flavours):
        _compare_flavour(folder, report, chosen, flavour, engine)
    if "vision" in folder.cases and "vision" in chosen:
        report.set_apart("vision", "", "", "not yet", f"{len(list(folder.cases['vision']))} tensors")
    _name_unused(folder, report, chosen, flavours)


def _compare_flavour(
    folder: Folder, report: Report, chosen: Container[str], flavour: ArithmeticName, engine: str
) -> None:
    trace = _TRACES[flavour]
    cases = {name: case for name, case in folder.cases.items() if name in chosen}
    if not any(name in cases for name in (trace, *_STACK_CASES)):
        return
    session = Session(folder, flavour, report, engine)
    if trace in cases:
        TraceComparison(session, cases[trace]).run()
        if session.exact:
            compare_whole(session, cases[trace])
    text = next((cases[name] for name in ("text_full", trace, "text_long") if name in cases), None)
    if text is not None:
        compare_chunks(session, text)
        compare_replay(session, text)
    for name, compare in _STACK_CASES.items():
        if name in cases:
            compare(session, cases[name])
    session.judge_pool()


def _name_missing(folder: Folder, report: Report, case: Case, flavours: Container[str]) -> None:
    """A row for each tensor that `case` lacks though the format promises it, in the flavours asked for."""
    for name in missing_tensors(case.name, case, folder.config):
        item, _, ending = name.rpartition(".")
        of_trace = case.name.removeprefix("trace_")
        flavour = next((one for one in FLAVOURS if one in (of_trace, ending)), "")
        if not flavour or flavour in flavours:
            report.miss(case.name, flavour, item if ending == flavour else name)


def _name_unused(folder: Folder, report: Report, chosen: Container[str], flavours: Container[str]) -> None:
    """A row for each file or case of which something was not looked at, though all of it was asked for."""
    for name in folder.unknown:
        report.set_apart(name, "", "unknown file", "not compared")
    if any(flavour not in flavours for flavour in folder.flavours):
        return
    for case in folder.cases.values():
        unused = [name for name in case.unused() if not name.startswith("vision_rope.")]
        if unused and case.name in chosen and case.name != "vision":
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            report.set_apart(case.name, "", unused[0], "not compared", f"unknown tensor{more}")
