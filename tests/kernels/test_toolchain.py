"""The tool chain and its command: finding, caching, reading reports, and one clear line for what is missing."""

import shutil
from pathlib import Path

import pytest

import dsuf.__main__ as command_line
from dsuf.cuda import commands, kernels, toolchain
from dsuf.cuda.sizes import from_config
from dsuf.cuda.table import KERNELS, SOURCES
from dsuf.errors import CheckpointError, CommandError
from tests.kernels.conftest import configs

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH: kernels not compiled")

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 60 registers, used 1 barriers, 4608 bytes smem
ptxas info    : Compiling entry function 'two' for 'sm_90a'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 0 barriers
"""


def test_report() -> None:
    """Registers, shared memory and spills, entry by entry."""
    assert toolchain.parse_report(REPORT) == [("one", 60, 4608, 16), ("two", 20, 0, 0)]


def test_every_source_is_in_the_table() -> None:
    """No kernel without a row, no row without a file."""
    assert [path.stem for path in sorted((toolchain.FOLDER / "any").glob("*.cu"))] == SOURCES


def test_cache_folder() -> None:
    """The variable of the project wins over the user's cache."""
    assert toolchain.cache_folder({"DSUF_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a/kernels")
    assert toolchain.cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/dsuf/kernels")


def test_sizes_out_of_reach() -> None:
    """Sizes that the kernels do not serve are named."""
    config = configs()["tiny"]
    with pytest.raises(CheckpointError, match="head_dim in whole groups of 64, not 32"):
        from_config(
            type(config)(**{name: getattr(config, name) for name in config.__struct_fields__} | {"head_dim": 32})
        )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder of sources with one kernel."""
    (tmp_path / "any").mkdir()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "value.h").write_text("#pragma once\nconstexpr int kValue = 3;\n")
    source = '#include "value.h"\nextern "C" __global__ void put(int* to) { *to = kValue + DSUF_ADD; }\n'
    (tmp_path / "any" / "put.cu").write_text(source)
    return tmp_path


@pytest.mark.full
@needs_nvcc
def test_cache_by_content(project: Path, tmp_path: Path) -> None:
    """The same content gives the same file without compiling; a header, a macro or the target another."""
    chain = toolchain.find_toolchain(project, tmp_path / "cache")
    first = chain.build("put", "sm_90a", {"DSUF_ADD": "1"})
    assert [entry.entry for entry in first.entries] == ["put"]
    written = first.path.stat().st_mtime_ns
    assert chain.build("put", "sm_90a", {"DSUF_ADD": "1"}) == first
    assert first.path.stat().st_mtime_ns == written
    macro = chain.build("put", "sm_90a", {"DSUF_ADD": "2"})
    target = chain.build("put", "sm_103a", {"DSUF_ADD": "1"})
    (project / "include" / "value.h").write_text("#pragma once\nconstexpr int kValue = 4;\n")
    header = toolchain.find_toolchain(project, tmp_path / "cache").build("put", "sm_90a", {"DSUF_ADD": "1"})
    assert len({first.path, macro.path, target.path, header.path}) == 4
    assert not list((tmp_path / "cache").glob(".build-*"))


@needs_nvcc
def test_compile_error_is_one_line(project: Path, tmp_path: Path) -> None:
    """The first error, and nothing kept."""
    (project / "any" / "put.cu").write_text("int x = y;\n")
    with pytest.raises(CommandError, match=r'put.cu\(1\): error: identifier "y" is undefined$'):
        toolchain.find_toolchain(project, tmp_path / "cache").build("put", "sm_90a", {})
    assert not list((tmp_path / "cache").glob("*.cubin"))


@needs_nvcc
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sizes", ["tiny", "embedded", "nano", "released"])
def test_all_sources_compile(sizes: str, tmp_path: Path) -> None:
    """For all three targets, every entry of the table; no spilled register on sm_90a, next to none elsewhere."""
    chain, macros = toolchain.find_toolchain(cache=tmp_path), from_config(configs()[sizes]).macros()
    for sm in toolchain.TARGETS if sizes == "released" else ["sm_90a"]:
        entries = [entry for binary in chain.build_all(SOURCES, sm, macros) for entry in binary.entries]
        assert {entry.entry for entry in entries} == set(KERNELS)
        assert [entry for entry in entries if entry.spill_bytes > (0 if sm == "sm_90a" else 32)] == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["build", "--sm", "sm_80"], "sm_80 is not a target"),
        (["build", "--config", "/nowhere"], "cannot read /nowhere"),
    ],
)
def test_wrong_use(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit 2."""
    assert command_line.main(["kernels", *arguments]) == 2
    errors = capsys.readouterr().err
    assert part in errors
    assert errors.count("\n") == 1


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without nvcc the command says so."""
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    assert command_line.main(["kernels", "build", "--sm", "sm_90a"]) == 2
    assert capsys.readouterr().err.startswith("dsuf: no nvcc on PATH")


def test_no_bindings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without cuda-python `check` says so, and `build` falls back to the first target."""
    monkeypatch.setattr(kernels, "driver", None)
    monkeypatch.delenv("DSUF_SM", raising=False)
    assert command_line.main(["kernels", "check"]) == 2
    assert capsys.readouterr().err.startswith("dsuf: no GPU to be used: cuda-python is not installed")
    assert commands._targets(None) == ("sm_90a",)


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    """Every kernel is named, without a compiler."""
    assert command_line.main(["kernels", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(KERNELS)
