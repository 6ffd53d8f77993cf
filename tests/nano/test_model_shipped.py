"""The shipped weights in the training program and in the reference: the same model."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from bench.nano.export import export, restore  # noqa: E402
from bench.nano.mode import Mode  # noqa: E402
from bench.nano.model import Nano  # noqa: E402
from dsuf.checkpoint.config import load_config  # noqa: E402
from dsuf.checkpoint.token_map import TokenMap, load_tokenizer  # noqa: E402
from dsuf.reference.arithmetic import by_name  # noqa: E402
from dsuf.reference.loader import load_model  # noqa: E402
from tests.nano.layers import assert_near, measure_distance, measure_layers  # noqa: E402

SHIPPED = Path(__file__).parents[2] / "dsuf" / "nano"
TEXT = (
    'The code of "amber falcon" is 73914. The password of "quiet river" is 20658. What is the code of "amber falcon"?'
)
LENGTH = 192
pytestmark = pytest.mark.skipif(not (SHIPPED / "config.json").is_file(), reason=f"no trained model in {SHIPPED}")


@pytest.fixture(scope="module")
def model() -> Nano:
    token_ids = torch.from_numpy(TokenMap.from_tokenizer(SHIPPED / "tokenizer.json").ids)
    restored = Nano(load_config(SHIPPED / "config.json"), token_ids, torch.float32, LENGTH)
    restore(restored, SHIPPED)
    return restored


@pytest.fixture(scope="module")
def ids() -> "torch.Tensor":
    encoded = load_tokenizer(SHIPPED / "tokenizer.json").encode(TEXT * 6, add_special_tokens=False).ids
    return torch.tensor([[0, *encoded]])[:, :LENGTH]


def test_logits_are_the_references(model: Nano, ids: "torch.Tensor") -> None:
    """Without quantisers, the whole stack."""
    reference = load_model(SHIPPED, by_name("fp32"))
    output = reference.forward([(reference.new_cache(), ids[0].numpy())])
    model.dtype = torch.float32
    ours = model.logits(ids, Mode(False, False, False))[0]
    assert measure_distance(ours, reference.logits(output, slice(None))).max() < 1e-5


def test_every_layer_is_the_references_in_the_released_arithmetic(model: Nano, ids: "torch.Tensor") -> None:
    assert_near(measure_layers(model, SHIPPED, ids))


def test_the_next_tokens_are_the_references_in_the_released_arithmetic(model: Nano, ids: "torch.Tensor") -> None:
    """The whole stack, choices its own: rounding flips some, which the golden vectors grant to two in ten rows."""
    reference = load_model(SHIPPED, by_name("official"))
    output = reference.forward([(reference.new_cache(), ids[0].numpy())])
    model.dtype = torch.bfloat16
    ours = model.logits(ids, Mode(False, True, False))[0]
    same = (ours.argmax(1).numpy() == reference.logits(output, slice(None)).argmax(1)).mean()
    print(f"same arg-max: {same:.3f}")
    assert same > 0.9


def test_exporting_again_changes_no_value(model: Nano, tmp_path: Path) -> None:
    """What is stored is what its masters mean; packed once more, a scale may be finer, but every value is the same."""
    export(model, tmp_path, (SHIPPED / "tokenizer.json").read_bytes())
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    restore(model, tmp_path)
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, before[name]), name
