import copy
import random

import numpy as np
import pytest

from kvkern.cache.pages import PageAllocator, PageCopyPlan
from kvkern.errors import ArgumentError, KvkernError, OutOfPagesError


def state(allocator):
    return copy.deepcopy(vars(allocator))


def grown(allocator, num_tokens):
    seq = allocator.new_sequence()
    assert allocator.append(seq, num_tokens) == []
    return seq


class Machine:
    """Drives an allocator as an engine does, over a memory of its own.

    Every appended token is a fresh number, written to the slot the page table says. ``expected``
    is the naive model: one list of numbers per sequence, which shares nothing with any other.
    """

    def __init__(self, rng, num_pages, page_size):
        self.rng = rng
        self.allocator = PageAllocator(num_pages, page_size)
        self.memory = np.full((num_pages, page_size), -1)
        self.expected = {}
        self.extra_refs = {}
        self.next_value = 0
        self.num_copies = self.num_refusals = 0

    def num_pages_in_use(self):
        used = {page for seq in self.expected for page in self.allocator.pages(seq)}
        return len(used | set(self.extra_refs))

    def holders(self, page):
        by_sequences = sum(page in self.allocator.pages(seq) for seq in self.expected)
        return by_sequences + self.extra_refs.get(page, 0)

    def append(self, seq):
        allocator, size = self.allocator, self.allocator.page_size
        old_len, num_new = len(self.expected[seq]), self.rng.randint(0, 2 * size)
        pages = allocator.pages(seq)
        touches_shared = num_new > 0 and old_len % size > 0 and self.holders(pages[-1]) > 1
        num_wanted = -(-(old_len + num_new) // size) - len(pages) + touches_shared
        if num_wanted > allocator.num_pages - self.num_pages_in_use():
            before = state(allocator)
            with pytest.raises(OutOfPagesError):
                allocator.append(seq, num_new)
            assert state(allocator) == before
            self.num_refusals += 1
            return
        copies = allocator.append(seq, num_new)
        assert len(copies) == touches_shared
        self.num_copies += len(copies)
        for src, dst in copies:
            assert src == pages[-1] and self.holders(dst) == 1
            self.memory[dst] = self.memory[src]
        for position in range(old_len, old_len + num_new):
            page = allocator.pages(seq)[position // size]
            assert self.holders(page) == 1, "a shared page is never written"
            self.memory[page, position % size] = self.next_value
            self.expected[seq].append(self.next_value)
            self.next_value += 1

    def new_sequence(self):
        pages, num_tokens = [], 0
        if self.expected and self.rng.random() < 0.5:
            other = self.rng.choice(list(self.expected))
            num_tokens = self.rng.randint(0, len(self.expected[other]))
            pages = self.allocator.pages(other)[: -(-num_tokens // self.allocator.page_size)]
        seq = self.allocator.new_sequence(pages, num_tokens)
        assert seq not in self.expected
        self.expected[seq] = self.expected[other][:num_tokens] if pages else []

    def fork(self, seq):
        self.expected[self.allocator.fork(seq)] = list(self.expected[seq])

    def truncate(self, seq):
        num_tokens = self.rng.randint(0, len(self.expected[seq]))
        self.allocator.truncate(seq, num_tokens)
        del self.expected[seq][num_tokens:]

    def free(self, seq):
        self.allocator.free(seq)
        del self.expected[seq]

    def hold_page(self, seq):
        if pages := self.allocator.pages(seq):
            page = self.rng.choice(pages)
            self.allocator.incref(page)
            self.extra_refs[page] = self.extra_refs.get(page, 0) + 1

    def release_page(self):
        if self.extra_refs:
            page = self.rng.choice(list(self.extra_refs))
            self.allocator.decref(page)
            self.extra_refs[page] -= 1
            if self.extra_refs[page] == 0:
                del self.extra_refs[page]

    def step(self):
        if not self.expected:
            self.new_sequence()
            return
        on_sequence = [*[self.append] * 4, self.truncate, self.free, self.hold_page]
        growing = [self.new_sequence, self.fork] if len(self.expected) < 6 else [self.free]
        action = self.rng.choice([*on_sequence, *growing, self.release_page])
        if action in (self.new_sequence, self.release_page):
            action()
        else:
            action(self.rng.choice(list(self.expected)))

    def verify(self):
        allocator, size = self.allocator, self.allocator.page_size
        allocator.check(self.extra_refs)
        assert allocator.num_free_pages == allocator.num_pages - self.num_pages_in_use()
        for seq, values in self.expected.items():
            assert allocator.num_tokens(seq) == len(values)
            pages = allocator.pages(seq)
            assert [self.memory[pages[i // size], i % size] for i in range(len(values))] == values
        for page in range(allocator.num_pages):
            assert allocator.ref_count(page) == self.holders(page)


@pytest.mark.parametrize("page_size", [1, 2, 3])  # 1 has no partly filled page
def test_every_sequence_reads_back_what_it_wrote_whatever_is_shared(page_size):
    machine = Machine(random.Random(page_size), num_pages=12, page_size=page_size)
    for _ in range(3000):
        machine.step()
        machine.verify()
    assert machine.num_refusals > 20
    assert (machine.num_copies > 20) == (page_size > 1)


def test_two_forks_that_both_append_end_on_two_pages_with_one_copy():
    allocator = PageAllocator(num_pages=4, page_size=4)
    first = grown(allocator, 6)
    second = allocator.fork(first)
    assert allocator.num_tokens(second) == 6
    full_page, partial_page = allocator.pages(first)
    assert allocator.pages(second) == [full_page, partial_page]

    (plan,) = allocator.append(second, 1)
    assert plan == PageCopyPlan(src=partial_page, dst=allocator.pages(second)[1])
    assert plan.dst != plan.src
    assert allocator.append(first, 1) == [], "the page is private again"
    assert allocator.pages(first) == [full_page, partial_page]
    assert allocator.ref_count(full_page) == 2
    allocator.check()


def test_append_after_a_full_shared_page_copies_nothing():
    allocator = PageAllocator(num_pages=3, page_size=4)
    first = grown(allocator, 4)
    second = allocator.fork(first)
    assert allocator.append(second, 4) == []
    assert allocator.pages(second)[0] == allocator.pages(first)[0]
    assert allocator.num_free_pages == 1


def test_append_after_truncation_into_a_shared_page_copies_it():
    allocator = PageAllocator(num_pages=4, page_size=4)
    first = grown(allocator, 8)
    second = allocator.fork(first)
    allocator.truncate(second, 7)
    assert allocator.pages(second) == allocator.pages(first), "still needed for tokens 4 to 6"
    (plan,) = allocator.append(second, 1)
    assert plan.src == allocator.pages(first)[1] and plan.dst == allocator.pages(second)[1]
    allocator.check()


def test_append_to_a_page_that_only_a_prefix_holder_shares_copies_it():
    allocator = PageAllocator(num_pages=2, page_size=4)
    seq = grown(allocator, 4)
    (page,) = allocator.pages(seq)
    allocator.incref(page)
    allocator.truncate(seq, 3)
    assert allocator.append(seq, 1) == [(page, allocator.pages(seq)[0])]
    assert allocator.ref_count(page) == 1
    allocator.check({page: 1})


def test_append_of_no_tokens_changes_nothing_even_in_a_shared_page():
    allocator = PageAllocator(num_pages=1, page_size=4)
    seq = grown(allocator, 3)
    allocator.fork(seq)
    before = state(allocator)
    assert allocator.append(seq, 0) == []
    assert state(allocator) == before


@pytest.mark.parametrize("num_tokens, num_pages", [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2)])
def test_a_sequence_has_exactly_the_pages_its_tokens_need(num_tokens, num_pages):
    allocator = PageAllocator(num_pages=8, page_size=4)
    seq = grown(allocator, num_tokens)
    assert len(allocator.pages(seq)) == num_pages
    one_by_one = allocator.new_sequence()
    for _ in range(num_tokens):
        allocator.append(one_by_one, 1)
    assert len(allocator.pages(one_by_one)) == num_pages
    allocator.append(seq, 8)
    allocator.truncate(seq, num_tokens)
    assert len(allocator.pages(seq)) == num_pages


def test_append_that_does_not_fit_changes_nothing_and_says_what_is_missing():
    allocator = PageAllocator(num_pages=3, page_size=4)
    seq = grown(allocator, 6)
    allocator.fork(seq)
    before = state(allocator)
    message = r"^num_tokens: want 2 free pages for 3 more tokens, got 1$"  # one is the copy
    with pytest.raises(OutOfPagesError, match=message):
        allocator.append(seq, 3)
    assert state(allocator) == before
    allocator.append(seq, 2)
    assert allocator.num_free_pages == 0


def test_prefix_pages_are_shared_and_survive_the_sequence_that_made_them():
    allocator = PageAllocator(num_pages=4, page_size=4)
    first = grown(allocator, 8)
    prefix = allocator.pages(first)
    second = allocator.new_sequence(prefix, 8)
    allocator.free(first)
    assert allocator.pages(second) == prefix and allocator.num_free_pages == 2
    allocator.free(second)
    assert allocator.num_free_pages == 4


def test_pages_is_a_copy():
    allocator = PageAllocator(num_pages=4, page_size=4)
    seq = grown(allocator, 8)
    allocator.pages(seq).clear()
    assert len(allocator.pages(seq)) == 2


def test_numpy_integers_are_taken_as_integers():
    allocator = PageAllocator(np.int64(4), np.int32(2))
    seq = grown(allocator, np.int64(3))
    pages = np.array(allocator.pages(seq), dtype=np.int32)
    assert allocator.pages(allocator.new_sequence(pages, np.int64(3))) == pages.tolist()
    assert type(allocator.num_tokens(seq)) is int


def test_table_has_one_row_per_sequence_padded_with_minus_one():
    allocator = PageAllocator(num_pages=8, page_size=2)
    long, empty, short = grown(allocator, 5), grown(allocator, 0), grown(allocator, 1)
    table = allocator.table([short, long, empty])
    assert table.dtype == np.int32
    assert table.tolist() == [[*allocator.pages(short), -1, -1], allocator.pages(long), [-1] * 3]
    wide = allocator.table([long], width=5)
    assert wide.tolist() == [[*allocator.pages(long), -1, -1]]
    assert allocator.table([]).shape == (0, 0)
    assert allocator.table([empty]).shape == (1, 0)
    assert allocator.table([], width=4).shape == (0, 4)
    allocator.append(long, 2)  # a table lent out must not block growth


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda a, seq: PageAllocator(0, 4), "num_pages: want an integer >= 1, got 0"),
        (lambda a, seq: PageAllocator(4, 0), "page_size: want an integer >= 1, got 0"),
        (lambda a, seq: PageAllocator(4, 2.0), "page_size: want an integer >= 1, got 2.0"),
        (lambda a, seq: a.append(seq, -1), "num_tokens: want an integer >= 0, got -1"),
        (lambda a, seq: a.append(seq, "1"), "num_tokens: want an integer >= 0, got '1'"),
        (lambda a, seq: a.append(9, 1), "seq: want the id of a live sequence, got 9"),
        (lambda a, seq: a.append(9, 0), "seq: want the id of a live sequence, got 9"),
        (lambda a, seq: a.fork(9), "seq: want the id of a live sequence, got 9"),
        (lambda a, seq: a.free(9), "seq: want the id of a live sequence, got 9"),
        (lambda a, seq: a.pages(9), "seq: want the id of a live sequence, got 9"),
        (lambda a, seq: a.num_tokens(9), "seq: want the id of a live sequence, got 9"),
        (lambda a, seq: a.truncate(9, 0), "seq: want the id of a live sequence, got 9"),
        (lambda a, seq: a.truncate(seq, 6), "num_tokens: want an integer from 0 to 5, got 6"),
        (lambda a, seq: a.truncate(seq, -1), "num_tokens: want an integer from 0 to 5, got -1"),
        (lambda a, seq: a.table([seq, 9]), "seqs: want the id of a live sequence, got 9"),
        (lambda a, seq: a.table([seq], 1), "width: want an integer >= 2, got 1"),
        (lambda a, seq: a.ref_count(8), "page: want an integer from 0 to 7, got 8"),
        (lambda a, seq: a.incref(-1), "page: want an integer from 0 to 7, got -1"),
        (lambda a, seq: a.incref(7), "page: want a page in use, got 7, which is free"),
        (lambda a, seq: a.decref(7), "page: want a page in use, got 7, which is free"),
        (lambda a, seq: a.decref(8), "page: want an integer from 0 to 7, got 8"),
        (
            lambda a, seq: a.new_sequence([0, 7], 8),
            "prefix_pages: want a page in use, got 7, which is free",
        ),
        (
            lambda a, seq: a.new_sequence([0, 8], 8),
            "prefix_pages: want an integer from 0 to 7, got 8",
        ),
        (
            lambda a, seq: a.new_sequence([0, 0], 8),
            "prefix_pages: want distinct pages, got [0, 0]",
        ),
        (
            lambda a, seq: a.new_sequence([0, 1], 4),
            "num_tokens: want 5 to 8 for 2 prefix pages of 4, got 4",
        ),
        (
            lambda a, seq: a.new_sequence([0, 1], 9),
            "num_tokens: want 5 to 8 for 2 prefix pages of 4, got 9",
        ),
        (
            lambda a, seq: a.new_sequence((), 1),
            "num_tokens: want 0 to 0 for 0 prefix pages of 4, got 1",
        ),
        (lambda a, seq: a.new_sequence((), -1), "num_tokens: want an integer >= 0, got -1"),
    ],
)
def test_bad_argument_is_named_with_wanted_and_got_and_changes_nothing(call, message):
    allocator = PageAllocator(num_pages=8, page_size=4)
    seq = grown(allocator, 5)
    before = state(allocator)
    with pytest.raises(ArgumentError) as caught:
        call(allocator, seq)
    assert str(caught.value) == message
    assert state(allocator) == before


def test_freeing_twice_is_refused_even_after_a_new_sequence_began():
    allocator = PageAllocator(num_pages=8, page_size=4)
    seq = grown(allocator, 5)
    allocator.free(seq)
    grown(allocator, 5)
    with pytest.raises(ArgumentError, match="seq: want the id of a live sequence"):
        allocator.free(seq)
    assert allocator.num_free_pages == 6


@pytest.mark.parametrize(
    "corrupt, message",
    [
        (lambda a: a._free_pages.append(a._free_pages[0]), "free list: want every page once"),
        (lambda a: a._free_pages.append(0), "page 0: want not in the free list with 2 ref"),
        (lambda a: a._free_pages.pop(), "page 2: want in the free list with 0 references"),
        (lambda a: a._free_pages.append(8), "pages: want 0 to 7, got 8"),
        (lambda a: a._free_pages.append(-1), "pages: want 0 to 7, got -1"),
        (lambda a: a._ref_counts.__setitem__(0, 1), "page 0: want 2 references, got 1"),
        (lambda a: a._ref_counts.__setitem__(0, 3), "page 0: want 2 references, got 3"),
        (lambda a: a._ref_counts.__setitem__(5, 1), "page 5: want 0 references, got 1"),
        (lambda a: a._sequences[0].pages.pop(), "sequence 0: want 2 pages for 5 tokens, got 1"),
        (lambda a: a._sequences[0].pages.__setitem__(1, 0), "sequence 0: want every page once"),
        (lambda a: setattr(a._sequences[0], "num_tokens", 9), "sequence 0: want 3 pages for 9"),
        (lambda a: a.decref(0), "page 0: want 2 references, got 1"),
        (lambda a: a.incref(0), "page 0: want 2 references, got 3"),
    ],
)
def test_check_finds_every_kind_of_corruption(corrupt, message):
    allocator = PageAllocator(num_pages=8, page_size=4)
    allocator.fork(grown(allocator, 5))
    allocator.check()
    corrupt(allocator)
    with pytest.raises(KvkernError, match=message):
        allocator.check()


def test_check_counts_the_references_of_other_holders():
    allocator = PageAllocator(num_pages=8, page_size=4)
    grown(allocator, 4)
    allocator.incref(0)
    allocator.check({0: 1})
    for wrong in (None, {}, {0: 2}, {0: 1, 1: 1}):
        with pytest.raises(KvkernError, match="references"):
            allocator.check(wrong)
    with pytest.raises(KvkernError, match="pages: want 0 to 7, got 9"):
        allocator.check({0: 1, 9: 1})
