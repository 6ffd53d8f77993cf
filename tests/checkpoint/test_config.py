"""Configurations that no model can have are refused in one line; whatever loads can be planned."""

import copy
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsuf.__main__ import main
from dsuf.checkpoint.config import MAX_EXPERTS, ModelConfig, load_config, parse_config
from dsuf.checkpoint.forms import flat_form
from dsuf.checkpoint.inventory import expected_tensors
from dsuf.checkpoint.synthetic import EMBEDDED
from dsuf.errors import CheckpointError

TINY = Path(__file__).parents[1] / "golden" / "tiny"
FORMS = ("config.json", "inference/config.json")
VALUES = (0, -1, 10**12, 10**400, 0.5, math.nan, math.inf, "8", None)


def decode(form: str) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.json.decode((TINY / form).read_bytes())
    return data


def numbers(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the numbers (and nulls) of decoded JSON are."""
    if isinstance(node, dict | list):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from numbers(child, (*path, key))
    elif node is None or (isinstance(node, int | float) and not isinstance(node, bool)):
        yield path


def mutate(data: dict[str, Any], path: tuple[Any, ...], value: object) -> dict[str, Any]:
    mutated = copy.deepcopy(data)
    node: Any = mutated
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return mutated


@pytest.mark.parametrize("form", FORMS)
def test_any_number_replaced_is_refused_or_planned(form: str) -> None:
    data, refused, places = decode(form), 0, list(numbers(decode(form)))
    assert len(places) > 80
    for path in places:
        for value in VALUES:
            started = time.process_time()
            try:
                config = parse_config(mutate(data, path, value))
                assert all(size > 0 for spec in expected_tensors(config) for size in spec.shape), (path, value)
            except CheckpointError as error:
                refused += 1
                assert "\n" not in str(error) and len(str(error)) < 200, (path, value)
            assert time.process_time() - started < 2, (path, value)
    assert refused > 5 * len(places)


CHANGES: list[dict[str, object]] = [
    {"o_groups": 0}, {"o_groups": 3}, {"dim": -1}, {"dim": 100}, {"n_routed_experts": 10**12},
    {"candidate_block_size": 0}, {"candidate_block_size": -1}, {"candidate_topk_blocks": 0}, {"index_topk": 0},
    {"index_topk": -1}, {"n_activated_experts": 0}, {"n_activated_experts": 17}, {"dspark_n_activated_experts": 9},
    {"beta_fast": 0}, {"beta_slow": -1}, {"original_seq_len": 0}, {"compress_rope_theta": 0}, {"rope_theta": 1},
    {"rope_factor": 0}, {"rope_head_dim": 31}, {"rope_head_dim": 66}, {"head_dim": 130}, {"index_head_dim": 48},
    {"q_lora_rank": 120}, {"moe_inter_dim": 80}, {"o_lora_rank": 30}, {"engram_head_dim": 3}, {"engram_pad_id": 512},
    {"eos_token_id": 512}, {"dspark_noise_token_id": 512}, {"image_token_id": 512}, {"bos_token_id": -1},
    {"vocab_size": 0}, {"vocab_size": 1 << 25}, {"engram_vocab_size": 0}, {"engram_n_heads": 0},
    {"engram_n_heads": 60_000}, {"engram_max_ngram_size": 1}, {"engram_num_embeddings": [2304, 0]},
    {"engram_layer_ids": [1, 14]}, {"engram_layer_ids": [4, 1]}, {"engram_layer_ids": [4, 4]}, {"hc_mult": 0},
    {"hc_sinkhorn_iters": 0}, {"swiglu_limit": 0}, {"swiglu_limit": -1.5}, {"norm_eps": math.nan},
    {"route_scale": math.inf}, {"dspark_target_layer_ids": [11, 12, 14]}, {"dspark_target_layer_ids": []},
    {"dspark_target_layer_ids": [-1, 12, 13]}, {"candidate_source_layer": 8}, {"candidate_source_layer": -1},
    {"kv_source_layers": [4, 2, 7]}, {"kv_source_layers": []}, {"n_layers": 13}, {"n_shared_experts": 2},
    {"n_routed_experts": MAX_EXPERTS // 14},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(f"{k}={v}" for k, v in change.items()))
def test_sizes_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    data = flat_form(load_config(TINY / "config.json")) | {"bos_token_id": 0, "eos_token_id": 1}
    parse_config(data)
    with pytest.raises(CheckpointError, match="config: "):
        parse_config(data | change)


@pytest.mark.parametrize("config", [EMBEDDED, load_config(TINY / "config.json")], ids=["embedded", "tiny"])
def test_configurations_in_use_are_within_bounds(config: ModelConfig) -> None:
    assert msgspec.convert(msgspec.to_builtins(config), ModelConfig) == config


def test_without_a_draft_head_its_target_layers_do_not_matter() -> None:
    whole = load_config(TINY / "config.json")
    cut = msgspec.structs.replace(whole, n_mtp_layers=0, compress_ratios=whole.compress_ratios[:14],
                                  dspark_target_layer_ids=(20,))  # fmt: skip
    assert not any(spec.name.startswith("mtp.") for spec in expected_tensors(cut))


@pytest.mark.parametrize("change", [{"o_groups": 0}, {"hidden_size": -1}, {"n_routed_experts": 10**12}])
def test_commands_refuse_it_in_one_line(
    change: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = decode("config.json")
    data["text_config"] |= change
    (tmp_path / "tiny").mkdir()
    (tmp_path / "cases").mkdir()
    (tmp_path / "tiny" / "config.json").write_bytes(msgspec.json.encode(data))
    for command in (["weights", "plan", "--config", str(tmp_path / "tiny" / "config.json")], ["golden", str(tmp_path)]):
        assert main(command) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("dsuf: config: ") and captured.err.count("\n") == 1


def test_a_node_refuses_it_in_one_line(tmp_path: Path) -> None:
    """In a process of its own, since an event loop leaves its signal handlers behind."""
    data = decode("config.json")
    data["text_config"]["index_topk"] = 0
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(data))
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    command = [sys.executable, "-m", "dsuf", "serve", "--model", str(tmp_path), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("dsuf: config: ") and done.stderr.count("\n") == 1
