"""Tensor parallelism: what of every tensor, and of the caches, each of N ranks holds.

A rank has whole attention heads with their output groups, a slice of every expert's inner width, some heads of the
Engram hash with their table rows, and a slice of the vocabulary of the heads that make logits. Where the inner width
has no equal slices of whole blocks, the last ranks' are filled up with zeros, which add nothing. What is small, or what
a reduction would cost more than reading it twice, every rank has in full: first projections, router, hyper-connections,
compressors, index queries, the embeddings, and what folds the backbone's taps into the draft head. Of the caches a rank
has everything but the index keys: of each page it keeps an equal run of rows, so one page table serves all ranks and
the scores of a row are spread evenly.

Two sums over ranks a layer follow from this, after attention and after the experts, and one after an Engram projection.
Decided here: index queries are in full because gathering them would cost a message, of which the shortest between two
H200 took 4.2 µs (`bench/results/peers.json`), where the bytes cost 1 µs. In a prefill, whose messages are long, ranks
share them by rows (`split`).
"""

import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from dsuf.checkpoint.config import QUANTISED, ModelConfig
from dsuf.checkpoint.engram import table_primes
from dsuf.checkpoint.inventory import TensorSpec, expected_tensors
from dsuf.errors import CommandError

MAX_RANKS = 8
"""Peers whose buffers one reduction reads; the same constant stands in the source."""

Rule = Literal["whole", "rows", "columns", "hash columns", "hash rows"]
Span = tuple[int, int]

_RULES: dict[str, Rule] = {
    "embed": "whole", "norm": "whole", "head": "rows",
    "attn.wq_a": "whole", "attn.q_norm": "whole", "attn.wq_b": "rows", "attn.wkv": "whole", "attn.kv_norm": "whole",
    "attn.wo_a": "rows", "attn.wo_b": "columns", "attn.attn_sink": "rows", "attn_norm": "whole", "ffn_norm": "whole",
    "attn.compressor.wkv": "whole", "attn.compressor.wgate": "whole", "attn.compressor.norm": "whole",
    "attn.indexer.wk": "whole", "attn.indexer.k_norm": "whole", "attn.indexer.wq_b": "whole",
    "attn.indexer.weights_proj": "whole", "ffn.gate": "whole", "ffn.gate.bias": "whole", "ffn.gate.bias_vl": "whole",
    "ffn.shared_experts.w1": "rows", "ffn.shared_experts.w2": "columns", "ffn.shared_experts.w3": "rows",
    "ffn.experts.w1": "rows", "ffn.experts.w2": "columns", "ffn.experts.w3": "rows",
    "hc_attn_fn": "whole", "hc_attn_base": "whole", "hc_attn_scale": "whole",
    "hc_ffn_fn": "whole", "hc_ffn_base": "whole", "hc_ffn_scale": "whole",
    "engram.embed": "hash rows", "engram.wkv": "hash columns", "engram.q_weight": "whole", "engram.k_weight": "whole",
    "main_proj": "whole", "main_norm": "whole", "markov_head.embed": "whole", "markov_head.head": "rows",
    "confidence_head.proj": "whole",
}  # fmt: skip
"""How each tensor is split, by its name without layer, expert and `.weight` or `.scale`; the picture tower is whole."""


class Share(msgspec.Struct, frozen=True, gc=False):
    """What a rank holds of a tensor: these spans along `axis`, one behind the other; all of it if `axis` is None.

    Zeros behind them make it at least `least` long.
    """

    axis: int | None = None
    spans: tuple[Span, ...] = ()
    least: int = 0

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the share of a tensor of shape `whole`."""
        if self.axis is None:
            return whole
        length = sum(stop - start for start, stop in self.spans)
        return (*whole[: self.axis], max(length, self.least), *whole[self.axis + 1 :])

    def take(self, tensor: NDArray[Any]) -> NDArray[Any]:
        """The share of `tensor`; a view where it is one whole run."""
        if self.axis is None:
            return tensor
        lead = (slice(None),) * self.axis
        parts = [tensor[(*lead, slice(start, stop))] for start, stop in self.spans]
        lack = self.least - sum(stop - start for start, stop in self.spans)
        if lack > 0:
            parts.append(np.zeros((*tensor.shape[: self.axis], lack, *tensor.shape[self.axis + 1 :]), tensor.dtype))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=self.axis)


WHOLE = Share()


def check_ranks(config: ModelConfig, ranks: int) -> None:
    """Raise `CommandError` where `config` cannot be split over `ranks` ranks."""
    for problem in _problems(config, ranks):
        raise CommandError(f"{ranks} ranks: {problem}")


def _problems(c: ModelConfig, ranks: int) -> list[str]:
    """Why not, in words."""
    if not 1 <= ranks <= MAX_RANKS:
        return [f"1 to {MAX_RANKS} can work together"]
    counts = {
        "n_heads": c.n_heads, "o_groups": c.o_groups, "engram_n_heads": c.engram_n_heads, "vocab_size": c.vocab_size,
    }  # fmt: skip
    found = [f"{name} is {count}, no multiple of {ranks}" for name, count in counts.items() if count % ranks]
    blocks = c.moe_inter_dim // QUANTISED
    if c.moe_inter_dim % QUANTISED or (ranks - 1) * -(-blocks // ranks) >= blocks:
        found.append(f"moe_inter_dim is {c.moe_inter_dim}, which leaves a rank without a block of {QUANTISED}")
    if ranks > 1 and table_primes(c).sum(axis=(1, 2)).tolist() != list(c.engram_num_embeddings):
        found.append(f"engram_num_embeddings is {list(c.engram_num_embeddings)}, which is not what the hash has")
    return found


def split_tensors(config: ModelConfig, ranks: int, rank: int) -> Iterator[tuple[TensorSpec, Share]]:
    """Every released tensor, with what `rank` of `ranks` holds of it; `check_ranks` has found nothing."""
    primes = table_primes(config).tolist()
    for spec in expected_tensors(config):
        if spec.part == "vision" or ranks == 1:
            yield spec, WHOLE
        else:
            yield spec, _share(config, spec, primes, ranks, rank)


def _share(c: ModelConfig, spec: TensorSpec, primes: list[list[list[int]]], ranks: int, rank: int) -> Share:
    rule = rule_of(spec.name)
    if rule == "whole":
        return WHOLE
    if ".ffn." in spec.name:
        axis = 0 if rule == "rows" else 1
        return _inner_share(c, axis, spec.shape[axis], ranks, rank)
    if rule == "rows":
        return Share(0, (_part(spec.shape[0], ranks, rank),))
    if rule == "columns":
        return Share(1, (_part(spec.shape[1], ranks, rank),))
    if rule == "hash columns":
        width = spec.shape[1] // ((c.engram_max_ngram_size - 1) * c.engram_n_heads)
        sizes = [[width] * c.engram_n_heads] * (c.engram_max_ngram_size - 1)
        return Share(1, _hash_spans(sizes, ranks, rank))
    layer = c.engram_layer_ids.index(int(spec.name.split(".")[1]))
    return Share(0, _hash_spans(primes[layer], ranks, rank))


def _inner_share(c: ModelConfig, axis: int, size: int, ranks: int, rank: int) -> Share:
    """The share along an axis of `size` which is the experts' inner width, or its blocks or packed pairs."""
    each = inner_width(c, ranks) * size // c.moe_inter_dim
    return Share(axis, ((rank * each, min(size, (rank + 1) * each)),), each)


def inner_width(config: ModelConfig, ranks: int) -> int:
    """The experts' inner width on each of `ranks` ranks, in whole blocks."""
    return -(-config.moe_inter_dim // (ranks * QUANTISED)) * QUANTISED


def rule_of(name: str) -> Rule:
    """How the tensor `name` of the backbone or the draft head is split; raises `KeyError` for one that nobody knows."""
    plain = re.sub(r"^(layers|mtp)\.\d+\.", "", name)
    plain = re.sub(r"\.experts\.\d+\.", ".experts.", plain)
    return _RULES[plain.removesuffix(".weight").removesuffix(".scale")]


def _part(size: int, ranks: int, rank: int) -> Span:
    """The `rank`-th of `ranks` equal parts."""
    return size * rank // ranks, size * (rank + 1) // ranks


def _hash_spans(sizes: list[list[int]], ranks: int, rank: int) -> tuple[Span, ...]:
    """The spans that belong to a rank's heads, one for each length of n-gram; `sizes` [lengths][heads] lie in order.

    Heads rather than neighbouring columns: every rank then has each length alike, as one with fewer heads would.
    """
    spans, at = [], 0
    for heads in sizes:
        first, last = _part(len(heads), ranks, rank)
        spans.append((at + sum(heads[:first]), at + sum(heads[:last])))
        at += sum(heads)
    return tuple(spans)


def hash_heads(config: ModelConfig, ranks: int, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A rank's sub-tables: their rows and, in its share of each table, their first rows, both [layers, columns]."""
    primes = table_primes(config)
    first, last = _part(config.engram_n_heads, ranks, rank)
    own = primes[:, :, first:last].reshape(len(primes), -1)
    return own, np.cumsum(own, axis=1) - own


def rank_config(config: ModelConfig, ranks: int, rank: int) -> ModelConfig:
    """`config` with the sizes that `rank` computes with; the vocabulary stays, since every rank embeds all of it."""
    tables = hash_heads(config, ranks, rank)[0].sum(axis=1).tolist() if ranks > 1 else config.engram_num_embeddings
    return msgspec.structs.replace(
        config, n_heads=config.n_heads // ranks, o_groups=config.o_groups // ranks,
        moe_inter_dim=inner_width(config, ranks), engram_n_heads=config.engram_n_heads // ranks,
        engram_num_embeddings=tuple(tables),
    )  # fmt: skip


def key_span(page_rows: int, ranks: int, rank: int) -> Span:
    """The rows of every page whose index keys `rank` keeps; row r of page p lies at p * (stop - start) + r - start."""
    return _part(page_rows, ranks, rank)
