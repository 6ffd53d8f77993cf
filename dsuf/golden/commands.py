"""`dsuf golden DIR`: the arguments and the exit code."""

import argparse
import sys
from pathlib import Path

from dsuf.errors import CommandError
from dsuf.golden.folder import FLAVOURS, Folder
from dsuf.golden.layout import CASES
from dsuf.golden.report import Report
from dsuf.golden.runner import compare_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `dsuf golden`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="holds tiny/ (a checkpoint) and cases/")
    parser.add_argument(
        "--engine", choices=["reference", "cuda"], default="reference", help="what is compared (%(default)s)"
    )
    parser.add_argument(
        "--flavour", choices=FLAVOURS, action="append", help="only this arithmetic; may be given several times"
    )
    parser.add_argument(
        "--case", choices=CASES, action="append", metavar="NAME",
        help=f"only this case file; may be given several times ({', '.join(CASES)})",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Compare and print; 0 all rows hold, 1 one does not.

    Raises `CommandError` or `CheckpointError`, one line, for a directory that cannot be used.
    """
    folder = Folder.open(args.directory)
    report = Report(sys.stdout)
    flavours = args.flavour or FLAVOURS
    if args.engine == "cuda":
        flavours = [flavour for flavour in flavours if flavour == "official"]
        if not flavours:
            raise CommandError("the CUDA engine computes as released only: --flavour official")
    compare_folder(folder, report, args.case or CASES, flavours, args.engine)
    report.close()
    return report.exit_code
