"""The small random model of the reference's tests, and cold runs of it."""

from pathlib import Path

import pytest

from dsuf.reference.loader import load_draft
from dsuf.reference.model import Model
from dsuf.reference.speculate import HeadDrafter
from tests.node.conftest import model_dir  # noqa: F401 - a fixture
from tests.reference.conftest import model, small_checkpoint  # noqa: F401 - fixtures
from tests.turns.reference import Oracle


@pytest.fixture(scope="session")
def oracle(small_checkpoint: Path, model: Model) -> Oracle:  # noqa: F811
    """Cold runs, remembered from test to test."""
    return Oracle(model, HeadDrafter(load_draft(small_checkpoint, model)))
