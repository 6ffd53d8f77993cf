"""The parameter structs in Python against what the compiler makes of the header."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dsuf.cuda import contract
from dsuf.cuda.contract import Params
from dsuf.cuda.table import KERNELS
from dsuf.cuda.toolchain import FOLDER
from dsuf.errors import CommandError

STRUCTS = {value.name: value for value in vars(contract).values() if isinstance(value, Params)}
PAIRED = Params("Paired", hidden="*bf16 rows 2 inter", inner="*bf16 rows inter", live="*i32 1", rows="i32")
HEADER = (FOLDER / "include" / "contract.h").read_text()


class Described:
    """A device array that exists on paper."""

    def __init__(
        self, shape: tuple[int, ...], typestr: str = "<u2", address: int = 4096, strides: object = None
    ) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "strides": strides,
        }


def test_same_structs() -> None:
    """Header and Python name the same structs, and each belongs to a kernel."""
    assert set(re.findall(r"^struct (\w+) \{", HEADER, re.MULTILINE)) == set(STRUCTS)
    assert {kernel.params.name for kernel in KERNELS.values()} == set(STRUCTS)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on PATH: struct layouts not compared")
def test_same_layout(tmp_path: Path) -> None:
    """Sizes and offsets as compiled."""
    lines = []
    for name, params in STRUCTS.items():
        parts = [f'"{field}": " << offsetof(dsuf::{name}, {field}) << "' for field in params.offsets()]
        body = ", ".join(part.replace('"', r"\"", 2) for part in parts)
        lines.append(rf'std::cout << "{{\"name\": \"{name}\", \"size\": " << sizeof(dsuf::{name}) << ", {body}}}\n";')
    source = (
        '#include <cstddef>\n#include <iostream>\n#include "contract.h"\nint main() {\n' + "\n".join(lines) + "\n}\n"
    )
    (tmp_path / "layout.cpp").write_text(source)
    command = [
        "g++",
        "-std=c++17",
        "-Wno-invalid-offsetof",
        "-I",
        str(FOLDER / "include"),
        "layout.cpp",
        "-o",
        "layout",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    printed = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True, timeout=60).stdout
    compiled = {row.pop("name"): row for row in map(json.loads, printed.splitlines())}
    stated = {name: {"size": _size(params), **params.offsets()} for name, params in STRUCTS.items()}
    assert compiled == stated


def test_same_fields() -> None:
    """Field for field, with the same element types: a layout alone would not see two pointers swapped."""
    kinds = {"uint16_t": "bf16", "uint8_t": "u8", "float": "f32", "double": "f64", "int32_t": "i32", "int64_t": "i64"}
    for name, params in STRUCTS.items():
        body = HEADER.partition(f"struct {name} {{")[2].partition("};")[0]
        found = re.findall(r"^\s+(?:const )?(\w+)(\*?) (\w+);", body, re.MULTILINE)
        assert [(kinds[kind], bool(star), field) for kind, star, field in found] == [
            (field.kind, field.shape is not None, field.name) for field in params.fields
        ]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"hidden": Described((2, 99))}, "hidden: 256 elements are needed, the array has 198"),
        ({"hidden": Described((2, 128), "<f4")}, "hidden: elements of bf16 are needed, not <f4"),
        ({"hidden": Described((2, 128), strides=(4, 2))}, "hidden: the array has gaps"),
        ({"hidden": Described((2, 128), address=4098)}, "hidden: the array is not aligned to 16 bytes"),
        ({"hidden": None}, "hidden: an array is needed"),
        ({"rows": Described((1,))}, "rows: a number is needed"),
        ({"colour": 3}, "missing or unknown: colour"),
    ],
)
def test_wrong_arguments(change: dict[str, object], fault: str) -> None:
    """What cannot be passed is refused in one line, before anything is launched."""
    good = {"hidden": Described((2, 128)), "inner": Described((2, 64)), "live": Described((1,), "<i4"), "rows": 2}
    assert PAIRED.pack(good, {"inter": 64}).rows == 2
    with pytest.raises(CommandError, match=re.escape(fault)):
        PAIRED.pack(good | change, {"inter": 64})


def test_packed_bytes() -> None:
    """Addresses and numbers stand where the header has them."""
    values = {
        "hidden": Described((1, 2)),
        "inner": Described((1, 1), address=64),
        "live": Described((1,), "<i4"),
        "rows": 1,
    }
    packed = np.frombuffer(bytes(PAIRED.pack(values, {"inter": 1})), np.uint64)
    assert packed.tolist()[:3] == [4096, 64, 4096]


def _size(params: Params) -> int:
    return len(bytes(params.ctype()))


def test_readme_figures_stand_in_the_results() -> None:
    """The times in the readme are those of the result file."""
    rows = json.loads((FOLDER.parent / "bench" / "results" / "kernels.json").read_text())["rows"]
    measured = {(row["kernel"], row["what"], f"{row['median_us']:.1f}", f"{row['floor_us']:.1f}") for row in rows}
    told = re.findall(
        r"^\| ([a-z]\w*) \| (.*) \| ([\d.]+) \| ([\d.]+) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    assert len(told) > 8
    assert set(told) <= measured


def test_readme_sums_stand_in_the_results() -> None:
    """Those of two GPUs, of NCCL on two, and of one."""
    rows = json.loads((FOLDER.parent / "bench" / "results" / "peers.json").read_text())["rows"]
    by = {(row["by"], row["gpus"], str(row["rows"])): f"{row['median_us']:.2f}" for row in rows}
    told = re.findall(
        r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    assert len(told) == 4
    for count, *figures in told:
        ways = [("announce and reduce", 2), ("NCCL", 2), ("announce and reduce", 1)]
        assert figures == [by[*way, count] for way in ways]
