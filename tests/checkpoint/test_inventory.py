"""The table of expected tensors, against the published totals."""

from pathlib import Path

import pytest

from dsuf.checkpoint.config import load_config
from dsuf.checkpoint.header import Entry, read_header
from dsuf.checkpoint.inventory import PARTS, content_faults, expected_tensors, tally

RELEASED_TOTALS = {
    "BF16": (520, 3_952_883_712),
    "F32": (387, 169_229_128),
    "F8_E4M3": (357, 204_015_223_296),
    "F8_E8M0": (47_589, 23_563_015_184),
    "I8": (47_232, 278_585_671_680),
}


@pytest.mark.parametrize("form", ["config.json", "inference_config.json"])
def test_released_totals(released: Path, form: str) -> None:
    table = tally(expected_tensors(load_config(released / form)))
    totals = dict.fromkeys(RELEASED_TOTALS, (0, 0))
    for (part, dtype), entry in table.items():
        assert part in PARTS
        count, size = totals[dtype]
        totals[dtype] = (count + entry.tensors, size + entry.bytes)
    assert totals == RELEASED_TOTALS
    assert sum(count for count, _ in totals.values()) == 96_085
    assert sum(size for _, size in totals.values()) == 510_286_023_000
    assert (table["vision", "BF16"].tensors, table["vision", "BF16"].bytes) == (266, 970_536_960)


def test_released_layer_sizes(released: Path) -> None:
    """Bytes of single layers, as published: plain ones, owners of compressed KV and of an index, an Engram layer."""
    specs = list(expected_tensors(load_config(released / "config.json")))

    def dense_bytes(layer: int) -> int:
        return sum(s.bytes for s in specs if s.name.startswith(f"layers.{layer}.")
                   and s.part not in ("routed experts", "engram tables"))  # fmt: skip

    assert dense_bytes(0) == dense_bytes(3) == 170_055_128
    extra = {2: 16_193_792, 8: 16_193_792, 20: 10_950_912, 24: 5_575_680, 1: 157_521_920}
    assert {layer: dense_bytes(layer) - dense_bytes(0) for layer in extra} == extra
    assert sum(s.bytes for s in specs if s.name.startswith("layers.5.ffn.experts.")) == 7_219_445_760
    assert sum(s.bytes for s in specs if s.part == "engram tables") == 202_758_032_400


def test_names_are_unique(released: Path) -> None:
    names = [spec.name for spec in expected_tensors(load_config(released / "config.json"))]
    assert len(set(names)) == len(names)


def test_golden_checkpoint_has_just_these_tensors(whole_golden: Path) -> None:
    folder = whole_golden / "tiny"
    stored = {name: (path.name, entry) for path in folder.glob("*.safetensors")
              for name, entry in read_header(path).entries.items()}  # fmt: skip
    config = load_config(folder / "config.json")
    assert list(content_faults(config, stored)) == []
    assert len(stored) == len(list(expected_tensors(config)))


def test_vision_norm_may_be_unrounded_and_a_weight_may_not(golden: Path) -> None:
    config = load_config(golden / "tiny/config.json")
    stored = {spec.name: ("a", Entry(spec.dtype, spec.shape, 0, spec.bytes)) for spec in expected_tensors(config)}
    for name in ("vision.blocks.0.norm1.weight", "embed.weight"):
        stored[name] = ("a", Entry("F32", stored[name][1].shape, 0, 0))
    assert list(content_faults(config, stored)) == ["a: tensor embed.weight: wrong dtype: F32, expected BF16"]
