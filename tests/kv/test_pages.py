"""The pool of device pages: no page in two states, none lost, and the least recently used goes first."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsuf.kv.pages import PagePool
from dsuf.kv.prefix import Node


def make_node(number: int = 0) -> Node:
    return Node(None, number.to_bytes(4, "little"), b"")


def test_pages_are_taken_shared_and_found() -> None:
    forgotten: list[Node] = []
    pool, node = PagePool(3, forgotten.append), make_node()
    assert pool.take(4) is None
    taken = pool.take(2)
    assert taken == [0, 1]
    pool.name(0, node)
    pool.retain([0])
    assert pool.is_shared(0)
    pool.release([0, 1])
    assert (pool.held, pool.cached, pool.room, pool.is_shared(0)) == (1, 0, 2, False)
    pool.release([0])
    assert (pool.held, pool.cached, node.device) == (0, 1, 0)
    pool.retain([0])
    assert (pool.held, pool.cached) == (1, 0)
    pool.release([0])
    assert pool.take(3) is not None, "what is only cached makes room"
    assert node.device is None
    assert forgotten == [node]


def test_what_was_used_last_and_what_stands_first_stays_longest() -> None:
    pool, nodes = PagePool(4, lambda node: None), [make_node(n) for n in range(4)]
    taken = pool.take(4)
    assert taken is not None
    for page, node in zip(taken, nodes, strict=True):
        pool.name(page, node)
    pool.release(taken[:2])
    pool.release(taken[2:])
    pool.retain([taken[0]])
    pool.release([taken[0]])
    order = []
    for _ in range(4):
        pool.take(1)
        order += [n for n, node in enumerate(nodes) if node.device is None and n not in order]
    assert order == [1, 3, 2, 0]


def test_a_prefix_has_one_page_and_a_page_one_prefix() -> None:
    pool, node = PagePool(2, lambda node: None), make_node()
    pool.take(2)
    pool.name(0, node)
    pool.name(1, node)
    pool.name(0, other := make_node(1))
    assert (node.device, other.device) == (0, None)
    pool.release([0, 1])
    assert (pool.cached, pool.room) == (1, 2)


@pytest.mark.parametrize("wrong", ["release", "retain", "name"])
def test_books_that_do_not_add_up_are_refused(wrong: str) -> None:
    pool = PagePool(2, lambda node: None)
    with pytest.raises(AssertionError):
        pool.name(0, make_node()) if wrong == "name" else getattr(pool, wrong)([0])


class Pool(RuleBasedStateMachine):
    """A pool against plain counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(6, self.on_forgotten)
        self.forgotten: list[Node] = []
        self.references: Counter[int] = Counter()
        self.names: dict[int, Node] = {}
        self.numbers = 0

    def on_forgotten(self, node: Node) -> None:
        self.forgotten.append(node)

    def held(self) -> list[int]:
        return sorted(self.references)

    @rule(count=st.integers(0, 7))
    def take(self, count: int) -> None:
        free = 6 - len(self.references)
        taken = self.pool.take(count)
        assert (taken is None) == (count > free)
        for page in taken or ():
            assert page not in self.references, "given out twice"
            self.references[page] = 1
            self.names.pop(page, None)

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        pages = sorted({*self.references, *self.names})
        chosen = data.draw(st.lists(st.sampled_from(pages), unique=True) if pages else st.just([]))
        self.pool.retain(chosen)
        self.references.update(chosen)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.held()), unique=True))
        self.pool.release(chosen)
        self.references.subtract(chosen)
        self.references = +self.references

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held()))
        self.numbers += 1
        node = make_node(self.numbers)
        self.pool.name(page, node)
        assert (node.device == page) == (page not in self.names)
        self.names.setdefault(page, node)

    @rule(page=st.integers(0, 5))
    def forget(self, page: int) -> None:
        self.pool.forget(page)
        if page in self.names:
            assert self.forgotten[-1] is self.names.pop(page)

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        pool = self.pool
        held = {page for page in range(6) if pool._references[page]}
        assert held == set(self.references)
        assert all(pool._references[page] == count for page, count in self.references.items())
        assert sorted([*held, *pool._free, *pool._cached]) == list(range(6))
        assert set(pool._named) == set(self.names)
        assert set(pool._cached) == set(self.names) - held
        assert all(self.names[page].device == page for page in self.names)
        assert (pool.held, pool.room) == (len(held), 6 - len(held))


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
