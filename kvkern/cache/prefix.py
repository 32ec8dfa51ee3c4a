"""Which pages hold which tokens: a trie of whole pages, so that requests reuse a common prefix.

The key and value rows of a token depend on every token before it, so a page is found under its
parent page *and* its own tokens, compared one by one. Only leaves are evicted, so whatever is
indexed can be reached.
"""

import heapq
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvkern.cache.pages import PageAllocator, check_int
from kvkern.errors import ArgumentError, KvkernError

_ROOT = -1  # the parent of every first page


@dataclass(slots=True)
class _Node:
    parent: int  # page, or _ROOT
    tokens: tuple[int, ...]  # of this page alone
    last_use: int = 0
    num_children: int = 0
    queued: bool = False


class PrefixIndex:
    """Finds pages that already hold a prompt's first tokens; holds one reference to each.

    Args:
        allocator: owner of the pages. All methods take and give references through it.

    Every method raises ``ArgumentError`` for a bad argument and then has changed nothing.
    Tokens are any sequence of integers: list, tuple, numpy array or CPU tensor.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._pages: dict[tuple[int, tuple[int, ...]], int] = {}  # (parent, tokens) -> page
        self._nodes: dict[int, _Node] = {}  # by page
        # Every leaf once, as (a use no later than its last, page), and nodes that were leaves when
        # queued. Corrected as entries come up: a match is then free of heap operations.
        self._queue: list[tuple[int, int]] = []
        self._clock = 0

    @property
    def num_pages(self) -> int:
        """Pages in the index. Changes nothing."""
        return len(self._nodes)

    def __contains__(self, page: object) -> bool:
        """Whether the page is indexed. Changes nothing."""
        return page in self._nodes

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Pages of the longest indexed prefix of ``tokens``; marks them used, takes no reference.

        Every token in the returned pages, and so every token before each page, equals the one
        asked for. Start a sequence from them before the next ``evict``, which may free them.
        """
        path = self._walk(_ROOT, self._split(tokens))
        self._touch(path)
        return path

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], *, after: int | None = None
    ) -> int:
        """Index the whole pages of ``tokens``; adds a reference to each page newly indexed.

        Args:
            tokens: a sequence's first tokens, or those that follow the page ``after``, all of
                them written to the cache. A last page that they do not fill is left out.
            pages: the pages that hold them, in order; more may follow. Where the same prefix is
                indexed already, the old page stays and the one given is not needed for reuse.
            after: an indexed page of the same sequence, which must have been held ever since it
                was indexed or matched: what comes before it is not compared again, so a sequence
                that grows page by page costs each token once.

        Returns:
            The number of pages newly indexed.
        """
        split = list(self._split(tokens))
        if len(pages) < len(split):
            raise ArgumentError(f"pages: want >= {len(split)} for the tokens, got {len(pages)}")
        given = self._allocator.check_pages_in_use("pages", pages[: len(split)])
        if after is not None and after not in self._nodes:
            raise ArgumentError(f"after: want an indexed page, got {after!r}")
        parent = _ROOT if after is None else after
        path = self._walk(parent, split)
        num_known = len(path)
        for page in given[num_known:]:
            if page in self._nodes:
                raise ArgumentError(f"pages: want {page} indexed once, got it under other tokens")
        for page, page_tokens in zip(given[num_known:], split[num_known:], strict=True):
            self._add(path[-1] if path else parent, page_tokens, page)
            path.append(page)
        self._touch(path)
        self._touch_ancestors(parent)
        if len(path) > num_known:
            self._enqueue(path[-1])
        return len(path) - num_known

    def evict(self, num_pages: int) -> int:
        """Free up to ``num_pages`` pages that only the index holds and return how many it freed.

        Least recently used first, and a page after all that continue it: what stays indexed can
        still be matched. Fewer than ``num_pages`` means that sequences hold all the rest.
        """
        num_pages = check_int("num_pages", num_pages, at_least=0)
        num_freed = 0
        held: list[int] = []  # at most one leaf for each sequence, so worth setting aside
        while num_freed < num_pages and self._queue:
            queued_use, page = heapq.heappop(self._queue)
            node = self._nodes[page]
            node.queued = False
            if node.num_children > 0:
                continue  # queued again when its last child goes
            if self._allocator.ref_count(page) > 1:
                held.append(page)
            elif queued_use < node.last_use:
                self._enqueue(page)
            else:
                self._remove(page)
                num_freed += 1
        for page in held:
            self._enqueue(page)
        return num_freed

    def clear(self) -> None:
        """Forget everything; drops the index's reference to each page."""
        for page in self._nodes:
            self._allocator.decref(page)
        self._pages.clear()
        self._nodes.clear()
        self._queue.clear()

    def check(self, extra_refs: Mapping[int, int] | None = None) -> None:
        """Raise ``KvkernError`` unless trie, queue and allocator agree. Changes nothing.

        Args:
            extra_refs: references held by others than sequences and this index, by page.
        """
        children: dict[int, list[int]] = defaultdict(list)
        for page, node in self._nodes.items():
            children[node.parent].append(page)
            if self._pages.get((node.parent, node.tokens)) != page:
                raise KvkernError(f"page {page}: want it found by its tokens, got another or none")
        reached = children[_ROOT].copy()
        for page in reached:  # grows on the way
            reached.extend(children[page])
        queued = sorted(page for _, page in self._queue)
        for what, want, got in (
            ("pages by tokens", len(self._nodes), len(self._pages)),
            ("pages under the root", len(self._nodes), len(reached)),
            ("queue", sorted(page for page, node in self._nodes.items() if node.queued), queued),
        ):
            if want != got:
                raise KvkernError(f"{what}: want {want}, got {got}")
        for page, node in self._nodes.items():
            if node.num_children != len(children[page]):
                raise KvkernError(
                    f"page {page}: want {len(children[page])} children, got {node.num_children}"
                )
            if node.num_children == 0 and not node.queued:
                raise KvkernError(f"page {page}: want every leaf queued, got one that is not")
            if any(self._nodes[child].last_use > node.last_use for child in children[page]):
                raise KvkernError(f"page {page}: want use no older than its children's, got older")
        for queued_use, page in self._queue:
            if queued_use > self._nodes[page].last_use:
                raise KvkernError(f"page {page}: want it queued by a past use, got a later one")
        self._allocator.check(Counter(dict(extra_refs or {})) + Counter(self._nodes.keys()))

    def _split(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Whole pages of ``tokens`` as tuples of plain ints, which compare by value."""
        plain = tokens if isinstance(tokens, list | tuple) else np.asarray(tokens).tolist()
        size = self._allocator.page_size
        for start in range(0, len(plain) - size + 1, size):
            page_tokens = plain[start : start + size]
            try:
                yield tuple(map(operator.index, page_tokens))
            except TypeError:
                odd = next(token for token in page_tokens if not hasattr(token, "__index__"))
                raise ArgumentError(f"tokens: want integers, got {odd!r}") from None

    def _walk(self, parent: int, split: Iterable[tuple[int, ...]]) -> list[int]:
        path: list[int] = []
        for page_tokens in split:
            page = self._pages.get((path[-1] if path else parent, page_tokens))
            if page is None:
                break
            path.append(page)
        return path

    def _touch(self, path: list[int]) -> None:
        self._clock += 1
        for page in path:
            self._nodes[page].last_use = self._clock

    def _touch_ancestors(self, page: int) -> None:
        """Mark ``page`` and all before it used just now, as the pages after it are."""
        while page != _ROOT:
            node = self._nodes[page]
            node.last_use = self._clock
            page = node.parent

    def _enqueue(self, page: int) -> None:
        node = self._nodes[page]
        if not node.queued:
            node.queued = True
            heapq.heappush(self._queue, (node.last_use, page))

    def _add(self, parent: int, page_tokens: tuple[int, ...], page: int) -> None:
        self._allocator.incref(page)
        self._pages[parent, page_tokens] = page
        self._nodes[page] = _Node(parent, page_tokens)
        if parent != _ROOT:
            self._nodes[parent].num_children += 1

    def _remove(self, page: int) -> None:
        node = self._nodes.pop(page)
        del self._pages[node.parent, node.tokens]
        self._allocator.decref(page)
        if node.parent != _ROOT:
            parent = self._nodes[node.parent]
            parent.num_children -= 1
            if parent.num_children == 0:
                self._enqueue(node.parent)
