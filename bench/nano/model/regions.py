"""Compilation in parts, each once for all layers that it serves.

A model of thirteen blocks as one graph would take minutes to compile; its parts take seconds. Parts that work on rows
alone are compiled for any number of rows, those that know of sequences for each shape.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.nano.model import backbone, nano
from bench.nano.model.draft import Choice, Intake
from bench.nano.model.engram import Engram
from bench.nano.model.layer import Attention, Block, Stage
from bench.nano.model.nano import Nano

_BY_ROW: dict[type[nn.Module], tuple[str, ...]] = {
    Block: ("enter", "leave"),
    Attention: ("project", "compress", "ask"),
    Intake: ("forward",),
    Engram: ("forward",),
}
_BY_SHAPE: dict[type[nn.Module], tuple[str, ...]] = {
    Attention: ("look",),
    Stage: ("look",),
    Choice: ("forward",),
}


def compile_regions(model: Nano) -> None:
    """From now on the parts of `model` are compiled at their first calls."""
    torch._dynamo.config.recompile_limit = 64
    for module in model.modules():
        for kinds, by_row in ((_BY_ROW, True), (_BY_SHAPE, False)):
            for kind, names in kinds.items():
                for name in names if isinstance(module, kind) else ():
                    setattr(module, name, _compile(getattr(module, name), by_row=by_row))
    for place, name in ((backbone, "choose"), (backbone, "divergence_of"), (nano, "judge_text"), (nano, "judge")):
        setattr(place, name, _compile(getattr(place, name), by_row=False))


def _compile(function: Callable[..., Any], *, by_row: bool) -> Callable[..., Any]:
    """`function` compiled whole; `by_row`: the first axis of all its tensors counts rows, of any number."""
    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    if not by_row:
        return compiled

    def call(*arguments: Any) -> Any:
        for tensor in _tensors(arguments):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*arguments)

    return call


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among `arguments` and in the tuples of these."""
    found: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, tuple):
            found += _tensors(argument)
    return found
