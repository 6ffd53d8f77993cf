"""The training program's roundings against those of the reference and of the packing, bit for bit."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bench.nano.model import quantiser  # noqa: E402
from dsuf.checkpoint.packing import pack_dense, pack_fp4, pack_table  # noqa: E402
from dsuf.reference import quant  # noqa: E402
from dsuf.reference.weights import dequantise_dense, dequantise_expert  # noqa: E402


def draw(*shape: int) -> np.ndarray:
    """Values over many binades, with zeros, ties and powers of two among them."""
    rng = np.random.default_rng(7)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 8, (*shape[:-1], 1)))
    values[rng.random(shape) < 0.1] = 0
    values[rng.random(shape) < 0.1] = 0.75
    values[0] = 448.0
    return values.astype(np.float32)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(quantiser.q8, quant.FP8), (quantiser.q4_index, quant.FP4_INDEX), (quantiser.q4_entry, quant.FP4_ENTRY)],
)
def test_activations_round_as_in_the_reference(ours, theirs) -> None:  # type: ignore[no-untyped-def]
    x = draw(200, 64)
    np.testing.assert_array_equal(ours(torch.from_numpy(x)).numpy(), theirs.roundtrip(x))
    rounded = torch.from_numpy(x).bfloat16()
    again = theirs.roundtrip(rounded.float().numpy())
    np.testing.assert_array_equal(ours(rounded).float().numpy(), torch.from_numpy(again).bfloat16().float().numpy())


def test_weights_round_as_they_are_packed() -> None:
    w = draw(96, 64)
    packed = {
        quantiser.dense_weight: dequantise_dense(*pack_dense(w)),
        quantiser.expert_weight: dequantise_expert(*pack_fp4(w)),
        quantiser.table: dequantise_rows(*pack_table(w)),
    }
    for ours, stored in packed.items():
        np.testing.assert_array_equal(ours(torch.from_numpy(w)).numpy(), stored)


def dequantise_rows(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """A table's values before they are rounded to BF16."""
    values = quant.decode_e4m3(codes.view(np.uint8))
    return values * np.repeat(quant.decode_e8m0(scale.view(np.uint8)), 32, axis=1)


def test_gradients_pass_straight_through() -> None:
    x = torch.from_numpy(draw(8, 64)).requires_grad_()
    weight = torch.arange(64.0)
    (quantiser.q8(x) * weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.expand(8, -1))
