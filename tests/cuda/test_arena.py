"""Regions add up, the budget refuses with its numbers, every tensor has one place of its own."""

from pathlib import Path

import numpy as np
import pytest

from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.forms import RELEASED
from dsuf.checkpoint.inventory import expected_tensors
from dsuf.checkpoint.synthetic import EMBEDDED
from dsuf.cuda.arena import ALIGNMENT_BYTES, Array, Region, add_up, check_budget
from dsuf.cuda.constants import rope_frequencies
from dsuf.cuda.machine import Setup, count_pages, plan_regions, plan_sizes
from dsuf.cuda.weights import plan_weights
from dsuf.errors import CommandError
from dsuf.reference.rope import Rope

TINY = load_config(Path(__file__).parents[1] / "golden" / "tiny" / "config.json")
CONFIGS = {"tiny": TINY, "embedded": EMBEDDED, "released": load_config(RELEASED / "config.json")}


def test_parts_add_up() -> None:
    """Each part has its regions' bytes, rounded up to the alignment; pinned ones are counted apart."""
    regions = [
        Region("a", "bf16", (3, 5), "weights"),
        Region("b", "f32", (100,), "weights"),
        Region("c", "i64", (1,), "pages", pinned=True),
    ]
    assert add_up(regions) == {"weights": ALIGNMENT_BYTES + 2 * ALIGNMENT_BYTES}
    assert add_up(regions, pinned=True) == {"pages": ALIGNMENT_BYTES}


def test_budget_is_refused_with_numbers() -> None:
    """One byte too few is too few, and the line says how much of what is needed."""
    regions = [Region("a", "u8", (2_000_000_000,), "weights"), Region("b", "u8", (512,), "pages")]
    total = sum(region.reserved_bytes for region in regions)
    check_budget(regions, total)
    with pytest.raises(CommandError, match=r"2\.000 GB are needed \(weights 2\.000 GB, pages 0\.000 GB\)"):
        check_budget(regions, total - 1)


def test_array_views() -> None:
    """Rows and elements of an array are where NumPy has them."""
    array, twin = Array(1000, "f32", (4, 3, 2)), np.zeros((4, 3, 2), np.float32)
    assert array[2].pointer - 1000 == twin[2].ctypes.data - twin.ctypes.data
    assert array[2].shape == (3, 2)
    part = array.rows(1, 3)
    assert part.pointer - 1000 == twin[1:].ctypes.data - twin.ctypes.data
    assert part.shape == (2, 3, 2) and part.bytes == twin[1:3].nbytes


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("draft", [True, False])
def test_every_tensor_has_a_place(name: str, draft: bool) -> None:
    """All that the text path reads is placed, inside its region, and nothing overlaps; regions are filled whole."""
    config = CONFIGS[name]
    regions, placements = plan_weights(config, draft=draft, engram_on_host=True)
    specs = {spec.name: spec for spec in expected_tensors(config)}
    left_out = specs.keys() - {placement.tensor for placement in placements}
    assert all(
        specs[spec].part == "vision" or spec.endswith("gate.bias_vl") or (specs[spec].part == "draft" and not draft)
        for spec in left_out
    )
    covered = {region.name: 0 for region in regions}
    for placement in sorted(placements, key=lambda p: (p.region, p.offset_bytes)):
        assert placement.offset_bytes == covered[placement.region]
        covered[placement.region] += specs[placement.tensor].bytes
    assert covered == {region.name: region.bytes for region in regions}
    assert {region.name for region in regions if region.pinned} == {
        region.name for region in regions if region.part == "Engram tables"
    }


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("compressed", [False, True])
def test_frequencies(name: str, compressed: bool) -> None:
    """The rotary frequencies are the reference's to the bit."""
    own, theirs = rope_frequencies(CONFIGS[name], compressed=compressed), Rope(CONFIGS[name], compressed=compressed)
    np.testing.assert_array_equal(own, theirs.frequencies)


def page_bytes(config: ModelConfig, setup: Setup, pages: int) -> int:
    """What a budget must be for this many pages."""
    return sum(region.reserved_bytes for region in plan_regions(config, setup, pages) if not region.pinned)


def test_pages_fill_the_budget() -> None:
    """As many pages as fit, never more; one context at least, or a refusal; no more than the turns can use."""
    setup = Setup(context_tokens=2000, max_turns=3, engram_on_host=True)
    one = -(-setup.reach_of(TINY) // 128)
    assert count_pages(TINY, setup, page_bytes(TINY, setup, 1000)) == 3 * one
    some = count_pages(TINY, setup, page_bytes(TINY, setup, one + 9))
    assert one <= some <= one + 9
    assert page_bytes(TINY, setup, some) <= page_bytes(TINY, setup, one + 9)
    with pytest.raises(CommandError, match="the budget is"):
        count_pages(TINY, setup, page_bytes(TINY, setup, one) - 1)
    sizes = plan_sizes(TINY, setup, some)
    pages = [region for region in sizes.plan() if region.part == "pages"]
    assert sum(region.bytes for region in pages) == some * sizes.page_bytes


def test_most_turns() -> None:
    """More turns than a step's kernels can hold are refused at once."""
    with pytest.raises(CommandError, match="at most 1024"):
        count_pages(TINY, Setup(context_tokens=100, max_turns=1025), 1 << 40)
