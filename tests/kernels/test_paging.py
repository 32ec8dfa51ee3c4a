"""Device side of the paged layout: the request of a token, against a binary search on the host."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from kvkern.kernels.paging import find_token, load_guess, load_requests

PROBES = 32


@triton.jit(do_not_specialize=["num_requests", "expect_decode"])
def _find_kernel(
    tokens_ptr,
    offsets_ptr,
    lengths_ptr,
    requests_ptr,
    positions_ptr,
    num_requests,
    expect_decode,
    PROBES: tl.constexpr,
):
    program = tl.program_id(0)
    token = tl.load(tokens_ptr + program)
    guess = load_guess(offsets_ptr, lengths_ptr, num_requests, token, expect_decode)
    num_loaded = num_requests - expect_decode * (num_requests + 1)  # as write_kv: none of a decode
    starts, cached = load_requests(offsets_ptr, lengths_ptr, 0, num_loaded, PROBES)
    request, position = find_token(
        offsets_ptr, lengths_ptr, num_requests, token, guess, starts, cached,
        expect_decode == 0, PROBES,
    )  # fmt: skip
    tl.store(requests_ptr + program, request)
    tl.store(positions_ptr + program, position)


def found(tokens, query_lens, cached, expect_decode, device, probes=PROBES):
    """Request and position of each token; -1, -1 for padding."""
    offsets = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    lengths = torch.tensor(cached, dtype=torch.int32)
    requests, positions = (torch.full((len(tokens),), -9, dtype=torch.int32) for _ in range(2))
    requests, positions = requests.to(device), positions.to(device)
    _find_kernel[(len(tokens),)](
        torch.tensor(tokens, dtype=torch.int32, device=device), offsets.to(device),
        lengths.to(device), requests, positions, len(query_lens), expect_decode, PROBES=probes,
    )  # fmt: skip
    requests = requests.cpu()
    return requests.tolist(), torch.where(requests < 0, -1, positions.cpu()).tolist()


def expected(tokens, query_lens, cached):
    offsets = torch.tensor([0, *itertools.accumulate(query_lens)])
    tokens = torch.tensor(tokens)
    requests = torch.searchsorted(offsets, tokens, right=True) - 1
    requests = torch.where(requests < len(query_lens), requests, -1)
    starts, lengths = offsets[requests], torch.tensor([*cached, 0])[requests]
    positions = torch.where(requests < 0, -1, lengths + tokens - starts)
    return requests.tolist(), positions.tolist()


def tokens_at_the_edges(query_lens, most):
    """First and last tokens of at most so many requests; the batch's own, and padding."""
    offsets = [0, *itertools.accumulate(query_lens)]
    num_tokens = offsets[-1]
    tokens = {t for offset in offsets for t in (offset - 1, offset, offset + 1)}
    tokens = sorted(t for t in tokens if t >= 0)
    picked = torch.randperm(len(tokens))[:most].tolist()
    always = [0, num_tokens - 1, num_tokens, num_tokens + 1, num_tokens + 1000]
    return sorted({tokens[i] for i in picked} | {t for t in always if t >= 0})


KINDS = {  # how many new tokens the requests have
    "any": [0, 1, 2, 7],
    "decode": [1],
    "decode with gaps": [0, 1],
    "mostly empty": [0, 0, 0, 0, 0, 0, 0, 0, 0, 3],
    "long": [0, 1000, 70_000],
    "empty": [0],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_requests", [0, 1, 2, 31, 32, 33, 100, 1023, 1024, 1025])
def test_token_is_found_as_by_a_binary_search(device, num_requests, kind):
    """Whatever is expected: a wrong guess costs time, not the answer."""
    choices = torch.tensor(KINDS[kind])
    query_lens = choices[torch.randint(len(choices), (num_requests,))].tolist()
    cached = torch.randint(50_000, (num_requests,)).tolist()
    tokens = tokens_at_the_edges(query_lens, most=24)
    answer = expected(tokens, query_lens, cached)
    for expect_decode in (0, 1):
        assert found(tokens, query_lens, cached, expect_decode, device) == answer


@pytest.mark.parametrize("num_requests", [*range(10), 15, 16, 17])
def test_every_token_is_found_when_two_requests_are_looked_at_together(device, num_requests):
    """Up to five levels of the search, which end in the middle of a block of each."""
    for choices in ([0, 1, 2, 5], [0, 1], [1]):
        query_lens = [choices[int(torch.randint(len(choices), ()))] for _ in range(num_requests)]
        cached = torch.randint(100, (num_requests,)).tolist()
        tokens = list(range(sum(query_lens) + 2))
        answer = expected(tokens, query_lens, cached)
        for expect_decode in (0, 1):
            assert found(tokens, query_lens, cached, expect_decode, device, probes=2) == answer


@pytest.mark.parametrize("num_requests", [32 * 32, 32 * 32 + 1, 32 * 32 * 32 - 1, 32 * 32 * 32 + 7])
def test_token_is_found_beside_every_step_of_the_search(device, num_requests):
    """Requests around multiples of 32 and 1024 own the only tokens."""
    query_lens, cached = [0] * num_requests, [5] * num_requests
    for size in (32, 1024):
        for multiple in (1, 2, 31, 32):
            for request in range(size * multiple - 2, size * multiple + 2):
                if request < num_requests:
                    query_lens[request] = 1 + request % 3
    query_lens[-1] = 2
    tokens = [*range(sum(query_lens)), sum(query_lens)]
    answer = expected(tokens, query_lens, cached)
    assert len(set(answer[0])) == sum(n > 0 for n in query_lens) + 1
    assert found(tokens, query_lens, cached, 0, device) == answer
