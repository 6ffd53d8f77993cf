"""`bin/lib.sh`: the environment is made once, by one process, whole or not at all; what lacks is said in one line.

The scripts run in a copy of the checkout whose lock files are empty, so that nothing is downloaded.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = "import sys; print('ran', sys.argv[1:], sys.prefix)"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the real scripts, empty lock files, and a program that prints its arguments."""
    shutil.copytree(ROOT / "bin", tmp_path / "bin")
    (tmp_path / "requirements.lock").write_text("# nothing\n")
    (tmp_path / "requirements-dev.lock").write_text("# nothing to develop with\n")
    (tmp_path / "dsuf").mkdir()
    (tmp_path / "dsuf" / "__init__.py").touch()
    (tmp_path / "dsuf" / "__main__.py").write_text(PROGRAM)
    return tmp_path


def start(checkout: Path, *arguments: str, script: str = "dsuf", **environment: str) -> subprocess.Popen[str]:
    """Start a script of `bin/` there, in a process group of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DSUF_")}
    return subprocess.Popen(
        [str(checkout / "bin" / script), *arguments],
        env=clean | environment,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of `process`, which gets a minute."""
    out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


def place_python(folder: Path, body: str) -> Path:
    """A `python3` in `folder` that is the shell script `body`."""
    folder.mkdir()
    (folder / "python3").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "python3").chmod(0o755)
    return folder / "python3"


@pytest.mark.full
def test_two_starts_at_once_then_a_third(checkout: Path) -> None:
    """One of two installs, both run the program in the new environment; a later start says nothing and is quick."""
    both = [finish(process) for process in (start(checkout, "a b", "c"), start(checkout, "a b", "c"))]
    expected = f"ran ['a b', 'c'] {checkout / '.venv'}\n"
    assert [(code, out) for code, out, _ in both] == [(0, expected)] * 2
    said = "".join(errors for _, _, errors in both)
    assert said.count("creating .venv") == said.count("some 100 MB to download") == 1
    assert said.count("base: installing") == 1

    began = time.monotonic()
    assert finish(start(checkout, "a b", "c")) == (0, expected, "")
    assert time.monotonic() - began < 60


@pytest.mark.full
def test_interrupted_setup_starts_over(checkout: Path) -> None:
    """What a killed installation left behind is not used."""
    process = start(checkout)
    while not (checkout / ".venv.new").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (checkout / ".venv").exists()
    (checkout / ".venv.new" / "half-a-package").touch()

    code, _, errors = finish(start(checkout))
    assert code == 0
    assert "creating .venv" in errors
    assert not (checkout / ".venv" / "half-a-package").exists()
    assert [path.name for path in checkout.glob(".venv*")] == [".venv"]
    assert not [path for path in (checkout / ".venv" / "bin").iterdir() if b".venv.new" in path.read_bytes()]

    (checkout / "requirements.lock").write_text("# another lock\n")
    code, _, errors = finish(start(checkout))
    assert code == 0
    assert "creating .venv" not in errors
    assert "base: installing" in errors


@pytest.mark.full
def test_the_old_environment_stays_until_the_new_one_is_whole(checkout: Path) -> None:
    """An installation over a good one was cut short: what still runs there keeps its files while another is made."""
    assert finish(start(checkout))[0] == 0
    old = checkout / ".venv"
    for name in (".installing", "half-a-package", "of-a-server"):
        (old / name).touch()
    lock = (checkout / "requirements.lock").read_text()
    (checkout / "requirements.lock").write_text("no-such-file @ file:///no-such-file.whl --hash=sha256:" + 64 * "0")
    assert finish(start(checkout))[0] == 1
    assert (old / "of-a-server").exists()

    (checkout / "requirements.lock").write_text(lock)
    code, out, errors = finish(start(checkout, "x"))
    assert (code, out) == (0, f"ran ['x'] {old}\n")
    assert "creating .venv" in errors
    assert not (old / "half-a-package").exists()


@pytest.mark.parametrize("word", ["--help", "-h"])
@pytest.mark.parametrize("name", ["dsuf", "serve", "fleet", "repro", "test"])
def test_help_installs_nothing(checkout: Path, name: str, word: str) -> None:
    """Not even an environment; the program itself is asked, and `bin/test` answers for itself."""
    code, out, errors = finish(start(checkout, word, script=name))
    assert (code, errors) == (0, "")
    if name == "test":
        assert out.startswith("bin/test [--full] [pytest arguments]: ")
        assert out.endswith("(tests/workers.py).\n")
    else:
        assert out.startswith("ran [") and f"'{word}'" in out
    assert not list(checkout.glob(".venv*"))


@pytest.mark.full
def test_a_gpu_asks_for_its_packages(checkout: Path, tmp_path: Path) -> None:
    """Where the driver lists a GPU the lock with CUDA is installed, once; where it lists none, the plain one."""
    (checkout / "requirements-cuda.lock").write_text("# nothing for a GPU\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    path = f"{tools}:{os.environ['PATH']}"
    for listed, name in (("No devices were found", "base"), ("GPU 0: NVIDIA H200", "cuda")):
        (tools / "nvidia-smi").write_text(f"#!/bin/sh\necho '{listed}'\n")
        (tools / "nvidia-smi").chmod(0o755)
        code, _, errors = finish(start(checkout, PATH=path))
        assert code == 0
        assert f"{name}: installing" in errors
        assert finish(start(checkout, PATH=path))[2] == ""


def test_no_python_is_one_line(checkout: Path, tmp_path: Path) -> None:
    """An interpreter that is too old is refused with the packages to install."""
    old = place_python(tmp_path / "old", "exit 1")
    code, out, errors = finish(start(checkout, DSUF_PYTHON=str(old)))
    assert (code, out) == (2, "")
    assert errors.startswith("dsuf: no Python 3.11 or newer found: install it")
    assert errors.endswith("apt-get install python3 python3-venv)\n")
    assert errors.count("\n") == 1


def test_no_venv_module_is_one_line(checkout: Path, tmp_path: Path) -> None:
    """Debian's python3 without python3-venv."""
    bare = place_python(tmp_path / "bare", 'case "$2" in *ensurepip*) exit 1;; esac')
    code, out, errors = finish(start(checkout, DSUF_PYTHON=str(bare)))
    assert (code, out) == (2, "")
    assert errors.count("\n") == 1
    assert "apt-get install python3-venv" in errors


@pytest.mark.full
def test_failed_installation_is_said_and_repeated(checkout: Path) -> None:
    """A lock that cannot be installed: pip's reason and one line of ours; the next start tries again."""
    (checkout / "requirements.lock").write_text("no-such-file @ file:///no-such-file.whl --hash=sha256:" + 64 * "0")
    for _ in range(2):
        code, out, errors = finish(start(checkout))
        assert (code, out) == (1, "")
        assert "installation failed" in errors.splitlines()[-1]


def test_no_setup_uses_the_given_python(checkout: Path, tmp_path: Path) -> None:
    """DSUF_NO_SETUP=1 leaves the machine as it is."""
    given = place_python(tmp_path / "given", 'echo "given $*"')
    assert finish(start(checkout, "x", DSUF_PYTHON=str(given), DSUF_NO_SETUP="1")) == (0, "given -m dsuf x\n", "")
    assert not (checkout / ".venv").exists()


@pytest.mark.full
def test_pyverbs_of_the_system_is_seen_where_it_fits(checkout: Path, tmp_path: Path) -> None:
    """By a link to it alone; one that leads nowhere any more goes."""
    system, other = tmp_path / "system", tmp_path / "other"
    tag = f"{sys.version_info.major}{sys.version_info.minor}"
    for folder, built in ((system, tag), (other, "27")):
        (folder / "pyverbs").mkdir(parents=True)
        (folder / "pyverbs" / f"device.cpython-{built}-x86_64-linux-gnu.so").touch()
        (folder / "numpy").mkdir()
    link = checkout / f".venv/lib/python3.{sys.version_info.minor}/site-packages/pyverbs"
    python = {"DSUF_PYTHON": sys.executable}

    assert finish(start(checkout, DSUF_SYSTEM_PACKAGES=str(other), **python))[0] == 0
    assert not link.is_symlink()
    assert finish(start(checkout, DSUF_SYSTEM_PACKAGES=str(system), **python))[0] == 0
    assert link.resolve() == system / "pyverbs"
    assert not (link.parent / "numpy").exists()
    shutil.rmtree(system)
    assert finish(start(checkout, DSUF_SYSTEM_PACKAGES=str(system), **python))[0] == 0
    assert not link.is_symlink()
