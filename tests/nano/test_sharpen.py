"""Doubled logits: every choice stays, whatever was likely is likelier, and the checkpoint holds it exactly."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from bench.nano.data.toy import make_toy_package  # noqa: E402
from bench.nano.export import export, restore  # noqa: E402
from bench.nano.mode import Mode  # noqa: E402
from bench.nano.model import Nano  # noqa: E402
from bench.nano.optimiser import name_parameters  # noqa: E402
from bench.nano.sharpen import sharpen  # noqa: E402
from bench.nano.sizes import TOY  # noqa: E402
from bench.nano.start import start_weights  # noqa: E402

MODE = Mode(dense=False, quantised=True, draft=True)


def make(seed: int) -> Nano:
    token_ids = torch.arange(TOY.vocab_size) % TOY.engram_compressed_vocab_size
    model = Nano(TOY, token_ids, torch.float32, 64)
    start_weights(name_parameters(model), TOY, seed)
    with torch.no_grad():
        model.mtp.choice.markov_head.head.normal_(generator=torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def test_logits_and_drafts_double_to_the_bit(tmp_path: Path) -> None:
    model, ids = make(1), torch.randint(0, 400, (1, 64), generator=torch.Generator().manual_seed(0))
    anchors = torch.arange(4, 50, 5)
    before, drafted = model.logits(ids, MODE), model.draft(ids, MODE, anchors)
    sharpen(model)
    assert torch.equal(model.logits(ids, MODE), 2 * before)
    after = model.draft(ids, MODE, anchors)
    assert torch.equal(after.logits, 2 * drafted.logits)
    assert torch.equal(after.confidence, drafted.confidence)
    export(model, tmp_path, make_toy_package().tokenizer_text.encode())
    read = make(2)
    restore(read, tmp_path)
    torch.testing.assert_close(read.logits(ids, MODE), 2 * before)
