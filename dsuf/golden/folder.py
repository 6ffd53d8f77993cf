"""A golden directory: its configuration, and its case files as tensors by name."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import numpy as np

from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.shards import read_safetensors
from dsuf.errors import CommandError
from dsuf.golden.layout import CASES, check_case
from dsuf.golden.measure import Array
from dsuf.reference.arithmetic import F32, F64, I64, ArithmeticName

FLAVOURS: tuple[ArithmeticName, ...] = ("fp32", "fp32q", "official")
"""The mathematics first, then the quantisers, then the released arithmetic."""


class Case:
    """One case file. It remembers which of its tensors were looked at, so that none is left out unnoticed."""

    def __init__(self, name: str, tensors: Mapping[str, Array]) -> None:
        self.name = name
        self._tensors = tensors
        self._used: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> Array:
        """Tensor `name` as stored."""
        self._used.add(name)
        return self._tensors[name]

    def single(self, name: str) -> F32:
        """Tensor `name` as float32."""
        return self[name].astype(np.float32)

    def double(self, name: str) -> F64:
        """Tensor `name` as float64."""
        return self[name].astype(np.float64)

    def whole(self, name: str) -> I64:
        """Tensor `name` as int64."""
        return self[name].astype(np.int64)

    def number(self, name: str) -> int:
        """The one element of tensor `name`."""
        return int(self[name].ravel()[0])

    def unused(self) -> list[str]:
        """Names of tensors that nobody looked at."""
        return [name for name in self._tensors if name not in self._used]


class Folder:
    """An opened golden directory; every case file in it is well-formed."""

    def __init__(self, root: Path, config: ModelConfig, cases: dict[str, Case], unknown: list[str]) -> None:
        """Use `open`. `unknown` are case files that the format does not have."""
        self.root, self.config, self.cases, self.unknown = root, config, cases, unknown

    @classmethod
    def open(cls, root: Path) -> Self:
        """Map every case file under `root` and check it against the configuration.

        Raises `CommandError` or `CheckpointError`, one line, on the first thing that is missing or wrong.
        """
        if not (root / "cases").is_dir():
            raise CommandError(f"{root} is not a golden directory: it has no folder cases/")
        config = load_config(root / "tiny" / "config.json")
        paths = sorted((root / "cases").glob("*.safetensors"))
        known = [path for path in paths if path.stem in CASES]
        if not known:
            raise CommandError(f"{root / 'cases'} holds no case file that is known here")
        contents = {path.stem: read_safetensors(path) for path in known}
        for name, tensors in contents.items():
            check_case(name, tensors, config)
        cases = {name: Case(name, tensors) for name, tensors in contents.items()}
        return cls(root, config, cases, [path.name for path in paths if path.stem not in CASES])

    @property
    def checkpoint(self) -> Path:
        """The folder of the checkpoint."""
        return self.root / "tiny"

    @property
    def flavours(self) -> list[ArithmeticName]:
        """The flavours that any case has results of."""
        endings = {name.removeprefix("trace_") for name in self.cases}
        endings |= {name.rsplit(".", 1)[-1] for case in self.cases.values() for name in case}
        return [flavour for flavour in FLAVOURS if flavour in endings]
