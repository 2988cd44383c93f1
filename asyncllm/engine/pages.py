"""The free list of KV pages. GPU thread; plain integers; never knows what a page holds."""


class PagePool:
    """Pages 1 .. num_pages-1; page 0 is the dummy that padding points to and is never given out."""

    def __init__(self, num_pages: int) -> None:
        self.num_usable = num_pages - 1
        self._free = list(range(num_pages - 1, 0, -1))
        self._is_free = bytearray([0] + [1] * self.num_usable)

    def __repr__(self) -> str:
        return f"PagePool({len(self._free)} of {self.num_usable} free)"

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """The caller has checked num_free."""
        assert count <= len(self._free), f"{count} pages wanted of {self!r}"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def give(self, pages: list[int]) -> None:
        """Raises RuntimeError on a double free: a page with two owners is worse than a dead engine."""
        for page in pages:
            if self._is_free[page]:
                raise RuntimeError(f"page {page} freed twice")
            self._is_free[page] = 1
        self._free.extend(pages)

    def free_pages(self) -> set[int]:
        return set(self._free)
