"""The parameter structs of the kernels, field for field those of `kernels/include/contract.h`.

A field is written as its type and shape: `*bf16 rows dim/32` points to that many BF16 values, `?` after the type says
that it may be None, `i32` alone is a number. Names in a shape are fields of the struct or sizes of the model; a pointer
without a shape is to a store whose size only its owner knows.
"""

import ctypes
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple, Protocol

from dsuf.errors import CommandError

_NUMBERS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}
_DTYPES = {"bf16": "<u2", "u8": "|u1", "f32": "<f4", "f64": "<f8", "i32": "<i4", "i64": "<i8"}
ALIGNMENT_BYTES = 16


class DeviceArray(Protocol):
    """An array on the device, as CuPy and others describe theirs: shape, typestr, data, strides."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        """The description."""


class Field(NamedTuple):
    """A field of a struct: a number (`shape` is None) or a pointer to `shape` elements of `kind`."""

    name: str
    kind: str
    optional: bool
    shape: tuple[str, ...] | None


class Params:
    """The layout of one struct; `pack` fills it."""

    def __init__(self, name: str, **fields: str) -> None:
        self.name = name
        self.fields = tuple(_parse(field, text) for field, text in fields.items())
        layout = [(f.name, _NUMBERS[f.kind] if f.shape is None else ctypes.c_void_p) for f in self.fields]
        self.ctype: type[ctypes.Structure] = type(name, (ctypes.Structure,), {"_fields_": layout})

    def offsets(self) -> dict[str, int]:
        """Bytes from the start of the struct to each field."""
        return {field.name: getattr(self.ctype, field.name).offset for field in self.fields}

    def row_bytes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Bytes of a row of each array that has a row for each of the launch's."""
        each = {}
        for field in self.fields:
            if field.shape and field.shape[0] == "rows":
                each[field.name] = prod(_factor(f, sizes) for f in field.shape[1:]) * int(_DTYPES[field.kind][2:])
        return each

    def pack(
        self, values: Mapping[str, DeviceArray | int | float | None], sizes: Mapping[str, int]
    ) -> ctypes.Structure:
        """The struct that holds `values`; raises `CommandError` for a wrong name, type, size or alignment."""
        if values.keys() != {field.name for field in self.fields}:
            differ = sorted(values.keys() ^ {field.name for field in self.fields})
            raise CommandError(f"{self.name}: missing or unknown: {', '.join(differ)}")
        names = dict(sizes) | {name: value for name, value in values.items() if isinstance(value, int)}
        packed = self.ctype()
        for field in sorted(self.fields, key=lambda field: field.shape is not None):
            setattr(packed, field.name, self._value(field, values[field.name], names))
        return packed

    def _value(self, field: Field, value: DeviceArray | int | float | None, names: Mapping[str, int]) -> float | None:
        """What goes into `field`: the number, or the address of the array after its checks."""
        if field.shape is None:
            if isinstance(value, int) or (isinstance(value, float) and field.kind == "f32"):
                return value
            raise CommandError(f"{self.name}.{field.name}: a number is needed")
        if value is None and field.optional:
            return None
        if value is None or isinstance(value, int | float):
            raise CommandError(f"{self.name}.{field.name}: an array is needed")
        described = value.__cuda_array_interface__
        need, have = int(bool(field.shape)), 1
        for factor in field.shape:
            need *= _factor(factor, names)
        for length in described["shape"]:
            have *= length
        problem = _array_problem(field, described, need, have)
        if problem:
            raise CommandError(f"{self.name}.{field.name}: {problem}")
        return int(described["data"][0])


def _array_problem(field: Field, described: Mapping[str, Any], need: int, have: int) -> str:
    """Why an array cannot be passed, or an empty text."""
    if described["typestr"] != _DTYPES[field.kind]:
        return f"elements of {field.kind} are needed, not {described['typestr']}"
    if described.get("strides") is not None:
        return "the array has gaps"
    if have < need:
        return f"{need} elements are needed, the array has {have}"
    # A row of packed cache bytes can begin anywhere; numbers that say where things are are read one by one.
    if field.kind in ("bf16", "f32") and have and described["data"][0] % ALIGNMENT_BYTES:
        return f"the array is not aligned to {ALIGNMENT_BYTES} bytes"
    return ""


def _parse(name: str, text: str) -> Field:
    kind, *shape = text.split()
    if not kind.startswith("*"):
        return Field(name, kind, optional=False, shape=None)
    return Field(name, kind.strip("*?"), kind.endswith("?"), tuple(shape))


def _factor(text: str, names: Mapping[str, int]) -> int:
    """The value of `3`, `rows`, `a+1` or `width/32` (rounded up)."""
    if "/" in text:
        name, divisor = text.split("/")
        return -(-_factor(name, names) // int(divisor))
    if "+" in text:
        return sum(_factor(part, names) for part in text.split("+"))
    return int(text) if text.isdigit() else names[text]


_LIVE = {"live": "*i32 1"}

QUANTIZE_ROWS = Params(
    "QuantizeRows", x="*bf16 rows width", codes="*u8", scales="*u8", meaning="*bf16? rows width", place="*i64? rows",
    **_LIVE, codes_stride="i64", scales_stride="i64", rows="i32", width="i32",
)  # fmt: skip
NORM_QUANTIZE = Params(
    "NormQuantize", x="*bf16 rows k", weight="*bf16 k", y="*bf16 rows k", codes="*u8? rows k", scales="*u8? rows k/32",
    **_LIVE, rows="i32",
)  # fmt: skip
PROJECT_STREAMS = Params(
    "ProjectStreams", streams="*bf16 rows streams dim", fn="*f32 outputs streams dim",
    partial="*f32 rows splits outputs+1", **_LIVE, rows="i32",
)  # fmt: skip
MIX_STREAMS = Params(
    "MixStreams", partial="*f32 rows splits outputs+1", base="*f32 outputs", scale="*f32 3", pre="*f32 rows streams",
    post="*f32 rows streams", comb="*f32 rows streams streams", **_LIVE, rows="i32",
)  # fmt: skip
COLLAPSE_NORM = Params(
    "CollapseNorm", streams="*bf16 rows streams dim", pre="*f32 rows streams", weight="*bf16 dim", y="*bf16 rows dim",
    codes="*u8? rows dim", scales="*u8? rows dim/32", meaning="*bf16? rows dim", **_LIVE, rows="i32",
)  # fmt: skip
EXPAND_STREAMS = Params(
    "ExpandStreams", branch="*bf16 rows dim", streams="*bf16 rows streams dim", post="*f32 rows streams",
    comb="*f32 rows streams streams", out="*bf16 rows streams dim", **_LIVE, rows="i32",
)  # fmt: skip
EXPAND_COLLAPSE = Params(
    "ExpandCollapse", branch="*bf16 rows dim", streams="*bf16 rows streams dim", post="*f32 rows streams",
    comb="*f32 rows streams streams", out="*bf16 rows streams dim", pre="*f32 rows streams", weight="*bf16 dim",
    y="*bf16 rows dim", codes="*u8? rows dim", scales="*u8? rows dim/32", meaning="*bf16? rows dim", **_LIVE,
    rows="i32",
)  # fmt: skip
_MET = {"partials": "*i64 ranks", "arrived": "*i32 ranks", "epoch": "*i32 1", "missing": "*i32 1"}
_PATIENT = {"ranks": "i32", "patience_us": "i32"}
SUM_EXPAND = Params(
    "SumExpand", **_MET, streams="*bf16 rows streams dim", post="*f32 rows streams",
    comb="*f32 rows streams streams", out="*bf16 rows streams dim", **_LIVE, rows="i32", **_PATIENT,
)  # fmt: skip
SUM_EXPAND_COLLAPSE = Params(
    "SumExpandCollapse", **_MET, streams="*bf16 rows streams dim", post="*f32 rows streams",
    comb="*f32 rows streams streams", out="*bf16 rows streams dim", pre="*f32 rows streams", weight="*bf16 dim",
    y="*bf16 rows dim", codes="*u8? rows dim", scales="*u8? rows dim/32", meaning="*bf16? rows dim", **_LIVE,
    rows="i32", **_PATIENT,
)  # fmt: skip
PLACE_ANGLES = Params(
    "PlaceAngles", positions="*i64 rows", group_positions="*i64 rows", window="*f32 rope_dim/2",
    compressed="*f32 rope_dim/2", angles="*f32 3 rows rope_dim", **_LIVE, rows="i32",
)  # fmt: skip
_TURNED = {"turned": "*bf16? rows k", "packed": "*u8", "place": "*i64? rows", "angles": "*f32 rows rope_dim"}
STORE_ROWS = Params(
    "StoreRows", x="*bf16 rows k", weight="*bf16 k", normed="*bf16? rows k", **_TURNED, **_LIVE, row_bytes="i64",
    rows="i32",
)  # fmt: skip
NORM_LATENTS = Params(
    "NormLatents", latent="*bf16 rows q_lora", weight="*bf16 q_lora", query="*bf16 rows q_lora",
    codes="*u8 rows q_lora", scales="*u8 rows q_lora/32", key="*bf16 rows k", key_weight="*bf16 k", **_TURNED, **_LIVE,
    row_bytes="i64", rows="i32",
)  # fmt: skip
PROJECT_FP8 = Params(
    "ProjectFp8", codes="*u8 rows k", scales="*u8 rows k/32", weight="*u8 n+second_n k",
    weight_scale="*u8 n+second_n/32 k/32", out="*bf16 rows n", second="*bf16? rows second_n", **_LIVE, rows="i32",
    n="i32", second_n="i32",
)  # fmt: skip
_ANNOUNCED = {"arrived": "*i64 ranks", "epoch": "*i32 1", "counter": "*i32 1"}
ANNOUNCE_FP8 = Params(
    "AnnounceFp8", codes="*u8 rows k", scales="*u8 rows k/32", weight="*u8 n+second_n k",
    weight_scale="*u8 n+second_n/32 k/32", out="*bf16 rows n", second="*bf16? rows second_n", **_ANNOUNCED, **_LIVE,
    rows="i32", n="i32", second_n="i32", rank="i32", ranks="i32",
)  # fmt: skip
PROJECT_BF16 = Params(
    "ProjectBf16", x="*bf16 rows k", weight="*bf16 n k", out="*f32? rows n", rounded="*bf16? rows n", **_LIVE,
    rows="i32", n="i32",
)  # fmt: skip
PROJECT_GROUPS = Params(
    "ProjectGroups", x="*bf16 rows heads head_dim", weight="*u8 o_width k", weight_scale="*u8 o_width/32 k/32",
    out="*bf16? rows o_width", codes="*u8 rows o_width", scales="*u8 rows o_width/32", **_LIVE, rows="i32",
)  # fmt: skip
ROUTE_EXPERTS = Params(
    "RouteExperts", logits="*f32 rows experts", bias="*f32 experts", chosen="*i32 rows picks",
    weights="*f32 rows picks", used="*i32? 1", expert="*i32? experts", first="*i32? experts+1",
    order="*i32? rows picks", arrived="*i32? 1", **_LIVE, rows="i32", experts="i32", picks="i32",
)  # fmt: skip
SCORE_INPUT = Params(
    "ScoreInput", x="*bf16 rows dim", weight="*bf16 experts dim", bias="*f32 experts", scores="*f32 rows experts",
    biased="*f32 rows experts", **_LIVE, rows="i32", experts="i32",
)  # fmt: skip
CHOOSE_FEW = Params(
    "ChooseFew", scores="*f32 rows experts", biased="*f32 rows experts", chosen="*i32 rows picks",
    weights="*f32 rows picks", used="*i32 1", expert="*i32 experts", first="*i32 experts+1", order="*i32 rows picks",
    **_LIVE, rows="i32", experts="i32", picks="i32",
)  # fmt: skip
GROUP_EXPERTS = Params(
    "GroupExperts", chosen="*i32 rows picks", used="*i32 1", expert="*i32 experts", first="*i32 experts+1",
    order="*i32 rows picks", rows="i32", picks="i32", experts="i32",
)  # fmt: skip
_GROUPED = {"used": "*i32 1", "expert": "*i32 slots", "first": "*i32 slots+1", "order": "*i32 1"}
ARRANGE_CODES = Params("ArrangeCodes", codes="*u8", count="i32")
EXPERTS_UP = Params(
    "ExpertsUp", x="*bf16 dim", w1="*u8 inter dim/2", w1_scale="*u8 inter dim/32", w3="*u8 inter dim/2",
    w3_scale="*u8 inter dim/32", weights="*f32 picks", **_GROUPED, inner="*bf16 picks inter", shared="*u8 2 inter dim",
    shared_scale="*u8 2 inter/32 dim/32", shared_inner="*bf16 rows inter", **_LIVE, rows="i32", slots="i32",
    picks="i32",
)  # fmt: skip
EXPERTS_DOWN = Params(
    "ExpertsDown", inner="*bf16 inter", w2="*u8 dim inter/2", w2_scale="*u8 dim inter/32", **_GROUPED, out="*bf16 dim",
    shared="*u8 dim inter", shared_scale="*u8 dim/32 inter/32", shared_inner="*bf16 rows inter",
    shared_out="*bf16 rows dim", **_LIVE, rows="i32", slots="i32",
)  # fmt: skip
COMBINE_EXPERTS = Params(
    "CombineExperts", routed="*bf16 rows picks dim", shared="*bf16 rows dim", out="*bf16 rows dim", **_LIVE, rows="i32",
    picks="i32",
)  # fmt: skip
ANNOUNCE_EXPERTS = Params(
    "AnnounceExperts", routed="*bf16 rows picks dim", shared="*bf16 rows dim", out="*bf16 rows dim", **_ANNOUNCED,
    **_LIVE, rows="i32", picks="i32", rank="i32", ranks="i32",
)  # fmt: skip
ATTEND_SPARSE = Params(
    "AttendSparse", q="*bf16 rows heads head_dim", window="*u8", fresh="*u8?", entries="*u8?",
    slots="*i32 rows window_slots", selected="*i32? rows entry_slots", sink="*f32 heads",
    angles="*f32 rows rope_dim", out="*bf16 rows heads head_dim", **_LIVE, rows="i32", heads="i32", window_slots="i32",
    entry_slots="i32", early="i32",
)  # fmt: skip
_PAGED = {"table_pages": "i32", "page_rows": "i32", "block_count": "i32", "block_size": "i32"}
INDEX_QUERIES = Params(
    "IndexQueries", q="*bf16 rows index_heads index_dim", meaning="*bf16 rows index_heads index_dim",
    weights="*bf16 rows index_heads", angles="*f32 rows rope_dim", **_LIVE, rows="i32",
)  # fmt: skip
SCORE_INDEX = Params(
    "ScoreIndex", q="*bf16 rows index_heads index_dim", weights="*bf16 rows index_heads", keys="*u8",
    row_slot="*i32 rows", table="*i32 table_pages", blocks="*i32? rows block_count", reachable="*i32 rows",
    scores="*bf16 rows entries", **_LIVE, rows="i32", entries="i32", **_PAGED,
)  # fmt: skip
SELECT_ROWS = Params(
    "SelectRows", scores="*bf16 rows entries", row_slot="*i32 rows", table="*i32? table_pages",
    blocks="*i32? rows block_count", reachable="*i32 rows", selected="*i32 rows count", **_LIVE, rows="i32",
    entries="i32", count="i32", **_PAGED,
)  # fmt: skip
MARK_BLOCKS = Params(
    "MarkBlocks", scores="*bf16 rows entries", reachable="*i32 rows", blocks="*i32 rows block_count",
    inside="*i32 rows", **_LIVE, rows="i32", entries="i32", block_count="i32", block_size="i32",
)  # fmt: skip
COMPRESS_ROWS = Params(
    "CompressRows", kv="*f32 rows head_dim", gate="*f32 rows head_dim", halves="*f32", keep="*i64 rows",
    partner="*i64 rows", pooled="*bf16 rows head_dim", **_LIVE, rows="i32",
)  # fmt: skip
GATHER_ENGRAM = Params(
    "GatherEngram", history="*i64 rows engram_shifts", multipliers="*i64 engram_shifts", primes="*i64 engram_columns",
    offsets="*i64 engram_columns", table="*u8", table_scale="*u8", codes="*u8 rows engram_width",
    scales="*u8 rows engram_width/32", **_LIVE, rows="i32",
)  # fmt: skip
GATE_ENGRAM = Params(
    "GateEngram", streams="*bf16 rows streams dim", projected="*bf16 rows streams+1 dim", q_weight="*bf16 streams dim",
    k_weight="*bf16 streams dim", out="*bf16 rows streams dim", **_LIVE, rows="i32",
)  # fmt: skip
PICK_TOKENS = Params(
    "PickTokens", logits="*f32 rows vocabulary", picked="*i32 rows", best="*f32 rows", **_LIVE, rows="i32",
    vocabulary="i32",
)  # fmt: skip
ANNOUNCE_PARTIAL = Params("AnnouncePartial", arrived="*i64 ranks", epoch="*i32 1", rank="i32", ranks="i32")
REDUCE_PEERS = Params(
    "ReducePeers", partials="*i64 ranks", arrived="*i32 ranks", epoch="*i32 1", out="*bf16 first+rows width",
    missing="*i32 1", **_LIVE, first="i32", rows="i32", width="i32", ranks="i32", patience_us="i32",
)  # fmt: skip
GATHER_PEERS = Params(
    "GatherPeers", partials="*i64 ranks", arrived="*i32 ranks", epoch="*i32 1", out="*f32 rows ranks width",
    missing="*i32 1", **_LIVE, rows="i32", width="i32", ranks="i32", patience_us="i32",
)  # fmt: skip
GATHER_ROWS = Params(
    "GatherRows", tables="*i64 count 8", row_bytes="*i64 count", arrived="*i32 ranks", epoch="*i32 1", missing="*i32 1",
    rows="i32", count="i32", rank="i32", ranks="i32", patience_us="i32",
)  # fmt: skip
_ROW = {"row_slot": "*i32 rows", "row_position": "*i32 rows", "row_id": "*i32 rows"}
PLACE_ROWS = Params(
    "PlaceRows", **_ROW, ids="*i32 turns ring", table="*i32 turns table_pages", floors="*i32 turns 4",
    engram_ids="*i32", positions="*i64 rows", group_positions="*i64 rows", ring_place="*i64 rows",
    entry_place="*i64 2 rows", reachable="*i32 2 rows", keep="*i64 rows", partner="*i64 rows",
    history="*i64 rows engram_shifts", windows="*i32 3 rows window", **_LIVE, rows="i32", turns="i32", ring="i32",
    table_pages="i32", page_tokens="i32", halves="i32", pad_id="i32", fresh="i32",
)  # fmt: skip
KEEP_IDS = Params("KeepIds", **_ROW, ids="*i32 turns ring", **_LIVE, rows="i32", turns="i32", ring="i32")
EMBED_ROWS = Params(
    "EmbedRows", embedding="*bf16", row_id="*i32 rows", streams="*bf16 rows streams dim", pre="*f32 rows streams",
    **_LIVE, rows="i32",
)  # fmt: skip
MEAN_STREAMS = Params(
    "MeanStreams", streams="*bf16 rows streams dim", taps="*bf16 rows taps dim", **_LIVE, rows="i32", tap="i32"
)
_BLOCK_ROW = {"row_slot": "*i32 batch block", "row_position": "*i32 batch block", "row_id": "*i32 batch block"}
GATHER_TURNS = Params(
    "GatherTurns", wanted="*i32 batch", done="*i32 turns", turn="*i32 batch", live_turns="*i32 1", live_rows="*i32 1",
    batch="i32", turns="i32",
)  # fmt: skip
PLACE_DRAFTS = Params(
    "PlaceDrafts", turn="*i32 batch", length="*i32 turns", anchor="*i32 turns", floors="*i32 turns 4", **_BLOCK_ROW,
    positions="*i64 batch block", windows="*i32 batch block window+block", **_LIVE, batch="i32", turns="i32",
    ring="i32", noise_id="i32",
)  # fmt: skip
_CHOSEN = {"anchors": "*i32 batch block", "drafts": "*i32 batch block"}
ADD_MARKOV = Params(
    "AddMarkov", embed="*bf16 vocabulary markov_rank", head="*bf16 vocabulary markov_rank", **_CHOSEN,
    logits="*f32 batch block vocabulary", **_LIVE, batch="i32", place="i32", vocabulary="i32",
)  # fmt: skip
RATE_DRAFTS = Params(
    "RateDrafts", streams="*bf16 batch block streams dim", pre="*f32 batch block streams", embed="*bf16",
    weight="*f32 dim+markov_rank", **_CHOSEN, confidence="*f32 batch block", **_LIVE, batch="i32",
)  # fmt: skip
PLACE_VERIFY = Params(
    "PlaceVerify", turn="*i32 batch", length="*i32 turns", anchor="*i32 turns", drafts="*i32? batch block",
    confidence="*f32? batch block", verified="*i32 batch", first="*i32 batch", **_ROW, live_rows="*i32 1", **_LIVE,
    batch="i32", turns="i32", rows="i32", limit="i32", threshold="f32",
)  # fmt: skip
SAMPLE_ROWS = Params(
    "SampleRows", logits="*f32 vocabulary", row_slot="*i32", row_position="*i32", temperature="*f64 turns",
    top_p="*f64 turns", seed="*i64 turns", picked="*i32 rows", peak="*f32 rows", least="*f32 rows", last="*i32 rows",
    mass="*i64 rows", **_LIVE, rows="i32", turns="i32", vocabulary="i32", first="i32", step="i32", purpose="i32",
)  # fmt: skip
JUDGE_DRAFTS = Params(
    "JudgeDrafts", logits="*f32 rows vocabulary", picked="*i32 rows", peak="*f32 rows", least="*f32 rows",
    last="*i32 rows", mass="*i64 rows", draft_logits="*f32? batch block vocabulary", draft_peak="*f32? batch block",
    draft_least="*f32? batch block", draft_last="*i32? batch block", draft_mass="*i64? batch block",
    drafts="*i32? batch block", turn="*i32 batch", first="*i32 batch", verified="*i32 batch", length="*i32 turns",
    temperature="*f64 turns", seed="*i64 turns", over="*i64 batch block", kept="*i32 batch", next="*i32 batch", **_LIVE,
    batch="i32", rows="i32", turns="i32", vocabulary="i32", rule="i32",
)  # fmt: skip
ADVANCE_TURNS = Params(
    "AdvanceTurns", turn="*i32 batch", drafts="*i32? batch block", verified="*i32? batch", first="*i32? batch",
    kept="*i32? batch", next="*i32 batch", length="*i32 turns", anchor="*i32 turns", generated="*i32 turns",
    max_tokens="*i32 turns", done="*i32 turns", feed_place="*i64? rows", results="*i32", sequence="*i64 result_steps",
    step="*i64 1", **_LIVE, batch="i32", turns="i32", rows="i32", ring="i32", fed="i32", eos_id="i32",
    result_steps="i32",
)  # fmt: skip
ASK_MASKS = Params(
    "AskMasks", turn="*i32 batch", length="*i32 turns", anchor="*i32 turns", ids="*i32 turns ring",
    drafts="*i32? batch block", verified="*i32? batch", ruled="*i32 1", questions="*i32", asked="*i64 1", step="*i64 1",
    **_LIVE, batch="i32", turns="i32", ring="i32",
)  # fmt: skip
AWAIT_MASKS = Params(
    "AwaitMasks", ruled="*i32 1", answered="*i64 1", late="*i32 1", step="*i64 1", patience_us="i32"
)  # fmt: skip
MASK_LOGITS = Params(
    "MaskLogits", logits="*f32 vocabulary", masks="*i32 batch block+1 words", masked="*i32 batch block+1",
    ruled="*i32 1", verified="*i32? batch", first="*i32? batch", **_LIVE, batch="i32", vocabulary="i32", words="i32",
)  # fmt: skip
_RATED = {"result_steps": "i32", "most_rows": "i32"}
RANK_LOGITS = Params(
    "RankLogits", logits="*f32 rows vocabulary", row_slot="*i32 rows", logprobs="*i32 turns", total="*f64 rows",
    likeliest="*i32 result_steps most_rows 20", likeliest_logprobs="*f32 result_steps most_rows 20", step="*i64 1",
    **_LIVE, rows="i32", turns="i32", vocabulary="i32", **_RATED,
)  # fmt: skip
RATE_TOKENS = Params(
    "RateTokens", logits="*f32 batch vocabulary", total="*f64 batch", row_id="*i32 batch", turn="*i32 batch",
    first="*i32? batch", kept="*i32? batch", next="*i32 batch", logprobs="*i32 turns",
    chosen_logprobs="*f32 result_steps most_rows", step="*i64 1", **_LIVE, batch="i32", turns="i32", vocabulary="i32",
    **_RATED,
)  # fmt: skip
