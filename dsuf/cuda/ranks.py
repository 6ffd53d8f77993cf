"""Several ranks that work as one engine: each launch goes to all of them, and what each has a part of is put together.

The ranks' arenas have one layout, so the first rank's launch with shifted addresses is every rank's, and what the host
writes is written to all. Three kinds of results are sums over ranks (attention's, the experts', an Engram
projection's); logits are slices of the vocabulary that are gathered before a choice is made of them. What is chosen of
logits, and which drafts are kept, the others take over from the first rank: one rank's choice is the choice. All else
the ranks compute alike, from the same bits; index keys every rank has in full so far. Ranks have a GPU each, or share
one and its streams; the order of launches (all announce, then all read) is that of both. Branches of few rows of a
decode pass are announced by what makes them and added up by what reads them, two launches less at every sum; an
observer of such a pass would not find them.

A rank that does not come in time is named in pinned memory, and every step from then on fails: ranks that have lost
each other never agree again, and only a new process helps.

Decided here: parts are rounded to BF16 before they are added, half the bytes of float32 on every link, as the usual
reduction has it. What goes into a sum is one rank's to the bit, and so is everything that follows from equal sums; the
sums themselves are not (about 0.3 % of a row's length), and quantisers and choices carry that on. One rank that
imitated the parts of eight would have to keep eight roundings of every expert's output, which the model has not.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Arena, Array, Region
from dsuf.cuda.contract import DeviceArray
from dsuf.cuda.kernels import Device, Kernels
from dsuf.cuda.machine import Setup, plan_regions
from dsuf.cuda.peers import Peers, plan_peers
from dsuf.cuda.streams import handle_on, worker_of
from dsuf.errors import DeviceError

SUMMED = ("project_fp8_o", "combine_experts", "project_fp8_engram")
"""Entries whose `out` is a part of a sum where a rank runs them."""

ANNOUNCING = {"combine_experts": "announce_experts", "project_fp8_o": "announce_fp8_o"}
"""Of those, the entries that also announce their part, in place of a launch that does nothing else."""

SUMMING = {"expand_streams": "sum_expand", "expand_collapse": "sum_expand_collapse"}
"""Entries that read such a sum, and those that add the parts up themselves."""

MOST_ROWS_WITHIN = 32
"""Rows of a decode pass that are summed so. Blocks that wait for other ranks hold their place on the GPU, eight a row:
those of more rows would leave none for what the other ranks wait for on another stream."""

CHOICES = {"sample_rows": ("picked",), "judge_drafts": ("kept", "next")}
"""Of entries that choose, the fields that say what; every rank has those of the first."""

STREAMS = 2
"""Streams on which ranks meet: decode's and prefill's."""

PATIENCE_US = 2_000_000

Value = DeviceArray | int | float | None
Values = Mapping[str, Value]


def plan_rank_regions(
    own: ModelConfig, setup: Setup, pages: int, ranks: int, streams: int = STREAMS
) -> list[Region]:  # fmt: skip
    """The regions of one of `ranks` ranks whose sizes are `own`: the engine's, with a slice of what makes logits, and
    what it needs to meet the others on some streams."""
    slices = {"head.weight", f"mtp.{own.n_mtp_layers - 1}.markov_head.head.weight"}
    regions = [
        msgspec.structs.replace(r, shape=(own.vocab_size // ranks, *r.shape[1:])) if r.name in slices else r
        for r in plan_regions(own, setup, pages)
    ]
    block = own.dspark_block_size + 1 if setup.drafts else 1
    rows = max(setup.max_turns * block, setup.prefill_rows, own.window_size)
    return regions + [region for number in range(streams) for region in plan_peers(own, number, rows, ranks)]


class RankedKernels(Kernels):
    """Each launch for all ranks of `arena`: by the kernels of each rank's own device, or by the only ones."""

    def __init__(
        self, kernels: Sequence[Kernels], arena: Arena, own: ModelConfig, devices: Sequence[Device] = ()
    ) -> None:
        self.names, self.ranks = kernels[0].names, arena.ranks
        self._kernels, self._arena, self._config, self._devices = kernels, arena, own, devices
        self._peers = [Peers(arena, n) for n in range(len(arena.regions)) if f"peers.{n}.parts" in arena]
        self._by_stream: dict[int, Peers] = {}
        self._slice_rows: dict[int, tuple[int, Array]] = {}  # of each array of logits: its rows, and how many live
        self._ranked: set[int] = set()  # arrays of logits whose slices are together already
        self._within = {arena[name].pointer for name in ("decode.branch", "draft.branch") if name in arena}
        self._shown: dict[int, Array] = {}  # of branches that are there as parts alone, the table of these

    def launch(self, entry: str, stream: int = 0, **values: DeviceArray | int | float | None) -> None:
        """As `Kernels.launch`."""
        try:
            self.launch_all(entry, stream, values)
        finally:
            self.settle()

    def settle(self) -> None:
        """Make the first rank's device the current one again."""
        if self._devices:
            self._devices[0].use()

    def check(self) -> None:
        """Raise `DeviceError` if a rank was ever waited for in vain."""
        for peers in self._peers:
            for rank, missing in enumerate(peers.missing):
                if missing[0]:
                    raise DeviceError(f"rank {rank} did not hear of rank {missing[0] - 1} in time")

    def launch_all(self, entry: str, stream: int, values: Values) -> None:
        """Queue `entry` for all ranks, and what brings together what each has a part of; any device may be current."""
        if entry in ANNOUNCING and self._is_within(values):
            self._show_part(entry, stream, values)
        elif entry in SUMMED:
            self.sum_up(entry, stream, values)
        elif entry in SUMMING and _address(values["branch"]) in self._shown:
            self._sum_within(entry, stream, values)
        elif entry == "project_bf16_dim" and _address(values["weight"]) == self._arena["head.weight"].pointer:
            self._project_slice(entry, stream, values)
        elif entry == "add_markov":
            logits: dict[str, Value] = {
                "logits": self._meet(stream)["slices"],
                "vocabulary": self._config.vocab_size // self.ranks,
            }
            self.launch_each(entry, stream, {**values, **logits})
        else:
            if entry in ("rank_logits", "sample_rows"):
                self._gather(entry, stream, values["logits"])
            self.launch_each(entry, stream, values)
            if entry in CHOICES:
                self._follow(stream, [values[name] for name in CHOICES[entry]])

    def launch_each(self, entry: str, stream: int, values: Values, ranks: Iterable[int] | None = None) -> None:
        """Queue `entry` for `ranks`, for all without any, each with its own arrays."""
        for rank in range(self.ranks) if ranks is None else ranks:
            own = {name: value.on(rank) if isinstance(value, Array) else value for name, value in values.items()}
            self.launch_on(rank, entry, stream, own)

    def launch_on(self, rank: int, entry: str, stream: int, values: Values) -> None:
        """Queue `entry` for one rank with these arrays."""
        place = rank if self._devices else 0
        if self._devices:
            self._devices[place].use()
        self._kernels[place].launch(entry, handle_on(stream, rank), **values)

    def _meet(self, stream: int) -> Peers:
        """The set of arrays that belongs to `stream`, wherever its work is captured."""
        stream = worker_of(stream)
        if stream not in self._by_stream:
            if not len(self._by_stream) < len(self._peers):
                raise DeviceError(f"ranks meet on at most {len(self._peers)} streams")
            self._by_stream[stream] = self._peers[len(self._by_stream)]
        return self._by_stream[stream]

    def sum_up(self, entry: str, stream: int, values: Values, share: int = 0) -> None:
        """Queue `entry` and the sum over ranks of its `out`: of all rows, or on each rank of its `share` of them."""
        peers, rows = self._meet(stream), values["rows"]
        width = values.get("n", self._config.dim)
        assert isinstance(rows, int) and isinstance(width, int) and isinstance(values["out"], Array)
        part, partials = peers.next_part(rows, width)
        self.launch_each(entry, stream, {**values, "out": part})
        self.announce(stream)
        sizes = {"rows": share or rows, "width": width, "ranks": self.ranks}
        common = {**self.met(stream), "partials": partials, "out": values["out"], "live": values["live"], **sizes}
        for rank in range(self.ranks):
            self.launch_each("reduce_peers", stream, {**common, "first": rank * share}, (rank,))

    def _is_within(self, values: Values) -> bool:
        """Whether these are few rows of a decode pass, whose branch nothing reads but its expansion."""
        rows = values["rows"]
        assert isinstance(rows, int)
        return rows <= MOST_ROWS_WITHIN and _address(values["out"]) in self._within

    def _show_part(self, entry: str, stream: int, values: Values) -> None:
        """Queue `entry`, whose `out` is there as parts alone, and that every rank says so."""
        peers, rows = self._meet(stream), values["rows"]
        assert isinstance(rows, int)
        part, self._shown[_address(values["out"])] = peers.next_part(rows, self._config.dim)
        told = {"arrived": peers["words"], "epoch": peers["epoch"], "counter": peers["counter"]}
        for rank in range(self.ranks):
            own: dict[str, Value] = {"out": part, **told, "rank": rank, "ranks": self.ranks}
            self.launch_each(ANNOUNCING[entry], stream, {**values, **own}, (rank,))

    def _sum_within(self, entry: str, stream: int, values: Values) -> None:
        """Queue what does as `entry` and adds up the parts of its branch itself."""
        own = {name: value for name, value in values.items() if name != "branch"}
        partials = self._shown.pop(_address(values["branch"]))
        met = {**self.met(stream), "partials": partials, "ranks": self.ranks}
        self.launch_each(SUMMING[entry], stream, {**own, **met})

    def _project_slice(self, entry: str, stream: int, values: Values) -> None:
        """Each rank's slice of the logits, which stay apart until a choice is made of them."""
        logits, rows, live = values["out"], values["rows"], values["live"]
        assert isinstance(rows, int) and isinstance(live, Array)
        self._slice_rows[_address(logits)] = rows, live
        own: dict[str, Value] = {"out": self._meet(stream)["slices"], "n": self._config.vocab_size // self.ranks}
        self.launch_each(entry, stream, {**values, **own})

    def _gather(self, entry: str, stream: int, logits: DeviceArray | float | None) -> None:
        """Put the slices together for `entry`; a choice takes those that were ranked before it as they are by then."""
        if entry == "sample_rows" and _address(logits) in self._ranked:
            self._ranked.remove(_address(logits))
            return
        if entry == "rank_logits":
            self._ranked.add(_address(logits))
        rows, live = self._slice_rows[_address(logits)]
        partials, width = self._meet(stream)["partials"][2], self._config.vocab_size // self.ranks
        self.announce(stream)
        own: dict[str, Value] = {"partials": partials, "out": logits, "live": live}
        sizes = {"rows": rows, "width": width, "ranks": self.ranks}
        self.launch_each("gather_peers", stream, {**self.met(stream), **own, **sizes})

    def _follow(self, stream: int, choices: Iterable[Value]) -> None:
        """Let the other ranks have what the first has at `choices`: gathered from one rank, as words of 32 bits."""
        self.announce(stream)
        for choice in choices:
            assert isinstance(choice, Array)
            words, leader = -(-choice.bytes // 16) * 4, self._meet(stream).find_leader(choice)
            sizes = {"rows": 1, "width": words, "ranks": 1}
            own = {"partials": leader, "out": choice.viewed("f32", 1, 1, words), "live": self._arena["one"]}
            self.launch_each("gather_peers", stream, {**self.met(stream), **own, **sizes}, range(1, self.ranks))

    def announce(self, stream: int) -> None:
        """Every rank says that what it has so far is there."""
        peers = self._meet(stream)
        for rank in range(self.ranks):
            own = {"arrived": peers["words"].on(rank), "epoch": peers["epoch"].on(rank)}
            self.launch_on(rank, "announce_partial", stream, {**own, "rank": rank, "ranks": self.ranks})

    def met(self, stream: int) -> dict[str, Value]:
        """How a rank knows that all are there."""
        peers = self._meet(stream)
        return {**{name: peers[name] for name in ("arrived", "epoch", "missing")}, "patience_us": PATIENCE_US}


def _address(value: DeviceArray | float | None) -> int:
    assert isinstance(value, Array)
    return value.pointer
