"""Which sequence owns which page: a free list, reference counts and copy-on-write, on the host.

Nothing here touches the cache's bytes. A page is free (count 0), private (count 1) or shared
(count > 1); a shared page is never handed out for writing.
"""

import operator
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvkern.errors import ArgumentError, KvkernError, OutOfPagesError


class PageCopyPlan(NamedTuple):
    """The bytes of page ``src`` must be copied to page ``dst`` before the next write."""

    src: int
    dst: int


@dataclass(slots=True)
class _PagedSequence:
    pages: "array[int]"  # int32, so that a table row is one memory copy
    num_tokens: int  # always fits the pages, with less than one page to spare


class PageAllocator:
    """Hands out the pages of one cache to sequences that may share them.

    Args:
        num_pages: pages in the cache, >= 1.
        page_size: tokens in a page, >= 1.

    Every method raises ``ArgumentError`` for a bad argument and then has changed nothing.
    Not thread-safe.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._num_pages = check_int("num_pages", num_pages, at_least=1)
        self._page_size = check_int("page_size", page_size, at_least=1)
        self._free_pages = list(
            range(self._num_pages - 1, -1, -1)
        )  # a stack: last freed, first out
        self._ref_counts = [0] * self._num_pages
        self._sequences: dict[int, _PagedSequence] = {}
        self._next_seq = 0  # ids are never reused, so a double free is always seen

    @property
    def num_pages(self) -> int:
        """Pages in the cache, used and free. Changes nothing."""
        return self._num_pages

    @property
    def page_size(self) -> int:
        """Tokens in a page. Changes nothing."""
        return self._page_size

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody references. Changes nothing."""
        return len(self._free_pages)

    def new_sequence(self, prefix_pages: Sequence[int] = (), num_tokens: int = 0) -> int:
        """Start a sequence and return its id; adds one reference to each prefix page.

        Args:
            prefix_pages: distinct pages in use that already hold the first ``num_tokens`` tokens.
            num_tokens: tokens in them; only the last page may be partly filled.
        """
        pages = self.check_pages_in_use("prefix_pages", prefix_pages)
        most = len(pages) * self._page_size
        least = most - self._page_size + 1 if pages else 0
        num_tokens = check_int("num_tokens", num_tokens, at_least=0)
        if not least <= num_tokens <= most:
            raise ArgumentError(
                f"num_tokens: want {least} to {most} for {len(pages)} prefix pages of "
                f"{self._page_size}, got {num_tokens}"
            )
        return self._add_sequence(pages, num_tokens)

    def fork(self, seq: int) -> int:
        """Start a sequence with the same tokens and return its id; adds one reference to each page.

        A partly filled last page is copied by whichever of the two appends first.
        """
        parent = self._get("seq", seq)
        return self._add_sequence(parent.pages, parent.num_tokens)

    def append(self, seq: int, num_tokens: int) -> list[PageCopyPlan]:
        """Give the sequence room for ``num_tokens`` more; takes pages off the free list as needed.

        Returns:
            At most one copy. When the first new token falls in a page that others hold too, a
            free page takes its place in the table and the old one's bytes must be copied to it
            (``copy_pages``). Run copies in the order they were returned, before anything is
            written to the cache. Once ``src`` is free a later ``append`` may take it, even as
            its ``dst``, so one ``copy_pages`` may run several only if no ``dst`` is also a ``src``.

        Raises:
            OutOfPagesError: too few free pages; nothing has changed.
        """
        sequence = self._get("seq", seq)
        num_tokens = check_int("num_tokens", num_tokens, at_least=0)
        writes_last_page = num_tokens > 0 and sequence.num_tokens % self._page_size > 0
        copies_last_page = writes_last_page and self._ref_counts[sequence.pages[-1]] > 1
        num_added = self._num_pages_for(sequence.num_tokens + num_tokens) - len(sequence.pages)
        num_taken = num_added + copies_last_page
        if num_taken > len(self._free_pages):
            raise OutOfPagesError(
                f"num_tokens: want {num_taken} free pages for {num_tokens} more tokens, "
                f"got {len(self._free_pages)}"
            )
        copies = []
        if copies_last_page:
            shared = sequence.pages[-1]
            sequence.pages[-1] = self._take_page()
            self.decref(shared)
            copies.append(PageCopyPlan(shared, sequence.pages[-1]))
        sequence.pages.extend(self._take_page() for _ in range(num_added))
        sequence.num_tokens += num_tokens
        return copies

    def truncate(self, seq: int, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens; drops the references to pages past them."""
        sequence = self._get("seq", seq)
        num_tokens = check_int("num_tokens", num_tokens, 0, at_most=sequence.num_tokens)
        num_kept = self._num_pages_for(num_tokens)
        self._drop_pages(sequence.pages[num_kept:])
        del sequence.pages[num_kept:]
        sequence.num_tokens = num_tokens

    def free(self, seq: int) -> None:
        """End the sequence; drops its references, so pages nobody else holds become free."""
        self._drop_pages(self._get("seq", seq).pages)
        del self._sequences[seq]

    def pages(self, seq: int) -> list[int]:
        """The sequence's pages in token order, as a copy. Changes nothing."""
        return self._get("seq", seq).pages.tolist()

    def num_tokens(self, seq: int) -> int:
        """Tokens the sequence has room for: appended and not truncated. Changes nothing."""
        return self._get("seq", seq).num_tokens

    def table(self, seqs: Sequence[int], width: int | None = None) -> npt.NDArray[np.int32]:
        """The page table of these sequences, one row each. Changes nothing.

        Args:
            seqs: sequence ids, in row order.
            width: columns; ``None`` takes what the longest sequence needs.

        Returns:
            int32 ``[len(seqs), width]``, a fresh array; entries past a sequence's pages are -1.
        """
        rows = [self._get("seqs", seq).pages for seq in seqs]
        longest = max(map(len, rows), default=0)
        width = longest if width is None else check_int("width", width, at_least=longest)
        table = np.full((len(rows), width), -1, dtype=np.int32)
        for row, pages in zip(table, rows, strict=True):
            row[: len(pages)] = pages
        return table

    def ref_count(self, page: int) -> int:
        """How many sequences and other holders share the page; 0 if free. Changes nothing."""
        return self._ref_counts[check_int("page", page, 0, self._num_pages - 1)]

    def incref(self, page: int) -> None:
        """Add one reference to a page in use, for a holder that is not a sequence."""
        (page,) = self.check_pages_in_use("page", (page,))
        self._ref_counts[page] += 1

    def decref(self, page: int) -> None:
        """Drop one reference that ``incref`` added; frees the page if it was the last one.

        Not checked: that the caller holds one. ``check`` finds a sequence's page dropped so.
        """
        (page,) = self.check_pages_in_use("page", (page,))
        self._drop_pages((page,))

    def check_pages_in_use(self, name: str, pages: Iterable[int]) -> list[int]:
        """The pages as a list, or ``ArgumentError`` unless distinct and in use. Changes nothing."""
        checked = [check_int(name, page, 0, self._num_pages - 1) for page in pages]
        for page in checked:
            if self._ref_counts[page] == 0:
                raise ArgumentError(f"{name}: want a page in use, got {page}, which is free")
        if len(set(checked)) < len(checked):
            raise ArgumentError(f"{name}: want distinct pages, got {checked}")
        return checked

    def check(self, extra_refs: Mapping[int, int] | None = None) -> None:
        """Raise ``KvkernError`` unless all counts and lists agree. Changes nothing.

        Args:
            extra_refs: references held by others than sequences, by page. With a ``PrefixIndex``,
                call its ``check`` instead, which adds its own.
        """
        held = Counter(dict(extra_refs or {}))
        for seq, sequence in self._sequences.items():
            if len(sequence.pages) != self._num_pages_for(sequence.num_tokens):
                raise KvkernError(
                    f"sequence {seq}: want {self._num_pages_for(sequence.num_tokens)} pages for "
                    f"{sequence.num_tokens} tokens, got {len(sequence.pages)}"
                )
            _check_no_page_twice(f"sequence {seq}", sequence.pages)
            held.update(sequence.pages)
        _check_no_page_twice("free list", self._free_pages)
        free = set(self._free_pages)
        strangers = (held.keys() | free) - set(range(self._num_pages))
        if strangers:
            raise KvkernError(f"pages: want 0 to {self._num_pages - 1}, got {min(strangers)}")
        for page, count in enumerate(self._ref_counts):
            if count != held[page]:
                raise KvkernError(f"page {page}: want {held[page]} references, got {count}")
            if (page in free) != (count == 0):
                raise KvkernError(
                    f"page {page}: want {'in' if count == 0 else 'not in'} the free list with "
                    f"{count} references, got {'in' if page in free else 'not in'}"
                )

    def _num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def _get(self, name: str, seq: int) -> _PagedSequence:
        sequence = self._sequences.get(seq)
        if sequence is None:
            raise ArgumentError(f"{name}: want the id of a live sequence, got {seq!r}")
        return sequence

    def _add_sequence(self, pages: Iterable[int], num_tokens: int) -> int:
        for page in pages:
            self._ref_counts[page] += 1
        seq = self._next_seq
        self._next_seq += 1
        self._sequences[seq] = _PagedSequence(array("i", pages), num_tokens)
        return seq

    def _take_page(self) -> int:
        page = self._free_pages.pop()
        self._ref_counts[page] = 1
        return page

    def _drop_pages(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._free_pages.append(page)


def check_int(name: str, value: int, at_least: int, at_most: int | None = None) -> int:
    """``value`` as a plain ``int`` (numpy's are taken), or ``ArgumentError``. Changes nothing."""
    try:
        number = operator.index(value)
    except TypeError:
        number = at_least - 1
    if number < at_least or (at_most is not None and number > at_most):
        wanted = f">= {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ArgumentError(f"{name}: want an integer {wanted}, got {value!r}")
    return number


def _check_no_page_twice(name: str, pages: Sequence[int]) -> None:
    page, count = max(Counter(pages).items(), key=operator.itemgetter(1), default=(-1, 0))
    if count > 1:
        raise KvkernError(f"{name}: want every page once, got page {page} {count} times")
