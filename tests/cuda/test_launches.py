"""Whole passes on paper: every launch has all that its kernel asks for, and arrays large enough for it."""

from collections import Counter
from pathlib import Path

import pytest

from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.forms import RELEASED
from dsuf.checkpoint.synthetic import EMBEDDED
from dsuf.cuda.machine import Machine, Setup, plan_regions, plan_sizes
from dsuf.cuda.step import StepShape
from tests.cuda.paper import PaperArena, PaperKernels
from tests.golden.cut import cut_config

TINY = Path(__file__).parents[1] / "golden" / "tiny" / "config.json"
CONFIGS = {
    "tiny": load_config(TINY), "embedded": EMBEDDED, "released": load_config(RELEASED / "config.json"),
    "without a draft head": cut_config(load_config(TINY)),
}  # fmt: skip


def make_machine(config: ModelConfig, **changes: object) -> tuple[Machine, PaperKernels]:
    """A machine on paper."""
    setup = Setup(context_tokens=4096, max_turns=6, **changes)
    arena, kernels = PaperArena(plan_regions(config, setup, 70)), PaperKernels(config)
    return Machine(None, kernels, arena, config, plan_sizes(config, setup, 70), setup, 0), kernels


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("batch", "drafts"), [(1, 0), (6, 5), *(pytest.param(*n, marks=pytest.mark.full) for n in ((6, 0), (1, 5), (4, 2)))]
)
@pytest.mark.parametrize("confidence", [0.0, 0.5])
@pytest.mark.parametrize("extras", [False, True])
def test_step(name: str, batch: int, drafts: int, confidence: float, extras: bool) -> None:
    """A decode step of every size; the draft head runs only where there are drafts to make."""
    machine, kernels = make_machine(CONFIGS[name], confidence=confidence)
    drafts = drafts if machine.draft else 0
    machine.decoder.queue(StepShape(batch, drafts, 4096, extras), 0)
    count = Counter(entry for entry, _ in kernels.launches)
    config = machine.config
    assert count["attend_sparse"] == config.n_layers + (config.n_mtp_layers if drafts else 0)
    assert count["add_markov"] == (config.dspark_block_size if drafts else 0)
    assert count["rate_drafts"] == int(drafts > 0 and confidence > 0)
    assert count["advance_turns"] == 1
    entries = [entry for entry, _ in kernels.launches]
    order = ["ask_masks", "rank_logits", "await_masks", "mask_logits", "rate_tokens"]
    assert [entry for entry in entries if entry in order] == (order if extras else [])
    indexed = len(config.index_source_layers)
    assert count["score_index"] == count["select_rows"] == indexed


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows", [1, 32, 256])
def test_prefill(name: str, rows: int) -> None:
    """Both kinds of pass; the encoder's runs the layers below the last source of entries, and half of that one."""
    machine, kernels = make_machine(CONFIGS[name])
    config = machine.config
    machine.prefiller.queue("forward", rows, 4096, 0)
    assert sum(entry == "attend_sparse" for entry, _ in kernels.launches) == config.n_layers
    kernels.launches.clear()
    machine.prefiller.queue("encode", rows, 4096, 0)
    count = Counter(entry for entry, _ in kernels.launches)
    assert count["attend_sparse"] == config.decoder_start
    assert count["store_entry"] == len(config.kv_source_layers)
