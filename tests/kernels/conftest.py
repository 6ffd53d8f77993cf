"""The GPU of the kernel tests, once for each set of sizes."""

from pathlib import Path

import numpy as np
import pytest

from bench.nano.sizes import SIZES
from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.forms import RELEASED
from dsuf.checkpoint.synthetic import EMBEDDED
from tests.kernels.gpu import Gpu, missing

TINY = Path(__file__).parents[1] / "golden" / "tiny" / "config.json"


def configs() -> dict[str, ModelConfig]:
    """The sizes that kernels are tested at."""
    released = load_config(RELEASED / "config.json")
    return {"tiny": load_config(TINY), "embedded": EMBEDDED, "nano": SIZES, "released": released}


@pytest.fixture(scope="session", params=["tiny", "embedded", "nano", "released"])
def gpu(request: pytest.FixtureRequest) -> Gpu:
    """The kernels at these sizes; skips where none can run."""
    reason = missing()
    if reason:
        pytest.skip(f"kernels not run: {reason}")
    return Gpu(configs()[request.param])


@pytest.fixture
def rng() -> np.random.Generator:
    """The same numbers in every run."""
    return np.random.default_rng(7)
