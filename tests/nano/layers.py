"""Each layer of the training program's model with the reference's input, in the released arithmetic."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.nano.mode import Mode
from bench.nano.model import Nano
from dsuf.reference.arithmetic import by_name
from dsuf.reference.batch import ForcedChoices
from dsuf.reference.loader import load_model

MEDIAN, MOST = 8e-3, 3e-2
"""What the golden vectors ask of an engine that rounds elsewhere, choices its own: of the median row and of 95 %."""


def measure_distance(ours: torch.Tensor, theirs: np.ndarray) -> torch.Tensor:
    """The relative difference of every row."""
    expected = torch.from_numpy(np.array(theirs)).flatten(1)
    return (ours.float().flatten(1) - expected).norm(dim=1) / expected.norm(dim=1)


def measure_layers(model: Nano, directory: Path, ids: torch.Tensor) -> list[torch.Tensor]:
    """Relative differences [rows] of every layer's streams for `ids` [1, rows], weights as in `directory`."""
    observer = ForcedChoices({})
    reference = load_model(directory, by_name("official"))
    reference.forward([(reference.new_cache(), ids[0].numpy())], observer)
    found: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        for index, layer in enumerate(model.backbone.layers):

            def leave(*arguments, index=index, plain=layer.leave):  # type: ignore[no-untyped-def]
                streams, _, load = plain(*arguments)
                found.append(measure_distance(streams, observer.seen[f"layers.{index}.h_out"]))
                given, pre = (np.array(observer.seen[f"layers.{index}.{name}"]) for name in ("h_out", "pre_mix_out"))
                return torch.from_numpy(given).bfloat16(), torch.from_numpy(pre), load

            patch.setattr(layer, "leave", leave)
        model.dtype = torch.bfloat16
        model.logits(ids, Mode(False, True, False))
    return found


def assert_near(distances: list[torch.Tensor]) -> None:
    """All layers within the limits; prints what they have."""
    for index, off in enumerate(distances):
        print(f"layer {index}: median {off.median():.1e}, 95 % {off.quantile(0.95):.1e}, largest {off.max():.1e}")
        assert off.median() < MEDIAN and off.quantile(0.95) < MOST, f"layer {index}"
