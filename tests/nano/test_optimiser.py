"""The optimiser against PyTorch's own, and what it must leave alone."""

import pytest

torch = pytest.importorskip("torch")

from bench.nano.optimiser import (  # noqa: E402
    ADAM_BETAS,
    ADAM_EPS,
    ADAM_RATE,
    ALIGNED,
    BIAS_RATE,
    CLIP_NORM,
    MUON_DECAY,
    MUON_MOMENTUM,
    MUON_RATE,
    Optimiser,
    adam_rate,
    is_draft,
    orthogonalise,
    takes_muon,
)


def make(seed: int = 0) -> dict[str, "torch.nn.Parameter"]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "layers.0.attn.wq_a": (16, 32),
        "layers.0.ffn.experts.w1": (3, 24, 32),
        "layers.0.ffn.gate": (3, 32),
        "layers.0.attn_norm": (32,),
        "mtp.0.attn.wq_a": (16, 32),
    }
    return {n: torch.nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}


def set_gradients(parameters: dict[str, "torch.nn.Parameter"], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad.copy_(1e-3 * torch.randn(parameter.shape, generator=generator))


def test_agrees_with_the_library_over_some_steps() -> None:
    mine, theirs = make(), make()
    optimiser = Optimiser(mine.items(), [])
    optimiser.set_pace(1.0, draft_on=True)
    muon = [theirs[n] for n in ("layers.0.attn.wq_a", "mtp.0.attn.wq_a")]
    adam = [theirs[n] for n in ("layers.0.ffn.gate", "layers.0.attn_norm")]
    library = [
        torch.optim.Muon(muon, lr=MUON_RATE, weight_decay=MUON_DECAY, momentum=MUON_MOMENTUM, adjust_lr_fn="original"),
        torch.optim.AdamW(adam, lr=ADAM_RATE, betas=ADAM_BETAS, eps=ADAM_EPS, weight_decay=0.0),
    ]
    for parameter in theirs.values():
        parameter.grad = torch.zeros_like(parameter)
    for step in range(5):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        optimiser.step()
        for part in library:
            part.step()
    for name in ("layers.0.ffn.gate", "layers.0.attn_norm"):
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-6)
    for name in ("layers.0.attn.wq_a", "mtp.0.attn.wq_a"):  # the library multiplies in bf16
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=4e-3)
        assert (mine[name] - make()[name]).abs().max() > 0.01


def test_every_parameter_is_aligned() -> None:
    shapes = {
        "layers.0.hc_attn_scale": (3,),
        "layers.0.attn.wq_a": (3, 7),
        "layers.1.attn.wq_a": (3, 7),
        "head": (5, 7),
    }
    parameters = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimiser = Optimiser(parameters.items(), [])
    for name, parameter in parameters.items():
        assert (parameter.data_ptr() - optimiser.masters.data_ptr()) % (4 * ALIGNED) == 0
        assert torch.equal(parameter, before[name])
    assert [group.count for group in optimiser.groups] == [1, 1]
    assert len({parameter.data_ptr() for parameter in parameters.values()}) == len(parameters)


def test_a_stack_is_its_matrices() -> None:
    stack = torch.randn(3, 24, 32)
    for one, whole in zip(stack, orthogonalise(stack), strict=True):
        torch.testing.assert_close(orthogonalise(one[None])[0], whole)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(2, 48, 16)))
    assert values.min() > 0.6 and values.max() < 1.3


def test_gradient_is_clipped_and_an_unsound_one_moves_nothing() -> None:
    parameters = make()
    optimiser = Optimiser(parameters.items(), [])
    optimiser.set_pace(1.0, draft_on=True)
    optimiser.gradients.fill_(100.0)
    norm = optimiser.step()
    assert norm > 100 and abs(float(optimiser.gradients.norm()) - CLIP_NORM) < 1e-4
    before = optimiser.masters.clone()
    optimiser.gradients.fill_(float("nan"))
    optimiser.step()
    assert torch.equal(before, optimiser.masters) and float(optimiser.count) == 1


def test_a_draft_without_gradients_stays() -> None:
    parameters = make()
    optimiser = Optimiser(parameters.items(), [])
    optimiser.set_pace(1.0, draft_on=False)
    set_gradients(parameters, 1)
    parameters["mtp.0.attn.wq_a"].grad.zero_()
    optimiser.step()
    assert torch.equal(parameters["mtp.0.attn.wq_a"], make()["mtp.0.attn.wq_a"])
    assert not torch.equal(parameters["layers.0.attn.wq_a"], make()["layers.0.attn.wq_a"])


def test_rate_zero_moves_nothing() -> None:
    parameters = make()
    bias = torch.zeros(2)
    optimiser = Optimiser(parameters.items(), [bias])
    set_gradients(parameters, 1)
    optimiser.step([torch.tensor([0.9, 0.1])])
    for name, parameter in make().items():
        assert torch.equal(parameter, parameters[name])
    assert not bias.any()


def test_routers_are_pushed_towards_equal_loads() -> None:
    bias = torch.zeros(3)
    optimiser = Optimiser(make().items(), [bias])
    optimiser.set_pace(1.0, draft_on=False)
    optimiser.step([torch.tensor([0.9, 0.5, 0.1])])
    torch.testing.assert_close(bias, torch.tensor([-BIAS_RATE, 0.0, BIAS_RATE]))


def test_state_goes_on_where_it_was() -> None:
    ran, resumed = make(), make(seed=9)
    first, second = Optimiser(ran.items(), [torch.zeros(1)]), Optimiser(resumed.items(), [torch.zeros(1)])
    for optimiser in (first, second):
        optimiser.set_pace(1.0, draft_on=True)
    for step in range(3):
        set_gradients(ran, step)
        first.step()
    second.restore({name: tensor.clone() for name, tensor in first.state().items()})
    for parameters, optimiser in ((ran, first), (resumed, second)):
        set_gradients(parameters, 7)
        optimiser.step()
    assert torch.equal(first.masters, second.masters)


@pytest.mark.parametrize(
    ("name", "muon"),
    [
        ("embed", False),
        ("head", False),
        ("layers.1.engram.embed", False),
        ("layers.1.engram.wkv", True),
        ("layers.0.hc_attn_fn", False),
        ("layers.2.attn.compressor.wgate", True),
        ("layers.2.attn.indexer.weights_proj", False),
        ("layers.2.ffn.gate", False),
        ("layers.2.ffn.experts.w2", True),
        ("mtp.0.main_proj", True),
        ("mtp.2.markov_head.head", False),
        ("mtp.2.confidence_head.proj", False),
    ],
)
def test_kinds_by_name(name: str, muon: bool) -> None:
    assert takes_muon(name, torch.zeros(4, 4)) is muon
    assert is_draft(name) is name.startswith("mtp")
    assert adam_rate("layers.1.engram.embed") > adam_rate("embed") > adam_rate("head") == ADAM_RATE
