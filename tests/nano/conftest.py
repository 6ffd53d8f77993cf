"""What the tests of the small model's training share."""

from pathlib import Path

import pytest

from bench.nano.data.package import Package
from bench.nano.data.toy import make_toy_package


@pytest.fixture(scope="session")
def package() -> Package:
    """A small package of training data with the vocabulary of the small model."""
    return make_toy_package(4096)


@pytest.fixture(scope="session")
def toy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package for the toy model, as a file."""
    path = tmp_path_factory.mktemp("package") / "toy.npz"
    make_toy_package().save(path)
    return path
