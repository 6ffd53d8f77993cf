"""The grid of the expert kernels against the tiles that their sources give a block."""

import re

import pytest

from dsuf.cuda.table import KERNELS, expert_split
from dsuf.cuda.toolchain import FOLDER

RULE = re.search(r"constexpr int kSplitOf =([^;]+);", (FOLDER / "include" / "experts.cuh").read_text())
EACH = re.search(r"kEach = kSplit == 1 \? (\d) : 1;", (FOLDER / "any" / "experts_down.cu").read_text())


@pytest.mark.parametrize("width", [32, 128, 256, 288, 480, 576, 640, 672, 1152, 1280, 1312, 2304, 2560, 2592, 5120])
def test_warps_that_share(width: int) -> None:
    """As many as the header says."""
    assert RULE is not None
    steps = re.findall(r"kWidth > (\d+) \? (\d)", RULE[1])
    assert len(steps) == 3
    assert expert_split(width) == next((int(warps) for most, warps in steps if width > int(most)), 1)


@pytest.mark.parametrize(
    ("dim", "inter"), [(128, 128), (256, 128), (5120, 2304), (5120, 288), (5120, 576), (5120, 1152)]
)
def test_grids_cover_all_outputs(dim: int, inter: int) -> None:
    """No output is left out, and no block has none."""
    assert EACH is not None
    names = {"dim": dim, "inter": inter, "slots": 3, "rows": 33}
    for entry, outputs, tile, width in (("experts_up", inter, 8, dim), ("experts_down", dim, 16, inter)):
        columns, rows = KERNELS[entry].grid(names)
        split = expert_split(width)
        each = tile * (8 // split) * (int(EACH[1]) if entry == "experts_down" and split == 1 else 1)
        assert rows == 2 + 3
        assert (columns - 1) * each < outputs <= columns * each
