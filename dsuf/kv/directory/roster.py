"""The other members, as their news tell: who lives, how far what is known of each goes, who has to be read again.

No clock and no connection in here. Time moves only while news come: a gap between two of them counts for no more than
`gap_s`. So nobody is forgotten because nothing at all was heard.
"""

from collections.abc import Iterable
from itertools import count, islice

from dsuf.kv.directory.book import Book
from dsuf.kv.directory.contract import Member
from dsuf.kv.directory.news import Beat, Change, Farewell, Name, News
from dsuf.observe.log import log_event

_WAITING_CHANGES = 1000
_DEPARTED = 1000


class Peer:
    """A member, whose entries are in the book under `holder` as they were after `number` changes.

    `number` is None before they were read for the first time. While it is `stale` or `reading`, further changes wait.
    `live` says whether itself was heard, and not only its record found.
    """

    def __init__(self, name: Name, holder: int, heard_s: float) -> None:
        self.name, self.holder, self.heard_s = name, holder, heard_s
        self.member: Member | None = None
        self.number: int | None = None
        self.stale = True
        self.reading = False
        self.live = False
        self.read_s = 0.0
        self.waiting: list[Change] = []


class Roster:
    """The peers of `own`, and in `book` what they keep. `twins` are nodes of which two processes are heard."""

    def __init__(self, own: Name, book: Book, expiry_s: float, gap_s: float) -> None:
        self.own, self.book = own, book
        self.twins: set[str] = set()
        self.gaps = 0
        self._expiry_s, self._gap_s = expiry_s, gap_s
        self._peers: dict[Name, Peer] = {}
        self._holders: dict[int, Peer] = {}
        self._departed: dict[Name, bool] = {}  # whether it said so itself
        self._gone: list[int] = []
        self._numbers = count()
        self._time_s = 0.0
        self._last_s: float | None = None

    def __len__(self) -> int:
        return len(self._peers)

    def member(self, holder: int) -> Member | None:
        """Who has the number `holder`; None where it is gone, or not known yet."""
        peer = self._holders.get(holder)
        return None if peer is None else peer.member

    def known(self) -> list[Peer]:
        """All peers of which it is known what they are, by name."""
        return [self._peers[name] for name in sorted(self._peers, key=str) if self._peers[name].member is not None]

    def stale(self) -> list[Peer]:
        """Peers that have to be read, and are not being read."""
        return [peer for peer in self._peers.values() if peer.stale and not peer.reading]

    def meet(self, names: Iterable[Name]) -> list[Peer]:
        """Peers that have records; those of earlier boots of this node are not among them."""
        fresh = [n for n in names if n.node != self.own.node and n not in self._peers and n not in self._departed]
        return [self._enter(name) for name in fresh]

    def hear(self, news: News, now_s: float) -> None:
        """Take in `news`, which came at `now_s` by a monotonic clock."""
        if self._last_s is not None:
            self._time_s += min(now_s - self._last_s, self._gap_s)
        self._last_s = now_s
        self._expire()
        if news.name == self.own or (self._departed.get(news.name, False)):
            return
        if isinstance(news, Farewell):
            self._depart(news.name, itself=True)
            return
        peer = self._peers.get(news.name) or self._enter(news.name)
        peer.heard_s = self._time_s
        if not peer.live:
            peer.live = True
            self._replace(peer)
        if isinstance(news, Change):
            peer.waiting.append(news)
            self._follow(peer)
        else:
            self._note(peer, news)

    def begin_read(self, peer: Peer) -> None:
        """The record of `peer` is read from now on."""
        peer.stale, peer.reading = False, True

    def end_read(self, peer: Peer, member: Member, number: int) -> None:
        """The book has what the record of `peer` held; changes that came since then follow."""
        peer.reading = False
        peer.number = number
        peer.member = peer.member or member
        self._follow(peer)

    def give_up_read(self, peer: Peer) -> None:
        """The record of `peer` could not be read."""
        peer.stale, peer.reading = True, False

    def is_here(self, peer: Peer) -> bool:
        """Whether `peer` was not forgotten meanwhile."""
        return self._peers.get(peer.name) is peer

    def forget(self, peer: Peer) -> None:
        """`peer` is gone; what the book has of it nobody asks for any more, and goes with `sweep`."""
        if self.is_here(peer):
            del self._peers[peer.name]
            del self._holders[peer.holder]
            self._gone.append(peer.holder)
            node = peer.name.node
            if sum(name.node == node for name in (self.own, *self._peers)) < 2:
                self.twins.discard(node)

    def sweep(self, entries: int) -> bool:
        """Drop up to so many entries of those that are gone; whether more are left."""
        while self._gone and entries > 0:
            part = list(islice(self.book.held(self._gone[-1]), entries))
            self.book.remove(self._gone[-1], part)
            entries -= len(part)
            if not self.book.held(self._gone[-1]):
                self.book.drop(self._gone.pop())
        return bool(self._gone)

    def _enter(self, name: Name) -> Peer:
        peer = Peer(name, next(self._numbers), self._time_s)
        self._peers[name] = self._holders[peer.holder] = peer
        return peer

    def _note(self, peer: Peer, beat: Beat) -> None:
        """A beat: `peer` lives, and says how far its changes go."""
        peer.member = beat.member
        if peer.number is not None and not peer.reading and beat.number > peer.number:
            self._miss(peer)

    def _follow(self, peer: Peer) -> None:
        """Apply the changes that wait, as far as none is missing."""
        if peer.reading or peer.number is None:
            del peer.waiting[:-_WAITING_CHANGES]
            return
        waiting, peer.waiting = peer.waiting, []
        for i, change in enumerate(waiting):
            if change.number > peer.number + 1:
                peer.waiting = waiting[i:][-_WAITING_CHANGES:]
                self._miss(peer)
                return
            if change.number == peer.number + 1:
                self.book.remove(peer.holder, change.removed)
                self.book.add(peer.holder, change.added)
                peer.number = change.number

    def _miss(self, peer: Peer) -> None:
        """News of `peer` are missing."""
        self.gaps += not peer.stale
        peer.stale = True

    def _replace(self, peer: Peer) -> None:
        """`peer` was heard for the first time: other boots of its node are over, unless both are heard in turn."""
        node = peer.name.node
        if node == self.own.node or peer.name in self._departed:
            if node not in self.twins:
                log_event("two processes of one node", level="warning", node=node, boot=peer.name.boot)
            self.twins.add(node)
        if node not in self.twins:
            for other in [p for p in self._peers.values() if p.name.node == node and p is not peer]:
                self._depart(other.name, itself=False)

    def _depart(self, name: Name, itself: bool) -> None:
        """`name` is over; later news of it are old, or show that it is not."""
        self._departed[name] = itself
        while len(self._departed) > _DEPARTED:
            del self._departed[next(iter(self._departed))]
        if (peer := self._peers.get(name)) is not None:
            self.forget(peer)

    def _expire(self) -> None:
        """Forget who was silent while others spoke."""
        for peer in [p for p in self._peers.values() if self._time_s - p.heard_s > self._expiry_s]:
            log_event("member silent", level="warning", node=peer.name.node, boot=peer.name.boot)
            self.forget(peer)
