"""Which tokens each step computes, and who owns which pages. Host data only."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvkern.cache.pages import PageAllocator, PageCopyPlan
from kvkern.cache.prefix import PrefixIndex
from kvkern.engine.sampling import SamplingParams
from kvkern.engine.text import TextStream
from kvkern.errors import OutOfPagesError

CopyPages = Callable[[Sequence[PageCopyPlan]], None]


@dataclass(eq=False, slots=True)
class Request:
    """One submitted prompt on its way through the engine."""

    id: int
    tokens: list[int]  # the prompt, then what has been generated
    prompt_len: int
    params: SamplingParams
    seed: int
    text: TextStream | None
    seq: int | None = None  # its pages in the allocator; None while it waits
    num_computed: int = 0  # leading tokens that are in the cache
    num_indexed_pages: int = 0  # leading pages already offered to the prefix index

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed


class Chunk(NamedTuple):
    """The next tokens of one request that a step computes."""

    request: Request
    seq: int
    start: int  # tokens before the chunk: all in the cache
    stop: int

    @property
    def gives_token(self) -> bool:
        """Whether the chunk ends at the last known token, so that its logits choose the next."""
        return self.stop == len(self.request.tokens)


class Scheduler:
    """Shares a token budget and a page pool among requests, first come first served.

    Every running request is older than every waiting one: admission takes the head of the queue,
    preemption takes the youngest running one and puts it back at the head. So the oldest request
    always advances, and nobody starves.

    Args:
        allocator: the page pool; nobody else may use it.
        index: where full pages stay findable for later prompts; ``None`` to reuse nothing.
        copy_pages: copies the bytes of pages, at once.
        max_batch_tokens: tokens that a step computes at most.
        max_requests: requests that hold pages at the same time at most.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        index: PrefixIndex | None,
        copy_pages: CopyPages,
        *,
        max_batch_tokens: int,
        max_requests: int,
    ) -> None:
        self.waiting: deque[Request] = deque()  # oldest first, younger than all running ones
        self.running: list[Request] = []  # oldest first
        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0
        self._allocator = allocator
        self._index = index
        self._copy_pages = copy_pages
        self._max_batch_tokens = max_batch_tokens
        self._max_requests = max_requests

    def schedule(self) -> list[Chunk]:
        """Choose the next step's chunks, one-token chunks first, and give them pages.

        Calling it again before ``commit`` chooses the same chunks: a step that failed may be
        repeated.
        """
        self._reserve_running()
        budget = self._max_batch_tokens
        decoding = [request for request in self.running if request.num_uncomputed == 1]
        chunks = [_chunk(request, 1) for request in decoding]
        budget -= len(chunks)  # never below 0: admission leaves a token for every running request
        for request in self.running:
            if budget and request.num_uncomputed > 1:
                chunks.append(_chunk(request, budget))
                budget -= chunks[-1].stop - chunks[-1].start
        while budget and self.waiting and len(self.running) < self._max_requests:
            if not self._admit(self.waiting[0]):
                break
            request = self.waiting.popleft()
            self.running.append(request)
            chunks.append(_chunk(request, budget))
            budget -= chunks[-1].stop - chunks[-1].start
        return sorted(chunks, key=lambda chunk: chunk.stop - chunk.start > 1)

    def commit(self, chunk: Chunk) -> None:
        """Record that the chunk is in the cache, and index the pages that it filled."""
        chunk.request.num_computed = chunk.stop
        self._index_full_pages(chunk.request)

    def release(self, request: Request) -> None:
        """Forget a request, running or waiting, and give its pages back."""
        if request.seq is None:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._free_pages(request)

    def check(self) -> None:
        """Raise ``KvkernError`` unless every page is accounted for. Changes nothing."""
        if self._index is None:
            self._allocator.check()
        else:
            self._index.check()

    def num_held_pages(self) -> int:
        """Distinct pages of the running requests. Changes nothing."""
        seqs = [request.seq for request in self.running if request.seq is not None]
        return len({page for seq in seqs for page in self._allocator.pages(seq)})

    def _reserve_running(self) -> None:
        """Give every running request room for all its tokens, preempting from the youngest end."""
        for request in list(self.running):
            while request.seq is not None and not self._reserve(request.seq, len(request.tokens)):
                self._preempt(self.running[-1])

    def _admit(self, request: Request) -> bool:
        """Give a waiting request pages for all its tokens; shares those of an indexed prefix."""
        prefix_pages: list[int] = []
        if self._index is not None:
            prefix_pages = self._index.match(request.tokens)
        page_size = self._allocator.page_size
        # the last token is computed in any case: its logits choose the next
        num_hit = min(len(prefix_pages) * page_size, len(request.tokens) - 1)
        seq = self._allocator.new_sequence(prefix_pages[: -(-num_hit // page_size)], num_hit)
        if not self._reserve(seq, len(request.tokens)):
            self._allocator.free(seq)
            return False
        request.seq = seq
        request.num_computed = num_hit
        request.num_indexed_pages = num_hit // page_size
        self.num_prefix_hit_tokens += num_hit
        return True

    def _reserve(self, seq: int, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` in all, evicting from the index; False if it cannot be."""
        num_new = num_tokens - self._allocator.num_tokens(seq)
        while True:
            try:
                copies = self._allocator.append(seq, num_new)
            except OutOfPagesError:
                if not self._evict(num_new):
                    return False
            else:
                if copies:  # at once: a later call may hand out the source again
                    self._copy_pages(copies)
                return True

    def _evict(self, num_tokens: int) -> bool:
        """Free index pages that might be missing for ``num_tokens``; False if there are none."""
        if self._index is None:
            return False
        # one page more: the first token may fall in a shared page, which is then copied
        num_wanted = num_tokens // self._allocator.page_size + 2 - self._allocator.num_free_pages
        return self._index.evict(max(num_wanted, 1)) > 0

    def _preempt(self, request: Request) -> None:
        """Take a running request's pages; its tokens stay and are computed again later."""
        self.running.remove(request)
        self._free_pages(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _free_pages(self, request: Request) -> None:
        assert request.seq is not None
        self._allocator.free(request.seq)
        request.seq = None
        request.num_computed = 0

    def _index_full_pages(self, request: Request) -> None:
        num_full = request.num_computed // self._allocator.page_size
        if self._index is None or request.seq is None or num_full == request.num_indexed_pages:
            return
        pages = self._allocator.pages(request.seq)[:num_full]
        start = request.num_indexed_pages
        after = pages[start - 1] if start else None
        if after not in self._index:  # another request indexed the same tokens on its own page
            start, after = 0, None
        page_size = self._allocator.page_size
        tokens = request.tokens[start * page_size : num_full * page_size]
        self._index.insert(tokens, pages[start:], after=after)
        request.num_indexed_pages = num_full


def _chunk(request: Request, budget: int) -> Chunk:
    assert request.seq is not None
    stop = request.num_computed + min(request.num_uncomputed, budget)
    return Chunk(request, request.seq, request.num_computed, stop)
