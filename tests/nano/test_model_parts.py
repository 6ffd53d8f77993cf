"""Mechanisms of the training model by themselves: what attends to what, and what a gradient reaches."""

import msgspec
import pytest

torch = pytest.importorskip("torch")

from bench.nano.mode import Mode  # noqa: E402
from bench.nano.model import Nano, sinkhorn  # noqa: E402
from bench.nano.model.gather import gather  # noqa: E402
from bench.nano.sizes import TOY  # noqa: E402
from dsuf.checkpoint.config import ModelConfig  # noqa: E402

LENGTH = 64
DENSE, SPARSE = Mode(True, False, False), Mode(False, False, False)


def make(config: ModelConfig = TOY, dtype: "torch.dtype" = torch.float32) -> Nano:
    """A random model whose smaller parameters are not at their neutral values."""
    torch.manual_seed(3)
    model = Nano(config, torch.arange(config.vocab_size) % config.engram_compressed_vocab_size, dtype, 2 * LENGTH)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for router in model.routers():
            router.bias.add_(0.1 * torch.randn_like(router.bias))
    return model


def draw_ids(*shape: int) -> "torch.Tensor":
    return torch.randint(0, TOY.vocab_size, shape, generator=torch.Generator().manual_seed(1))


def test_selecting_everything_is_dense() -> None:
    """With as many selected entries as there are, both forms give the same logits."""
    model = make(msgspec.structs.replace(TOY, index_topk=LENGTH, candidate_topk_blocks=LENGTH))
    ids = draw_ids(2, LENGTH)
    dense, sparse = model.logits(ids, DENSE), model.logits(ids, SPARSE)
    assert (dense - sparse).norm() < 1e-5 * dense.norm()
    few = make(TOY)
    assert (few.logits(ids, DENSE) - few.logits(ids, SPARSE)).norm() > 1e-3 * dense.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [DENSE, SPARSE, Mode(False, True, False)])
def test_no_row_sees_what_comes_after_it(mode: Mode, dtype: "torch.dtype") -> None:
    """Other tokens from a position on leave all earlier logits as they were, to the bit, and change later ones."""
    model, ids, changed = make(dtype=dtype), draw_ids(2, LENGTH), draw_ids(2, LENGTH)
    at = 41
    changed[:, at:] = (ids[:, at:] + 1) % TOY.vocab_size
    changed[:, :at] = ids[:, :at]
    before, after = model.logits(ids, mode), model.logits(changed, mode)
    assert torch.equal(before[:, :at], after[:, :at])
    assert not torch.equal(before[:, at:], after[:, at:])


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    model, ids = make(), draw_ids(2, LENGTH)
    together = model.logits(ids, SPARSE)
    for row in range(2):
        alone = model.logits(ids[row : row + 1], SPARSE)[0]
        assert (together[row] - alone).norm() < 1e-5 * alone.norm()


def test_every_parameter_learns() -> None:
    """A step with drafts gives every parameter a finite gradient that is not zero."""
    model = make()
    ids, weights = draw_ids(2, LENGTH), torch.ones(2, LENGTH)
    model(ids, weights, Mode(False, True, True), torch.tensor([20, 40, LENGTH + 30])).loss.backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()]
    assert idle == []


def test_the_index_loss_trains_the_indexer_alone() -> None:
    model = make()
    passed = model._run(draw_ids(2, LENGTH), SPARSE, None)
    passed.index_loss.sum().backward()
    reached = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached and all(".indexer." in name for name in reached)
    text = make()
    text._predict(text._run(draw_ids(2, LENGTH), SPARSE, None)).square().mean().backward()
    assert not any(".indexer." in n for n, p in text.named_parameters() if p.grad is not None and p.grad.any())


def test_drafts_train_the_draft_head_alone() -> None:
    model, ids = make(), draw_ids(2, LENGTH)
    passed = model._run(ids, SPARSE, None)
    drafted = model._draft(ids, passed, torch.tensor([20, 40]), Mode(False, False, True), None)
    (drafted.logits.square().mean() + drafted.confidence.sum()).backward()
    reached = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached and all(name.startswith("mtp.") for name in reached)


def test_short_batches_without_weights_give_no_nan() -> None:
    model, ids = make(), draw_ids(1, 8)
    done = model(ids, torch.zeros(1, 8), Mode(False, True, True), torch.tensor([0, 7]))
    done.loss.backward()
    assert done.loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def plain_sinkhorn(logits: "torch.Tensor", rounds: int, eps: float) -> "torch.Tensor":
    c = torch.softmax(logits, 2) + eps
    c = c / (c.sum(1, keepdim=True) + eps)
    for _ in range(rounds - 1):
        c = c / (c.sum(2, keepdim=True) + eps)
        c = c / (c.sum(1, keepdim=True) + eps)
    return c


def test_sinkhorn_gradient_is_that_of_its_rounds() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = (2 * torch.randn(50, 4, 4, generator=generator)).requires_grad_()
    pull = torch.randn(50, 4, 4, generator=generator)
    ours, plain = sinkhorn.sinkhorn(logits, 20, 1e-6), plain_sinkhorn(logits, 20, 1e-6)
    torch.testing.assert_close(ours, plain)
    mine, theirs = (torch.autograd.grad((c * pull).sum(), logits)[0] for c in (ours, plain))
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


def test_a_gather_adds_its_gradient_up_in_float32() -> None:
    """A thousand small parts arrive in full, where a sum in BF16 would stand still."""
    table = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    rows = torch.tensor([1] * 1000 + [2])
    (gather(table, rows) * 0.125).sum().backward()
    assert table.grad is not None
    assert table.grad[:, 0].tolist() == [0.0, 125.0, 0.125]
