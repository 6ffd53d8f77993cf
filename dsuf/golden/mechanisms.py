"""The primitives about mechanisms: router, attention, mixing, norm, rotary positions, compressor, candidates."""

from pathlib import Path

import msgspec
import numpy as np

import dsuf.checkpoint
from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.golden import tolerance
from dsuf.golden.folder import Case
from dsuf.golden.measure import Distance
from dsuf.golden.report import Report
from dsuf.reference.arithmetic import F32, FP32, OFFICIAL
from dsuf.reference.compress import Compressor
from dsuf.reference.hyper import Mixes, collapse, expand, split_mixes
from dsuf.reference.indexer import candidate_mask
from dsuf.reference.moe import Router
from dsuf.reference.norm import rms_norm
from dsuf.reference.rope import Rope
from dsuf.reference.sparse import attend
from dsuf.reference.weights import WeightSource

RELEASED = Path(dsuf.checkpoint.__file__).parent / "released" / "config.json"
"""The rotary primitives are made with the released parameters, whatever the checkpoint beside them has."""

OFFICIAL_ROW = tolerance.Tolerance(4e-3)
"""A row of which some BF16 values are rounded the other way."""


def compare_gate(report: Report, case: Case, group: str, config: ModelConfig) -> None:
    """The choice of experts and their weights; rows of a picture have a bias of their own."""
    recorded = case.whole(f"{group}.indices_sorted")
    picture = case[f"{group}.image_mask"][:, None] != 0
    bias = np.where(picture, case.single(f"{group}.bias_vl"), case.single(f"{group}.bias"))
    router = Router(case.double(f"{group}.weight"), bias, recorded.shape[1], config.route_scale)
    scores = router.scores(case.single(f"{group}.x"))
    report.judge_equal(case.name, "", f"{group} experts", router.choose(scores), recorded)
    _judge(report, case, f"{group}.weights_sorted", router.weights(scores, recorded))


def compare_attention(report: Report, case: Case, group: str, config: ModelConfig) -> None:
    """Attention with a sink over lists of slots, some empty."""
    q, values, slots = case.single(f"{group}.q"), case.double(f"{group}.kv"), case.whole(f"{group}.idx")
    sink = case.single(f"{group}.sink")
    for arithmetic, name, limit in (
        (OFFICIAL, f"{group}.out", OFFICIAL_ROW), (FP32, f"{group}.out_fp32", tolerance.PRIMITIVE),
    ):  # fmt: skip
        with np.errstate(over="ignore"):  # a row without slots divides by infinity, which is the zero it must be
            _judge(report, case, name, attend(q, values, slots, sink, arithmetic), limit)


def compare_mixes(report: Report, case: Case, group: str, config: ModelConfig) -> None:
    """Pre, post and comb out of a site's raw numbers; `hc_hard` needs every Sinkhorn round."""
    sizes = msgspec.structs.replace(config, hc_mult=case[f"{group}.pre"].shape[1])
    mixes = split_mixes(case.single(f"{group}.mixes"), case.single("hc.scale"), case.single("hc.base"), sizes)
    for name, value in mixes._asdict().items():
        _judge(report, case, f"{group}.{name}", value)


def compare_mixing(report: Report, case: Case, group: str, config: ModelConfig) -> None:
    """Streams collapsed and expanded with the mixes of `hc`."""
    streams, branch = case.single(f"{group}.h"), case.single(f"{group}.branch")
    mixes = Mixes(case.single("hc.pre"), case.single("hc.post"), case.single("hc.comb"))
    _judge(report, case, f"{group}.collapsed", collapse(streams, mixes.pre, FP32))
    _judge(report, case, f"{group}.expanded", expand(branch, streams, mixes, FP32))


def compare_norm(report: Report, case: Case, group: str, config: ModelConfig) -> None:
    """The norm of inputs so small that its epsilon shows."""
    y = rms_norm(case.single(f"{group}.x"), case.single(f"{group}.weight"), config.norm_eps, FP32)
    _judge(report, case, f"{group}.y", y)


def compare_rope(report: Report, case: Case, group: str, config: ModelConfig) -> None:
    """Rotation and its inverse up to positions past the original context."""
    x = case.single(f"{group}.x")
    released = msgspec.structs.replace(load_config(RELEASED), rope_head_dim=2 * case[f"{group}.cos"].shape[1])
    rotation = Rope(released, compressed=group == "rope_compressed").rotation(case.whole(f"{group}.pos"))
    _judge(report, case, f"{group}.cos", rotation.cos)
    _judge(report, case, f"{group}.sin", rotation.sin)
    _judge(report, case, f"{group}.y", rotation.apply(x, FP32))
    _judge(report, case, f"{group}.y_inverse", rotation.apply(x, FP32, inverse=True))


def compare_compressor(report: Report, case: Case, group: str, config: ModelConfig) -> None:
    """Latents of whole groups of two positions; a last odd position waits."""
    x, width = case.single(f"{group}.x"), len(case[f"{group}.norm"])
    tensors = {
        "layers.0.attn.compressor.wkv.weight": case[f"{group}.wkv"],
        "layers.0.attn.compressor.wgate.weight": case[f"{group}.wgate"],
        "layers.0.attn.compressor.norm.weight": case[f"{group}.norm"],
        "layers.0.attn.indexer.wk.weight": np.zeros((1, width), np.float32),
        "layers.0.attn.indexer.k_norm.weight": np.zeros(1, np.float32),
    }
    sizes = msgspec.structs.replace(
        config, head_dim=width, compress_ratios=(2,) * len(config.compress_ratios), kv_source_layers=(0,),
        index_source_layers=(0,), candidate_source_layer=0,
    )  # fmt: skip
    compressor = Compressor(WeightSource(tensors.__getitem__), 0, sizes, FP32, Rope(sizes, compressed=True))
    whole = len(x) - len(x) % 2
    _judge(report, case, f"{group}.y", compressor.latents(compressor.project(x)[:whole]))


def compare_candidates(report: Report, case: Case, group: str, config: ModelConfig) -> None:
    """Entries in the best blocks; the recorded mask also holds what is not reachable yet."""
    scores, reachable = case.single(f"{group}.logits"), case.whole(f"{group}.lens")
    blocks, block_size = case.number(f"{group}.topk_blocks"), case.number(f"{group}.block_size")
    past = np.arange(scores.shape[1]) < reachable[:, None]
    mask = candidate_mask(np.where(past, scores, np.float32(-np.inf)), reachable, blocks, block_size)
    report.judge_equal(case.name, "", f"{group}.mask", mask & past, (case[f"{group}.mask"] != 0) & past)


def _judge(report: Report, case: Case, name: str, own: F32, limit: tolerance.Tolerance = tolerance.PRIMITIVE) -> None:
    """A row for recorded tensor `name`."""
    report.judge_rows(case.name, "", name, Distance.between(own, case[name]), limit)
