"""The schedule of decode: every key once, even shares, right merges; out of date, too."""

import itertools
import math

import pytest
import torch

from kvkern import PagedBatch
from kvkern.kernels.schedule import (
    Work,
    _choose_blocks,
    fill_schedule,
    make_schedule,
    merge_cuts,
)

OVERHEAD = 3
BLOCK_N = 64
LATENT = 16


def make_batch(query_lens, cached, device="cpu"):
    offsets = [0, *itertools.accumulate(query_lens)]
    longest = max((c + q for c, q in zip(cached, query_lens, strict=True)), default=0)
    table = [[0] * -(-longest // BLOCK_N)] * len(cached)
    return PagedBatch(offsets, cached, table, device=device)


def blocks_of(batch, request):
    start, end = batch.input_row_offsets[request : request + 2].tolist()
    cached = int(batch.cache_lengths[request])
    return -(-(cached + end - start) // BLOCK_N) if end > start else 0


def walk(schedule, batch):
    """What each part does: (part, request, first block, last block, slot or None if whole)."""
    bounds = schedule.bounds.tolist()
    for part, ((first, begin), (last, end)) in enumerate(itertools.pairwise(bounds)):
        if (first, begin) == (last, end):
            continue
        for request in range(first, last + (end > 0)):
            starts_inside = request == first and begin > 0
            ends_inside = request == last and end > 0
            num_blocks = blocks_of(batch, request)
            stop = min(end, num_blocks) if ends_inside else num_blocks
            slot = 2 * part if starts_inside else 2 * part + 1 if ends_inside else None
            yield part, request, begin if starts_inside else 0, stop, slot


def scheduled(
    query_lens,
    cached,
    num_heads=4,
    parts=5,
    gang=1,
    tile_rows=16,
    device="cpu",
    dtype=torch.float32,
):
    batch = make_batch(query_lens, cached, device)
    work = Work(parts, gang, tile_rows, BLOCK_N, OVERHEAD)
    max_query_len = max(query_lens, default=1)
    schedule = make_schedule(batch, num_heads, max_query_len, LATENT, work, dtype)
    for unwritten in (schedule.bounds, schedule.cuts, schedule.ends):
        unwritten.fill_(0x7F7F7F7F)
    fill_schedule(schedule, batch, num_heads)
    return schedule, batch


def expected_bounds(query_lens, cached, num_heads, parts, gang_rows):
    """The cheapest of three ways, by what their costliest part costs."""
    work = []  # (passes, blocks) of each request
    for q, c in zip(query_lens, cached, strict=True):
        work.append((-(-q * num_heads // gang_rows), -(-(c + q) // BLOCK_N) if q else 0))
    costs = [passes * (blocks + OVERHEAD) for passes, blocks in work]
    share = -(-sum(costs) // parts)
    own_cost, own = bounds_of_own_parts(work, share, parts)
    whole_cost, whole = bounds_between_requests(costs, parts)
    anywhere_cost = share + 2 * OVERHEAD
    if whole_cost <= anywhere_cost and whole_cost < own_cost:
        bounds = whole
    else:
        bounds = own if own_cost <= anywhere_cost else bounds_anywhere(work, costs, parts)
    return [(0, 0), *bounds[1:parts], (len(work), 0)]


def bounds_of_own_parts(work, share, parts):
    """Each request is cut evenly, between as few parts as none costs more than ``most``."""
    for step in range(64 if len(work) <= parts else 0):
        most = share + step * max(share // 64, 1)
        if any(passes and most - passes * OVERHEAD < passes for passes, _ in work):
            continue
        counts = [
            max(-(-passes * blocks // (most - passes * OVERHEAD)), 1) if passes else 0
            for passes, blocks in work
        ]
        if sum(counts) <= parts:
            cost = max(
                (
                    p * (-(-b // max(k, 1)) + OVERHEAD)
                    for (p, b), k in zip(work, counts, strict=True)
                ),
                default=0,
            )
            bounds = [
                (request, index * blocks // count)
                for request, ((_, blocks), count) in enumerate(zip(work, counts, strict=True))
                for index in range(count)
            ]
            bounds += [(len(work), 0)] * (parts - len(bounds))
            return cost + OVERHEAD * (max(counts, default=0) > 1), bounds
    return math.inf, []


def bounds_between_requests(costs, parts):
    """No request is cut: as many of them to each part, if they were equal."""
    num = max(-(-len(costs) // max(-(-len(costs) // parts), 1)), 1)
    begins = list(itertools.accumulate(costs, initial=0))
    nearest = []
    for part in range(num + 1):
        target = part * begins[-1] // num
        owner = sum(begin <= target for begin in begins[1:])
        is_past = owner < len(costs) and begins[owner + 1] - target < target - begins[owner]
        nearest.append(owner + is_past)
    cost = max(begins[b] - begins[a] for a, b in itertools.pairwise(nearest))
    return cost, [(request, 0) for request in nearest[:num]] + [(len(costs), 0)] * (parts - num)


def bounds_anywhere(work, costs, parts):
    ends, total = list(itertools.accumulate(costs)), sum(costs)
    bounds = [(0, 0)]
    for part in range(1, parts):
        target = part * total // parts
        owner = sum(end <= target for end in ends)
        if owner == len(costs):
            bounds.append((owner, 0))
            continue
        passes, blocks = work[owner]
        slack = max(total // (24 * parts) // max(passes, 1), 1)
        block = (target - (ends[owner] - costs[owner])) // max(passes, 1)
        if block + slack > blocks:
            bounds.append((owner + 1, 0))
        else:
            bounds.append((owner, block if block >= slack else 0))
    return bounds


CASES = {
    "even": ([1] * 8, [4096] * 8),
    "one": ([1], [100_000]),
    "one short": ([1], [5]),
    "fewer blocks than parts": ([1], [150]),
    "ragged": ([1] * 7, [63, 64, 4096, 1, 777, 20_000, 0]),
    "empty requests": ([0, 1, 0, 0, 2, 0], [500, 3000, 64, 0, 9000, 77]),
    "longer queries": ([3, 40, 1, 7], [1000, 5000, 64, 0]),
    "nobody": ([0, 0], [100, 0]),
    "no request": ([], []),
    "many": ([1] * 1500, [(i * 7919) % 5000 for i in range(1500)]),
    "even, as many as parts": ([1] * 132, [4095] * 132),
    "even, two to a part": ([1] * 130, [4095] * 130),
    "even, eight parts each": ([1] * 16, [8191] * 16),
    "few, uneven": ([1] * 16, [500 * i for i in range(16)]),
    "nearly even": ([1] * 128, [4000 + (i * 37) % 190 for i in range(128)]),
}


@pytest.mark.parametrize(
    "name, parts, parts_used, num_cut",
    [
        ("even, as many as parts", 132, 132, 0),
        ("even, as many as parts", 66, 66, 0),
        ("even, two to a part", 132, 130, 0),
        ("even, two to a part", 66, 65, 0),
        ("even, eight parts each", 132, 128, 16),
        ("nearly even", 132, 128, 0),
        ("nearly even", 66, 64, 0),
        ("ragged", 13, 13, 2),
    ],
)
def test_equal_requests_are_not_cut_where_few_parts_idle_for_it(
    name, parts, parts_used, num_cut, device
):
    schedule, batch = scheduled(*CASES[name], parts=parts, device=device)
    work = list(walk(schedule, batch))
    assert len({part for part, *_ in work}) == parts_used
    assert len({request for _, request, _, _, slot in work if slot is not None}) == num_cut


@pytest.mark.parametrize("parts, gang", [(1, 1), (5, 1), (66, 2), (132, 1)])
@pytest.mark.parametrize("name", CASES)
def test_bounds_are_the_cheapest_way(name, parts, gang, device):
    schedule, _ = scheduled(*CASES[name], parts=parts, gang=gang, device=device)
    bounds = [tuple(bound) for bound in schedule.bounds.tolist()]
    assert bounds == expected_bounds(*CASES[name], 4, parts, 16 * gang)


@pytest.mark.parametrize("parts", [1, 2, 5, 66, 132])
@pytest.mark.parametrize("name", CASES)
def test_every_block_is_taken_once(name, parts, device):
    schedule, batch = scheduled(*CASES[name], parts=parts, device=device)
    assert_taken_once(schedule, batch)


def assert_taken_once(schedule, batch):
    taken = {request: [] for request in range(batch.num_requests)}
    slots = set()
    for _, request, begin, end, slot in walk(schedule, batch):
        taken[request] += range(begin, end)
        assert slot is None or slot not in slots
        slots.add(slot)
        slots.discard(None)
    for request, blocks in taken.items():
        assert blocks == list(range(blocks_of(batch, request)))


def test_shares_are_even_to_a_start_and_a_24th(device):
    query_lens, cached = CASES["ragged"]
    schedule, batch = scheduled(query_lens, cached, parts=13, device=device)
    shares = [0] * 13
    for part, _, begin, end, _ in walk(schedule, batch):
        shares[part] += end - begin
    total = sum(shares) + OVERHEAD * len(cached)
    assert max(shares) <= total / 13 * (1 + 2 / 24) + 2
    assert sum(shares) == sum(blocks_of(batch, request) for request in range(len(cached)))


def test_cuts_name_the_first_and_last_bound_in_each_cut_request(device):
    for name, parts in itertools.product(CASES, (1, 2, 5, 132)):
        schedule, _ = scheduled(*CASES[name], parts=parts, device=device)
        inside = {}
        for part, (request, block) in enumerate(schedule.bounds.tolist()):
            if block > 0:
                inside.setdefault(request, []).append(part)
        cuts = schedule.cuts.tolist()
        expected = [[request, parts[0], parts[-1]] for request, parts in inside.items()]
        assert cuts[: len(inside)] == expected
        assert all(request == -1 for request, _, _ in cuts[len(inside) :])


# ---- merging


def attend(q, kv, begin, end, query_len, seq_len):
    """Of rows ``[query_len, H]`` over keys ``[begin, end)``: normalised output, base-2 lse."""
    scores = torch.einsum("thd,nd->thn", q, kv[begin:end])
    visible = seq_len - query_len + torch.arange(query_len)[:, None] >= torch.arange(begin, end)
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None].clamp(min=-1e30)).exp()
    return weights @ kv[begin:end], lse / math.log(2)


def decode_by(schedule, batch, q, kvs, scale=None):
    """As a kernel does it that follows the schedule; all memory is poisoned first."""
    schedule.outs.fill_(math.nan)
    schedule.lses.fill_(math.nan)
    out = torch.full((*q.shape[:2], LATENT), math.nan, device=batch.device)
    lse = torch.full(q.shape[:2], math.nan, device=batch.device)
    offsets = batch.input_row_offsets.tolist()
    for _, request, begin, end, slot in walk(schedule, batch):
        start, stop = offsets[request : request + 2]
        if start == stop:
            continue
        first, last = begin * BLOCK_N, min(end * BLOCK_N, len(kvs[request]))
        piece, piece_lse = attend(
            q[start:stop], kvs[request], first, max(last, first), stop - start, len(kvs[request])
        )
        if slot is None:
            out[start:stop] = piece.to(out.device)
            lse[start:stop] = piece_lse.to(out.device) * math.log(2)
            continue
        rows = piece.shape[0] * piece.shape[1]
        saw_key = (piece_lse > -math.inf).flatten().to(out.device)
        schedule.lses[slot, :rows] = piece_lse.flatten().to(out.device)
        piece = piece.flatten(0, 1).to(out.device)[saw_key]
        schedule.outs[slot, :rows][saw_key] = (piece if scale is None else piece / scale[0]).to(
            schedule.outs.dtype
        )
    merge_cuts(schedule, batch, out, lse, scale)
    return out.cpu(), lse.cpu()


def assert_decodes(schedule, batch, num_heads=4, scale=None, rtol=1e-4):
    torch.manual_seed(0)
    offsets, cached = batch.input_row_offsets.tolist(), batch.cache_lengths.tolist()
    query_lens = [b - a for a, b in itertools.pairwise(offsets)]
    q = torch.randn(offsets[-1], num_heads, LATENT)
    kvs = [torch.randn(c + n, LATENT) for c, n in zip(cached, query_lens, strict=True)]
    out, lse = decode_by(schedule, batch, q, kvs, scale)
    for request, (start, stop) in enumerate(itertools.pairwise(offsets)):
        kv = kvs[request]
        whole, whole_lse = attend(q[start:stop], kv, 0, len(kv), stop - start, len(kv))
        torch.testing.assert_close(out[start:stop], whole, atol=rtol / 5, rtol=rtol)
        torch.testing.assert_close(lse[start:stop], whole_lse * math.log(2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "query_lens, cached, parts",
    [
        ([1, 1, 1], [700, 64, 3000], 5),
        ([1], [2000], 40),  # more parts than blocks: some are idle
        ([2, 0, 3], [500, 64, 1000], 7),
        ([1] * 4, [127, 128, 129, 0], 3),
        ([1, 1], [64 * 60, 64 * 9], 13),
    ],
)
def test_pieces_merge_to_the_attention_over_all_keys(query_lens, cached, parts, device):
    schedule, batch = scheduled(query_lens, cached, parts=parts, tile_rows=4, device=device)
    assert_decodes(schedule, batch)


@pytest.mark.parametrize("parts", [34, 66])
def test_more_pieces_than_are_read_together_merge(parts, device):
    cached = 64 * 8 * parts - 1
    schedule, batch = scheduled([1], [cached], parts=parts, tile_rows=4, device=device)
    read_together, *_ = _choose_blocks(parts, 1, LATENT, torch.float32)
    assert sum(1 for _ in walk(schedule, batch)) == parts > read_together
    assert_decodes(schedule, batch)


def test_pieces_in_fp16_are_in_units_of_the_scale(device):
    scale = torch.tensor([2.0**-12, math.nan], device=device)  # the second is of rope keys
    schedule, batch = scheduled([1, 2], [700, 3000], device=device, dtype=torch.float16)
    assert_decodes(schedule, batch, scale=scale, rtol=1e-3)


@pytest.mark.parametrize("then", [[1, 3000, 0, 64], [5000, 5000, 5000, 5000], [0, 0, 0, 0]])
def test_schedule_for_other_lengths_costs_balance_and_no_key(then, device):
    schedule, _ = scheduled([1, 1, 0, 1], [4000, 10, 300, 900], parts=6, device=device)
    batch = make_batch([1, 1, 1, 1], then, device)
    assert_taken_once(schedule, batch)
    assert_decodes(schedule, batch)


def test_rows_that_were_not_cut_are_left_alone(device):
    schedule, batch = scheduled([1, 1], [64, 64], parts=2, device=device)
    assert (schedule.cuts[:, 0] == -1).all()
    out = torch.full((2, 4, LATENT), 7.0, device=device)
    lse = torch.full((2, 4), 7.0, device=device)
    merge_cuts(schedule, batch, out, lse)
    assert (out == 7).all() and (lse == 7).all()
