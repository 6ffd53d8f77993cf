"""Where the test data of the checkpoint layer is."""

import os
from pathlib import Path

import pytest

import dsuf.checkpoint

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
