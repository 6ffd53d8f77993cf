"""The grid of the expert kernels against the tiles that their sources give a block."""

import re

import pytest

from dsuf.cuda.table import KERNELS, MANY_ROWS, expert_split
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


def test_entries_for_many_rows() -> None:
    """Such an entry takes the place of another one, with the same parameters and geometry."""
    stand_ins = {kernel.many: kernel for kernel in KERNELS.values() if kernel.many}
    assert stand_ins
    for entry, kernel in stand_ins.items():
        many = KERNELS[entry]
        assert (many.source, many.params, many.threads, many.grid) == kernel[1:5]
        assert (many.aliases, many.many) == (kernel.aliases, "")
        rows = range(MANY_ROWS - 2, MANY_ROWS + 2)
        assert [kernel.pick_entry({"rows": n}) for n in rows] == [kernel.entry] * 2 + [entry] * 2
        assert {many.pick_entry({"rows": n}) for n in rows} == {entry}
