"""A model on this machine's GPU, loaded once; tests that ask for it skip where there is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsuf.checkpoint.config import load_config
from dsuf.checkpoint.synthetic import write_synthetic
from dsuf.cuda.machine import Machine, Setup
from dsuf.reference.loader import load_model
from dsuf.reference.model import Model
from tests.kernels.gpu import missing

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of the golden set's sizes: every kind of layer, both Engram layers, a draft head."""
    directory = tmp_path_factory.mktemp("model")
    write_synthetic(directory, load_config(GOLDEN / "config.json"), 3, (GOLDEN / "tokenizer.json").read_bytes())
    return directory


@pytest.fixture(scope="session")
def machine(checkpoint: Path) -> Iterator[Machine]:
    """The checkpoint on the GPU."""
    if reason := missing():
        pytest.skip(f"the CUDA engine was not run: {reason}")
    setup = Setup(context_tokens=2048, max_turns=8, prefill_rows=128, pages=120, budget_bytes=4 << 30)
    machine = Machine.load(checkpoint, setup)
    yield machine
    machine.close()


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Model:
    """The checkpoint in NumPy."""
    return load_model(checkpoint)
