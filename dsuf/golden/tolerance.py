"""How far rows may be from recorded ones, and why so far.

Without rounding (`fp32`) two correct programs differ by 1e-6 at most, so 1e-5 for every row tells right from wrong.

With rounding, one layer at a time from the recorded input, nearly all rows of a correct program are equal to the bit.
A few are not: a value whose last BF16 bit differs lands on the other side of an FP8 or FP4 boundary, and that one
element moves its row. How often that happens depends on the numbers, how far a row can move on the format. So the
tolerance is a *share* of rows, pooled over layers, which a wrong formula misses by far since it moves every row; and
a ceiling for the rest.
"""

import math

import msgspec
import numpy as np

from dsuf.golden.measure import Distance


class Tolerance(msgspec.Struct, frozen=True):
    """At least `share` of the rows within `within`, or all but `spare` where that is fewer; none over `ceiling`."""

    within: float
    share: float = 1.0
    ceiling: float = math.inf
    spare: int = 0

    def allows(self, distance: Distance) -> bool:
        """Whether the rows of `distance` keep to this."""
        beyond = int(np.count_nonzero(distance.errors > self.within))
        return (
            beyond <= max(self.spare, round((1 - self.share) * len(distance.errors)))
            and distance.largest <= self.ceiling
        )

    def __str__(self) -> str:
        if self.share == 1:
            return f"max {self.within:.0e}" if self.within else "equal to the bit"
        return f"{self.share:.0%} within {self.within:.0e}, max {self.ceiling:.1e}"


EXACT = Tolerance(0.0)
PRIMITIVE = Tolerance(1e-6)
"""Small cases in float32."""
FP32 = Tolerance(1e-5)

WITHIN = 2e-3
"""More than BF16 differences make of a row, less than most moved elements do."""
SHARE = 0.98
LAYER_SHARE = 0.8
"""For one layer: a whole window of queries sees a window row that moved."""

_STREAMS, _BRANCH, _FP8_ROW, _FP4_ROW = 3e-2, 0.15, 5e-2, 0.25
CEILINGS = {
    "h_after_engram": _STREAMS, "h_out": _STREAMS, "attn_in": _STREAMS, "ffn_in": _STREAMS, "pre_mix_out": _STREAMS,
    "compressed_latent_pre_rope": _STREAMS, "router_weights": _STREAMS, "main_hidden": _STREAMS,
    "attn_out": _BRANCH, "ffn_out": _BRANCH, "window_kv": _FP8_ROW, "compressed_kv": _FP4_ROW, "index_k": _FP4_ROW,
    "index_score": _FP4_ROW,
}  # fmt: skip
"""As far as one moved element can take a row: an eighth of a large FP8 element, half of a large FP4 element. A branch
may be a small sum of large terms; in the streams its error is diluted by what they held before."""

EXPERT = Tolerance(WITHIN, 0.8, _BRANCH, spare=1)
"""A rounded expert on a handful of rows."""
DRAFT = Tolerance(4e-2, 0.8, 0.3, spare=1)
"""Draft stages and logits from recorded context rows: all stages in a row, with free choices of experts. A context row
that moved is seen by a whole window of steps, so there is no share to go by: `fp32` tells right from wrong here."""

EQUAL_SHARE = 0.5
"""Of the streams after a layer, in `official`, how many rows must equal the recorded ones to the bit."""
ARGMAX_SHARE = 0.8
"""Of all positions of a flavour, how many must have the recorded arg-max where a whole stack ran with free choices."""
CASE_SHARE, CASE_POSITIONS = 0.4, 32
"""What a case of that many positions must reach by itself: far below any correct program, far above a broken path."""
STACK_MEDIAN = 0.25
"""Median error of hidden rows after a whole rounded stack, for which there is no arg-max."""
GREEDY_GAP = 0.3
"""A greedy choice may differ where its recorded margin is below this, or below this part of the logits' RMS."""


_FUSED_STREAMS, _FUSED_BRANCH = Tolerance(8e-3, 0.5, 1.5e-2), Tolerance(8e-2, SHARE, 2 * _BRANCH, spare=2)
"""An engine of fused kernels rounds elsewhere, attention's probabilities above all. What moved by a last bit there goes
through the quantisers of the branch; in the streams little of it is left."""


def layer_tolerance(flavour: str, output: str, *, pooled: bool, fused: bool = False) -> Tolerance:
    """For `output` of one layer from its recorded input, or (`pooled`) of all layers together."""
    if flavour == "fp32":
        return FP32
    if fused and output in ("attn_out", "ffn_out"):
        return msgspec.structs.replace(_FUSED_BRANCH, share=SHARE if pooled else LAYER_SHARE)
    if fused and CEILINGS[output] == _STREAMS:
        return _FUSED_STREAMS
    return Tolerance(WITHIN, SHARE if pooled else LAYER_SHARE, CEILINGS[output], spare=2)


def router_margin(flavour: str) -> float:
    """The margin of a choice of experts below which rounding decides it; scores are of order one."""
    return 1e-5 if flavour == "fp32" else 1e-2
