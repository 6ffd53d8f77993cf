"""gather_engram and gate_engram against the reference's Engram."""

from types import SimpleNamespace

import numpy as np
import pytest

from dsuf.checkpoint.config import ModelConfig
from dsuf.checkpoint.engram import EngramHash
from dsuf.reference.arithmetic import OFFICIAL
from dsuf.reference.engram import Engram
from dsuf.reference.quant import FP8
from dsuf.reference.weights import dequantise_rows
from tests.kernels.gpu import Gpu, assert_bf16, cupy, draw_bf16, draw_e4m3, draw_e8m0, from_bf16


def make_hash(rng: np.random.Generator, config: ModelConfig) -> EngramHash:
    """A hash of these shapes into small tables, with multipliers as large as they can be."""
    shifts = config.engram_max_ngram_size
    multipliers = rng.integers(2**62 // 200_000, 2**62 // 100_000, (1, shifts)) * 2 + 1
    primes = rng.integers(90, 200, (1, shifts - 1, config.engram_n_heads))
    return EngramHash(np.arange(100_000), 0, multipliers, primes)


@pytest.mark.parametrize(("rows", "live"), [(0, 0), (1, 1), (9, 7)])
@pytest.mark.parametrize("pinned", [False, True])
def test_gather(gpu: Gpu, rng: np.random.Generator, rows: int, live: int, pinned: bool) -> None:
    """The rows that the hash names, quantised to the bit, from the card or from pinned host memory."""
    width, maker = gpu.sizes.engram_width, make_hash(rng, gpu.config)
    history = rng.integers(0, 50_000, (rows, maker.shifts))
    stored = int(maker.primes.sum())
    table, scale = draw_e4m3(rng, stored, gpu.sizes.engram_dim), draw_e8m0(rng, stored, gpu.sizes.engram_dim // 32)
    found = gpu.run(
        "gather_engram", {"codes": ("u8", (rows, width)), "scales": ("u8", (rows, width // 32))}, history=history,
        multipliers=maker.multipliers[0], primes=maker.primes[0], offsets=maker.offsets[0],
        table=pin(table) if pinned else table, table_scale=scale, live=live, rows=rows,
    )  # fmt: skip
    named = maker.rows(0, history[:live])
    expected = FP8.pack(dequantise_rows(table[named], scale[named]).reshape(live, width))
    np.testing.assert_array_equal(np.concatenate([found["codes"], found["scales"]], axis=1)[:live], expected)
    assert not found["codes"][live:].any()
    assert not found["scales"][live:].any()


def pin(array: np.ndarray) -> object:
    """A copy of `array` in pinned host memory, described as a device array."""
    memory = cupy.cuda.alloc_pinned_memory(array.nbytes)
    np.frombuffer(memory, array.dtype, array.size)[:] = array.ravel()
    described = {"shape": array.shape, "typestr": "|u1", "data": (memory.ptr, False), "version": 3}
    return SimpleNamespace(__cuda_array_interface__=described, memory=memory)


@pytest.mark.parametrize(("rows", "live"), [(0, 0), (1, 1), (9, 7)])
@pytest.mark.parametrize("in_place", [False, True])
def test_gate(gpu: Gpu, rng: np.random.Generator, rows: int, live: int, in_place: bool) -> None:
    """Matches of both signs, one of zero."""
    s, dim = gpu.sizes.streams, gpu.sizes.dim
    streams, projected = draw_bf16(rng, rows, s, dim, scale=5), draw_bf16(rng, rows, s + 1, dim)
    projected[:1, 0] = 0
    q, k = draw_bf16(rng, s, dim), draw_bf16(rng, s, dim)
    values = {"projected": projected, "q_weight": q, "k_weight": k, "live": live, "rows": rows}
    if in_place:
        found = gpu.run_in_place("gate_engram", "streams", "out", streams, **values)
    else:
        found = gpu.run("gate_engram", {"out": ("bf16", (rows, s, dim))}, streams=streams, **values)["out"]
    engram = object.__new__(Engram)
    engram.config, engram.match_weight = gpu.config, from_bf16(q) * from_bf16(k)
    x, keys, value = from_bf16(streams), from_bf16(projected[:, :-1]), from_bf16(projected[:, -1:])
    expected = OFFICIAL.act(x + engram._gate(x, keys) * value)
    assert_bf16(found[:live], expected[:live], share=0.002)
    assert not found[live:].any()
