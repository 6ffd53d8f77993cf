"""The first weights: what layer 0's heads look at, and that all else is as sizes demand."""

import pytest

torch = pytest.importorskip("torch")

from bench.nano.mode import Mode  # noqa: E402
from bench.nano.model import Nano  # noqa: E402
from bench.nano.optimiser import name_parameters  # noqa: E402
from bench.nano.sizes import SIZES, TOY  # noqa: E402
from bench.nano.start import fix_embedding, start_weights  # noqa: E402
from dsuf.checkpoint.config import ModelConfig  # noqa: E402

LENGTH = 128


def start(config: ModelConfig, seed: int = 3) -> Nano:
    token_ids = torch.arange(config.vocab_size) % config.engram_compressed_vocab_size
    model = Nano(config, token_ids, torch.float32, LENGTH)
    start_weights(name_parameters(model), config, seed)
    return model


@pytest.fixture(scope="module")
def model() -> Nano:
    return start(SIZES)


@torch.no_grad()
def test_heads_of_layer_0_look_back_by_one_to_four(model: Nano) -> None:
    """Each puts nine tenths of its attention on its place, through the quantisers and over a whole window."""
    ids = torch.randint(0, SIZES.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    layer, table = model.backbone.layers[0], model.backbone.window_table[:LENGTH]
    streams = model.embed[ids[0]].unsqueeze(1).expand(-1, SIZES.hc_mult, -1)
    first = torch.eye(SIZES.hc_mult)[:1].expand(LENGTH, -1)
    u, _ = layer.enter(streams, first)
    _, q, keys = layer.attn.project(u, table, True)
    scores = torch.einsum("thd,sd->hts", q, keys) * SIZES.head_dim**-0.5
    for head in range(SIZES.n_heads):
        windows = scores[head].unfold(1, SIZES.window_size, 1)[range(70, LENGTH), range(70 - 63, LENGTH - 63)]
        assert bool((windows.argmax(1) == SIZES.window_size - 2 - head).all())
        assert float(torch.softmax(windows, 1).amax(1).mean()) > 0.9


def test_the_constant_channel_is_about_two_after_the_norm(model: Nano) -> None:
    rows = model.embed.detach()
    assert bool((rows[:, 0] == 1).all())
    assert abs(float(1 / rows.square().mean(1).sqrt().mean()) - 2) < 0.1
    with torch.no_grad():
        model.embed[:, 0] = 5.0
    fix_embedding(model.embed)
    assert bool((model.embed[:, 0] == 1).all())


def test_streams_are_read_by_turns_and_kept(model: Nano) -> None:
    for index, layer in enumerate(model.backbone.layers):
        for kind, base in enumerate((layer.hc_attn_base, layer.hc_ffn_base)):
            assert int(base[:4].argmax()) == (2 * index + kind) % 4
            assert bool((base[8:].view(4, 4).argmax(1) == torch.arange(4)).all())


@pytest.mark.parametrize("config", [SIZES, TOY], ids=["sizes", "toy"])
def test_a_first_pass_is_sound(config: ModelConfig) -> None:
    model = start(config)
    ids = torch.randint(0, config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(0)).int()
    anchors = torch.arange(1, 100, 7)
    outcome = model(ids, torch.ones(2, LENGTH), Mode(dense=True, quantised=True, draft=True), anchors)
    outcome.loss.backward()
    named = dict(zip(("text", "index"), outcome.metrics.tolist(), strict=False))
    assert abs(named["text"] - float(torch.log(torch.tensor(float(config.vocab_size))))) < 1.0
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())


def test_the_same_seed_gives_the_same_weights() -> None:
    one, same, other = start(TOY), start(TOY), start(TOY, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.head, other.head)
