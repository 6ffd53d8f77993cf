"""A block of the transformer in parts that do not know what their attention looks at.

The parts are the same for every layer and every draft stage, so that each is compiled once.
"""

import torch
from torch import Tensor, nn

from bench.nano.model.attention import Compressor, Projections, Seen, attend, attend_block, make_entries
from bench.nano.model.engram import Engram
from bench.nano.model.experts import Experts
from bench.nano.model.indexer import Indexer, Queries
from bench.nano.model.mixing import Mixes, collapse, expand, mix, site
from bench.nano.model.norm import rms_norm
from bench.nano.model.quantiser import q8
from dsuf.checkpoint.config import ModelConfig


class Block(nn.Module):
    """Everything of a block but its attention."""

    def __init__(self, config: ModelConfig, experts: int, chosen: int) -> None:
        super().__init__()
        self.config = config
        site(self, "attn", config)
        site(self, "ffn", config)
        self.attn_norm, self.ffn_norm = (nn.Parameter(torch.ones(config.dim)) for _ in range(2))
        self.ffn = Experts(config, experts, chosen)

    def enter(self, streams: Tensor, pre: Tensor) -> tuple[Tensor, Mixes]:
        """Attention's input [rows, dim] and the mixes of its site."""
        mixes = mix(streams, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale, self.config)
        return rms_norm(collapse(streams, pre), self.attn_norm, self.config.norm_eps), mixes

    def leave(self, streams: Tensor, branch: Tensor, mixes: Mixes, quantised: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Streams after attention's `branch` and the experts, the next collapse's weights, and the experts' load."""
        streams = expand(branch, streams, mixes)
        after = mix(streams, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale, self.config)
        v = rms_norm(collapse(streams, mixes.pre), self.ffn_norm, self.config.norm_eps)
        feed = self.ffn(v, quantised)
        return expand(feed.branch, streams, after), after.pre, feed.load


class Attention(Projections):
    """A backbone layer's attention, by its mode with compressor and indexer."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config)
        mode = config.mode(index)
        self.compressor = Compressor(config, config.ratio(index)) if mode == "full" else None
        self.indexer = {"full": Indexer, "reindex": Queries}[mode](config) if mode in ("full", "reindex") else None

    def project(self, u: Tensor, rotation: Tensor, quantised: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Query latent, queries and window rows for input `u` [rows, dim]."""
        x = q8(u) if quantised else u
        latent = self.latent(x, quantised)
        return latent, self.queries(latent, rotation, quantised), self.keys(x, rotation, quantised)

    def compress(self, u: Tensor, rotation: Tensor, quantised: bool) -> tuple[Tensor, Tensor]:
        """Compressed entries [n, head_dim] and index keys [n, width] of a Full layer; `rotation` is the entries'."""
        latents = self.compressor(u)
        return make_entries(latents, rotation, quantised), self.indexer.keys(latents, rotation, quantised)

    def ask(self, u: Tensor, latent: Tensor, rotation: Tensor, quantised: bool) -> tuple[Tensor, Tensor]:
        """Index queries and head weights of a layer that selects."""
        return self.indexer.ask(u, latent, rotation, quantised)

    def look(
        self, q: Tensor, keys: Tensor, mask: Tensor, seen: Seen | None, rotation: Tensor, quantised: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The branch [rows, dim], and the attention paid to what is `seen`."""
        attended, paid = attend(q, keys, mask, self.attn_sink, seen)
        return self.output(attended, rotation, quantised), paid


class Layer(Block):
    """Backbone layer `index`, with the Engram before it if there is one."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, config.n_routed_experts, config.n_activated_experts)
        self.attn = Attention(config, index)
        slots = {layer: slot for slot, layer in enumerate(config.engram_layer_ids)}
        self.engram = Engram(config, slots[index]) if index in slots else None


class Stage(Block):
    """A draft stage: every row of a block attends to its context and to the whole block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.dspark_n_routed_experts, config.dspark_n_activated_experts)
        self.attn = Projections(config)

    def look(self, u: Tensor, context: Tensor, mask: Tensor, rotation: Tensor, size: int, quantised: bool) -> Tensor:
        """The branch [blocks · size, dim] for input `u`; `context` [blocks, window, head_dim] where `mask` says so."""
        x = q8(u) if quantised else u
        q = self.attn.queries(self.attn.latent(x, quantised), rotation, quantised)
        own = self.attn.keys(x, rotation, quantised).unflatten(0, (-1, size))
        attended = attend_block(q, torch.cat([context, own], 1), mask, self.attn.attn_sink)
        return self.attn.output(attended, rotation, quantised)
