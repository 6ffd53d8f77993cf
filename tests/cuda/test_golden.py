"""`dsuf golden --engine cuda`: the recorded set of the repository, the whole one where it is, and two made here."""

import tarfile
from os import environ
from pathlib import Path

import msgspec
import pytest

from dsuf.__main__ import main
from dsuf.checkpoint.config import load_config
from dsuf.cuda.machine import Machine, Setup
from tests.cuda.host import HostArena, make_host_machine
from tests.kernels.gpu import missing
from tests.reference.forge import forge_cases, forge_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def on_device() -> None:
    """Skips where no kernel can run."""
    if reason := missing():
        pytest.skip(f"golden was not compared on a GPU: {reason}")


@pytest.mark.usefixtures("on_device")
def test_recorded(tmp_path: Path, capsys: Capture) -> None:
    """The first ten layers on forty tokens: every layer from its recorded input, with the recorded choices."""
    with tarfile.open(GOLDEN / "prefix.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has no filters
        archive.extractall(tmp_path)
    assert main(["golden", str(tmp_path), "--engine", "cuda"]) == 0, capsys.readouterr().out


@pytest.mark.usefixtures("on_device")
def test_whole(capsys: Capture) -> None:
    """All cases of the whole recorded set: layers, texts, decode, greedy, drafts."""
    if "DSUF_GOLDEN" not in environ:
        pytest.skip("the whole recorded set was not compared: DSUF_GOLDEN is not set")
    assert main(["golden", environ["DSUF_GOLDEN"], "--engine", "cuda"]) == 0, capsys.readouterr().out


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("seed", [5, 6])
def test_made_here(seed: int, tmp_path: Path, capsys: Capture) -> None:
    """Two random checkpoints, layer by layer from what the reference recorded."""
    tokenizer = (GOLDEN / "tiny" / "tokenizer.json").read_bytes()
    forge_checkpoint(tmp_path, load_config(GOLDEN / "tiny" / "config.json"), tokenizer, seed)
    forge_cases(tmp_path, seed=seed, positions=60, flavours=("official",))
    arguments = ["golden", str(tmp_path), "--engine", "cuda", "--case", "trace_official"]
    assert main(arguments) == 0, capsys.readouterr().out


@pytest.mark.full
def test_a_device_that_computes_nothing(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every comparison runs to its end without a GPU, and finds that nothing is right."""

    def load(directory: Path, setup: Setup) -> Machine:
        config = load_config(directory / "config.json")
        machine = make_host_machine(monkeypatch, config, msgspec.structs.replace(setup, pages=8 * 6))
        machine.prefiller.kernels.runs = False  # type: ignore[attr-defined]
        return machine

    tokenizer = (GOLDEN / "tiny" / "tokenizer.json").read_bytes()
    forge_checkpoint(tmp_path, load_config(GOLDEN / "tiny" / "config.json"), tokenizer, 5)
    forge_cases(tmp_path, seed=5, positions=40, flavours=("official",))
    monkeypatch.setattr("dsuf.golden.device.Machine.load", load)
    monkeypatch.setattr("dsuf.golden.device.Arena", HostArena)
    assert main(["golden", str(tmp_path), "--engine", "cuda"]) == 1
    said = capsys.readouterr().out
    for item in ("h_out", "attn_out", "index_topk", "router_indices"):
        assert f"FAIL trace_official official all layers: {item}" in said
    assert "FAIL text_full official logits" in said
    assert "FAIL dspark official taught: draft_ids" in said


@pytest.mark.parametrize("flavour", ["fp32", "fp32q"])
def test_other_arithmetics_are_refused(flavour: str, capsys: Capture) -> None:
    """The kernels compute as released and in no other way."""
    assert main(["golden", str(GOLDEN), "--engine", "cuda", "--flavour", flavour]) == 2
    assert "official" in capsys.readouterr().err
