"""A smaller tokenizer cut out of a large one: the earliest merges and the tokens of the prompt format.

Text costs more tokens under it, and every text still has a form, since all single bytes stay.
"""

from pathlib import Path
from typing import Any

import msgspec

from dsuf.checkpoint.token_map import load_tokenizer
from dsuf.errors import CheckpointError

_PLACEHOLDERS = ("place_holder", "place▁holder")


def cut_tokenizer(source: Path, size: int = 8192) -> bytes:
    """The `tokenizer.json` of `size` tokens cut from the byte-level BPE in `source`.

    Ids are given anew, in the old order: tokens that are in the model and in no merge (the bytes, and those the format
    begins with) first, then merges, then the added tokens without the placeholders. So the first ids stay as they are.
    Raises `CheckpointError` if `source` cannot be read or `size` is too small for what must stay.
    """
    load_tokenizer(source)  # for its errors: what follows may take the structure as given
    document: dict[str, Any] = msgspec.json.decode(source.read_bytes())
    model, added = document["model"], _kept_added(document["added_tokens"])
    made = {_result(merge) for merge in model["merges"]}
    vocabulary = [token for token in sorted(model["vocab"], key=model["vocab"].__getitem__) if token not in made]
    appended = [token["content"] for token in added if token["content"] not in model["vocab"]]
    merges, results = _first_merges(model["merges"], set(vocabulary), size - len(vocabulary) - len(appended))
    model["merges"] = merges
    model["vocab"] = {token: id_ for id_, token in enumerate(vocabulary + results)}
    ids = model["vocab"] | {token: len(model["vocab"]) + place for place, token in enumerate(appended)}
    document["added_tokens"] = sorted(
        ({**token, "id": ids[token["content"]]} for token in added), key=lambda t: t["id"]
    )
    return msgspec.json.format(msgspec.json.encode(document), indent=1)


def _kept_added(added: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The added tokens that mean something, in the order of their ids."""
    kept = [token for token in added if not any(mark in token["content"] for mark in _PLACEHOLDERS)]
    return sorted(kept, key=lambda token: token["id"])


def _first_merges(merges: list[Any], known: set[str], count: int) -> tuple[list[Any], list[str]]:
    """The first merges that make `count` tokens out of `known` ones or such as were made before; and these tokens."""
    kept: list[Any] = []
    results: list[str] = []
    for merge in merges:
        if len(results) == count:
            break
        left, right = _parts(merge)
        if left in known and right in known:
            kept.append(merge)
            if left + right not in known:
                results.append(left + right)
                known.add(left + right)
    if count < 0 or len(results) < count:
        raise CheckpointError(f"tokenizer: cannot be cut so that {count} merged tokens are left")
    return kept, results


def _parts(merge: Any) -> tuple[str, str]:
    """Both sides of a merge; files hold it as a string or as a pair."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _result(merge: Any) -> str:
    return "".join(_parts(merge))
