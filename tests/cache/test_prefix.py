import copy
import random
from array import array
from collections import Counter

import numpy as np
import pytest

from kvkern.cache.pages import PageAllocator
from kvkern.cache.prefix import PrefixIndex
from kvkern.errors import ArgumentError, KvkernError, OutOfPagesError


def state(index):
    """Everything the index and its allocator know, for comparison."""
    return copy.deepcopy({**vars(index), "_allocator": vars(index._allocator)})


def make_index(num_pages=16, page_size=2):
    allocator = PageAllocator(num_pages, page_size)
    return allocator, PrefixIndex(allocator)


def written(allocator, tokens):
    """A sequence with room for ``tokens``, and its pages."""
    seq = allocator.new_sequence()
    allocator.append(seq, len(tokens))
    return seq, allocator.pages(seq)


def indexed(allocator, index, tokens):
    """Index the pages of a sequence that has ended, as a server does; returns them."""
    seq, pages = written(allocator, tokens)
    index.insert(tokens, pages)
    allocator.free(seq)
    return pages


class NaiveIndex:
    """The model: each indexed page by the whole prefix it ends, scanned in full every time."""

    def __init__(self, page_size):
        self.page_size = page_size
        self.pages = {}  # prefix -> page
        self.last_use = {}  # prefix -> time
        self.now = 0

    def prefixes(self, tokens):
        size = self.page_size
        return [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def use(self, prefixes):
        self.now += 1
        self.last_use.update(dict.fromkeys(prefixes, self.now))

    def match(self, tokens):
        found = [prefix for prefix in self.prefixes(tokens) if prefix in self.pages]
        self.use(found)
        return [self.pages[prefix] for prefix in found]

    def insert(self, tokens, pages):
        before = len(self.pages)
        for prefix, page in zip(self.prefixes(tokens), pages, strict=False):
            self.pages.setdefault(prefix, page)
        self.use(self.prefixes(tokens))
        return len(self.pages) - before

    def evict(self, num_pages, is_held):
        evicted = []
        while len(evicted) < num_pages:
            parents = {prefix[: -self.page_size] for prefix in self.pages}
            leaves = [prefix for prefix in self.pages if prefix not in parents]
            loose = [prefix for prefix in leaves if not is_held(self.pages[prefix])]
            if not loose:
                break
            oldest = min(loose, key=self.last_use.__getitem__)
            evicted.append(self.pages.pop(oldest))
        return evicted


class Server:
    """Requests over two tokens, so prefixes collide all the time, with a memory of its own.

    A slot holds the whole prefix up to its token, as real key and value rows do, so that reusing a
    page under any other prefix is seen.
    """

    def __init__(self, rng, num_pages, page_size):
        self.rng = rng
        self.allocator, self.index = make_index(num_pages, page_size)
        self.naive = NaiveIndex(page_size)
        self.memory = [[None] * page_size for _ in range(num_pages)]
        self.requests = {}
        self.prompts = [self.random_tokens(6 * page_size) for _ in range(6)]
        self.seen = Counter()

    def random_tokens(self, at_most):
        return [self.rng.randrange(2) for _ in range(self.rng.randint(0, at_most))]

    def is_held(self, page):
        return any(page in self.allocator.pages(seq) for seq in self.requests)

    def evict(self, num_pages):
        expected = self.naive.evict(num_pages, self.is_held)
        num_free = self.allocator.num_free_pages
        assert self.index.evict(num_pages) == len(expected)
        assert self.allocator.num_free_pages == num_free + len(expected)
        assert all(self.allocator.ref_count(page) == 0 for page in expected)
        self.seen["evicted"] += len(expected)

    def match(self, tokens):
        pages = self.index.match(tokens)
        assert pages == self.naive.match(tokens)
        return pages

    def start(self):
        size = self.allocator.page_size
        prompt = self.rng.choice(self.prompts)
        tokens = prompt[: self.rng.randint(0, len(prompt))] + self.random_tokens(size)
        pages = self.match(tokens)
        self.seen["reused"] += len(pages)
        num_reused = len(pages) * size
        if num_reused == len(tokens) > 0:
            num_reused -= 1  # a server computes at least one token to get its logits
            pages = pages[: -(-num_reused // size)]
        seq = self.allocator.new_sequence(pages, num_reused)
        self.requests[seq] = tokens[:num_reused]
        self.extend(seq, tokens[num_reused:])

    def extend(self, seq, tokens):
        num_old, size = len(self.requests[seq]), self.allocator.page_size
        try:
            copies = self.allocator.append(seq, len(tokens))
        except OutOfPagesError:
            self.seen["out of pages"] += 1
            self.evict(2)
            return
        self.seen["copied"] += len(copies)
        for src, dst in copies:
            self.memory[dst] = list(self.memory[src])
        self.requests[seq] += tokens
        pages = self.allocator.pages(seq)
        for i in range(num_old, num_old + len(tokens)):
            self.memory[pages[i // size]][i % size] = tuple(self.requests[seq][: i + 1])

    def keep(self, seq):
        tokens, pages = self.requests[seq], self.allocator.pages(seq)
        assert self.index.insert(tokens, pages) == self.naive.insert(tokens, pages)

    def finish(self, seq):
        self.allocator.free(seq)
        del self.requests[seq]

    def truncate(self, seq):
        num_tokens = self.rng.randint(0, len(self.requests[seq]))
        self.allocator.truncate(seq, num_tokens)
        del self.requests[seq][num_tokens:]

    def step(self):
        if len(self.requests) < 2:
            self.start()
            return
        seq = self.rng.choice(list(self.requests))
        action = self.rng.choice(["start", "extend", "keep", "keep", "finish", "truncate", "evict"])
        if action == "start" and len(self.requests) < 5:
            self.start()
        elif action == "extend":
            self.extend(seq, self.random_tokens(3))
        elif action == "evict":
            self.evict(self.rng.randrange(4))
        elif action != "start":
            getattr(self, action)(seq)

    def verify(self):
        size = self.allocator.page_size
        self.index.check()
        assert self.index.num_pages == len(self.naive.pages)
        in_use = set(self.naive.pages.values())
        for seq, tokens in self.requests.items():
            pages = self.allocator.pages(seq)
            in_use.update(pages)
            for i in range(len(tokens)):
                assert self.memory[pages[i // size]][i % size] == tuple(tokens[: i + 1])
        for prefix, page in self.naive.pages.items():
            assert self.memory[page][-1] == prefix, "an indexed page is never overwritten"
        assert self.allocator.num_free_pages == self.allocator.num_pages - len(in_use)


@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_reused_pages_hold_what_the_request_asked_for_and_eviction_is_lru(page_size):
    server = Server(random.Random(page_size), num_pages=10, page_size=page_size)
    for _ in range(3000):
        server.step()
        server.verify()
    assert min(server.seen[event] for event in ("evicted", "reused", "out of pages")) > 20
    assert (server.seen["copied"] > 20) == (page_size > 1)
    for seq in list(server.requests):
        server.finish(seq)
    server.evict(server.allocator.num_pages)
    assert server.index.num_pages == 0
    assert server.allocator.num_free_pages == server.allocator.num_pages


def test_only_whole_pages_are_indexed_and_matched():
    allocator, index = make_index(page_size=4)
    _, pages = written(allocator, range(10))
    assert index.insert(list(range(3)), pages) == 0
    assert index.insert(list(range(10)), pages) == 2
    for length, num_matched in [(0, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (9, 2), (12, 2)]:
        assert index.match(list(range(length))) == pages[:num_matched]
    assert allocator.ref_count(pages[2]) == 1
    index.check()


def test_a_page_matches_only_after_equal_preceding_tokens():
    allocator, index = make_index()
    pages = indexed(allocator, index, [1, 2, 3, 4])
    assert index.match([3, 4]) == []
    assert index.match([9, 2, 3, 4]) == []
    assert index.match([1, 2, 3, 9]) == pages[:1]
    assert index.match([1, 2, 9, 9, 3, 4]) == pages[:1]
    other = indexed(allocator, index, [5, 6, 3, 4])
    assert index.match([1, 2, 3, 4]) == pages
    assert index.match([5, 6, 3, 4]) == other


def test_tokens_with_equal_hashes_are_different():
    assert hash((-1, 0)) == hash((-2, 0))
    allocator, index = make_index()
    indexed(allocator, index, [-1, 0])
    assert index.match([-2, 0]) == []
    assert index.match([-1, 0]) != []


def test_inserting_a_known_prefix_again_keeps_the_old_pages():
    allocator, index = make_index()
    old = indexed(allocator, index, [1, 2, 3, 4])
    seq, new = written(allocator, [1, 2, 3, 4, 5, 6])
    assert index.insert([1, 2, 3, 4, 5, 6], new) == 1
    assert index.match([1, 2, 3, 4, 5, 6]) == [*old, new[2]]
    assert index.insert([1, 2, 3, 4, 5, 6], new) == 0
    allocator.free(seq)
    assert allocator.ref_count(new[0]) == allocator.ref_count(new[1]) == 0
    assert allocator.ref_count(new[2]) == 1
    index.check()


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda t: array("q", t)])
def test_tokens_match_whatever_sequence_holds_them(kind):
    allocator, index = make_index()
    pages = indexed(allocator, index, kind([1, 2, 3, 4]))
    assert index.match([1, 2, 3, 4]) == pages
    assert index.match(kind([1, 2, 3, 4])) == pages
    assert index.match([np.int32(1), np.int64(2)]) == pages[:1]


def test_eviction_takes_the_least_recently_used_branch_first():
    allocator, index = make_index()
    a = indexed(allocator, index, [1, 1])
    b = indexed(allocator, index, [2, 2])
    c = indexed(allocator, index, [3, 3])
    assert index.match([1, 1]) == a  # now b is the oldest
    assert index.evict(1) == 1
    assert index.match([2, 2]) == [] and allocator.ref_count(b[0]) == 0
    assert index.evict(1) == 1
    assert index.match([3, 3]) == [] and allocator.ref_count(c[0]) == 0
    assert index.match([1, 1]) == a
    index.check()


def test_inserting_a_known_prefix_counts_as_use():
    allocator, index = make_index()
    a = indexed(allocator, index, [1, 1])
    indexed(allocator, index, [2, 2])
    indexed(allocator, index, [1, 1])
    index.evict(1)
    assert index.match([2, 2]) == [] and index.match([1, 1]) == a


@pytest.mark.parametrize("seed", range(5))
def test_a_prefix_inserted_piece_by_piece_is_the_one_inserted_whole(seed):
    """Two sequences that part somewhere, in pieces of any length, against two whole inserts."""
    rng = random.Random(seed)
    common = [rng.randrange(3) for _ in range(rng.randrange(8))]
    both = [common + [rng.randrange(3) for _ in range(rng.randrange(1, 12))] for _ in range(2)]
    allocator, pieces = make_index(num_pages=40)
    whole_allocator, whole = make_index(num_pages=40)
    for tokens in both:
        _, pages = written(allocator, tokens)
        num_done = 0
        while num_done < len(tokens) // 2:
            num_more = rng.randrange(1, len(tokens) // 2 - num_done + 1)
            after = pages[num_done - 1] if num_done else None
            start = num_done if after in pieces else 0
            after = after if start else None
            num_done += num_more
            pieces.insert(tokens[2 * start : 2 * num_done], pages[start:], after=after)
            pieces.check()
        whole.insert(tokens, written(whole_allocator, tokens)[1])
    for tokens in both:
        assert pieces.match(tokens) == whole.match(tokens)  # both allocators hand out alike
    assert pieces.num_pages == whole.num_pages


def test_what_follows_a_page_is_known_under_that_page_alone():
    allocator, index = make_index()
    _, (first, second) = written(allocator, [1, 2, 3, 4])
    index.insert([1, 2, 3, 4], [first, second])
    elsewhere = indexed(allocator, index, [5, 6])
    seq = allocator.new_sequence([first], 2)
    allocator.append(seq, 4)
    _, third, fourth = allocator.pages(seq)
    assert index.insert([3, 4], [third], after=first) == 0 and third not in index
    assert index.insert([5, 6], [fourth], after=second) == 1
    index.check()
    assert index.match([1, 2, 3, 4, 5, 6]) == [first, second, fourth]
    assert index.match([5, 6]) == elsewhere


def test_inserting_after_a_page_counts_as_use_of_all_before_it():
    allocator, index = make_index()
    seq, pages = written(allocator, [1, 2, 3, 4, 5, 6])
    index.insert([1, 2, 3, 4], pages)
    other = indexed(allocator, index, [7, 8])
    assert index.insert([5, 6], pages[2:], after=pages[1]) == 1
    index.check()
    allocator.free(seq)
    assert index.evict(1) == 1 and other[0] not in index and pages[0] in index
    assert index.match([1, 2, 3, 4, 5, 6]) == pages


def test_an_evicted_leaf_exposes_its_parent_but_a_parent_never_goes_first():
    allocator, index = make_index()
    pages = indexed(allocator, index, [1, 1, 2, 2, 3, 3])
    index.match([1, 1])
    for num_left in (2, 1, 0):
        assert index.evict(1) == 1
        assert index.match([1, 1, 2, 2, 3, 3]) == pages[:num_left]
        index.check()
    assert index.evict(1) == 0
    assert allocator.num_free_pages == allocator.num_pages


def test_a_page_with_two_continuations_goes_after_both():
    allocator, index = make_index()
    indexed(allocator, index, [1, 1, 2, 2])
    indexed(allocator, index, [1, 1, 3, 3])
    assert index.evict(2) == 2
    assert len(index.match([1, 1, 2, 2])) == len(index.match([1, 1, 3, 3])) == 1
    assert index.evict(9) == 1


def test_pages_that_a_sequence_holds_are_not_evicted_until_it_ends():
    allocator, index = make_index()
    pages = indexed(allocator, index, [1, 1, 2, 2])
    reader = allocator.new_sequence(index.match([1, 1, 2, 2]), 4)
    recent = indexed(allocator, index, [3, 3])
    assert index.evict(9) == 1, "only the page that nobody reads, though used last"
    assert allocator.ref_count(recent[0]) == 0
    assert index.match([1, 1, 2, 2]) == pages
    index.check()
    allocator.free(reader)
    assert index.evict(9) == 2


def test_a_parent_stays_while_a_sequence_holds_only_its_continuation():
    allocator, index = make_index()
    indexed(allocator, index, [1, 1])
    seq, own = written(allocator, [1, 1, 2, 2])
    index.insert([1, 1, 2, 2], own)  # the second page, under the older first page
    assert index.evict(9) == 0
    allocator.free(seq)
    assert index.evict(9) == 2


def test_eviction_frees_no_more_than_asked():
    allocator, index = make_index()
    indexed(allocator, index, [1, 1, 2, 2, 3, 3])
    assert index.evict(0) == 0 and index.num_pages == 3
    assert index.evict(2) == 2 and index.num_pages == 1


def test_matching_takes_no_reference():
    allocator, index = make_index()
    (page,) = indexed(allocator, index, [1, 1])
    index.match([1, 1])
    assert allocator.ref_count(page) == 1
    index.check()


def test_clear_gives_back_every_page_that_no_sequence_holds():
    allocator, index = make_index()
    indexed(allocator, index, [1, 1, 2, 2])
    reader = allocator.new_sequence(index.match([1, 1]), 2)
    index.clear()
    assert index.num_pages == 0 and index.match([1, 1]) == [] and index.evict(9) == 0
    assert allocator.num_free_pages == allocator.num_pages - 1
    index.check()
    allocator.free(reader)
    assert indexed(allocator, index, [1, 1]) == index.match([1, 1])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda i: i.insert([1, 2, 3, 4], [0]), "pages: want >= 2 for the tokens, got 1"),
        (
            lambda i: i.insert([9, 9, 3, 4], [2, 15]),
            "pages: want a page in use, got 15, which is free",
        ),
        (lambda i: i.insert([9, 9], [16]), "pages: want an integer from 0 to 15, got 16"),
        (lambda i: i.insert([9, 9, 8, 8], [2, 2]), "pages: want distinct pages, got [2, 2]"),
        (
            lambda i: i.insert([9, 9, 8, 8], [2, 0]),
            "pages: want 0 indexed once, got it under other tokens",
        ),
        (
            lambda i: i.insert([1, 2, 8, 8], [2, 1]),
            "pages: want 1 indexed once, got it under other tokens",
        ),
        (lambda i: i.insert([9, 9], [2], after=2), "after: want an indexed page, got 2"),
        (lambda i: i.insert([9, 1.5], [2]), "tokens: want integers, got 1.5"),
        (lambda i: i.match([1, 2, 3, "4"]), "tokens: want integers, got '4'"),
        (lambda i: i.match(np.ones((2, 3), int)), "tokens: want integers, got [1, 1, 1]"),
        (lambda i: i.evict(-1), "num_pages: want an integer >= 0, got -1"),
        (lambda i: i.evict(0.5), "num_pages: want an integer >= 0, got 0.5"),
    ],
)
def test_bad_argument_is_named_with_wanted_and_got_and_changes_nothing(call, message):
    allocator, index = make_index()
    _, pages = written(allocator, [1, 2, 3, 4, 5, 6])
    assert pages == [0, 1, 2]
    index.insert([1, 2, 3, 4], pages)
    before = state(index)
    with pytest.raises(ArgumentError) as caught:
        call(index)
    assert str(caught.value) == message
    assert state(index) == before


@pytest.mark.parametrize(
    "corrupt, message",
    [
        (lambda a, i: a.decref(0), "page 0: want 1 references, got 0"),
        (lambda a, i: a.incref(1), "page 1: want 1 references, got 2"),
        (lambda a, i: i._pages.popitem(), "page 2: want it found by its tokens"),
        (lambda a, i: i._pages.__setitem__((1, (9, 9)), 2), "pages by tokens: want 3, got 4"),
        (lambda a, i: setattr(i._nodes[2], "tokens", (9, 9)), "page 2: want it found"),
        (lambda a, i: setattr(i._nodes[0], "num_children", 0), "page 0: want 1 children, got 0"),
        (lambda a, i: setattr(i._nodes[0], "last_use", 0), "page 0: want use no older"),
        (lambda a, i: setattr(i._nodes[2], "last_use", 0), "page 2: want it queued by a past"),
        (lambda a, i: i._queue.clear(), r"queue: want \[2\], got \[\]"),
        (lambda a, i: i._queue.append(i._queue[0]), r"queue: want \[2\], got \[2, 2\]"),
        (
            lambda a, i: (i._queue.clear(), setattr(i._nodes[2], "queued", False)),
            "page 2: want every leaf queued",
        ),
        (
            lambda a, i: (i._nodes.pop(0), i._pages.pop((-1, (1, 1)))),
            "pages under the root: want 2, got 0",
        ),
    ],
)
def test_check_finds_every_kind_of_corruption(corrupt, message):
    allocator, index = make_index()
    assert indexed(allocator, index, [1, 1, 2, 2, 3, 3]) == [0, 1, 2]
    index.check()
    corrupt(allocator, index)
    with pytest.raises(KvkernError, match=message):
        index.check()


def test_check_counts_the_references_of_other_holders():
    allocator, index = make_index()
    indexed(allocator, index, [1, 1])
    allocator.incref(0)
    index.check({0: 1})
    with pytest.raises(KvkernError, match="page 0: want 1 references, got 2"):
        index.check()


def test_eviction_looks_at_few_pages_however_many_are_held(monkeypatch):
    num_held, num_loose = 20_000, 500
    allocator, index = make_index(num_pages=num_held + num_loose, page_size=1)
    _, pages = written(allocator, range(num_held))
    index.insert(range(num_held), pages)
    for i in range(num_loose):
        indexed(allocator, index, [num_held + i])

    looked_at = []
    real_ref_count = allocator.ref_count
    monkeypatch.setattr(
        allocator, "ref_count", lambda page: looked_at.append(page) or real_ref_count(page)
    )
    assert sum(index.evict(1) for _ in range(num_loose)) == num_loose
    assert len(looked_at) <= 2 * num_loose, "each time the one held leaf, and the page evicted"
    index.check()
