"""The training program's model against the reference, on one exported checkpoint."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bench.nano.export import export, restore  # noqa: E402
from bench.nano.mode import Mode  # noqa: E402
from bench.nano.model import Nano  # noqa: E402
from bench.nano.sizes import SIZES, TOY  # noqa: E402
from dsuf.checkpoint.forms import RELEASED  # noqa: E402
from dsuf.checkpoint.inventory import expected_tensors  # noqa: E402
from dsuf.checkpoint.shards import Checkpoint  # noqa: E402
from dsuf.checkpoint.token_map import TokenMap  # noqa: E402
from dsuf.checkpoint.vocabulary_cut import cut_tokenizer  # noqa: E402
from dsuf.reference.arithmetic import ArithmeticName, by_name  # noqa: E402
from dsuf.reference.loader import load_draft, load_model  # noqa: E402
from tests.nano.layers import assert_near, measure_distance, measure_layers  # noqa: E402

LENGTH, ANCHOR = 160, 149
MODES = {"fp32": Mode(False, False, True), "fp32q": Mode(False, True, True)}
LIMITS: dict[ArithmeticName, float] = {"fp32": 1e-5, "fp32q": 0.13}
"""Largest relative distance of a row. Two right programs with quantisers are equal until one value, summed in another
order, crosses a rounding boundary; then per cents apart, as the golden vectors' own comparison says."""


class Pair(NamedTuple):
    """A checkpoint and the model that it was exported from, its masters set to what the checkpoint means."""

    directory: Path
    model: Nano
    ids: "torch.Tensor"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp("exported")
    tokenizer = cut_tokenizer(RELEASED / "tokenizer.json", TOY.vocab_size)
    (directory / "tokenizer.json").write_bytes(tokenizer)
    token_ids = torch.from_numpy(TokenMap.from_tokenizer(directory / "tokenizer.json").ids)
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(5)
    model = Nano(TOY, token_ids, torch.float32, LENGTH)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        for router in model.routers():
            router.bias.add_(0.1 * torch.randn(router.bias.shape, generator=generator))
    ids = torch.randint(0, TOY.vocab_size, (1, LENGTH), generator=generator)
    before = model.logits(ids, MODES["fp32q"])
    export(model, directory, tokenizer)
    restore(model, directory)
    assert torch.equal(before, model.logits(ids, MODES["fp32q"])), (
        "an exported weight is not what training computed with"
    )
    return Pair(directory, model, ids)


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("replay", [False, True])
def test_logits_and_drafts_are_the_references(pair: Pair, name: ArithmeticName, replay: bool) -> None:
    """Logits of all rows, then a block of drafts with its confidence; exact prefill and bounded replay."""
    model, ids, arithmetic = pair.model, pair.ids, by_name(name)
    model.dtype = torch.float32
    reference = load_model(pair.directory, arithmetic)
    draft, cache, prompt = load_draft(pair.directory, reference), reference.new_cache(), ids[0, :ANCHOR].numpy()
    output = reference.prefill_replay(cache, prompt, last=True) if replay else reference.forward([(cache, prompt)])
    assert output is not None
    first = ANCHOR - len(output.pre)
    replay_from = torch.tensor([first]) if replay else None
    ours = model.logits(ids, MODES[name], replay_from)[0, first:ANCHOR]
    off = measure_distance(ours, reference.logits(output, slice(None)))
    print(f"{name}, replay {replay}: median {off.median():.1e}, largest {off.max():.1e}")
    assert off.median() < 1e-5 and off.max() < LIMITS[name]
    draft.feed(cache, first, output.taps)
    forced = ids[0, ANCHOR + 1 :].numpy()
    block = draft.propose([(cache, ANCHOR, int(ids[0, ANCHOR]))], pick=lambda slot, _: forced[slot : slot + 1])
    drafted = model.draft(ids, MODES[name], torch.tensor([ANCHOR]), replay_from)
    assert measure_distance(drafted.logits[0], block.logits[0]).max() < LIMITS[name]
    np.testing.assert_allclose(drafted.confidence[0].numpy(), block.confidence[0], atol=LIMITS[name])


def test_every_layer_is_the_references_in_the_released_arithmetic(pair: Pair) -> None:
    assert_near(measure_layers(pair.model, pair.directory, pair.ids))


def test_an_exported_directory_is_whole(pair: Pair) -> None:
    """It opens, with every tensor of its sizes, and says the sizes that it was made with."""
    with Checkpoint.open(pair.directory) as checkpoint:
        assert checkpoint.config == TOY


def test_sizes_are_those_of_the_tokenizer_and_fit() -> None:
    """20 million bytes hold tensors, their names, the tokenizer and a page about them."""
    specs = list(expected_tensors(SIZES))
    names = sum(2 * len(spec.name) + 130 for spec in specs)
    assert sum(spec.bytes for spec in specs) + names + 140_000 < 20_000_000
