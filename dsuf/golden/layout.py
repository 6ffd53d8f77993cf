"""Which tensors a case file has, of what kind and shape: `layout.txt`, read and applied.

A file that passes can be computed with: no id, expert or entry in it is out of range.
"""

import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from dsuf.checkpoint.config import ModelConfig
from dsuf.checkpoint.header import show
from dsuf.errors import CheckpointError
from dsuf.golden.measure import Array
from dsuf.reference.arithmetic import ArithmeticName

Tensors = Mapping[str, Array]
Sizes = dict[str, int]

_STEPS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": lambda a, b: -(-a // b),
}  # fmt: skip


class Line(NamedTuple):
    """A line of the table: a name, possibly with `*` or `#`, its kind and the sizes of its axes."""

    name: str
    kind: str
    axes: tuple[str, ...]
    required: bool
    promised: bool


def _read_table() -> dict[str, list[Line]]:
    """The lines of each section."""
    sections: dict[str, list[Line]] = {}
    lines: list[Line] = []
    for text in Path(__file__).with_name("layout.txt").read_text().splitlines():
        if text.startswith("["):
            lines = []
            sections |= dict.fromkeys(text[1:-1].split(", "), lines)
        elif text and not text.startswith("#"):
            name, kind, *axes = text.split()
            lines.append(Line(name.lstrip("!?"), kind, tuple(axes), name.startswith("!"), not name.startswith("?")))
    return sections


_SECTIONS = _read_table()
_FLAVOURS: tuple[ArithmeticName, ...] = get_args(ArithmeticName)
_INPUT_LAYERS = (0, 2)
"""Layers of a trace that promise the inputs of their attention and their experts."""
CASES = (
    "engram_hash", "primitives", *(f"trace_{flavour}" for flavour in _FLAVOURS),
    "text_full", "text_long", "short", "decode", "greedy", "dspark", "vision",
)  # fmt: skip
"""Names of case files, without their ending."""


def check_case(name: str, tensors: Tensors, config: ModelConfig) -> None:
    """Raise `CheckpointError`, one line, on the first tensor of case `name` that is missing or cannot be used."""
    try:
        if name.startswith("trace_"):
            _check_trace(tensors, config)
        elif name == "primitives":
            _check_primitives(tensors, config)
        elif name in _SECTIONS:
            _check_section(name, tensors, _config_sizes(config), config)
    except CheckpointError as error:
        raise CheckpointError(f"{name}.safetensors: {error}") from error


def missing_tensors(name: str, tensors: Collection[str], config: ModelConfig) -> list[str]:
    """What the format promises of a file of case `name`, and `tensors` does not have: names, or groups of primitives.

    A flavour of which the file has nothing is not promised.
    """
    if name == "primitives":
        return [group for group, there in (*primitive_groups(iter(tensors)).items(), _pictures(tensors)) if not there]
    if name.startswith("trace_"):
        sections = [("trace", ""), *_trace_sections(config)]
    else:
        sections = [(name, "")] if name in _SECTIONS else []
    endings = {tensor.rsplit(".", 1)[-1] for tensor in tensors}
    flavours = [flavour for flavour in _FLAVOURS if flavour in endings]
    lines = [
        (line, prefix) for section, prefix in sections for line in _SECTIONS[section] if _is_promised(line, config)
    ]
    promised = [prefix + spelt for line, prefix in lines for spelt in _spell_out(line.name, config, flavours)]
    return [tensor for tensor in promised if tensor not in tensors]


def _is_promised(line: Line, config: ModelConfig) -> bool:
    """Whether a file has what `line` names; without a draft head there is no input of one."""
    return line.promised and (config.n_mtp_layers > 0 or "M" not in line.axes)


def _pictures(tensors: Collection[str]) -> tuple[str, bool]:
    """The group of primitives that has no section, since it is not compared yet."""
    return "vision_rope", any(name.startswith("vision_rope.") for name in tensors)


def primitive_groups(names: Iterator[str]) -> dict[str, bool]:
    """Each group of primitives, and whether `names` has any of it."""
    there = {name.split(".")[0] for name in names}
    groups = [section.split()[1] for section in _SECTIONS if section.startswith("primitives")]
    return {group: group in there for group in groups}


def _config_sizes(c: ModelConfig) -> Sizes:
    hashes = (c.engram_max_ngram_size - 1) * c.engram_n_heads
    return {
        "V": c.vocab_size, "D": c.dim, "S": c.hc_mult, "M": len(c.dspark_target_layer_ids) * c.dim,
        "E": c.n_routed_experts, "K": c.n_activated_experts, "H": c.head_dim, "I": c.index_head_dim,
        "B": c.dspark_block_size, "L": len(c.engram_layer_ids), "N": c.engram_max_ngram_size, "G": hashes,
    }  # fmt: skip


def _check_trace(tensors: Tensors, c: ModelConfig) -> None:
    sizes = _config_sizes(c)
    _check_section("trace", tensors, sizes, c)
    for section, prefix in _trace_sections(c):
        entries = sizes["T"] // max(1, c.ratio(int(prefix.split(".")[1])))
        _check_section(section, tensors, sizes | {"C": entries}, c, prefix)


def _trace_sections(c: ModelConfig) -> list[tuple[str, str]]:
    """The sections of a trace that each layer has, and the prefix of their names."""
    found = []
    for layer in range(c.n_layers):
        parts = {
            "layer": True, "inputs": layer in _INPUT_LAYERS, "engram": layer in c.engram_layer_ids,
            "full": c.mode(layer) == "full", "indexed": c.mode(layer) in ("full", "reindex"),
            "candidates": layer == c.candidate_source_layer,
        }  # fmt: skip
        found += [(f"trace {part}", f"layers.{layer}.") for part, has in parts.items() if has]
    return found


def _check_primitives(tensors: Tensors, config: ModelConfig) -> None:
    for group, there in primitive_groups(iter(tensors)).items():
        if there:
            _check_section(f"primitives {group}", tensors, {}, config)


def _check_section(section: str, tensors: Tensors, sizes: Sizes, config: ModelConfig, prefix: str = "") -> None:
    """Check every line of `section`; `sizes` learns the letters that it did not know."""
    for line in _SECTIONS[section]:
        names = [prefix + name for name in _spell_out(line.name, config, _FLAVOURS)]
        if line.required and names[0] not in tensors:
            raise CheckpointError(f"missing tensor {names[0]}")
        for name in (name for name in names if name in tensors):
            fault = _find_fault(line, tensors[name], sizes)
            if fault:
                raise CheckpointError(f"tensor {show(name)}: {fault}")


def _spell_out(name: str, config: ModelConfig, flavours: Collection[str]) -> list[str]:
    """The names that a line stands for, in `flavours`."""
    stages = [name.replace("#", str(stage)) for stage in range(config.n_mtp_layers)] if "#" in name else [name]
    return [stage.replace("*", flavour) for stage in stages for flavour in flavours] if "*" in name else stages


def _find_fault(line: Line, tensor: Array, sizes: Sizes) -> str:
    """What is wrong with `tensor`, in words, or nothing."""
    if len(line.axes) != tensor.ndim:
        return f"shape {list(tensor.shape)}, expected {len(line.axes)} axes"
    shape = [_measure(axis, size, sizes) for axis, size in zip(line.axes, tensor.shape, strict=True)]
    if list(tensor.shape) != shape:
        return f"shape {list(tensor.shape)}, expected {shape}"
    return _find_kind_fault(line.kind, tensor, sizes)


def _measure(axis: str, found: int, sizes: Sizes) -> int:
    """The size that `axis` must have; a letter that is new takes the size that was `found`."""
    first, *steps = re.findall(r"\w+|[-+*/]", axis)
    if first not in sizes and not first.isdigit():
        if steps:
            return -1
        sizes[first] = max(1, found)
    size = int(first) if first.isdigit() else sizes[first]
    for step, operand in zip(steps[::2], steps[1::2], strict=True):
        size = _STEPS[step](size, int(operand) if operand.isdigit() else sizes[operand])
    return size


def _find_kind_fault(kind: str, tensor: Array, sizes: Sizes) -> str:
    """Where the elements of `tensor` are not of `kind`, or out of its range."""
    real = np.dtype(tensor.dtype).kind not in "iub"
    if kind == "byte":
        return "" if tensor.dtype.itemsize == 1 else f"dtype {tensor.dtype}, expected one byte an element"
    if (kind == "real") != real:
        return f"dtype {tensor.dtype}, expected {'a float' if kind == 'real' else 'an integer'}"
    limits = {"id": (0, "V"), "expert": (0, "E"), "slot": (-1, "C"), "length": (1, "T")}
    if kind not in limits:
        return ""
    lowest, letter = limits[kind]
    highest = sizes[letter] - (kind != "length")
    if kind == "length":
        sizes["P"] = int(tensor.ravel()[-1])
    if tensor.size and not (lowest <= tensor.min() and tensor.max() <= highest):
        return f"values from {tensor.min()} to {tensor.max()}, expected {lowest} to {highest}"
    return ""
