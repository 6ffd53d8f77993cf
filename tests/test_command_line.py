"""`python -m dsuf`: exit codes, one-line errors, help that reads well and is quick."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

import dsuf.__main__ as command_line
from dsuf import __version__, doctor
from dsuf.errors import CheckpointError, CommandError

ROOT = Path(__file__).parents[1]
NAMES = [command.name for command in command_line.COMMANDS]


@pytest.fixture
def fake_doctor(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module behind `dsuf doctor` replaced by one whose `run` a test sets."""
    module = ModuleType("fake", "A fake.")
    monkeypatch.setattr(module, "add_arguments", lambda parser: None, raising=False)
    monkeypatch.setattr(command_line, "_load", lambda name: module)
    return module


def run_fake(module: ModuleType, outcome: int | BaseException) -> int:
    """The exit code of `dsuf doctor` where its module returns or raises `outcome`."""

    def run(args: object) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    module.run = run  # type: ignore[attr-defined]
    return command_line.main(["doctor"])


@pytest.mark.parametrize("code", [0, 1, 2])
def test_exit_code_is_the_commands(fake_doctor: ModuleType, code: int) -> None:
    """What the subcommand returns is the exit code."""
    assert run_fake(fake_doctor, code) == code


@pytest.mark.parametrize("kind", [CommandError, CheckpointError])
def test_error_is_one_line(fake_doctor: ModuleType, kind: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    """Bad input: one line, exit 2, no traceback."""
    assert run_fake(fake_doctor, kind("weights.json: no such file")) == 2
    assert capsys.readouterr() == ("", "dsuf: weights.json: no such file\n")


def test_interrupt(fake_doctor: ModuleType) -> None:
    """Ctrl-C."""
    assert run_fake(fake_doctor, KeyboardInterrupt()) == 130


LOADING = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    raise ImportError("as compiled modules do") from None
"""


@pytest.mark.parametrize(("ignored", "code"), [(False, 130), (True, 7)])
def test_interrupt_while_modules_load(ignored: bool, code: int, tmp_path: Path) -> None:
    """Ctrl-C during the first moments: the same code, no traceback; a process that ignores it goes on."""
    tail = "def add_arguments(parser): pass\ndef run(args): return 7\n"
    (tmp_path / "loading.py").write_text(f'"""A module."""\n{LOADING}\n{tail}')
    lines = (
        "import signal, sys, dsuf.__main__ as m",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)" if ignored else "",
        "m.COMMANDS = (m.Command('serve', '', 'loading'),)",
        "sys.exit(m.main(['serve']))",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_interrupt_after_modules_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is an exception again, which lets what has begun end."""
    monkeypatch.setattr(command_line.importlib, "import_module", lambda name: ModuleType(name))
    command_line._load("anything")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_fault_of_ours_keeps_its_traceback(fake_doctor: ModuleType) -> None:
    """Only typed errors are made into a line."""
    with pytest.raises(ZeroDivisionError):
        run_fake(fake_doctor, ZeroDivisionError())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "required: SUBCOMMAND"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["doctor", "--nothing"], "unrecognized arguments: --nothing"),
        (["--nothing"], "SUBCOMMAND"),
        (["--nothing", "doctor"], "unrecognized arguments: --nothing (see dsuf --help)"),
        (["serve", "--portt", "5"], "unrecognized arguments: --portt 5 (see dsuf serve --help)"),
        (["doctor", "extra"], "unrecognized arguments: extra (see dsuf doctor --help)"),
        (["weights", "fetch", "--repo", "x"], "unrecognized arguments: --repo (see dsuf weights fetch --help)"),
        (["weights", "fetch"], "required: DIR (see dsuf weights fetch --help)"),
    ],
)
def test_wrong_use(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong use: one line, exit 2."""
    with pytest.raises(SystemExit) as left:
        command_line.main(arguments)
    assert left.value.code == 2
    errors = capsys.readouterr().err
    assert part in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("name", NAMES)
def test_help_of_a_subcommand(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every subcommand explains itself."""
    with pytest.raises(SystemExit) as left:
        command_line.main([name, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: dsuf {name}")
    assert len(text.splitlines()) > 4


@pytest.mark.parametrize("name", NAMES)
def test_help_without_packages_is_short(name: str) -> None:
    """Before anything is installed: what it is for, and how its arguments come to be listed; it does nothing else."""
    for word, code in (("--help", 0), ("--nothing", 1)):
        # -S: as an interpreter without any of the packages
        command = [sys.executable, "-S", "-m", "dsuf", name, word]
        done = subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code
        assert (command_line.FLAGS_LATER in done.stdout) == (code == 0)
        assert ("Traceback" in done.stderr) == (code == 1)


def test_overview_is_quick_and_complete() -> None:
    """`dsuf --help` lists every subcommand and loads none: NumPy alone would cost more than the rest."""
    began = time.monotonic()
    code = "import sys, dsuf.__main__ as m\ntry: m.main(['--help'])\nfinally: assert 'numpy' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert time.monotonic() - began < 10
    for command in command_line.COMMANDS:
        assert f"    {command.name} " in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`dsuf --version`."""
    with pytest.raises(SystemExit):
        command_line.main(["--version"])
    assert capsys.readouterr().out == f"dsuf {__version__}\n"


def test_closed_pipe_is_quiet() -> None:
    """A reader that leaves early gets no traceback."""
    shell = f"{sys.executable} -m dsuf doctor | head -c 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert len(done.stdout) == 1


PLAN = "weights plan --config dsuf/checkpoint/released/config.json"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["serve --print-config", PLAN])
def test_output_that_cannot_be_written_is_one_line(arguments: str, unbuffered: str) -> None:
    """A full disk, met while printing or only when the rest is flushed."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dsuf", *arguments.split()], cwd=ROOT, stdout=full, stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered}, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "dsuf: the output cannot be written: No space left on device\n")


def test_an_error_of_another_file_is_not_taken_for_the_outputs(fake_doctor: ModuleType) -> None:
    """It is a fault of ours, and keeps its traceback."""
    with pytest.raises(OSError, match="of another file"):
        run_fake(fake_doctor, OSError(28, "of another file"))


def test_a_closed_output_is_no_error() -> None:
    """As `>&-` leaves it: there is nothing to write to."""
    shell = f"{sys.executable} -m dsuf serve --print-config >&-"
    assert subprocess.run(["bash", "-c", shell], cwd=ROOT, stderr=subprocess.PIPE, timeout=60, check=True).stderr == b""


def test_a_name_that_is_no_text_is_printed(tmp_path: Path) -> None:
    """Any bytes can be a folder's name."""
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    done = subprocess.run(
        [sys.executable, "-m", "dsuf", "serve", "--print-config", "--model", folder],
        cwd=ROOT, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert b"\\udcff" in done.stdout and done.stderr == b""


def test_doctor_reports_every_probe(capsys: pytest.CaptureFixture[str]) -> None:
    """One line a probe, each with a known state; what is missing says for what."""
    assert command_line.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(doctor.PROBES)
    for line, (title, _) in zip(lines, doctor.PROBES, strict=True):
        state = line.split()[0]
        assert state in {"ok", "note", "missing"}
        assert line[9:].startswith(title)
        assert state != "missing" or "needed for:" in line
