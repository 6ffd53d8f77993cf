"""The primitives about number formats: quantisers, quantised linear layers and single experts."""

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from dsuf.checkpoint.config import ModelConfig
from dsuf.golden import tolerance
from dsuf.golden.folder import Case
from dsuf.golden.measure import Array, Distance
from dsuf.golden.report import Report
from dsuf.reference import quant
from dsuf.reference.arithmetic import F32, F64, I64, OFFICIAL, matmul
from dsuf.reference.batch import NO_OBSERVER
from dsuf.reference.moe import Moe, Router
from dsuf.reference.weights import WeightSource

_QUANTISERS: Mapping[str, quant.Quantiser] = {
    "fp8": quant.FP8, "fp4_e8m0_32": quant.FP4_INDEX, "fp4_e4m3_16": quant.FP4_ENTRY,
}  # fmt: skip


def compare_quantiser(report: Report, case: Case, group: str, config: ModelConfig) -> None:
    """Codes, scales, and the values that they mean, by `roundtrip` and out of the packed row."""
    quantiser, x = _QUANTISERS[group], case.single(f"{group}.x")
    codes = case[f"{group}.q" if quantiser.codes_per_byte == 1 else f"{group}.packed"].view(np.uint8)
    packed = quantiser.pack(x)
    report.judge_equal(case.name, "", f"{group} codes", packed[:, : codes.shape[1]], codes)
    report.judge_equal(case.name, "", f"{group} scales", packed[:, codes.shape[1] :], _bytes(case[f"{group}.scale"]))
    values = case.single(f"{group}.dequant")
    report.judge_equal(case.name, "", f"{group} values", quantiser.roundtrip(x), values)
    report.judge_equal(case.name, "", f"{group} values of packed rows", quantiser.unpack(packed), values)


def compare_e2m1(report: Report, case: Case, group: str, config: ModelConfig) -> None:
    """Rounding to E2M1, ties and signs of zero included."""
    y = quant.round_e2m1(np.clip(case.single(f"{group}.x"), -quant.E2M1_MAX, quant.E2M1_MAX))
    report.judge_equal(case.name, "", f"{group} values", y, case.single(f"{group}.y"))
    codes = quant.encode_e2m1(np.stack([y, np.zeros_like(y)], axis=-1))[:, 0]
    report.judge_equal(case.name, "", f"{group} codes", codes, _bytes(case[f"{group}.code"]))


def compare_linear(report: Report, case: Case, group: str, config: ModelConfig) -> None:
    """A linear layer whose input is quantised: its product is exact, so every element is equal."""
    source = WeightSource(case.__getitem__)
    weight = source.expert(group) if group.endswith("fp4") else source.linear(group)
    y = OFFICIAL.act(matmul(OFFICIAL.q8(case.single(f"{group}.x")), weight))
    report.judge_equal(case.name, "", group, y, case.single(f"{group}.y"))


def compare_expert(report: Report, case: Case, group: str, config: ModelConfig) -> None:
    """One expert with given routing weights, whose inputs exceed the SwiGLU limit."""
    x, route = case.single(f"{group}.x"), case.single(f"{group}.route_weight")
    sizes = msgspec.structs.replace(config, swiglu_limit=float(case.single(f"{group}.limit")[0]))
    moe = Moe(_LoneExpert(case, group), "ffn", sizes, OFFICIAL, experts=1, chosen=1)
    moe.router = _GivenWeights(route)
    y = moe.forward(x, NO_OBSERVER)
    report.judge_rows(case.name, "", group, Distance.between(y, case[f"{group}.y"]), tolerance.EXPERT)


class _LoneExpert(WeightSource):
    """The weights of a layer that has one routed expert, as recorded in `group`, and a shared one of zeros."""

    def __init__(self, case: Case, group: str) -> None:
        super().__init__(case.__getitem__)
        self._group = group

    def expert(self, prefix: str) -> F64:
        """The recorded matrix, whichever format it is in."""
        name = f"{self._group}.{prefix.rsplit('.', 1)[1]}"
        return super().expert(name) if self._group.endswith("fp4") else super().linear(name)

    def linear(self, prefix: str) -> F64:
        """Zeros, in the shape of the recorded matrix."""
        return np.zeros_like(self.expert(prefix))

    def matrix(self, name: str) -> F64:
        """A router's weight, which is not used."""
        return np.zeros((1, 1))

    def vector(self, name: str) -> F32:
        """A router's bias, which is not used."""
        return np.zeros(1, np.float32)


class _GivenWeights(Router):
    """Sends every row to the only expert, with routing weights `route` [rows, 1]."""

    def __init__(self, route: F32) -> None:
        super().__init__(np.zeros((1, 1)), np.zeros(1, np.float32), chosen=1, route_scale=1)
        self._route = route

    def scores(self, v: F32) -> F32:
        """All alike."""
        return np.ones((len(v), 1), np.float32)

    def weights(self, scores: F32, experts: I64) -> F32:
        """Those that were given."""
        return self._route


def _bytes(codes: Array) -> NDArray[np.uint8]:
    return codes.view(np.uint8)
