"""Where the test data of the checkpoint layer is."""

import os
import shutil
from pathlib import Path

import msgspec
import pytest

import dsuf.checkpoint
from dsuf.checkpoint.config import load_config
from dsuf.checkpoint.synthetic import write_synthetic

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def golden() -> Path:
    """The reduced golden set that is always there."""
    return HERE.parent / "golden"


@pytest.fixture(scope="session")
def released() -> Path:
    """The released configuration and tokenizer."""
    return Path(dsuf.checkpoint.__file__).parent / "released"


@pytest.fixture(scope="session")
def whole_golden() -> Path:
    """The whole golden set, with weights."""
    folder = os.environ.get("DSUF_GOLDEN")
    if not folder:
        pytest.skip("DSUF_GOLDEN is not set: the golden checkpoint is not here")
    return Path(folder)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, golden: Path) -> Path:
    """A random checkpoint in the tiny golden model's sizes with two experts, in two shards; not to be changed."""
    directory = tmp_path_factory.mktemp("small")
    config = load_config(golden / "tiny/config.json")
    config = msgspec.structs.replace(config, n_routed_experts=2, n_activated_experts=1, dspark_n_routed_experts=2,
                                     dspark_n_activated_experts=1)  # fmt: skip
    write_synthetic(directory, config, 7, (golden / "tiny/tokenizer.json").read_bytes())
    return directory


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Path:
    """A copy of `small` to damage."""
    return Path(shutil.copytree(small, tmp_path / "copy"))
