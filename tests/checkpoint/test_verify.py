"""`dsuf weights plan` and `verify`: one line for each fault, and the exit codes."""

import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsuf.__main__ import main
from dsuf.checkpoint.progress import Progress, describe
from tests.checkpoint import damage

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT = "layers.0.attn.wq_a.weight"


def faults(directory: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[str]:
    """The lines that `verify` prints, without the verdict; checks that exit code and verdict agree with them."""
    code = main(["weights", "verify", str(directory), *more])
    *lines, verdict = capsys.readouterr().out.splitlines()
    assert code == (1 if lines else 0)
    assert verdict.startswith(f"{directory}: ") and ("no fault" in verdict) == (not lines)
    return lines


def edit_index(directory: Path, edit: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((directory / INDEX).read_text())
    edit(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def test_sound_checkpoint(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert faults(small, capsys) == []


def test_golden_checkpoint_is_sound(whole_golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert faults(whole_golden / "tiny", capsys) == []


def missing_shard(copy: Path) -> None:
    (copy / SECOND).unlink()


def missing_tensor(copy: Path) -> None:
    damage.drop_tensor(copy / FIRST, WEIGHT)


def missing_tensor_and_index_entry(copy: Path) -> None:
    damage.drop_tensor(copy / FIRST, WEIGHT)
    edit_index(copy, lambda index: index.pop(WEIGHT))


def unknown_tensor(copy: Path) -> None:
    damage.add_tensor(copy / FIRST, "layers.99.extra")
    edit_index(copy, lambda index: index.update({"layers.99.extra": FIRST}))


def wrong_shape(copy: Path) -> None:
    damage.edit_header(copy / FIRST, lambda header: header[WEIGHT].update(shape=[64, 256]))


def wrong_dtype(copy: Path) -> None:
    damage.edit_header(copy / FIRST, lambda header: header[WEIGHT].update(dtype="I8"))


def truncated_file(copy: Path) -> None:
    (copy / FIRST).write_bytes((copy / FIRST).read_bytes()[:-1])


def truncated_to_header(copy: Path) -> None:
    (copy / FIRST).write_bytes((copy / FIRST).read_bytes()[:100])


def corrupt_header(copy: Path) -> None:
    content = bytearray((copy / FIRST).read_bytes())
    content[8] = 0xFF
    (copy / FIRST).write_bytes(content)


def trailing_bytes(copy: Path) -> None:
    with (copy / FIRST).open("ab") as file:
        file.write(b"xyz")


def overlapping_offsets(copy: Path) -> None:
    def overlap(header: damage.Header) -> None:
        scale = header["layers.0.attn.wq_b.scale"]["data_offsets"]
        header["layers.0.attn.wq_b.scale"]["data_offsets"] = [offset - 4 for offset in scale]

    damage.edit_header(copy / FIRST, overlap)


def wrong_shard(copy: Path) -> None:
    edit_index(copy, lambda index: index.update({WEIGHT: SECOND}))


def absent_shard_in_index(copy: Path) -> None:
    edit_index(copy, lambda index: index.update({WEIGHT: "model-00003-of-00002.safetensors"}))


def not_in_index(copy: Path) -> None:
    edit_index(copy, lambda index: index.pop(WEIGHT))


def stored_twice(copy: Path) -> None:
    damage.add_tensor(copy / SECOND, WEIGHT)


def unknown_shard(copy: Path) -> None:
    (copy / "extra.safetensors").write_bytes(damage.join({}, b""))
    damage.add_tensor(copy / "extra.safetensors", "extra")


def missing_index(copy: Path) -> None:
    (copy / INDEX).unlink()


def corrupt_index(copy: Path) -> None:
    (copy / INDEX).write_text("{")


def missing_config(copy: Path) -> None:
    (copy / "config.json").unlink()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (missing_shard, [f"{SECOND}: missing shard"]),
        (missing_tensor, [f"{FIRST}: tensor {WEIGHT}: missing tensor"]),
        (missing_tensor_and_index_entry, [f"{INDEX}: tensor {WEIGHT}: missing tensor"]),
        (unknown_tensor, [f"{FIRST}: tensor layers.99.extra: unknown tensor"]),
        (wrong_shape, [f"{FIRST}: tensor {WEIGHT}: wrong shape: [64, 256], expected [128, 128]"]),
        (wrong_dtype, [f"{FIRST}: tensor {WEIGHT}: wrong dtype: I8, expected F8_E4M3"]),
        (truncated_file, [f"{FIRST}: truncated: 1 bytes are missing"]),
        (truncated_to_header, [f"{FIRST}: truncated or corrupt header"]),
        (corrupt_header, [f"{FIRST}: corrupt header"]),
        (trailing_bytes, [f"{FIRST}: trailing bytes: 3 bytes"]),
        (overlapping_offsets, [f"{FIRST}: tensor layers.0.attn.wq_b.scale: overlapping offsets", f"{FIRST}: tensor "]),
        (wrong_shard, [f"{INDEX}: tensor {WEIGHT}: wrong shard: the index says {SECOND}, it is in {FIRST}"]),
        (
            absent_shard_in_index,
            [
                f"model-00003-of-00002.safetensors: missing shard: the index puts tensor {WEIGHT} into it",
                f"{INDEX}: tensor {WEIGHT}: wrong shard",
            ],
        ),
        (not_in_index, [f"{FIRST}: tensor {WEIGHT}: not in the index"]),
        (stored_twice, [f"{SECOND}: tensor {WEIGHT}: stored twice"]),
        (unknown_shard, ["extra.safetensors: unknown shard", "extra.safetensors: tensor extra: unknown tensor"]),
        (missing_index, [f"{INDEX}: missing file"]),
        (corrupt_index, [f"{INDEX}: corrupt index"]),
        (missing_config, ["config: cannot read"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_each_fault_has_its_line_and_no_other(
    copy: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None], expected: list[str]
) -> None:
    make(copy)
    lines = faults(copy, capsys)
    assert len(lines) == len(expected), lines
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)


def test_all_faults_are_reported(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing_tensor(copy)
    trailing_bytes(copy)
    (copy / SECOND).write_bytes((copy / SECOND).read_bytes()[:-9])
    edit_index(copy, lambda index: index.pop("norm.weight"))
    assert len(faults(copy, capsys)) == 4


def test_empty_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(faults(tmp_path, capsys)) == 2


def test_digests(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums = tmp_path / "sums"
    good = {
        name: hashlib.sha256((copy / name).read_bytes()).hexdigest()
        for name in (FIRST, SECOND, "inference/config.json")
    }
    sums.write_text("".join(f"{digest} *{name}\n" for name, digest in good.items()))
    assert faults(copy, capsys, "--digests", str(sums)) == []
    content = bytearray((copy / SECOND).read_bytes())
    content[-1] ^= 1
    (copy / SECOND).write_bytes(content)
    sums.write_text(sums.read_text() + f"{'0' * 64}  gone.bin\n")
    lines = faults(copy, capsys, "--digests", str(sums))
    assert [line.split(": ")[:2] for line in lines] == [[SECOND, "digest mismatch"], ["gone.bin", "missing file"]]


@pytest.mark.parametrize("content", ["nonsense", "0" * 64, f"{'0' * 64}  ../outside", f"{'0' * 64}  /etc/passwd"])
def test_unusable_arguments_exit_2_with_one_line(
    small: Path, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sums").write_text(content)
    for argv in (
        ["verify", str(tmp_path / "absent")],
        ["verify", str(tmp_path / "sums")],
        ["verify", str(small), "--digests", str(tmp_path / "sums")],
        ["verify", str(small), "--digests", str(tmp_path / "absent")],
        ["plan", "--config", str(tmp_path / "sums")],
        ["plan", "--config", str(tmp_path / "absent")],
    ):
        assert main(["weights", *argv]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_plan_prints_the_released_totals_in_time_and_memory(released: Path) -> None:
    # Not `ru_maxrss`: after a fork it starts from what the parent, the whole test run, had in use.
    code = ("import os, sys; from dsuf.__main__ import main; main(sys.argv[1:]); "
            "peak = open('/proc/self/status').read().partition('VmHWM:')[2].split()[0]; "
            "print(peak, sum(os.times()[:2]))")  # fmt: skip
    command = [sys.executable, "-c", code, "weights", "plan", "--config", str(released / "config.json")]
    out = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    *table, use = [line.split() for line in out.splitlines()]
    assert table[-1] == ["total", "96,085", "510,286,023,000"]
    assert ["all", "F8_E8M0", "47,589", "23,563,015,184"] in table
    assert ["vision", "BF16", "266", "970,536,960"] in table
    assert int(use[0]) < 300_000 and float(use[1]) < 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere() -> None:
    for stream in (Terminal(), io.StringIO()):
        progress = Progress("headers", 2, stream, "shards")
        progress.advance(1)
        progress.advance(1)
        progress.close()
        assert stream.getvalue().endswith("100% 2 of 2 shards\n")
        assert ("\r" in stream.getvalue()) == stream.isatty()
    assert describe("digests", 5 * 10**8, 10**9, "B", 2.0).endswith(" 50% 0.50 of 1.00 GB, 0.25 GB/s")
