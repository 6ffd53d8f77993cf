"""All that is wrong with a checkpoint directory, a line each."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.digests import digest_file
from dsuf.checkpoint.header import Entry, read_header, show, show_some
from dsuf.checkpoint.inventory import content_faults, expected_tensors, missing_tensors
from dsuf.checkpoint.shards import INDEX_NAME, SINGLE_NAME, read_index
from dsuf.errors import CheckpointError

Advance = Callable[[int], None]


class Survey(msgspec.Struct):
    """What the files of a directory say, each by itself.

    `index`: the shard of each tensor, None where no index can be read. `stored`: all places of each tensor, as shard
    and entry. `broken`: tensors whose entry is damaged. `dark`: shards that are missing or have no usable header.
    """

    index: dict[str, str] | None = None
    stored: dict[str, list[tuple[str, Entry]]] = msgspec.field(default_factory=dict)
    broken: set[str] = msgspec.field(default_factory=set)
    dark: set[str] = msgspec.field(default_factory=set)
    faults: list[str] = msgspec.field(default_factory=list)


def shard_names(directory: Path) -> list[str]:
    """Names of the safetensors files that lie in `directory`."""
    return sorted(path.name for path in directory.glob("*.safetensors"))


def find_faults(directory: Path, advance: Advance) -> list[str]:
    """Every fault of names, types, shapes, offsets and lengths; `advance(1)` follows each shard of `shard_names`."""
    survey, config = Survey(), None
    try:
        config = load_config(directory / "config.json")
    except CheckpointError as error:
        survey.faults.append(str(error))
    _look_at_index(directory, survey)
    for shard in shard_names(directory):
        _look_at_shard(directory / shard, survey)
        advance(1)
    found = [*survey.faults, *_index_faults(survey, config), *_duplicate_faults(survey)]
    if config is not None:
        found += _missing_faults(survey, config)
        found += content_faults(config, {name: places[0] for name, places in survey.stored.items()})
    return found


def find_digest_faults(directory: Path, digests: Mapping[str, str], advance: Advance) -> Iterator[str]:
    """Files whose SHA-256 is not the one in `digests`; `advance` is told of the bytes read."""
    for name, expected in digests.items():
        try:
            found = digest_file(directory / name, advance)
        except FileNotFoundError:
            yield f"{show(name)}: missing file: there is a digest for it"
        except OSError as error:
            yield f"{show(name)}: cannot read: {error.strerror}"
        else:
            if found != expected:
                yield f"{show(name)}: digest mismatch: SHA-256 is {found}, expected {expected}"


def _look_at_index(directory: Path, survey: Survey) -> None:
    """Take the index into `survey`, and which of its shards are missing."""
    present = set(shard_names(directory))
    try:
        if (directory / INDEX_NAME).exists():
            survey.index = read_index(directory / INDEX_NAME)
        elif not present:
            survey.faults.append(f"{SINGLE_NAME}: missing file: neither it nor {INDEX_NAME} is there")
            survey.dark.add(SINGLE_NAME)
        elif present != {SINGLE_NAME}:
            survey.faults.append(f"{INDEX_NAME}: missing file: the shards have no index")
    except CheckpointError as error:
        survey.faults.append(str(error))
    if survey.index is None:
        return
    for shard in sorted(set(survey.index.values()) - present):
        names = [name for name, home in survey.index.items() if home == shard]
        survey.faults.append(f"{shard}: missing shard: the index puts tensor {show_some(names)} into it")
        survey.dark.add(shard)


def _look_at_shard(path: Path, survey: Survey) -> None:
    """Take the header of the shard at `path` into `survey`."""
    try:
        header = read_header(path)
    except CheckpointError as error:
        survey.faults.append(str(error))
        survey.dark.add(path.name)
        return
    survey.faults += [f"{path.name}: {fault}" for fault in header.faults]
    survey.broken |= header.broken
    for name, entry in header.entries.items():
        survey.stored.setdefault(name, []).append((path.name, entry))


def _index_faults(survey: Survey, config: ModelConfig | None) -> Iterator[str]:
    """Where index and shards disagree about the place of a tensor."""
    if survey.index is None:
        return
    named = set(survey.index.values())
    expected = {spec.name for spec in expected_tensors(config)} if config else set()
    for name, shard in survey.index.items():
        places = [place for place, _ in survey.stored.get(name, ())]
        if places and shard not in places:
            yield f"{INDEX_NAME}: tensor {show(name)}: wrong shard: the index says {shard}, it is in {places[0]}"
        elif not places and shard not in survey.dark and name not in survey.broken | expected:
            yield f"{INDEX_NAME}: tensor {show(name)}: unknown tensor: the index says {shard}, no shard has it"
    for shard in sorted({place for places in survey.stored.values() for place, _ in places} - named):
        yield f"{shard}: unknown shard: the index does not name it"
    for name, found in survey.stored.items():
        if name not in survey.index and found[0][0] in named:
            yield f"{found[0][0]}: tensor {show(name)}: not in the index"


def _duplicate_faults(survey: Survey) -> Iterator[str]:
    for name, places in survey.stored.items():
        for shard, _ in places[1:]:
            yield f"{shard}: tensor {show(name)}: stored twice: it is also in {places[0][0]}"


def _missing_faults(survey: Survey, config: ModelConfig) -> Iterator[str]:
    """Tensors that are nowhere, except where a damaged entry, a missing shard or a lost header explains it."""
    for name in missing_tensors(config, survey.stored):
        if survey.index is None:
            shard, told = SINGLE_NAME, bool(survey.dark)
        else:
            shard = survey.index.get(name, INDEX_NAME)
            told = shard in survey.dark
        if not told and name not in survey.broken:
            yield f"{shard}: tensor {name}: missing tensor"
