"""Sums within what makes and reads them: announce_experts, announce_fp8_o, sum_expand, sum_expand_collapse; one GPU."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.gpu import Gpu, cupy, draw_bf16, draw_e4m3, draw_e8m0, from_bf16, poisoned, to_bf16
from tests.kernels.test_peers import PATIENCE_US, Ranks, expected_sum

ROWS = [(1, 1), (6, 6), (9, 5), (4, 0), (32, 31)]


class Site:
    """What is expanded, and into what, of one rank; the same for all ranks."""

    def __init__(self, gpu: Gpu, rng: np.random.Generator, rows: int, live: int) -> None:
        s, self.dim, self.gpu, self.rows = gpu.sizes.streams, gpu.sizes.dim, gpu, rows
        self.live = cupy.asarray([live], cupy.int32)
        self.streams = cupy.asarray(draw_bf16(rng, rows, s, self.dim, scale=30))
        mixes = {"post": (rows, s), "comb": (rows, s, s), "pre": (rows, s)}
        self.mixes = {name: cupy.asarray(rng.random(shape, np.float32)) for name, shape in mixes.items()}
        self.weight = cupy.asarray(draw_bf16(rng, self.dim))

    def outputs(self, *, collapsed: bool) -> dict[str, Any]:
        """Poisoned arrays for what comes out, by field."""
        rows, dim = self.rows, self.dim
        out = {"out": poisoned("bf16", self.streams.shape)}
        if not collapsed:
            return out
        out |= {"y": poisoned("bf16", (rows, dim)), "meaning": poisoned("bf16", (rows, dim))}
        return out | {"codes": poisoned("u8", (rows, dim)), "scales": poisoned("u8", (rows, dim // 32))}

    def run(self, entry: str, stream: int = 0, **values: Any) -> dict[str, Any]:
        """Launch an expansion with where its branch comes from; what comes out, still on the device."""
        collapsed = entry.endswith("collapse")
        out = self.outputs(collapsed=collapsed)
        cupy.cuda.get_current_stream().synchronize()  # they are filled on another stream than the launch's
        names = ("post", "comb", "pre") if collapsed else ("post", "comb")
        fields = {name: self.mixes[name] for name in names} | ({"weight": self.weight} if collapsed else {})
        common = {"streams": self.streams, "live": self.live, "rows": self.rows}
        self.gpu.kernels.launch(entry, stream, **common, **fields, **out, **values)
        return out

    def sum(self, entry: str, group: Ranks, rank: int, turn: int = 0, **values: Any) -> dict[str, Any]:
        """The same of the parts of all ranks, as `rank` adds them up."""
        own = group.all[rank]
        met = {"arrived": own.arrived, "epoch": own.epoch, "missing": own.missing, "partials": group.partials[turn]}
        return self.run(entry, **{"patience_us": PATIENCE_US, "ranks": len(group.all)} | met | values)


def on_host(found: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Arrays of the device as NumPy's."""
    return {name: cupy.asnumpy(array) for name, array in found.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("rows", "live"), ROWS)
@pytest.mark.parametrize("entry", ["expand", "expand_collapse"])
def test_same_bits(gpu: Gpu, rng: np.random.Generator, ranks: int, rows: int, live: int, entry: str) -> None:
    """Those of a sum that is written and read again, on every rank, in turn, also where the counters wrap around."""
    site, group = Site(gpu, rng, rows, live), Ranks(gpu, ranks, rows, gpu.sizes.dim, epoch=2**31 - 2)
    for step in range(3):
        parts = draw_bf16(rng, ranks, rows, gpu.sizes.dim, scale=3)
        parts[:, live:] = 0xFFFF
        group.give(step % 2, parts)
        for rank in range(ranks):
            group.announce(rank)
        branch = np.zeros((rows, gpu.sizes.dim), np.uint16)
        branch[:live] = to_bf16(expected_sum(parts))[:live]
        plain = "expand_streams" if entry == "expand" else entry
        expected = on_host(site.run(plain, branch=cupy.asarray(branch)))
        for rank in range(ranks):
            for name, found in on_host(site.sum(f"sum_{entry}", group, rank, step % 2)).items():
                np.testing.assert_array_equal(found, expected[name], name)
    assert not any(int(rank.missing[0]) for rank in group.all)


def test_in_place(gpu: Gpu, rng: np.random.Generator) -> None:
    """Streams that are overwritten."""
    site, group = Site(gpu, rng, 6, 6), Ranks(gpu, 2, 6, gpu.sizes.dim)
    group.give(0, draw_bf16(rng, 2, 6, gpu.sizes.dim))
    for rank in range(2):
        group.announce(rank)
    expected = on_host(site.sum("sum_expand", group, 0))["out"]
    site.outputs = lambda *, collapsed: {"out": site.streams}  # type: ignore[method-assign]
    np.testing.assert_array_equal(on_host(site.sum("sum_expand", group, 1))["out"], expected)


@pytest.mark.parametrize("entry", ["sum_expand", "sum_expand_collapse"])
def test_waits_for_a_slow_rank(gpu: Gpu, rng: np.random.Generator, entry: str) -> None:
    """A rank that is early reads what the other writes later."""
    site, group = Site(gpu, rng, 6, 6), Ranks(gpu, 2, 6, gpu.sizes.dim)
    parts = draw_bf16(rng, 2, 6, gpu.sizes.dim)
    early, late = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    group.all[0].parts[0].set(parts[0])
    cupy.cuda.Device().synchronize()
    group.announce(0, early.ptr)
    found = site.sum(entry, group, 0, stream=early.ptr)
    assert not early.done
    group.all[1].parts[0].set(parts[1], stream=late)
    group.announce(1, late.ptr)
    late.synchronize()
    early.synchronize()
    branch = cupy.asarray(to_bf16(expected_sum(parts)))
    plain = {"sum_expand": "expand_streams", "sum_expand_collapse": "expand_collapse"}[entry]
    expected = on_host(site.run(plain, branch=branch))
    for name, array in on_host(found).items():
        np.testing.assert_array_equal(array, expected[name], name)


@pytest.mark.parametrize("entry", ["sum_expand", "sum_expand_collapse"])
def test_gives_up(gpu: Gpu, rng: np.random.Generator, entry: str) -> None:
    """A rank that never comes is named, no number looks like a sum, and nobody hangs."""
    site, group = Site(gpu, rng, 3, 2), Ranks(gpu, 3, 3, gpu.sizes.dim)
    group.give(0, draw_bf16(rng, 3, 3, gpu.sizes.dim))
    group.announce(0)
    group.announce(2)
    found = on_host(site.sum(entry, group, 0, patience_us=300))
    assert int(group.all[0].missing[0]) == 2
    assert np.isnan(from_bf16(found["out"][:2])).all() and not found["out"][2:].any()
    if "y" in found:
        assert np.isnan(from_bf16(found["y"][:2])).all() and not found["y"][2:].any()


class Announcing:
    """A group whose ranks' parts are made by kernels that also announce them."""

    def __init__(self, gpu: Gpu, ranks: int, rows: int, width: int) -> None:
        self.group, self.gpu = Ranks(gpu, ranks, rows, width, epoch=2**31 - 2), gpu
        self.counters = cupy.zeros(ranks, cupy.int32)

    def launch(self, entry: str, rank: int, turn: int, **values: Any) -> None:
        """Rank `rank` makes its part of this turn, and says so."""
        own = self.group.all[rank]
        told = {"arrived": self.group.arrived, "epoch": own.epoch, "counter": self.counters[rank : rank + 1]}
        sizes = {"rank": rank, "ranks": len(self.group.all)}
        self.gpu.kernels.launch(entry, out=own.parts[turn], **told, **sizes, **values)

    def check(self, step: int) -> None:
        """All have announced as often, in everybody's memory, and are ready for the next time."""
        epoch = np.array(2**31 - 2 + step + 1).astype(np.int32)
        assert not cupy.asnumpy(self.counters).any()
        for rank in self.group.all:
            assert (cupy.asnumpy(rank.arrived) == epoch).all() and int(rank.epoch[0]) == int(epoch)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize(("rows", "live"), ROWS)
def test_experts_announce(gpu: Gpu, rng: np.random.Generator, ranks: int, rows: int, live: int) -> None:
    """The bits of combine_experts, and once a launch, when all of them are there, the word in everybody's memory."""
    dim, picks = gpu.sizes.dim, gpu.config.n_activated_experts
    announcing, site = Announcing(gpu, ranks, rows, dim), Site(gpu, rng, rows, live)
    for step in range(3):
        parts = []
        for rank in range(ranks):
            held = {"routed": draw_bf16(rng, rows, picks, dim), "shared": draw_bf16(rng, rows, dim)}
            device = {name: cupy.asarray(array) for name, array in held.items()}
            sizes = {"live": site.live, "rows": rows, "picks": picks}
            announcing.launch("announce_experts", rank, step % 2, **device, **sizes)
            plain = gpu.run("combine_experts", {"out": ("bf16", (rows, dim))}, **held, **sizes | {"live": live})["out"]
            np.testing.assert_array_equal(cupy.asnumpy(announcing.group.all[rank].parts[step % 2]), plain)
            parts.append(plain)
        announcing.check(step)
        branch = cupy.asarray(to_bf16(expected_sum(np.stack(parts))))
        expected = on_host(site.run("expand_collapse", branch=branch))
        found = on_host(site.sum("sum_expand_collapse", announcing.group, ranks - 1, step % 2))
        for name, array in found.items():
            np.testing.assert_array_equal(array, expected[name], name)


@pytest.mark.parametrize(("rows", "live"), [*ROWS, (41, 37)])
@pytest.mark.parametrize("n", [16, 104])
def test_projection_announces(gpu: Gpu, rng: np.random.Generator, rows: int, live: int, n: int) -> None:
    """The same of project_fp8_o, which has several blocks a row and rows a block."""
    k, announcing = gpu.sizes.named()["o_width"], Announcing(gpu, 3, rows, n)
    for step in range(3):
        for rank in range(3):
            held = {"codes": draw_e4m3(rng, rows, k), "scales": draw_e8m0(rng, rows, k // 32)}
            held |= {"weight": draw_e4m3(rng, n, k), "weight_scale": draw_e8m0(rng, -(-n // 32), k // 32)}
            device = {name: cupy.asarray(array) for name, array in held.items()}
            sizes = {"rows": rows, "n": n, "second": None, "second_n": 0}
            alive = cupy.asarray([live], cupy.int32)
            announcing.launch("announce_fp8_o", rank, step % 2, **device, **sizes, live=alive)
            plain = gpu.run("project_fp8_o", {"out": ("bf16", (rows, n))}, **held, **sizes, live=live)["out"]
            np.testing.assert_array_equal(cupy.asnumpy(announcing.group.all[rank].parts[step % 2]), plain)
        announcing.check(step)
