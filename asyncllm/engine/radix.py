"""The prefix cache: a radix tree over whole pages of token ids. GPU thread; numpy only.

It owns the pages in it and knows which are locked; it never knows sequences, and never frees a page
itself: evict() and clear() return pages to whoever keeps the free list.
"""

import heapq
import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


class Node:
    """An edge and its end: `pages[i]` holds the KV of `ids[i*page_size : (i+1)*page_size]`.

    `num_locks` counts the locks at or below this node, so an unlocked node has no locked child.
    """

    __slots__ = ("children", "ids", "last_used", "num_locks", "pages", "parent")

    def __init__(self, parent: "Node | None", ids: Ids, pages: list[int]) -> None:
        self.parent = parent
        self.ids = ids
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.num_locks = 0
        self.last_used = 0

    def __repr__(self) -> str:
        return f"Node({len(self.pages)} pages, {self.num_locks} locks, {len(self.children)} children)"


class RadixTree:
    """Longest cached prefixes, page by page."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.num_locked = 0  # pages in locked nodes
        self._clock = itertools.count(1)
        self._entries = itertools.count(1)  # breaks ties in the heap, the same in every run
        self.root = _new_root()
        self._lost: list[Node] = []  # roots of what is never matched again, and goes when nobody holds it
        self._salted: dict[str, Node] = {}  # a root each; those without children go when there are many
        # (last_used, entry, node) of every unlocked leaf, and outdated entries, skipped when popped.
        self._leaves: list[tuple[int, int, Node]] = []

    def __repr__(self) -> str:
        return f"RadixTree({self.num_pages} pages, {self.num_locked} locked)"

    @property
    def num_evictable(self) -> int:
        return self.num_pages - self.num_locked

    def match(self, ids: Ids, max_pages: int, salt: str = "") -> tuple[Node, list[int]]:
        """The deepest node whose path is a prefix of `ids`, at most `max_pages` long, and the path's pages.

        A node that matches in part is split, so that a lock holds no page too many. Only what was inserted
        under the same salt is found.
        """
        node = self._salted.get(salt, self.root) if salt else self.root
        if salt and node is self.root:
            return node, []
        pages: list[int] = []
        now = next(self._clock)
        while len(pages) < max_pages:
            child, num_common = self._descend(node, ids, len(pages), max_pages)
            if child is None:
                break
            node = child if num_common == len(child.pages) else self._split(child, num_common)
            node.last_used = now
            pages += node.pages
        self._remember_leaf(node)  # its last_used is new
        return node, pages

    def insert(self, ids: Ids, pages: list[int], salt: str = "") -> tuple[Node, list[int]]:
        """Make `ids` (whole pages) matchable. Returns its node and those of `pages` the tree now owns.

        Where the tree already holds a stretch, its own pages stay and the caller keeps his.
        """
        assert len(ids) == len(pages) * self.page_size
        if salt and pages and salt not in self._salted:
            self._add_root(salt)
        node, held = self.match(ids, len(pages), salt)
        adopted = pages[len(held) :]
        if adopted:
            node = self._add_child(node, ids[len(held) * self.page_size :], adopted)
        return node, adopted

    def lock(self, node: Node) -> None:
        """Keep the path to `node` from being evicted; the caller unlocks it once."""
        for step in _upward(node):
            if step.num_locks == 0:
                self.num_locked += len(step.pages)
            step.num_locks += 1

    def unlock(self, node: Node) -> None:
        for step in _upward(node):
            assert step.num_locks > 0
            step.num_locks -= 1
            if step.num_locks == 0:
                self.num_locked -= len(step.pages)
        self._remember_leaf(node)

    def lose(self, node: Node) -> None:
        """Match nothing any more that begins as the path to `node` does: what was computed there is not to be trusted.

        Its pages stay where they are until they are evicted: others may hold them.
        """
        top = node
        for top in _upward(node):  # noqa: B007  (the last one counts)
            pass
        if (root := top.parent) is None or self.is_lost(node):
            return
        key = self._key(top.ids, 0)
        self._lost = [lost for lost in self._lost if lost.children]
        self._lost.append(grave := _new_root())
        grave.children[key] = root.children.pop(key)
        top.parent = grave

    def is_lost(self, node: Node) -> bool:
        """Whether this path is matched no more; then nothing can be added to it."""
        if not self._lost:
            return False
        while node.parent is not None:
            node = node.parent
        return any(lost is node for lost in self._lost)

    def evict(self, count: int) -> list[int]:
        """Give up `count` unlocked pages (fewer if there are fewer), least recently used leaves first."""
        freed: list[int] = []
        while len(freed) < count and self._leaves:
            last_used, _, leaf = heapq.heappop(self._leaves)
            if leaf.last_used != last_used or not self._is_evictable(leaf):
                continue
            freed += self._shorten(leaf, count - len(freed))
        return freed

    def clear(self) -> list[int]:
        """Forget everything; nothing may be locked. Returns every page."""
        assert self.num_locked == 0, f"cleared with {self.num_locked} pages locked"
        pages = [page for node in self.nodes() for page in node.pages]
        self.root.children.clear()
        self._salted.clear()
        self._lost.clear()
        self._leaves.clear()
        self.num_pages = 0
        return pages

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        roots = (self.root, *self._salted.values(), *self._lost)
        stack = [child for root in roots for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold. For tests; walks the tree."""
        num_pages = num_locked = 0
        evictable = {id(leaf) for last_used, _, leaf in self._leaves if leaf.last_used == last_used}
        for node in self.nodes():
            assert node.pages and len(node.ids) == len(node.pages) * self.page_size
            assert node.parent is not None and node.parent.children[self._key(node.ids, 0)] is node
            assert node.num_locks >= sum(child.num_locks for child in node.children.values())
            assert not self._is_evictable(node) or id(node) in evictable, f"{node} would never be evicted"
            num_pages += len(node.pages)
            num_locked += len(node.pages) if node.num_locks else 0
        assert (num_pages, num_locked) == (self.num_pages, self.num_locked)

    def _add_root(self, salt: str) -> None:
        if len(self._salted) > 64 + 2 * self.num_pages:
            self._salted = {old: root for old, root in self._salted.items() if root.children}
        self._salted[salt] = _new_root()

    def _key(self, ids: Ids, page: int) -> bytes:
        return ids[page * self.page_size : (page + 1) * self.page_size].tobytes()

    def _descend(self, node: Node, ids: Ids, page: int, max_pages: int) -> tuple[Node | None, int]:
        """The child that continues `ids` at `page`, and for how many pages it does."""
        child = node.children.get(self._key(ids, page))
        if child is None:
            return None, 0
        start = page * self.page_size
        num_compared = min(len(child.ids), len(ids) - start, (max_pages - page) * self.page_size)
        differs = child.ids[:num_compared] != ids[start : start + num_compared]
        num_equal = int(differs.argmax()) if differs.any() else num_compared
        return child, num_equal // self.page_size

    def _add_child(self, parent: Node, ids: Ids, pages: list[int]) -> Node:
        node = Node(parent, ids.copy(), pages)
        node.last_used = next(self._clock)
        parent.children[self._key(ids, 0)] = node
        self.num_pages += len(pages)
        self._remember_leaf(node)
        return node

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut off the first pages of `node` as its new parent. `node` stays the deep end: locks point there."""
        cut = num_pages * self.page_size
        assert node.parent is not None
        upper = Node(node.parent, node.ids[:cut], node.pages[:num_pages])
        upper.num_locks, upper.last_used = node.num_locks, node.last_used
        node.parent.children[self._key(node.ids, 0)] = upper
        node.parent, node.ids, node.pages = upper, node.ids[cut:], node.pages[num_pages:]
        upper.children[self._key(node.ids, 0)] = node
        return upper

    def _shorten(self, leaf: Node, count: int) -> list[int]:
        """Free up to `count` pages from the leaf's end; what is left of it stays cached."""
        keep = max(0, len(leaf.pages) - count)
        freed = leaf.pages[keep:]
        self.num_pages -= len(freed)
        if keep:
            leaf.pages, leaf.ids = leaf.pages[:keep], leaf.ids[: keep * self.page_size]
            self._remember_leaf(leaf)
        else:
            assert leaf.parent is not None
            del leaf.parent.children[self._key(leaf.ids, 0)]
            parent, leaf.parent = leaf.parent, None
            self._remember_leaf(parent)
        return freed

    def _is_evictable(self, node: Node) -> bool:
        return node.num_locks == 0 and not node.children and node.parent is not None

    def _remember_leaf(self, node: Node) -> None:
        if self._is_evictable(node):
            heapq.heappush(self._leaves, (node.last_used, next(self._entries), node))
            # Without eviction, outdated entries would pile up: one for each request served.
            if len(self._leaves) > 64 + 4 * self.num_pages:
                self._rebuild_leaves()

    def _rebuild_leaves(self) -> None:
        self._leaves = [(n.last_used, next(self._entries), n) for n in self.nodes() if self._is_evictable(n)]
        heapq.heapify(self._leaves)


def _new_root() -> Node:
    return Node(None, np.empty(0, np.int32), [])


def _upward(node: Node) -> Iterator[Node]:
    step: Node | None = node
    while step is not None and step.parent is not None:
        yield step
        step = step.parent
