"""Which model a node serves, and with which engine."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.forms import NANO, RELEASED
from dsuf.checkpoint.inventory import expected_tensors
from dsuf.checkpoint.synthetic import ensure_embedded
from dsuf.config import Settings
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.machine import Setup, find_lack
from dsuf.engine_scripted import ScriptedEngine, load_script
from dsuf.errors import CommandError, DeviceError, EngineFailed
from dsuf.recipe.masks import Masks
from dsuf.recipe.vocabulary import Vocabulary, load_vocabulary
from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.pages import PAGE_TOKENS
from dsuf.reference.speculate import Speculation
from dsuf.types import Engine, EngineFacts, PrefillRange, Prompt, Sampling, StepPlan, Turn

_WARM_UP = "warm-up"
MOST_PREFILL_ROWS = 512
"""Rows of one pass on a GPU, whose workspaces grow with them; longer chunks take several passes."""

EngineName = Literal["reference", "scripted", "cuda"]


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What is served: its directory, vocabulary with masks over it, and sizes. Weights are not loaded yet."""

    directory: Path
    config: ModelConfig
    vocabulary: Vocabulary
    masks: Masks


def find_directory(settings: Settings) -> Path:
    """The checkpoint to serve: without a choice the one that ships with the code. Raises `CheckpointError`.

    An installation that left that out makes one with random weights. The scripted engine needs only a tokenizer, so
    without a model it takes the released one.
    """
    if settings.model is not None:
        return settings.model
    if settings.engine == "scripted":
        return RELEASED
    return NANO if (NANO / "config.json").is_file() else ensure_embedded(find_cache(settings))


def name_checkpoint(directory: Path) -> str:
    """What people call the checkpoint in `directory`."""
    place = directory.resolve()
    return {NANO.resolve(): "dsuf-nano", RELEASED.resolve(): "a tokenizer alone"}.get(place, place.name)


def find_cache(settings: Settings) -> Path:
    """The folder for what can be made again. Raises `CommandError` where neither settings nor system name one."""
    if settings.cache_dir is not None:
        return settings.cache_dir
    if os.path.isabs(base := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(base) / "dsuf"
    try:
        return Path.home() / ".cache" / "dsuf"
    except RuntimeError as error:
        raise CommandError("cache_dir: this user has no home folder; name a folder") from error


def open_model(directory: Path) -> Model:
    """Read configuration and tokenizer; raises `CheckpointError`."""
    config = load_config(directory / "config.json")
    vocabulary = load_vocabulary(directory)
    return Model(directory=directory, config=config, vocabulary=vocabulary, masks=Masks(vocabulary, config.vocab_size))


def pick_engine(settings: Settings) -> EngineName:
    """Which engine the settings ask for; `auto` is `cuda` where a GPU and all that it takes are there."""
    if settings.engine != "auto":
        return settings.engine
    return "reference" if find_lack() else "cuda"


def foresee_facts(settings: Settings, model: Model) -> EngineFacts:
    """What the engine's facts will be. `api/` needs them before the weights are there.

    Raises `CommandError` for more drafts than the model's head proposes.
    """
    name, most = pick_engine(settings), model.config.dspark_block_size
    if settings.drafts > most and name != "scripted":
        raise CommandError(f"drafts = {settings.drafts}: the draft head of this model proposes at most {most}")
    block = most if settings.drafts and name != "scripted" else 0
    context_tokens = min(settings.context_tokens, model.config.max_seq_len)
    if settings.device_cache_tokens:  # a turn alone may fill all pages, but for what its last step writes beyond
        context_tokens = min(context_tokens, _count_pages(settings) * PAGE_TOKENS - block)
    return EngineFacts(
        name=name,
        device={"reference": "cpu", "cuda": "gpu", "scripted": "none"}[name],
        context_tokens=context_tokens,
        max_turns=settings.max_turns,
        vocabulary=model.config.vocab_size,
        eos_id=model.vocabulary.eos_id,
        max_drafts=block,
        constrains=True,
        logprobs=True,
    )


def _count_pages(settings: Settings) -> int:
    """Pages that the settings ask for; 0: as many as the engine finds right."""
    return -(-settings.device_cache_tokens // PAGE_TOKENS)


def load_engine(settings: Settings, model: Model, progress: Callable[[int], None]) -> Engine:
    """Load the engine; takes its time, runs in a thread. Raises `CheckpointError` or `CommandError`.

    `progress` hears of each layer that is there.
    """
    facts = foresee_facts(settings, model)
    pages = _count_pages(settings) or None
    if facts.name == "cuda":
        return _load_cuda(settings, model, facts, progress)
    if facts.name == "scripted":
        if settings.script is None:
            raise CommandError("script: engine 'scripted' needs a script file")
        vocabulary, replay = model.vocabulary, PAGE_TOKENS if settings.prefill == "replay" else 0
        return ScriptedEngine(
            load_script(settings.script), vocabulary.encode, vocabulary.decode, facts, pages=pages, replay_tokens=replay
        )
    speculation = Speculation(rule=settings.draft_rule, confidence=settings.draft_confidence)
    try:
        return ReferenceEngine.load(
            model.directory,
            context_tokens=facts.context_tokens,
            max_turns=facts.max_turns,
            prefill=settings.prefill,
            pages=pages,
            speculation=speculation if settings.drafts else None,
            open_mask=model.masks.open,
            progress=progress,
        )
    except (MemoryError, OverflowError, ValueError) as error:
        if pages is None:
            raise
        raise CommandError(f"device_cache_tokens = {settings.device_cache_tokens}: no such memory: {error}") from error


def _load_cuda(settings: Settings, model: Model, facts: EngineFacts, progress: Callable[[int], None]) -> CudaEngine:
    """The CUDA engine; `progress` hears of as many layers as the bytes that are there would make."""
    config, lock, done = model.config, threading.Lock(), 0
    total = sum_weights(config)

    def count(arrived_bytes: int) -> None:
        nonlocal done
        with lock:
            done += arrived_bytes
            layer = config.n_layers * done // total
        progress(layer)

    setup = Setup(
        context_tokens=facts.context_tokens, max_turns=facts.max_turns, drafts=settings.drafts > 0,
        prefill_rows=min(settings.prefill_chunk_tokens, MOST_PREFILL_ROWS),
        pages=_count_pages(settings), budget_bytes=settings.device_bytes,
        engram_on_host=settings.engram_on_host, rule=settings.draft_rule, confidence=settings.draft_confidence,
    )  # fmt: skip
    try:
        return CudaEngine.load(model.directory, setup, settings.prefill, open_mask=model.masks.open, progress=count)
    except DeviceError as error:
        raise CommandError(f"engine 'cuda': {error}") from error


def sum_weights(config: ModelConfig) -> int:
    """Bytes of all tensors of a model of these sizes."""
    return sum(spec.bytes for spec in expected_tensors(config))


async def warm_up(engine: Engine, prompt: tuple[int, ...]) -> None:
    """Run one short turn, so that the first client does not wait for what happens once; raises `EngineFailed`."""
    sampling = Sampling(temperature=0.0, top_p=1.0, seed=0, max_tokens=2)
    needed = engine.layout.pages_for(len(prompt) + sampling.max_tokens + engine.layout.overrun_tokens)
    engine.attach(Turn(id=_WARM_UP, prompt=Prompt(ids=prompt), sampling=sampling), range(needed))
    try:
        results = await engine.step(StepPlan(prefill=(PrefillRange(_WARM_UP, 0, len(prompt)),)))
        if results and results[0].finish is None:
            results += await engine.step(StepPlan(decode=(_WARM_UP,)))
    finally:
        engine.detach(_WARM_UP)
    if not results or not (results[0].ids or results[0].finish):
        raise EngineFailed("the warm-up turn gave no token")
