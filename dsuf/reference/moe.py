"""Mixture of experts: a router in float32, routed FP4 experts, one shared FP8 expert.

Rows are grouped by expert into blocks of equal size, a product each.
"""

import numpy as np

from dsuf.checkpoint.config import ModelConfig
from dsuf.reference.arithmetic import F32, F64, I64, Arithmetic, matmul, silu
from dsuf.reference.batch import Observer
from dsuf.reference.weights import WeightSource


class Router:
    """Chooses experts: score = sqrt(softplus(W · v)), the best of score + bias, weights normalised without the bias."""

    def __init__(self, weight: F64, bias: F32, chosen: int, route_scale: float) -> None:
        self.weight, self.bias, self.chosen, self.route_scale = weight, bias, chosen, np.float32(route_scale)

    def scores(self, v: F32) -> F32:
        """Scores [rows, experts] in float32."""
        x = matmul(v, self.weight)
        scores: F32 = np.sqrt(np.maximum(x, np.float32(0)) + np.log1p(np.exp(-np.abs(x))))
        return scores

    def choose(self, scores: F32) -> I64:
        """Experts [rows, chosen], ascending by id; ties go to the lower id."""
        order = np.argsort(-(scores + self.bias), axis=1, kind="stable")
        return np.sort(order[:, : self.chosen], axis=1)

    def weights(self, scores: F32, experts: I64) -> F32:
        """Routing weights [rows, chosen] of `experts`: they sum to the route scale."""
        picked = scores[np.arange(len(experts))[:, None], experts]
        total: F32 = np.add.reduce(picked, axis=1, keepdims=True)
        return picked / (total + np.float32(1e-20)) * self.route_scale


class Moe:
    """The experts of one layer or draft stage; it has `experts` routed ones, of which a row uses `chosen`."""

    def __init__(
        self, source: WeightSource, prefix: str, config: ModelConfig, arithmetic: Arithmetic, experts: int, chosen: int
    ) -> None:
        self.arithmetic, self.limit, self.prefix = arithmetic, np.float32(config.swiglu_limit), prefix
        gate, bias = source.matrix(f"{prefix}.gate.weight"), source.vector(f"{prefix}.gate.bias")
        self.router = Router(gate, bias, chosen, config.route_scale)
        names = [f"{prefix}.experts.{e}" for e in range(experts)]
        self.w13: F64 = np.stack([np.concatenate([source.expert(f"{n}.w1"), source.expert(f"{n}.w3")]) for n in names])
        self.w2: F64 = np.stack([source.expert(f"{n}.w2") for n in names])
        shared = f"{prefix}.shared_experts"
        self.shared_w13: F64 = np.concatenate([source.linear(f"{shared}.w1"), source.linear(f"{shared}.w3")])
        self.shared_w2: F64 = source.linear(f"{shared}.w2")

    def forward(self, v: F32, observer: Observer) -> F32:
        """The branch [rows, dim] for normed input `v` [rows, dim]."""
        scores = self.router.scores(v)
        forced = observer.force(f"{self.prefix}.router_indices")
        experts = self.router.choose(scores) if forced is None else np.asarray(forced, np.int64)
        weights = self.router.weights(scores, experts)
        observer.see(f"{self.prefix}.router_indices", experts)
        observer.see(f"{self.prefix}.router_weights", weights)
        v_quantised = self.arithmetic.q8(v)
        routed = self._routed(v_quantised, experts, weights)
        total = np.add.reduce(routed, axis=1) + self._shared(v_quantised)  # ascending expert id, then the shared expert
        return self.arithmetic.act(total)

    def _shared(self, v_quantised: F32) -> F32:
        inner = swiglu(self.arithmetic.act(matmul(v_quantised, self.shared_w13)), self.limit)
        return self.arithmetic.act(matmul(self.arithmetic.q8(self.arithmetic.act(inner)), self.shared_w2))

    def _routed(self, v_quantised: F32, experts: I64, weights: F32) -> F32:
        """Each chosen expert's output [rows, chosen, dim]."""
        rows, chosen = experts.shape
        blocks, size, place = group_by_expert(experts.ravel(), len(self.w13))
        block_rows = np.zeros((len(blocks) * size, v_quantised.shape[1]))
        block_weights = np.zeros((len(blocks) * size, 1), np.float32)
        block_rows[place] = np.repeat(v_quantised, chosen, axis=0)
        block_weights[place] = weights.reshape(-1, 1)
        hidden = multiply_blocks(block_rows.reshape(len(blocks), size, -1), self.w13, blocks)
        inner = swiglu(self.arithmetic.act(hidden.reshape(len(block_rows), -1).astype(np.float32)), self.limit)
        # The routing weight comes before w2's quantiser; after it the numbers would differ.
        weighted = self.arithmetic.q8(self.arithmetic.act(inner * block_weights)).astype(np.float64)
        out = multiply_blocks(weighted.reshape(len(blocks), size, -1), self.w2, blocks)
        return self.arithmetic.act(out.reshape(len(block_rows), -1)[place].astype(np.float32)).reshape(rows, chosen, -1)


def group_by_expert(experts: I64, count: int) -> tuple[I64, int, I64]:
    """Sort `experts` [pairs], ids below `count`, into blocks of equal size that hold one expert each.

    Returns the expert of each block, the size of a block, and each pair's place among the blocks' rows. The size is the
    mean load, so that there are at most twice as many blocks as experts in use, however uneven the load.
    """
    size = max(1, -(-len(experts) // count))
    if size == 1:
        return experts, 1, np.arange(len(experts))  # a block a pair, in any order
    load = np.bincount(experts, minlength=count)
    blocks_of = -(-load // size)
    order = np.argsort(experts, kind="stable")
    first_row = (np.cumsum(blocks_of) - blocks_of) * size
    first_pair = np.cumsum(load) - load
    place = np.empty(len(experts), np.int64)
    ranked = experts[order]
    place[order] = first_row[ranked] + np.arange(len(experts)) - first_pair[ranked]
    return np.repeat(np.arange(count), blocks_of), size, place


def multiply_blocks(rows: F64, weights: F64, experts: I64) -> F64:
    """Each block of `rows` [blocks, size, k] times the transpose of its expert's weight, [blocks, size, n].

    `weights` [experts, n, k] are read in place: a copy of those in use would cost more than the products.
    """
    out = np.empty((*rows.shape[:2], weights.shape[1]))
    for block, expert, product in zip(rows, experts.tolist(), out, strict=True):
        np.matmul(block, weights[expert].T, out=product)
    return out


def swiglu(hidden: F32, limit: np.float32) -> F32:
    """silu(a) · b for the halves a, b of `hidden`; b clamped to ± limit, a from above only."""
    half = hidden.shape[-1] // 2
    a, b = hidden[..., :half], hidden[..., half:]
    return silu(np.minimum(a, limit)) * np.minimum(np.maximum(b, -limit), limit)
