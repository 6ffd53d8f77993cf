"""A block of the transformer: attention and experts, each between a collapse of the streams and an expansion back.

The backbone's layers and the draft head's stages are such blocks; they differ in what their attention looks at.
"""

from collections.abc import Callable

from dsuf.checkpoint.config import ModelConfig
from dsuf.reference.arithmetic import F32, Arithmetic
from dsuf.reference.attention import Attention
from dsuf.reference.batch import Batch, Observer
from dsuf.reference.hyper import HyperSite, collapse, expand
from dsuf.reference.moe import Moe
from dsuf.reference.norm import rms_norm
from dsuf.reference.rope import Rope
from dsuf.reference.weights import WeightSource


class TransformerBlock:
    """The weights of the block `prefix`, attention and Engram apart; a row goes to `chosen` of `experts` experts."""

    def __init__(
        self, source: WeightSource, prefix: str, config: ModelConfig, arithmetic: Arithmetic, experts: int, chosen: int
    ) -> None:
        self.prefix, self.config, self.arithmetic = prefix, config, arithmetic
        self.attn_site = HyperSite(source, f"{prefix}.hc_attn", config)
        self.ffn_site = HyperSite(source, f"{prefix}.hc_ffn", config)
        self.attn_norm: F32 = source.vector(f"{prefix}.attn_norm.weight")
        self.ffn_norm: F32 = source.vector(f"{prefix}.ffn_norm.weight")
        self.moe = Moe(source, f"{prefix}.ffn", config, arithmetic, experts, chosen)

    def attention_input(self, streams: F32, pre: F32) -> F32:
        """The normed collapse that attention reads [rows, dim]; `pre` comes from the site before."""
        collapsed = collapse(streams, pre, self.arithmetic)
        return rms_norm(collapsed, self.attn_norm, self.config.norm_eps, self.arithmetic)

    def run(self, streams: F32, pre: F32, attend: Callable[[F32], F32], observer: Observer) -> tuple[F32, F32]:
        """Streams [rows, s, dim] and the weights [rows, s] for the collapse at the next block's attention.

        `attend` gives attention's branch [rows, dim] for its input.
        """
        arithmetic = self.arithmetic
        mixes = self.attn_site.mixes(streams)
        u = self.attention_input(streams, pre)
        branch = attend(u)
        observer.see(f"{self.prefix}.attn_in", u)
        observer.see(f"{self.prefix}.attn_out", branch)
        streams = expand(branch, streams, mixes, arithmetic)
        attn_pre, mixes = mixes.pre, self.ffn_site.mixes(streams)
        v = rms_norm(collapse(streams, attn_pre, arithmetic), self.ffn_norm, self.config.norm_eps, arithmetic)
        branch = self.moe.forward(v, observer)
        observer.see(f"{self.prefix}.ffn_in", v)
        observer.see(f"{self.prefix}.ffn_out", branch)
        streams = expand(branch, streams, mixes, arithmetic)
        observer.see(f"{self.prefix}.h_out", streams)
        observer.see(f"{self.prefix}.pre_mix_out", mixes.pre)
        return streams, mixes.pre


class Layer(TransformerBlock):
    """Backbone layer `index`, Engram apart."""

    def __init__(
        self,
        source: WeightSource,
        index: int,
        config: ModelConfig,
        arithmetic: Arithmetic,
        rope: Rope,
        *,
        own_keys: bool,
    ) -> None:
        experts, chosen = config.n_routed_experts, config.n_activated_experts
        super().__init__(source, f"layers.{index}", config, arithmetic, experts, chosen)
        self.attention = Attention(source, index, config, arithmetic, rope, own_keys=own_keys)

    def forward(
        self, streams: F32, pre: F32, batch: Batch, observer: Observer, *, write_entries: bool = True
    ) -> tuple[F32, F32]:
        """Streams and collapse weights after this layer, as `run`; the rows' cache entries are written on the way."""

        def attend(u: F32) -> F32:
            return self.attention.forward(u, batch, observer, write_entries=write_entries)

        return self.run(streams, pre, attend, observer)
