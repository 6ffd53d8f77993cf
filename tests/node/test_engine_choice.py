"""Which engine a node takes, and what it loads it for."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dsuf.checkpoint.forms import RELEASED
from dsuf.config import Settings
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.machine import Setup
from dsuf.errors import CommandError, DeviceError
from dsuf.node import engines
from dsuf.types import OpenMask


@pytest.fixture(scope="module")
def model() -> engines.Model:
    """The released sizes and tokenizer; there are no weights, and nothing here reads them."""
    return engines.open_model(RELEASED)


@pytest.mark.parametrize(
    ("asked", "lack", "picked"),
    [("auto", "no GPU", "reference"), ("auto", "", "cuda"), ("reference", "", "reference"), ("cuda", "no GPU", "cuda")],
)
def test_choice(monkeypatch: pytest.MonkeyPatch, model: engines.Model, asked: str, lack: str, picked: str) -> None:
    """`auto` takes CUDA where nothing lacks; what is asked for by name is taken, and fails where it cannot be."""
    monkeypatch.setattr(engines, "find_lack", lambda: lack)
    settings = Settings(engine=asked)
    assert engines.pick_engine(settings) == picked
    assert engines.foresee_facts(settings, model).name == picked


@pytest.mark.parametrize("shipped", [True, False])
def test_model_without_a_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shipped: bool) -> None:
    """The one that ships, where the installation has it; else one is made in the cache."""
    nano, made = tmp_path / "nano", tmp_path / "cache"
    nano.mkdir()
    if shipped:
        (nano / "config.json").touch()
    monkeypatch.setattr(engines, "NANO", nano)
    monkeypatch.setattr(engines, "ensure_embedded", lambda cache: cache / "embedded")
    settings = Settings(cache_dir=made)
    assert engines.find_directory(settings) == (nano if shipped else made / "embedded")
    assert engines.find_directory(Settings(model=tmp_path)) == tmp_path
    assert engines.find_directory(Settings(engine="scripted", script=tmp_path)) == RELEASED


@pytest.mark.parametrize(
    ("engine", "drafts", "most"), [("reference", 3, 5), ("reference", 0, 0), ("scripted", 3, 0), ("cuda", 5, 5)]
)
def test_drafts_are_foreseen(model: engines.Model, engine: str, drafts: int, most: int) -> None:
    """Facts that are told before the weights are there name the head's block where the head will be loaded."""
    settings = msgspec.structs.replace(Settings(drafts=drafts), engine=engine)
    facts = engines.foresee_facts(settings, model)
    assert facts.max_drafts == most and facts.constrains and facts.logprobs


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_context_fits_the_pages(model: engines.Model, drafts: int) -> None:
    """What is promised to clients is what a turn alone can have, with what its last step writes beyond its end."""
    settings = Settings(device_cache_tokens=500, drafts=drafts, engine="reference")
    overrun = model.config.dspark_block_size if drafts else 0
    assert engines.foresee_facts(settings, model).context_tokens == 4 * 128 - overrun


def test_more_drafts_than_the_head_proposes_are_refused(model: engines.Model) -> None:
    """The head's block is all that there is to verify."""
    with pytest.raises(CommandError, match="at most 5"):
        engines.foresee_facts(Settings(drafts=6, engine="reference"), model)


def test_settings_reach_the_engine(monkeypatch: pytest.MonkeyPatch, model: engines.Model) -> None:
    """Memory, caches, drafts and prefill are what the settings say; bytes of weights count as layers."""
    seen: list[tuple[Path, Setup, str]] = []
    layers: list[int] = []
    total = engines.sum_weights(model.config)

    def load(
        directory: Path, setup: Setup, prefill: str, *, open_mask: OpenMask, progress: Callable[[int], None]
    ) -> str:
        assert open_mask == model.masks.open
        seen.append((directory, setup, prefill))
        progress(total // 2)
        progress(total - total // 2)
        return "engine"

    monkeypatch.setattr(CudaEngine, "load", load)
    settings = Settings(
        engine="cuda", context_tokens=1000, max_turns=3, drafts=5, device_bytes=10**9, device_cache_tokens=1000,
        engram_on_host=True, prefill="exact", prefill_chunk_tokens=4000, draft_rule="token", draft_confidence=0.5,
    )  # fmt: skip
    assert engines.load_engine(settings, model, layers.append) == "engine"
    expected = Setup(
        context_tokens=1000, max_turns=3, drafts=True, prefill_rows=512, pages=8, budget_bytes=10**9,
        engram_on_host=True, rule="token", confidence=0.5,
    )  # fmt: skip
    assert seen == [(RELEASED, expected, "exact")]
    assert layers == [model.config.n_layers * (total // 2) // total, model.config.n_layers]


def test_device_failure_is_one_line(monkeypatch: pytest.MonkeyPatch, model: engines.Model) -> None:
    """A driver that refuses while the engine loads ends the command with its name."""

    def load(*arguments: object, **named: object) -> None:
        raise DeviceError("the CUDA driver says CUDA_ERROR_ECC_UNCORRECTABLE")

    monkeypatch.setattr(CudaEngine, "load", load)
    with pytest.raises(CommandError, match="ECC_UNCORRECTABLE"):
        engines.load_engine(Settings(engine="cuda"), model, print)
