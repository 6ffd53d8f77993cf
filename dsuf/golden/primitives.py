"""The small input and output pairs, one comparison a group."""

from collections.abc import Callable, Mapping

from dsuf.checkpoint.config import ModelConfig
from dsuf.golden import formats, mechanisms
from dsuf.golden.folder import Case
from dsuf.golden.layout import primitive_groups
from dsuf.golden.report import Report

COMPARISONS: Mapping[str, Callable[[Report, Case, str, ModelConfig], None]] = {
    "fp8": formats.compare_quantiser,
    "fp4_e8m0_32": formats.compare_quantiser,
    "fp4_e4m3_16": formats.compare_quantiser,
    "e2m1_round": formats.compare_e2m1,
    "linear_fp8": formats.compare_linear,
    "linear_fp4": formats.compare_linear,
    "expert_fp4": formats.compare_expert,
    "expert_fp8": formats.compare_expert,
    "gate": mechanisms.compare_gate,
    "sparse_attn": mechanisms.compare_attention,
    "hc": mechanisms.compare_mixes,
    "hc_hard": mechanisms.compare_mixes,
    "hc_apply": mechanisms.compare_mixing,
    "rmsnorm": mechanisms.compare_norm,
    "rope_window": mechanisms.compare_rope,
    "rope_compressed": mechanisms.compare_rope,
    "compressor": mechanisms.compare_compressor,
    "candidates": mechanisms.compare_candidates,
}


def compare_primitives(report: Report, case: Case, config: ModelConfig) -> None:
    """Compare every group that `case` has; what belongs to pictures is not computed here yet."""
    for group, there in primitive_groups(iter(case)).items():
        if there:
            COMPARISONS[group](report, case, group, config)
    pictures = [name for name in case if name.startswith("vision_rope.")]
    if pictures:
        report.set_apart(case.name, "", "vision_rope", "not yet", f"{len(pictures)} tensors")
