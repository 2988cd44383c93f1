"""Which KV pages each sequence holds: its own from the pool, and those it shares through the radix tree.

GPU thread; numpy only. It never knows slots, steps or whose turn it is.
"""

from collections.abc import Collection

from .pages import PagePool
from .radix import Node, RadixTree
from .sequence import Sequence


class Cache:
    """Every page of the engine. A page is free, the tree's, or private to one sequence."""

    def __init__(self, num_pages: int, page_size: int, *, shares_prefixes: bool) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_size)
        self._shares_prefixes = shares_prefixes

    def __repr__(self) -> str:
        return f"Cache({self.pool!r}, {self.tree!r})"

    @property
    def num_available(self) -> int:
        """Pages that are free, or would be if a cached prefix were forgotten."""
        return self.pool.num_free + self.tree.num_evictable

    def fits(self, length: int) -> bool:
        """Whether so many tokens ever could be held."""
        return self._pages_for(length) <= self.pool.num_usable

    def place(self, sequence: Sequence, num_spare: int) -> bool:
        """Pages for all that a sequence without any knows, as far as possible found; False if that would not leave
        `num_spare` available."""
        node, pages = self._match(sequence)
        self.tree.lock(node)
        num_missing = self._pages_for(sequence.committed_len) - len(pages)
        if num_missing + num_spare > self.num_available:
            self.tree.unlock(node)
            return False
        sequence.node = node
        sequence.private = set(own := self._take(num_missing))
        sequence.pages = pages + own
        sequence.num_places = len(sequence.pages) * self.page_size
        sequence.planned_len = sequence.computed_len = len(pages) * self.page_size
        sequence.num_published = len(pages)
        return True

    def grow(self, sequence: Sequence) -> None:
        """One more page, of those available."""
        own = self._take(1)
        sequence.private.update(own)
        sequence.pages += own
        sequence.num_places += self.page_size

    def share_further(self, sequence: Sequence) -> range:
        """Before a chunk: somebody may have published what it would compute. Equal prompts that arrive
        together are computed once, however many chunks they take. Returns which pages are others now."""
        num_planned, rest = divmod(sequence.planned_len, self.page_size)
        if rest or self._is_lost(sequence):
            return range(0)
        node, pages = self._match(sequence)
        if len(pages) <= num_planned:
            return range(0)
        self._move_lock(sequence, node)
        replaced = sequence.pages[num_planned : len(pages)]  # not yet written to
        sequence.private.difference_update(replaced)
        self.pool.give(replaced)
        sequence.pages[num_planned : len(pages)] = pages[num_planned:]
        if not sequence.num_output:
            sequence.cached_len += len(pages) * self.page_size - sequence.planned_len
        sequence.planned_len = len(pages) * self.page_size
        sequence.num_published = len(pages)
        return range(num_planned, len(pages))

    def publish(self, sequence: Sequence) -> None:
        """Offer the full pages of what is known and planned to the tree."""
        num_pages = min(sequence.planned_len, sequence.committed_len) // self.page_size
        if not self._shares_prefixes or num_pages <= sequence.num_published or self._is_lost(sequence):
            return
        ids, pages = sequence.ids[: num_pages * self.page_size], sequence.pages[:num_pages]
        node, adopted = self.tree.insert(ids, pages, sequence.submission.cache_salt)
        self._move_lock(sequence, node)
        sequence.private.difference_update(adopted)
        sequence.num_published = num_pages

    def lose(self, sequence: Sequence) -> None:
        """Let nobody match what this sequence has computed or read any more."""
        assert sequence.node is not None
        self.tree.lose(sequence.node)

    def release(self, sequence: Sequence) -> None:
        """Take all pages back."""
        assert sequence.node is not None
        self.tree.unlock(sequence.node)
        self.pool.give(sorted(sequence.private))

    def clear(self) -> None:
        """Forget every prefix; no sequence may hold pages."""
        self.pool.give(self.tree.clear())

    def check(self, holders: Collection[Sequence]) -> None:
        """Raise AssertionError where an invariant does not hold. For tests; walks everything."""
        self.tree.check()
        free, cached = self.pool.free_pages(), [page for node in self.tree.nodes() for page in node.pages]
        private = [page for sequence in holders for page in sequence.private]
        owned = [*free, *cached, *private]
        assert sorted(owned) == list(range(1, self.pool.num_usable + 1)), "free + tree + private != all pages"
        for sequence in holders:
            assert sequence.private <= set(sequence.pages) and len(set(sequence.pages)) == len(sequence.pages)
            assert sequence.num_places == len(sequence.pages) * self.page_size, sequence
            assert len(sequence.pages) >= self._pages_for(sequence.planned_len), sequence
        if not holders:
            assert self.tree.num_locked == 0, "a lock outlived its sequence"

    def _match(self, sequence: Sequence) -> tuple[Node, list[int]]:
        """At least one token is left to compute: the first draw needs its hidden state."""
        if not self._shares_prefixes or sequence.num_unscored > 0:  # a position found is not computed, so not scored
            return self.tree.root, []
        most = (sequence.committed_len - 1) // self.page_size
        return self.tree.match(sequence.ids, most, sequence.submission.cache_salt)

    def _is_lost(self, sequence: Sequence) -> bool:
        """Whether it reads pages that nobody else may come to read: it keeps them, and adds nothing to them."""
        assert sequence.node is not None
        return self.tree.is_lost(sequence.node)

    def _move_lock(self, sequence: Sequence, node: Node) -> None:
        assert sequence.node is not None
        self.tree.lock(node)
        self.tree.unlock(sequence.node)
        sequence.node = node

    def _take(self, count: int) -> list[int]:
        if (num_missing := count - self.pool.num_free) > 0:
            self.pool.give(self.tree.evict(num_missing))
        return self.pool.take(count)

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)
