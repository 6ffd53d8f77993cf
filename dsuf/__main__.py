"""The command line: `python -m dsuf SUBCOMMAND`, which `bin/dsuf` and `bin/serve` run.

Each subcommand is a module with `add_arguments(parser)` and `run(args) -> int`. Exit codes: 0 done, 1 a check failed
or the output cannot be written, 2 wrong use or bad input (one line says which), 130 interrupted.
"""

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from dsuf import __version__
from dsuf.errors import CheckpointError, CommandError


class Command(NamedTuple):
    """A row of the subcommand table: its word, one line for the overview, the module that carries it out."""

    name: str
    summary: str
    module: str


COMMANDS = (
    Command("serve", "serve a model over HTTP in the foreground", "dsuf.serve"),
    Command("fleet", "try a fleet on this machine: nodes, Redis and a balancer on loopback", "dsuf.trial.command"),
    Command("repro", "ask a server for the Tetris, and say how fast it came", "dsuf.repro.command"),
    Command("golden", "compare the reference engine with recorded vectors of the official code", "dsuf.golden"),
    Command("weights", "plan, verify or fetch a released checkpoint", "dsuf.checkpoint.commands"),
    Command("plan", "say how much GPU and host memory serving takes, and whether it fits", "dsuf.cuda.plan"),
    Command("kernels", "build, list or check the CUDA kernels", "dsuf.cuda.commands"),
    Command("replay", "compute recorded turns again, and say whether each token is the same", "dsuf.replay"),
    Command("doctor", "say what this machine has, and what is missing for what", "dsuf.doctor"),
)

FLAGS_LATER = (
    "Its arguments are listed here once the locked packages are installed; any command without --help installs them."
)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line: a usage text of thirty flags would hide what is wrong."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is left over here, where `prog` is the subcommand's; argparse would only do so at the top."""
        known, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return known, left

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and leave with exit code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Before NumPy is loaded: its threads wait for each other by spinning, so one core is left to everything else.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) - 1)))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may hold bytes that are no text
    try:
        try:
            return _run(arguments)
        except (CommandError, CheckpointError) as error:
            _complain(str(error))
            return 2
        finally:
            _flush()  # also where argparse leaves; a failure while Python shuts down could not be told in one line
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if not _drop_output():
            raise
        if not isinstance(error, BrokenPipeError):  # a reader that has gone, `head` for instance, knows that it has
            _complain(f"the output cannot be written: {error.strerror}")
        return 1


def _run(arguments: list[str]) -> int:
    """Parse and carry out; the module of the chosen subcommand alone is loaded."""
    word = next((argument for argument in arguments if not argument.startswith("-")), None)
    chosen = next((command for command in COMMANDS if command.name == word), None)
    module = _load_or_do_without(chosen.module, arguments) if chosen else None
    parser = Parser(
        prog="dsuf",
        description="An inference server for one model, DeepSeek-V4.1-Flash.",
        epilog="`dsuf SUBCOMMAND --help` lists the arguments of one.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dsuf {__version__}")
    table = parser.add_subparsers(metavar="SUBCOMMAND", required=True, title="subcommands")
    for command in COMMANDS:
        described = module.__doc__ if command is chosen and module else f"{command.summary}\n\n{FLAGS_LATER}"
        subparser = table.add_parser(
            command.name,
            help=command.summary,
            description=described,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if command is chosen and module:
            module.add_arguments(subparser)
    args = parser.parse_args(arguments)
    return int(module.run(args)) if module else 2


def _load_or_do_without(name: str, arguments: list[str]) -> ModuleType | None:
    """The module of a subcommand; none where help is asked for and a package is not installed: it is short then."""
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if not {"-h", "--help"} & set(arguments) or (error.name or "dsuf").startswith("dsuf"):
            raise
        return None


def _load(name: str) -> ModuleType:
    """Import the module of one subcommand: the only late import of the project, since `--help` must not load NumPy.

    Ctrl-C ends the process at once here, where nothing has begun. Compiled modules would turn its exception into an
    `ImportError`, or print it and go on.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return importlib.import_module(name)
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        return importlib.import_module(name)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _complain(text: str) -> None:
    """Print what is wrong, where that can be printed; the exit code tells it in any case."""
    with suppress(OSError):
        print(f"dsuf: {text}", file=sys.stderr)


def _flush() -> None:
    """Write the buffered output; there is none of it where standard output was closed before the start."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _drop_output() -> bool:
    """Whether output fails, which one more line tells; what is buffered is dropped then, or would fail at the end."""
    try:
        print(flush=True)
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
