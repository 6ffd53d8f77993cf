"""How tensors are split over ranks: nothing twice, nothing lost, and the parts do the work of the whole."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench.nano.sizes import SIZES
from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.engram import EngramHash, table_primes
from dsuf.checkpoint.forms import RELEASED
from dsuf.checkpoint.inventory import expected_tensors
from dsuf.checkpoint.synthetic import EMBEDDED
from dsuf.checkpoint.token_map import TokenMap
from dsuf.cuda.group import WHOLE, check_ranks, hash_heads, key_span, rank_config, rule_of, split_tensors
from dsuf.cuda.sizes import from_config
from dsuf.errors import CommandError

FOLDER = Path(__file__).parents[1] / "golden" / "tiny"
CONFIGS = {"released": load_config(RELEASED / "config.json"), "embedded": EMBEDDED}
CONFIGS |= {"tiny": load_config(FOLDER / "config.json"), "nano": SIZES}
CONFIGS["narrow"] = msgspec.structs.replace(CONFIGS["tiny"], moe_inter_dim=96)
SPLITS = [("released", 2), ("released", 4), ("released", 8), ("embedded", 2), ("embedded", 4), ("tiny", 2), ("tiny", 4)]
SPLITS += [("nano", 2)]
REPLICATED = {
    "embed", "norm", "attn_norm", "ffn_norm", "wq_a", "q_norm", "wkv", "kv_norm", "wgate", "wk", "k_norm",
    "weights_proj", "gate", "bias", "bias_vl", "hc_attn_fn", "hc_attn_base", "hc_attn_scale", "hc_ffn_fn",
    "hc_ffn_base", "hc_ffn_scale", "q_weight", "k_weight", "main_proj", "main_norm", "proj",
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("name", "ranks"), SPLITS)
def test_shares_cover_and_do_not_overlap(name: str, ranks: int) -> None:
    """Every place along the split axis belongs to one rank; what is not split is of a named kind."""
    config = CONFIGS[name]
    whole = set()
    for parts in zip(*(split_tensors(config, ranks, rank) for rank in range(ranks)), strict=True):
        spec = parts[0][0]
        shares = [share for _, share in parts]
        if shares == [WHOLE] * ranks:
            whole.add(spec.name)
            continue
        assert len({share.axis for share in shares}) == 1
        spans = sorted(span for share in shares for span in share.spans)
        size = spec.shape[shares[0].axis or 0]
        assert all(start < stop for start, stop in spans)
        assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
        assert spans[-1][1] == size
        lengths = [share.shape(spec.shape)[share.axis or 0] for share in shares]
        assert len(set(lengths)) == 1 or "engram.embed" in spec.name
        assert sum(lengths) == size or (name == "nano" and ".ffn." in spec.name)
    text = {n for n in whole if not n.startswith(("vision.", "aligner.", "image_"))}
    plain = {n.removesuffix(".weight").removesuffix(".scale") for n in text}
    odd = {n for n in plain if n.rsplit(".", 1)[-1] not in REPLICATED}
    assert all(".indexer.wq_b" in n or ".compressor.norm" in n or "markov_head" in n or n == "mtp.2.norm" for n in odd)


@pytest.mark.parametrize(("name", "ranks"), SPLITS)
def test_scales_go_with_their_weights(name: str, ranks: int) -> None:
    """A rank's scale share is its weight share in blocks: 32 rows of a dense weight, 32 columns, or 16 packed bytes."""
    config, rank = CONFIGS[name], ranks - 1
    held = {spec.name: (spec, share) for spec, share in split_tensors(config, ranks, rank)}
    split = 0
    for scale_name, (_, share) in held.items():
        if not scale_name.endswith(".scale") or share == WHOLE:
            continue
        weight, of_weight = held[f"{scale_name.removesuffix('.scale')}.weight"]
        assert of_weight.axis == share.axis is not None
        by_row = weight.dtype == "I8" or "engram.embed" in scale_name
        block = (1 if by_row else 32) if share.axis == 0 else (16 if weight.dtype == "I8" else 32)
        assert of_weight.spans == tuple((start * block, stop * block) for start, stop in share.spans)
        split += 1
    assert split > 10


@pytest.mark.parametrize(("name", "ranks"), SPLITS)
def test_shapes_are_those_of_the_kernels(name: str, ranks: int) -> None:
    """What a rank holds has the sizes that its kernels are compiled for."""
    config = CONFIGS[name]
    own = rank_config(config, ranks, 1)
    sizes = from_config(own)
    n = sizes.named()
    shapes = {spec.name: share.shape(spec.shape) for spec, share in split_tensors(config, ranks, 1)}
    assert shapes["layers.1.attn.wq_b.weight"] == (n["heads"] * n["head_dim"], n["q_lora"])
    assert shapes["layers.1.attn.wo_a.weight"] == (n["o_width"], n["group_width"])
    assert shapes["layers.1.attn.wo_b.weight"] == (n["dim"], n["o_width"])
    assert shapes["layers.1.attn.attn_sink"] == (n["heads"],)
    assert shapes["layers.1.ffn.experts.3.w1.weight"] == (n["inter"], n["dim"] // 2)
    assert shapes["layers.1.ffn.experts.3.w2.weight"] == (n["dim"], n["inter"] // 2)
    assert shapes["layers.1.ffn.experts.3.w2.scale"] == (n["dim"], n["inter"] // 32)
    assert shapes["mtp.0.ffn.shared_experts.w2.weight"] == (n["dim"], n["inter"])
    assert shapes["layers.1.engram.wkv.weight"] == ((n["streams"] + 1) * n["dim"], n["engram_width"])
    tables = [shapes[f"layers.{layer}.engram.embed.weight"][0] for layer in config.engram_layer_ids]
    assert tables == list(own.engram_num_embeddings)
    assert shapes["head.weight"] == (config.vocab_size // ranks, n["dim"])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sizes", ["tiny", "nano"])
def test_parts_do_the_work_of_the_whole(sizes: str, ranks: int) -> None:
    """Attention's output and the experts, as sums of the ranks' products of small whole numbers, which are exact."""
    if sizes == "nano" and ranks == 4:
        return
    config, rng = CONFIGS[sizes], np.random.default_rng(3)
    by_rank = [{s.name: (s, share) for s, share in split_tensors(config, ranks, rank)} for rank in range(ranks)]
    names = ["layers.2.attn.wq_b", "layers.2.attn.wo_b", "layers.2.ffn.shared_experts.w1"]
    names += ["layers.2.ffn.shared_experts.w2", "layers.1.engram.wkv"]
    wq_b, wo_b, w1, w2, wkv = (rng.integers(-3, 4, by_rank[0][f"{n}.weight"][0].shape) for n in names)
    shares = [[held[f"{n}.weight"][1] for n in names] for held in by_rank]
    latent, v, e = (rng.integers(-3, 4, width) for width in (config.q_lora_rank, config.dim, wkv.shape[1]))
    queries = [s[0].take(wq_b) @ latent for s in shares]
    np.testing.assert_array_equal(np.concatenate(queries), wq_b @ latent)
    inner = [np.maximum(s[2].take(w1) @ v, 0) for s in shares]
    partial = [s[3].take(w2) @ part for s, part in zip(shares, inner, strict=True)]
    np.testing.assert_array_equal(sum(partial), w2 @ np.maximum(w1 @ v, 0))
    low = rng.integers(-3, 4, wo_b.shape[1])
    spread = [s[1].take(wo_b) @ s[1].take(low[None])[0] for s in shares]
    np.testing.assert_array_equal(sum(spread), wo_b @ low)
    engram = [s[4].take(wkv) @ s[4].take(e[None])[0] for s in shares]
    np.testing.assert_array_equal(sum(engram), wkv @ e)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_hash_rows_of_a_rank(ranks: int) -> None:
    """Every table row that a history asks for lies in one rank's share, at the place that its own offsets name."""
    config = CONFIGS["tiny"]
    hashes = EngramHash.from_config(config, TokenMap.from_tokenizer(FOLDER / "tokenizer.json"))
    ids = np.random.default_rng(5).integers(0, config.vocab_size, 50)
    lengths, heads = config.engram_max_ngram_size - 1, config.engram_n_heads
    for layer, index in enumerate(config.engram_layer_ids):
        rows = hashes.rows(layer, hashes.history(ids)).reshape(50, lengths, heads)
        table, found = np.arange(config.engram_num_embeddings[layer]), []
        for rank in range(ranks):
            shares = {spec.name: share for spec, share in split_tensors(config, ranks, rank)}
            own = shares[f"layers.{index}.engram.embed.weight"].take(table)
            primes, offsets = hash_heads(config, ranks, rank)
            mine = slice(heads * rank // ranks, heads * (rank + 1) // ranks)
            local = rows[:, :, mine] - hashes.offsets[layer].reshape(lengths, heads)[:, mine]
            assert (local < primes[layer].reshape(lengths, -1)).all()
            found.append(own[local + offsets[layer].reshape(lengths, -1)])
        np.testing.assert_array_equal(np.concatenate(found, axis=2), rows)


def test_released_tables() -> None:
    """The sub-tables are those of the model description: 24 primes a layer, the first and the last as written there."""
    primes = table_primes(CONFIGS["released"])
    assert primes.shape == (2, 3, 8)
    assert (primes[0, 0, 0], primes[1, 2, 7]) == (16_000_057, 16_000_889)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("page_rows", [64, 128])
def test_index_keys_of_a_page(page_rows: int, ranks: int) -> None:
    """Every row of a page is on one rank, in whole candidate blocks of eight."""
    spans = [key_span(page_rows, ranks, rank) for rank in range(ranks)]
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(page_rows))
    assert {(stop - start) % 8 for start, stop in spans} == {0}


@pytest.mark.parametrize(
    ("name", "ranks", "fault"),
    [
        ("released", 0, "0 ranks: 1 to 8 can work together"),
        ("released", 9, "9 ranks: 1 to 8 can work together"),
        ("released", 3, "3 ranks: n_heads is 64, no multiple of 3"),
        ("narrow", 4, "4 ranks: moe_inter_dim is 96, which leaves a rank without a block of 32"),
        ("embedded", 8, "8 ranks: o_groups is 4, no multiple of 8"),
        ("tiny", 8, "8 ranks: o_groups is 4, no multiple of 8"),
    ],
)
def test_ranks_that_do_not_divide(name: str, ranks: int, fault: str) -> None:
    """One line says why."""
    with pytest.raises(CommandError, match=fault):
        check_ranks(CONFIGS[name], ranks)


def test_what_is_lacking_is_zero() -> None:
    """Three blocks on two ranks: the second has one, and zeros as wide as the other's."""
    held = [{s.name: share for s, share in split_tensors(SIZES, 2, rank)} for rank in range(2)]
    for name, axis, each in (("w1.weight", 0, 64), ("w2.weight", 1, 32), ("w3.scale", 0, 64), ("w2.scale", 1, 2)):
        for kind in ("layers.3.ffn.experts.5", "mtp.1.ffn.experts.0"):
            whole = np.random.default_rng(1).integers(1, 200, (96, 96) if axis else (96, 8), np.uint8)
            whole = whole[:, : each * 3 // 2] if axis else whole
            first, second = (share[f"{kind}.{name}"].take(whole) for share in held)
            assert first.shape[axis] == second.shape[axis] == each
            both = np.concatenate([first, second], axis=axis)
            found, rest = np.split(both, [whole.shape[axis]], axis=axis)
            np.testing.assert_array_equal(found, whole)
            assert rest.shape[axis] == each // 2 and not rest.any()


def test_good_ranks() -> None:
    """All that the other tests use are allowed; a table that is not the hash's is not."""
    for name, ranks in SPLITS:
        check_ranks(CONFIGS[name], ranks)
    other = {**{f: getattr(EMBEDDED, f) for f in EMBEDDED.__struct_fields__}, "engram_num_embeddings": (24_562, 25_000)}
    with pytest.raises(CommandError, match="not what the hash has"):
        check_ranks(ModelConfig(**other), 2)


def test_every_tensor_has_a_rule() -> None:
    """A tensor that nobody decided about is an error, not a copy on every rank."""
    for spec in expected_tensors(CONFIGS["released"]):
        if spec.part != "vision":
            rule_of(spec.name)
    with pytest.raises(KeyError):
        rule_of("layers.3.attn.wq_c.weight")
