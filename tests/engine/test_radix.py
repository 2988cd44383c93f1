"""The radix tree equals a dictionary of page-aligned prefixes, whatever is done to it."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncllm.engine.pages import PagePool
from asyncllm.engine.radix import Node, RadixTree

texts = st.lists(st.integers(0, 2), min_size=1, max_size=14)


class RadixMachine(RuleBasedStateMachine):
    """The oracle: every cached prefix, as a tuple of ids, and the page its last stretch lies in."""

    @initialize(page_size=st.sampled_from([1, 2, 4]))
    def begin(self, page_size: int) -> None:
        self.page_size = page_size
        self.tree = RadixTree(page_size)
        self.pool = PagePool(40)
        self.prefixes: dict[tuple[int, ...], int] = {}
        self.locked: list[tuple[Node, tuple[int, ...]]] = []

    def _longest(self, ids: list[int]) -> list[int]:
        pages = []
        for end in range(self.page_size, len(ids) + 1, self.page_size):
            if tuple(ids[:end]) not in self.prefixes:
                break
            pages.append(self.prefixes[tuple(ids[:end])])
        return pages

    @rule(ids=texts)
    def match(self, ids: list[int]) -> None:
        expected = self._longest(ids)
        _, pages = self.tree.match(np.array(ids, np.int32), len(ids) // self.page_size)
        assert pages == expected

    @rule(ids=texts)
    def insert(self, ids: list[int]) -> None:
        ids = ids[: len(ids) // self.page_size * self.page_size]
        held = self._longest(ids)
        wanted = len(ids) // self.page_size
        if not ids or self.pool.num_free < wanted:
            return
        own = self.pool.take(wanted)
        node, adopted = self.tree.insert(np.array(ids, np.int32), own)
        assert adopted == own[len(held) :]
        self.pool.give(own[: len(held)])
        for i, page in enumerate(adopted, len(held) + 1):
            self.prefixes[tuple(ids[: i * self.page_size])] = page
        assert self.tree.match(np.array(ids, np.int32), wanted)[0] is node

    @rule(ids=texts)
    def lock(self, ids: list[int]) -> None:
        node, pages = self.tree.match(np.array(ids, np.int32), len(ids) // self.page_size)
        self.tree.lock(node)
        self.locked.append((node, tuple(ids[: len(pages) * self.page_size])))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, _ = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.tree.unlock(node)

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        evictable = self.tree.num_evictable
        freed = self.tree.evict(count)
        assert len(freed) == min(count, evictable)
        self.pool.give(freed)
        self.prefixes = {ids: page for ids, page in self.prefixes.items() if page not in freed}

    @precondition(lambda self: not self.locked)
    @rule()
    def clear(self) -> None:
        self.pool.give(self.tree.clear())
        self.prefixes = {}

    @invariant()
    def holds(self) -> None:
        self.tree.check()
        in_tree = sorted(page for node in self.tree.nodes() for page in node.pages)
        assert in_tree == sorted(self.prefixes.values())
        for _, ids in self.locked:  # a locked prefix is never lost
            assert len(self._longest(list(ids))) == len(ids) // self.page_size
        locked = {ids[: i + 1] for _, ids in self.locked for i in range(self.page_size - 1, len(ids), self.page_size)}
        assert self.tree.num_locked == len(locked)


TestRadix = RadixMachine.TestCase
TestRadix.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_least_recently_used_leaf_goes_first() -> None:
    tree = RadixTree(1)
    for i, ids in enumerate(([1, 2], [1, 3], [4])):
        tree.insert(np.array(ids, np.int32), list(range(10 * i, 10 * i + len(ids))))
    tree.match(np.array([1, 2], np.int32), 2)
    assert tree.evict(1) == [11]  # [1, 3]: [1, 2] was used since, and [1] has children
    assert tree.evict(1) == [20]


def test_eviction_entries_do_not_pile_up() -> None:
    """One hot prefix served for ever, never evicted: the heap of leaves stays as small as the tree."""
    tree = RadixTree(4)
    ids = np.arange(8, dtype=np.int32)
    tree.insert(ids, [1, 2])
    for _ in range(2000):
        node, _ = tree.match(ids, 2)
        tree.lock(node)
        tree.unlock(node)
    assert len(tree._leaves) <= 64 + 4 * tree.num_pages


def test_double_free_is_refused() -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    pool.give(pages)
    try:
        pool.give(pages)
    except RuntimeError as error:
        assert "freed twice" in str(error)
    else:
        raise AssertionError("a double free went unseen")
