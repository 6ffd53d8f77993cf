"""Compilation in parts, each once for all layers that it serves.

A model of thirteen blocks as one graph would take minutes to compile; its parts take seconds. Most parts work on rows
alone: buckets of equal numbers of rows share them. Shapes are static, since tracing with unknown ones takes far longer.
"""

from types import ModuleType

import torch
from torch import nn

from bench.nano.model import backbone, nano
from bench.nano.model.draft import Choice, Intake
from bench.nano.model.engram import Engram
from bench.nano.model.layer import Attention, Block, Stage
from bench.nano.model.nano import Nano

_METHODS: dict[type[nn.Module], tuple[str, ...]] = {
    Block: ("enter", "leave"),
    Stage: ("look",),
    Attention: ("project", "compress", "ask", "look"),
    Engram: ("forward",),
    Intake: ("forward",),
    Choice: ("forward",),
}
_FUNCTIONS: tuple[tuple[ModuleType, str], ...] = (
    (backbone, "choose"), (backbone, "divergence_of"), (backbone, "gather"), (backbone, "mean_of_streams"),
    (nano, "predict"), (nano, "judge_text"), (nano, "judge"),
)  # fmt: skip


def compile_regions(model: Nano) -> None:
    """From now on the parts of `model` are compiled at their first calls, again for each shape and mode."""
    torch._dynamo.config.recompile_limit = 64
    for module in model.modules():
        names = [name for kind, own in _METHODS.items() if isinstance(module, kind) for name in own]
        for name in names:
            setattr(module, name, torch.compile(getattr(module, name), fullgraph=True, dynamic=False))
    for place, name in _FUNCTIONS:
        setattr(place, name, torch.compile(getattr(place, name), fullgraph=True, dynamic=False))
