"""Makes golden directories of any sizes, to test the comparison (not the model) on.

The numbers come from the reference itself, with sums in another order.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.header import DTYPES
from dsuf.checkpoint.inventory import TensorSpec
from dsuf.checkpoint.shards import Checkpoint
from dsuf.checkpoint.synthetic import write_synthetic
from dsuf.checkpoint.writer import write_safetensors
from dsuf.golden.choices import score_entries
from dsuf.golden.measure import Array
from dsuf.golden.trace import recorded_name
from dsuf.reference import attention, compress, engram, hyper, indexer, moe, norm
from dsuf.reference import draft as draft_module
from dsuf.reference import model as model_module
from dsuf.reference.arithmetic import F32, F64, I64, ArithmeticName, by_name
from dsuf.reference.batch import ForcedChoices, Segment
from dsuf.reference.draft import Draft
from dsuf.reference.loader import load_model
from dsuf.reference.model import Model, enter_streams
from dsuf.reference.weights import WeightSource

FLAVOURS: tuple[ArithmeticName, ...] = ("fp32", "fp32q", "official")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@contextmanager
def other_sums() -> Iterator[None]:
    """Within, products and norms are summed in float32, as another correct program does it."""
    with ExitStack() as stack:
        for module in (attention, compress, draft_module, engram, hyper, indexer, model_module, moe):
            if hasattr(module, "matmul"):
                stack.enter_context(patch.object(module, "matmul", _matmul))
        for module in (engram, hyper, norm):
            stack.enter_context(patch.object(module, "inverse_rms", _inverse_rms))
        yield


def _matmul(x: F32, weight: F64) -> F32:
    """Like the reference's, with sums in float32."""
    return np.matmul(x, weight.T.astype(np.float32))


def _inverse_rms(x: F32, eps: float) -> F32:
    """Like the reference's, with the mean in float32."""
    return np.float32(1) / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))


def forge_checkpoint(directory: Path, config: ModelConfig, tokenizer: bytes, seed: int) -> None:
    """Write a random checkpoint for a golden directory into the existing `directory`."""
    (directory / "tiny").mkdir()
    write_synthetic(directory / "tiny", config, seed, tokenizer)


def forge_cases(directory: Path, *, seed: int, positions: int, flavours: tuple[ArithmeticName, ...] = FLAVOURS) -> None:
    """Write all cases but the fixed ones beside the checkpoint in `directory`, for a random text."""
    (directory / "cases").mkdir()
    config = load_config(directory / "tiny" / "config.json")
    ids = np.random.default_rng(seed).integers(3, config.vocab_size, positions)
    cases: dict[str, dict[str, Array]] = {}
    for flavour in flavours:
        model = load_model(directory / "tiny", by_name(flavour))
        draft = Draft(WeightSource(Checkpoint.open(directory / "tiny").tensor), model)
        with other_sums():
            for name, tensors in _record(model, draft, ids, flavour).items():
                cases.setdefault(name, {}).update(tensors)
            cases[f"trace_{flavour}"] = _trace(model, ids)
    for name, tensors in cases.items():
        write_case(directory / "cases" / f"{name}.safetensors", tensors)


def write_case(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write a case file."""
    drawn = [(TensorSpec(name, _NAMES[value.dtype], value.shape, "head"), value) for name, value in tensors.items()]
    write_safetensors(path, drawn)


def _record(model: Model, draft: Draft, ids: I64, flavour: str) -> dict[str, dict[str, Array]]:
    """Inputs and results of the cases of whole runs."""
    start, lengths = len(ids) // 3 | 1, np.array([1, 2, 3, len(ids) // 2])
    cache = model.new_cache()
    output = model.forward([(cache, ids)])
    logits = model.logits(output, slice(None))
    own = _decode(model, ids, start)
    for layer in model.layers:
        layer.attention.own_keys = False
    released = _decode(model, ids, start)
    for layer in model.layers:
        layer.attention.own_keys = True
    greedy, gaps = _continue(model, ids[:start], 6)
    return {
        "text_full": {
            "input_ids": ids, f"logits.{flavour}": logits, f"main_hidden.{flavour}": _store(model, output.taps),
        },
        "short": {
            "input_ids": ids, "prefix_lens": lengths,
            f"last_logits.{flavour}": np.concatenate([_decode(model, ids[:n], n) for n in lengths]),
        },
        "decode": {
            "input_ids": ids, "prefill_len": np.array([start]), f"logits.own_keys.{flavour}": own,
            f"logits.as_released.{flavour}": released, f"logits.full_prefill.{flavour}": logits[start - 1 :],
        },
        "greedy": {"prompt_ids": ids[:start], f"greedy_ids.{flavour}": greedy, f"top1_top2_gap.{flavour}": gaps},
        "dspark": _draft(model, draft, ids[: start + 5], start, flavour),
    }  # fmt: skip


def _store(model: Model, x: F32) -> Array:
    """`x` in the type in which activations are recorded."""
    return x.astype(ml_dtypes.bfloat16 if model.arithmetic.rounds else np.float32)


def _decode(model: Model, ids: I64, start: int) -> F32:
    """Logits of position `start` - 1 and of each later one, fed one by one."""
    cache = model.new_cache()
    rows = [model.logits(model.forward([(cache, ids[:start])]), slice(-1, None))]
    rows += [model.logits(model.forward([(cache, ids[i : i + 1])]), slice(None)) for i in range(start, len(ids))]
    return np.concatenate(rows)


def _continue(model: Model, prompt: I64, count: int) -> tuple[I64, F32]:
    """Greedy ids after `prompt`, and their margins."""
    cache, ids, gaps = model.new_cache(), [], []
    logits = model.logits(model.forward([(cache, prompt)]), slice(-1, None))[0]
    for _ in range(count):
        best = np.sort(logits)[-2:]
        ids.append(int(logits.argmax()))
        gaps.append(best[1] - best[0])
        logits = model.logits(model.forward([(cache, np.array(ids[-1:]))]), slice(None))[0]
    return np.array(ids), np.array(gaps, np.float32)


def _draft(model: Model, draft: Draft, ids: I64, start: int, flavour: str) -> dict[str, Array]:
    """The draft case."""
    cache = model.new_cache()
    output = model.forward([(cache, ids[:start])])
    draft.feed(cache, 0, output.taps)
    results: dict[str, Array] = {
        "prefill_main_hidden": _store(model, output.taps),
        "prefill_next": model.logits(output, slice(-1, None)).argmax(axis=1),
    }
    anchors, taps, blocks = [], [], []
    for position in range(start, len(ids)):
        output = model.forward([(cache, ids[position : position + 1])])
        anchors.append(int(model.logits(output, slice(None)).argmax()))
        taps.append(output.taps)
        draft.feed(cache, position, output.taps)
        blocks.append(draft.propose([(cache, position + 1, anchors[-1])]))
    results |= {
        "main_next": np.array(anchors), "main_hidden": _store(model, np.concatenate(taps)),
        "draft_ids": np.stack([np.append(anchor, block.ids[0]) for anchor, block in zip(anchors, blocks, strict=True)]),
        "draft_logits": np.concatenate([block.logits for block in blocks]),
        "confidence": np.concatenate([block.confidence for block in blocks]),
    } | {f"last_step_stage{i}_h": _store(model, h) for i, h in enumerate(blocks[-1].stages)}  # fmt: skip
    named = {f"{name}.{flavour}": value for name, value in results.items()}
    return {"input_ids": ids, "prefill_len": np.array([start])} | named


def _trace(model: Model, ids: I64) -> dict[str, Array]:
    """All that happens in a prefill of `ids`, layer by layer."""
    config, cache, observer = model.config, model.new_cache(), ForcedChoices({})
    cache.put_ids(0, ids)
    segment = Segment(cache, 0, len(ids))
    batch = model.batch([segment])
    h = model.embedding[ids]
    streams, pre = enter_streams(h, config.hc_mult)
    trace: dict[str, Array] = {"input_ids": ids, "h_embed": _store(model, h)}
    for layer in range(config.n_layers):
        name = f"layers.{layer}."
        if layer in config.engram_layer_ids:
            rows = model.hash.rows(config.engram_layer_ids.index(layer), model.hash.history(ids))
            streams = model.engrams[layer].forward(streams, rows)
            trace |= {f"{name}engram_hash_ids": rows, f"{name}h_after_engram": _store(model, streams)}
        u = model.layers[layer].attention_input(streams, pre)
        streams, pre = model.layers[layer].forward(streams, pre, batch, observer)
        if config.mode(layer) in ("full", "reindex"):
            trace |= _index(
                model, layer, score_entries(SimpleNamespace(model=model, config=config), layer, u, batch, segment)
            )
        if config.mode(layer) == "full":
            entries = slice(len(ids) // config.ratio(layer))
            trace[f"{name}compressed_kv"] = _store(model, cache.entries[layer].read(entries).astype(np.float32))
            trace[f"{name}index_k"] = _store(model, cache.index_keys[layer].read(entries).astype(np.float32))
        if layer == config.candidate_source_layer:
            entries = len(ids) // config.ratio(layer)
            every = np.ones((len(ids), entries), np.uint8)  # recorded too where there is nothing to leave out
            trace[f"{name}candidates"] = every if segment.candidates is None else segment.candidates.astype(np.uint8)
    return trace | {recorded_name(name): _as_recorded(model, name, value) for name, value in observer.seen.items()}


def _as_recorded(model: Model, name: str, value: NDArray[np.generic]) -> Array:
    """What an observer saw, in the type of a trace."""
    if name.endswith(("router_indices", "index_topk")):
        return value.astype(np.int32)
    single = value.astype(np.float32)
    return single if name.endswith(("router_weights", "pre_mix_out")) else _store(model, single)


def _index(model: Model, layer: int, scores: F32) -> dict[str, Array]:
    """Scores of an index layer and the margin of its choice; the choice itself is seen."""
    count = model.config.index_topk
    ranked = -np.sort(-scores, axis=1)
    margin = np.full(len(scores), np.inf, np.float32)
    if scores.shape[1] > count:
        free = ranked[:, count] > -np.inf
        margin[free] = ranked[free, count - 1] - ranked[free, count]
    return {f"layers.{layer}.index_score": _store(model, scores), f"layers.{layer}.index_margin": margin}
