"""What news make of the others: gaps, boots, silence. No clock, no connection."""

from dsuf.kv.directory.book import Book
from dsuf.kv.directory.contract import Member
from dsuf.kv.directory.news import Beat, Change, Farewell, Name, News
from dsuf.kv.directory.roster import Peer, Roster

OWN, A, A2, B = Name("own", "0"), Name("a", "1"), Name("a", "2"), Name("b", "1")
E = [bytes([n]) * 16 for n in range(100)]


class Scene:
    """A roster that hears, reads and is asked."""

    def __init__(self) -> None:
        self.book = Book()
        self.roster = Roster(OWN, self.book, expiry_s=10, gap_s=2)
        self.now_s = 1000.0

    def hear(self, *news: News, after_s: float = 0.5) -> None:
        """Each `after_s` later than what came before."""
        for one in news:
            self.now_s += after_s
            self.roster.hear(one, self.now_s)
            while self.roster.sweep(1):
                pass

    def read(self, name: Name, number: int, *entries: bytes) -> None:
        """Read the record of `name`."""
        [peer] = [peer for peer in self.roster.stale() if peer.name == name]
        self.roster.begin_read(peer)
        self.end_read(peer, number, *entries)

    def end_read(self, peer: Peer, number: int, *entries: bytes) -> None:
        """What a reader does with a record."""
        held = set(self.book.held(peer.holder))
        self.book.remove(peer.holder, held - set(entries))
        self.book.add(peer.holder, entries)
        self.roster.end_read(peer, member(peer.name), number)

    def names(self) -> list[str]:
        """Who is there."""
        return [str(peer.name) for peer in self.roster.known()]

    def held(self, name: Name) -> set[bytes]:
        """What `name` keeps."""
        return next((self.book.held(peer.holder) for peer in self.roster.known() if peer.name == name), set())


def member(name: Name) -> Member:
    return Member(node=name.node, boot=name.boot)


def beat(name: Name, number: int) -> Beat:
    return Beat(member(name), number)


def change(name: Name, number: int, added: bytes = b"", removed: bytes = b"") -> Change:
    return Change(name, number, tuple(filter(None, [added])), tuple(filter(None, [removed])))


def test_who_is_heard_is_read_and_then_followed() -> None:
    scene = Scene()
    scene.hear(beat(A, 2))
    assert scene.names() == ["a/1"]
    scene.read(A, 2, E[1], E[2])
    scene.hear(change(A, 3, added=E[3]), change(A, 4, removed=E[1]), beat(A, 4))
    assert scene.held(A) == {E[2], E[3]}
    assert scene.roster.stale() == []
    assert scene.roster.gaps == 0


def test_changes_that_come_before_the_record_and_while_it_is_read_follow() -> None:
    scene = Scene()
    scene.hear(change(A, 6, added=E[6]), change(A, 7, added=E[7]))
    [peer] = scene.roster.stale()
    scene.roster.begin_read(peer)
    assert scene.roster.stale() == []
    scene.hear(change(A, 8, removed=E[6]), beat(A, 8))
    scene.end_read(peer, 6, E[5], E[6])
    assert scene.held(A) == {E[5], E[7]}
    assert scene.roster.stale() == []


def test_a_gap_is_seen_at_the_next_change_and_at_the_next_beat() -> None:
    for late in (change(A, 5, added=E[5]), beat(A, 5)):
        scene = Scene()
        scene.hear(beat(A, 3))
        scene.read(A, 3, E[3])
        scene.hear(late)
        assert scene.roster.gaps == 1
        scene.hear(change(A, 6, added=E[6]))
        assert scene.held(A) == {E[3]}
        scene.read(A, 5, E[3], E[4], E[5])
        assert scene.held(A) == {E[3], E[4], E[5], E[6]}
        assert (scene.roster.gaps, scene.roster.stale()) == (1, [])


def test_what_comes_twice_or_too_late_changes_nothing() -> None:
    scene = Scene()
    scene.hear(beat(A, 3))
    scene.read(A, 3, E[3])
    scene.hear(change(A, 4, added=E[4]), change(A, 5, removed=E[4]), change(A, 4, added=E[4]), beat(A, 3))
    assert scene.held(A) == {E[3]}
    assert scene.roster.stale() == []


def test_a_gap_while_the_record_is_read_makes_it_read_again() -> None:
    scene = Scene()
    scene.hear(beat(A, 1))
    [peer] = scene.roster.stale()
    scene.roster.begin_read(peer)
    scene.hear(change(A, 4, added=E[4]))
    scene.end_read(peer, 2, E[2])
    assert scene.held(A) == {E[2]}
    scene.read(A, 4, E[2], E[4])
    assert scene.held(A) == {E[2], E[4]}


def test_a_record_that_is_not_read_for_long_does_not_pile_up_changes() -> None:
    scene = Scene()
    scene.hear(beat(A, 1))
    [peer] = scene.roster.stale()
    scene.hear(*(change(A, n, added=E[n % 100]) for n in range(2, 3000)), after_s=0.0)
    assert len(peer.waiting) <= 1000
    scene.read(A, 5, E[5])
    assert [p.name for p in scene.roster.stale()] == [A]


def test_who_is_silent_while_others_speak_is_forgotten() -> None:
    scene = Scene()
    scene.hear(beat(A, 1), beat(B, 1))
    scene.read(A, 1, E[1])
    scene.read(B, 1, E[1])
    for _ in range(15):
        scene.hear(beat(B, 1), after_s=1.0)
    assert scene.names() == ["b/1"]
    assert scene.book.entries == 1


def test_own_beats_are_news_enough() -> None:
    scene = Scene()
    scene.hear(beat(A, 1))
    for _ in range(15):
        scene.hear(beat(OWN, 1), after_s=1.0)
    assert scene.names() == []


def test_nobody_is_forgotten_while_nothing_is_heard() -> None:
    """Redis was gone for an hour, or this process stood still."""
    scene = Scene()
    scene.hear(beat(A, 1), beat(B, 1), beat(OWN, 0))
    scene.hear(beat(B, 1), after_s=3600)
    scene.hear(beat(OWN, 0), beat(A, 1))
    assert scene.names() == ["a/1", "b/1"]


def test_who_leaves_is_gone_at_once_and_late_news_do_not_bring_it_back() -> None:
    scene = Scene()
    scene.hear(beat(A, 1))
    scene.read(A, 1, E[1])
    scene.hear(Farewell(A), beat(A, 1), change(A, 2, added=E[2]))
    assert scene.names() == []
    assert scene.book.entries == 0
    assert scene.roster.meet([A]) == []


def test_a_new_boot_takes_the_place_of_the_old_one() -> None:
    scene = Scene()
    scene.hear(beat(A, 1))
    scene.read(A, 1, E[1])
    scene.hear(beat(A2, 0))
    assert scene.names() == ["a/2"]
    assert scene.roster.twins == set()
    scene.read(A2, 0)
    assert scene.book.entries == 0


def test_the_record_that_an_old_boot_left_behind_goes_when_the_new_one_is_heard() -> None:
    scene = Scene()
    assert [peer.name for peer in scene.roster.meet([OWN, Name("own", "old"), A, A2])] == [A, A2]
    scene.read(A, 1, E[1])
    scene.read(A2, 1, E[2])
    scene.hear(beat(A2, 1))
    assert scene.names() == ["a/2"]


def test_two_processes_of_one_node_are_both_kept_and_both_told() -> None:
    scene = Scene()
    scene.hear(beat(A, 1), beat(A2, 1), beat(A, 1), beat(A2, 1), beat(A, 1))
    assert scene.names() == ["a/1", "a/2"]
    assert scene.roster.twins == {"a"}
    scene.hear(Farewell(A2))
    assert scene.names() == ["a/1"]
    assert scene.roster.twins == set()


def test_another_process_with_the_own_name_is_noticed() -> None:
    scene = Scene()
    scene.hear(beat(Name("own", "1"), 0))
    assert scene.roster.twins == {"own"}
    for _ in range(15):
        scene.hear(beat(OWN, 0), after_s=1.0)
    assert scene.roster.twins == set()
