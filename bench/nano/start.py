"""The weights that a training starts from, by the names of the released layout.

Layer 0 starts with four positional heads: head h reads the token h + 1 places back. All of it stays trainable, except
that column 0 of the embedding is 1 for every token. Random heads of this kind are slow to grow, since at the released
theta few rotary pairs can tell neighbours apart, and nothing else is constant over tokens.
"""

import math
from collections.abc import Iterable

import torch

from bench.nano.optimiser import last_part
from dsuf.checkpoint.config import ModelConfig

# Strength of the rotary pairs of layer 0, the fastest first; the others start at zero.
PAIRS = (3.6, 3.0, 2.0, 1.5, 1.0)
QUERY_GAIN = 4.0
PLAIN_QUERY = 0.1
EMBEDDING_DEVIATION = 0.5
PRE_BASE = 1.5
COMB_BASE = 2.0
HC_SCALE = 0.3
HC_DEVIATION = 0.02
TABLE_DEVIATION = 0.1
MARKOV_DEVIATION = 0.2

Named = Iterable[tuple[str, torch.nn.Parameter]]


@torch.no_grad()
def start_weights(named: Named, config: ModelConfig, seed: int) -> None:
    """Fill all parameters in place; the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(named)
    for name, parameter in sorted(parameters.items()):
        parameter.copy_(_draw(name, parameter, config, generator))
    place_heads(parameters, config, generator)


def fix_embedding(embedding: torch.Tensor) -> None:
    """Write the constant channel back, [vocabulary, width]; after every step."""
    with torch.no_grad():
        embedding[:, 0] = 1.0


def place_heads(parameters: dict[str, torch.nn.Parameter], config: ModelConfig, generator: torch.Generator) -> None:
    """The positional heads of layer 0.

    After its norm the constant channel is about 2, all others about 1 (deviation .5 beside a 1). Row 0 of wq_a carries
    it into the queries, whose rotary part then is 8 a e^(-i o f) for offset o and pair strength a; keys hold a. The
    score is the sum of 8 a² cos((distance - o) f) / sqrt(width of a head).
    """
    attention = "layers.0.attn."
    fix_embedding(parameters["embed"])
    wq_a, wq_b, wkv = (parameters[f"{attention}{name}"] for name in ("wq_a", "wq_b", "wkv"))
    wq_a[:, 0] = 0.0
    wq_a[0] = 0.0
    wq_a[0, 0] = 1.0
    plain = config.head_dim - config.rope_head_dim
    heads = wq_b.view(config.n_heads, config.head_dim, -1)
    heads *= PLAIN_QUERY
    heads[:, plain:] = 0.0
    for head in range(config.n_heads):
        heads[head, plain:, 0] = _rotary_rows(config, head + 1).to(heads.device)
    wkv.zero_()
    wkv[:plain, 1:] = _orthonormal(plain, config.dim - 1, generator).to(wkv.device)
    wkv[plain::2, 0][: len(PAIRS)] = torch.tensor(PAIRS, device=wkv.device)[: config.rope_head_dim // 2] / 2
    parameters[f"{attention}wo_b"].mul_(2.0)


def _rotary_rows(config: ModelConfig, offset: int) -> torch.Tensor:
    """Column 0 of a head's rotary rows [rope_head_dim], so that its score is highest `offset` places back."""
    rows = torch.zeros(config.rope_head_dim)
    for pair, strength in enumerate(PAIRS[: config.rope_head_dim // 2]):
        frequency = config.rope_theta ** (-2 * pair / config.rope_head_dim)
        rows[2 * pair] = QUERY_GAIN * strength * math.cos(offset * frequency)
        rows[2 * pair + 1] = -QUERY_GAIN * strength * math.sin(offset * frequency)
    return rows


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(columns, rows, generator=generator))[0].T


def _draw(name: str, parameter: torch.Tensor, config: ModelConfig, generator: torch.Generator) -> torch.Tensor:
    """A first value for one parameter: norms 1, sinks 0, mHC near the identity, matrices with fan_in^-0.5."""
    shape = parameter.shape
    noise = torch.randn(shape, generator=generator)
    last = last_part(name)
    if last.startswith("hc_"):
        return _draw_hyper(last, _site(name, last), noise, config)
    if "norm" in last or last in ("q_weight", "k_weight"):
        return torch.ones(shape)
    if last in ("attn_sink", "bias", "bias_vl") or "confidence" in name or "markov_head.head" in name:
        return torch.zeros(shape)
    if last == "embed":
        kinds = {"engram": TABLE_DEVIATION, "markov": MARKOV_DEVIATION}
        return noise * next((d for kind, d in kinds.items() if kind in name), EMBEDDING_DEVIATION)
    return noise * shape[-1] ** -0.5 * (0.5 if name == "head" else 1.0)


def _site(name: str, last: str) -> int:
    """The number of an mHC site: two a layer; the draft's stages count from zero again."""
    layer = next(int(part) for part in name.split(".") if part.isdigit())
    return 2 * layer + (last.startswith("hc_ffn"))


def _draw_hyper(last: str, site: int, noise: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """mHC: each site reads one stream, by turns, writes to all of them, and hands every stream on to itself."""
    if last.endswith("scale"):
        return torch.full(noise.shape, HC_SCALE)
    if last.endswith("fn"):
        return noise * HC_DEVIATION
    count = config.hc_mult
    base = noise * HC_DEVIATION
    base[:count] -= PRE_BASE
    base[site % count] += 2 * PRE_BASE
    base[2 * count :] += COMB_BASE * (2 * torch.eye(count) - 1).flatten()
    return base
