"""The grid of the expert kernels against the tiles that their source gives a block."""

import re

import pytest

from dsuf.cuda.table import KERNELS, expert_tiles
from dsuf.cuda.toolchain import FOLDER

RULE = re.search(r"constexpr int kSplitOf =([^;]+);", (FOLDER / "include" / "experts.cuh").read_text())


@pytest.mark.parametrize("width", [32, 64, 128, 256, 288, 480, 512, 576, 1024, 1152, 2016, 2048, 2304, 5120])
def test_tiles_of_a_block(width: int) -> None:
    """Eight warps, as many to a tile as the header says."""
    assert RULE is not None
    steps = re.findall(r"kWidth >= (\d+) \? (\d)", RULE[1])
    assert len(steps) == 3
    split = next((int(warps) for least, warps in steps if width >= int(least)), 1)
    assert expert_tiles(width) == 8 // split


@pytest.mark.parametrize(
    ("dim", "inter"), [(128, 128), (256, 128), (5120, 2304), (5120, 288), (5120, 576), (5120, 1152)]
)
def test_grids_cover_all_outputs(dim: int, inter: int) -> None:
    """No output is left out, and no block has none."""
    names = {"dim": dim, "inter": inter, "slots": 3}
    for entry, outputs, width in (("experts_up", inter, dim), ("experts_down", dim, inter)):
        columns, rows = KERNELS[entry].grid(names)
        each = 16 * expert_tiles(width)
        assert rows == 3
        assert (columns - 1) * each < outputs <= columns * each
