"""Reading safetensors: views without a copy, and nothing but `CheckpointError` for whatever a file may hold."""

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from dsuf.checkpoint.header import DTYPES, read_header
from dsuf.checkpoint.shards import Checkpoint, read_index, read_safetensors
from dsuf.errors import CheckpointError
from tests.checkpoint import damage

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


def write(path: Path, header: object, data: bytes = b"") -> Path:
    path.write_bytes(damage.join(header, data))
    return path


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 3), np.uint8),
        "c": np.array([-1, 2], np.int32),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    read = read_safetensors(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, values in tensors.items():
        assert read[name].dtype == values.dtype and read[name].shape == values.shape
        assert np.array_equal(read[name], values)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_a_view_of_its_bytes(tmp_path: Path, name: str) -> None:
    dtype = DTYPES[name]
    data = bytes(range(1, 1 + 4 * dtype.itemsize)) if name != "BOOL" else b"\0\1\1\0"
    header = {"x": {"dtype": name, "shape": [2, 2], "data_offsets": [0, len(data)]}}
    view = read_safetensors(write(tmp_path / "x.safetensors", header, data))["x"]
    assert (view.dtype, view.shape, view.tobytes()) == (dtype, (2, 2), data)
    assert not view.flags.owndata and not view.flags.writeable


def test_known_values_of_the_narrow_floats(tmp_path: Path) -> None:
    header = {
        "e4m3": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [0, 3]},
        "e8m0": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [3, 5]},
        "bf16": {"dtype": "BF16", "shape": [1], "data_offsets": [5, 7]},
    }
    read = read_safetensors(write(tmp_path / "x.safetensors", header, b"\x7e\x38\xc0\x7f\x80\x80\x3f"))
    assert read["e4m3"].astype(np.float32).tolist() == [448.0, 1.0, -2.0]
    assert read["e8m0"].astype(np.float32).tolist() == [1.0, 2.0]
    assert read["bf16"].dtype == ml_dtypes.bfloat16 and float(read["bf16"][0]) == 1.0


def test_views_outlive_the_checkpoint(small: Path) -> None:
    with Checkpoint.open(small) as checkpoint:
        view = checkpoint.tensor("embed.weight")
        names = set(checkpoint.names())
        assert "head.weight" in checkpoint and "no.such" not in checkpoint
    assert "head.weight" in names
    assert view.astype(np.float32).std() > 0
    with pytest.raises(CheckpointError, match=r"no tensor embed\.weight"):
        checkpoint.tensor("embed.weight")


def test_single_file_without_index(small: Path, tmp_path: Path) -> None:
    parts = [damage.split(small / shard) for shard in (FIRST, SECOND)]
    shift = len(parts[0][1])
    for entry in parts[1][0].values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [offset + shift for offset in entry["data_offsets"]]
    write(tmp_path / "model.safetensors", parts[0][0] | parts[1][0], parts[0][1] + parts[1][1])
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())
    with Checkpoint.open(tmp_path) as one, Checkpoint.open(small) as two:
        assert set(one.names()) == set(two.names())
        for name in one.names():
            assert one.tensor(name).tobytes() == two.tensor(name).tobytes()


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"x": ENTRY}, b"1234567", "truncated: 1 bytes are missing at the end, of tensor x"),
        ({"x": ENTRY}, b"123456789", "trailing bytes: 1 bytes"),
        ({"x": ENTRY | {"dtype": "F31"}}, b"12345678", "tensor x: unknown dtype F31"),
        ({"x": ENTRY | {"shape": [3]}}, b"12345678", r"tensor x: its offsets span 8 bytes, F32 \[3\] takes 12"),
        ({"x": ENTRY | {"shape": [-2]}}, b"12345678", "tensor x: corrupt header"),
        ({"x": ENTRY | {"shape": [2.5]}}, b"12345678", "tensor x: corrupt header"),
        ({"x": ENTRY | {"shape": [1 << 40, 1 << 40]}}, b"12345678", "tensor x: the shape is too large"),
        ({"x": ENTRY | {"shape": [0, 1 << 63]}}, b"12345678", "tensor x: "),
        ({"x": ENTRY | {"shape": [1] * 70}}, b"12345678", "tensor x: the shape is too large"),
        ({"x": ENTRY | {"data_offsets": [8, 0]}}, b"12345678", "tensor x: its offsets span -8"),
        ({"x": ENTRY | {"data_offsets": [0, 8, 9]}}, b"12345678", "tensor x: corrupt header"),
        ({"x": ENTRY | {"surprise": 1}}, b"12345678", "tensor x: corrupt header"),
        ({"x": 5}, b"", "tensor x: corrupt header"),
        ({"x": ENTRY, "y": ENTRY}, b"12345678", "tensor y: overlapping offsets: shares 8 bytes with x"),
        ({"x": ENTRY | {"data_offsets": [4, 12]}}, b"123456789012", "tensor x: gap: 4 bytes"),
        ({"__metadata__": {"a": 1}, "x": ENTRY}, b"12345678", "corrupt header"),
        ({"a\nb": ENTRY}, b"1234567", r"of tensor 'a\\nb'"),
        ([1], b"", "corrupt header"),
    ],
)
def test_damaged_header_is_one_line_with_file_and_tensor(
    tmp_path: Path, header: object, data: bytes, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_safetensors(write(tmp_path / "x.safetensors", header, data))
    assert str(caught.value).startswith("x.safetensors: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"\1", b"\0" * 8, b"\xff" * 8, b"\2" + b"\0" * 7 + b"{", b"\2" + b"\0" * 7 + b"\xff\xfe"]
)
def test_file_without_a_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^x: "):
        read_header(tmp_path / "x")


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("absent", ".", "pipe"):
        with pytest.raises(CheckpointError):
            read_header(tmp_path / name)


def test_deep_nesting_is_no_crash(tmp_path: Path) -> None:
    text = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError):
        read_safetensors(tmp_path / "x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
OFFSETS = st.lists(st.integers(-4, 40) | st.integers(), min_size=1, max_size=3)
ENTRIES = st.fixed_dictionaries({
    "dtype": st.sampled_from([*DTYPES, "F31"]) | JSON,
    "shape": st.lists(st.integers(0, 4), max_size=3) | JSON,
    "data_offsets": OFFSETS | JSON,
})  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.text(max_size=5) | st.just("__metadata__"), ENTRIES | JSON, max_size=4),
       data=st.binary(max_size=40))  # fmt: skip
def test_any_json_header_reads_or_raises_checkpoint_error(tmp_path: Path, header: object, data: bytes) -> None:
    path = tmp_path / "x"
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    read_or_refuse(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10_000), patch=st.binary(min_size=1, max_size=12), cut=st.none() | st.integers(0, 2000))
def test_any_patched_or_cut_file_reads_or_raises_checkpoint_error(
    tmp_path: Path, golden: Path, place: int, patch: bytes, cut: int | None
) -> None:
    content = bytearray((golden / "cases/engram_hash.safetensors").read_bytes()[:9000])
    content[place % 1000 : place % 1000 + len(patch)] = patch
    path = tmp_path / "x"
    path.write_bytes(content[:cut])
    read_or_refuse(path)


def read_or_refuse(path: Path) -> None:
    """Read all of `path`; only one error may come out, in one line."""
    try:
        for values in read_safetensors(path).values():
            values.tobytes()
    except CheckpointError as error:
        assert str(error).isprintable()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"weight_map": 1}',
        b'{"weight_map": {"a": "../x.safetensors"}}',
        b'{"weight_map": {"a": "x"}}',
        b"\xff",
    ],
)
def test_damaged_index(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^model\.safetensors\.index\.json: "):
        read_index(path)


def test_open_refuses_each_kind_of_difference(copy: Path) -> None:
    sound = (copy / FIRST).read_bytes()

    def refusal() -> str:
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(copy)
        (copy / FIRST).write_bytes(sound)
        return str(caught.value)

    damage.edit_header(copy / FIRST, lambda header: header["embed.weight"].update(dtype="F16"))
    assert "tensor embed.weight: wrong dtype: F16, expected BF16" in refusal()
    damage.drop_tensor(copy / FIRST, "embed.weight")
    assert "tensor embed.weight is not in " + FIRST in refusal()
    damage.add_tensor(copy / FIRST, "extra")
    assert f"{FIRST}: tensor extra is not in the index" in refusal()
    (copy / FIRST).unlink()
    assert f"{FIRST}: cannot read" in refusal()
    Checkpoint.open(copy).close()
