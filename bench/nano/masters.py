"""State of a training on disk: all that a resume needs, in files that a small transfer can carry.

Masters are kept as fp32 for a resume in place, or as bf16 where the files have to travel. The order of the parameters
is part of the file, so that a state is never read into other sizes.
"""

import json
from pathlib import Path

import torch

from bench.nano.optimiser import Optimiser
from dsuf.errors import CheckpointError

FILE_BYTES = 15 << 20
INDEX = "state.json"


def save_state(directory: Path, optimiser: Optimiser, progress: dict[str, object], dtype: torch.dtype) -> None:
    """Write masters, momenta and `progress` (what JSON can hold); the index last, so that a cut write is no state.

    Momenta are bf16 in any case: they steer the next steps only.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / INDEX).unlink(missing_ok=True)
    tensors = []
    for name, tensor in optimiser.state().items():
        kept = torch.bfloat16 if name in ("momentum", "squares") else dtype if name == "masters" else torch.float32
        flat = tensor.detach().to("cpu", kept).reshape(-1)
        parts = flat.split(FILE_BYTES // flat.element_size())
        files = [f"{name}.{i}.bin" for i in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            (directory / file).write_bytes(part.contiguous().view(torch.uint8).numpy().tobytes())
        tensors.append({"name": name, "dtype": str(kept).removeprefix("torch."), "files": files})
    index = {"order": optimiser.order, "tensors": tensors, "progress": progress}
    (directory / INDEX).write_text(json.dumps(index))


def load_state(directory: Path, optimiser: Optimiser) -> dict[str, object]:
    """Read what `save_state` wrote into an optimiser of the same parameters; returns the progress."""
    index = json.loads((directory / INDEX).read_text())
    if index["order"] != optimiser.order:
        raise CheckpointError(f"{directory}: the state is of a model with other parameters")
    state = {}
    for entry in index["tensors"]:
        data = b"".join((directory / file).read_bytes() for file in entry["files"])
        state[entry["name"]] = torch.frombuffer(bytearray(data), dtype=getattr(torch, entry["dtype"]))
    optimiser.restore(state)
    progress: dict[str, object] = index["progress"]
    return progress
