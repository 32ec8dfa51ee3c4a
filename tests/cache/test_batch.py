import numpy as np
import pytest
import torch

from kvkern import (
    ArgumentError,
    CacheFormat,
    KvkernError,
    LayoutError,
    PagedBatch,
    PagedKVCache,
    ShapeMismatchError,
    UnsupportedDtypeError,
)

OFFSETS, LENGTHS, TABLE = [0, 3, 3, 4], [5, 9, 0], [[7, 1, -1], [2, 0, 3], [4, -1, -1]]


def values(batch):
    return [
        batch.input_row_offsets.tolist(),
        batch.cache_lengths.tolist(),
        batch.page_table.tolist(),
    ]


def facts(batch):
    return (
        batch.num_requests,
        batch.num_tokens,
        batch.max_tokens,
        batch.max_query_len,
        batch.max_cache_len,
        batch.max_seq_len,
    )


@pytest.mark.parametrize(
    "convert",
    [
        list,
        np.array,
        lambda x: np.array(x, dtype=np.uint16) if np.min(x) >= 0 else np.array(x, dtype=np.int8),
        lambda x: np.asfortranarray(np.array(x, dtype=np.int64)),
        torch.tensor,
        lambda x: torch.tensor(x, dtype=torch.int32),
    ],
    ids=["lists", "numpy", "small ints", "fortran order", "int64 tensors", "int32 tensors"],
)
def test_any_host_integers_become_int32_tensors_on_the_device(device, convert):
    batch = PagedBatch(*map(convert, [OFFSETS, LENGTHS, TABLE]), device=device)
    assert values(batch) == [OFFSETS, LENGTHS, TABLE]
    for tensor in [batch.input_row_offsets, batch.cache_lengths, batch.page_table]:
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
        assert tensor.device.type == device
    assert batch.device.type == device
    assert facts(batch) == (3, 4, 4, 3, 9, 9)


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: np.array(x, dtype=np.int32),  # nothing to convert, so a view would do
        lambda x: torch.tensor(x, dtype=torch.int32),
        torch.tensor,
    ],
    ids=["numpy int32", "int32 tensors", "int64 tensors"],
)
def test_inputs_are_copied(device, convert):
    arrays = [convert(x) for x in [OFFSETS, LENGTHS, TABLE]]
    batch = PagedBatch(*arrays, device=device)
    for array in arrays:
        array[:] = 1
    assert values(batch) == [OFFSETS, LENGTHS, TABLE] and batch.num_tokens == 4
    _, prefill = batch.split_decode()  # which reads the host's copy
    assert values(prefill) == [OFFSETS, LENGTHS, TABLE]


def test_default_device_is_the_arguments_or_the_cpu(device):
    assert PagedBatch(OFFSETS, LENGTHS, TABLE).device.type == "cpu"
    table = torch.tensor(TABLE, dtype=torch.int32, device=device)
    batch = PagedBatch(OFFSETS, LENGTHS, table)
    assert batch.device.type == device and values(batch) == [OFFSETS, LENGTHS, TABLE]


@pytest.mark.parametrize("table", [[], np.zeros((0, 5), int)])
def test_batch_of_no_requests(device, table):
    batch = PagedBatch([0], [], table, device=device)
    assert facts(batch) == (0, 0, 0, 0, 0, 0)
    assert batch.page_table.ndim == 2 and len(batch.page_table) == 0


def test_requests_without_pages_or_tokens(device):
    batch = PagedBatch([0, 0, 0], [0, 0], [[], []], device=device)
    assert batch.page_table.shape == (2, 0) and facts(batch) == (2, 0, 0, 0, 0, 0)


# ---- what is refused

INT32_MAX = 2**31 - 1
BAD = {
    "offsets rank": (
        ([[0, 1]], [0], [[0]]),
        ShapeMismatchError,
        r"input_row_offsets: want 1-D, got shape \[1, 2\]",
    ),
    "offsets length": (
        ([0, 1], [0, 0], [[0], [0]]),
        ShapeMismatchError,
        r"input_row_offsets: want \[B\+1=3\], got \[2\]",
    ),
    "offsets empty": (
        ([], [], []),
        ShapeMismatchError,
        r"input_row_offsets: want \[B\+1=1\], got \[0\]",
    ),
    "offsets start": (
        ([1, 2], [0], [[0]]),
        ArgumentError,
        "input_row_offsets: want to start at 0, got 1",
    ),
    "offsets fall": (
        ([0, 3, 2], [0, 0], [[0], [0]]),
        ArgumentError,
        r"input_row_offsets: want non-decreasing, got \[3, 2\] at 1",
    ),
    "offsets wrap": (
        ([0, INT32_MAX, -INT32_MAX], [0, 0], [[0], [0]]),
        ArgumentError,
        "input_row_offsets: want non-decreasing",
    ),
    "offsets dtype": (
        ([0.0, 1.0], [0], [[0]]),
        UnsupportedDtypeError,
        "input_row_offsets: want integers, got float64",
    ),
    "offsets large": (
        ([0, 2**31], [0], [[0]]),
        ArgumentError,
        "input_row_offsets: want values within int32, got 2147483648",
    ),
    "lengths rank": (
        ([0, 1], 5, [[0]]),
        ShapeMismatchError,
        r"cache_lengths: want 1-D, got shape \[\]",
    ),
    "lengths negative": (
        ([0, 1, 2], [3, -1], [[0], [0]]),
        ArgumentError,
        "cache_lengths: want >= 0, got -1 at 1",
    ),
    "lengths dtype": (
        ([0, 1], [True], [[0]]),
        UnsupportedDtypeError,
        "cache_lengths: want integers, got bool",
    ),
    "lengths small": (
        ([0, 1], [-(2**40)], [[0]]),
        ArgumentError,
        "cache_lengths: want values within int32, got -1099511627776",
    ),
    "table rank": (
        ([0, 1], [0], [0]),
        ShapeMismatchError,
        r"page_table: want 2-D, got shape \[1\]",
    ),
    "table ragged": (
        ([0, 1, 2], [0, 0], [[0, 1], [2]]),
        ShapeMismatchError,
        "page_table: want 2-D, got a ragged list",
    ),
    "table rows": (
        ([0, 1], [0], [[0], [1]]),
        ShapeMismatchError,
        r"page_table: want \[B=1, any\], got \[2, 1\]",
    ),
    "table none": (
        ([0, 1], [0], []),
        ShapeMismatchError,
        r"page_table: want \[B=1, any\], got \[0, 0\]",
    ),
    "table ids": (([0, 1], [0], [[0, -2]]), ArgumentError, "page_table: want ids >= -1, got -2"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_argument_is_named(device, case):
    arguments, error, message = BAD[case]
    with pytest.raises(error, match=message) as raised:
        PagedBatch(*arguments, device=device)
    assert isinstance(raised.value, KvkernError)


def test_length_past_int32_does_not_wrap_around(device):
    batch = PagedBatch([0, 1], [INT32_MAX], [[0]], device=device)
    assert batch.max_seq_len == 2**31
    cache = PagedKVCache(
        CacheFormat("bf16", 128, 0), num_layers=1, num_pages=1, page_size=4, device=device
    )
    with pytest.raises(ArgumentError, match="page_table: want at least 536870912 columns"):
        cache.view(0, batch)


# ---- what only the device knows: `meta` stands in where there is no GPU


def on_device(device, *arrays):
    device = device if device == "cuda" else "meta"
    return [torch.tensor(x, dtype=torch.int32).to(device) for x in arrays]


def test_device_data_has_no_bounds_on_the_host(device):
    tensors = on_device(device, OFFSETS, LENGTHS, TABLE)
    batch = PagedBatch(*tensors)
    assert batch.page_table is tensors[2] and batch.num_requests == 3
    assert batch.device == tensors[0].device
    bounds = [batch.max_tokens, batch.max_query_len, batch.max_cache_len, batch.max_seq_len]
    assert bounds == [None] * 4 and not batch.can_split and batch.host_values is None
    with pytest.raises(ArgumentError, match="num_tokens: want a batch built from host data or"):
        _ = batch.num_tokens
    with pytest.raises(ArgumentError, match="split_decode: want a batch built from host data"):
        batch.split_decode()
    batch.check_num_tokens("kv", 0)
    batch.check_pages(page_size=1, num_pages=1)


@pytest.mark.parametrize(
    "spoil, error, message",
    [
        (
            lambda o, n, t: (o.long(), n, t),
            UnsupportedDtypeError,
            "input_row_offsets: want int32 on a device, got torch.int64",
        ),
        (
            lambda o, n, t: (o, n, t.mT),
            LayoutError,
            r"page_table: want contiguous, got strides \[1, 3\]",
        ),
        (
            lambda o, n, t: (o[1:], n, t),
            ShapeMismatchError,
            r"PagedBatch: want input_row_offsets \[B\+1\], .*; got \[3\], \[3\], \[3, 3\]",
        ),
        (lambda o, n, t: (o[:, None], n, t), ShapeMismatchError, r"got \[4, 1\], \[3\], \[3, 3\]"),
        (lambda o, n, t: (o[0], n, t), ShapeMismatchError, r"got \[\], \[3\], \[3, 3\]"),
        (lambda o, n, t: (o, n[:2], t), ShapeMismatchError, r"got \[4\], \[2\], \[3, 3\]"),
        (lambda o, n, t: (o, n, t[0]), ShapeMismatchError, r"got \[4\], \[3\], \[3\]"),
    ],
)
def test_shape_dtype_and_strides_of_device_data_are_checked(device, spoil, error, message):
    with pytest.raises(error, match=message):
        PagedBatch(*spoil(*on_device(device, OFFSETS, LENGTHS, TABLE)))


@pytest.mark.gpu
def test_values_of_device_data_are_checked_on_request_only():
    tensors = on_device("cuda", [0, 3, 2], [0, -1], [[-5], [0]])
    torch.cuda.set_sync_debug_mode("error")
    try:
        PagedBatch(*tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(ArgumentError, match="input_row_offsets: want non-decreasing"):
        PagedBatch(*tensors, check=True)
    sound = PagedBatch(*on_device("cuda", OFFSETS, LENGTHS, TABLE), check=True)
    assert facts(sound) == (3, 4, 4, 3, 9, 9) and sound.device.type == "cuda"


# ---- split_decode


@pytest.mark.parametrize(
    "query_lens, num_decode",
    [
        ([1, 1, 1], 3),
        ([5, 2], 0),
        ([1, 1, 4, 2], 2),
        ([1, 4, 1], 1),  # the last is one token behind a prefill: not leading
        ([1, 0, 1], 1),  # a request without new tokens is no decode
        ([0], 0),
        ([], 0),
    ],
)
def test_split_is_leading_single_tokens_and_the_rest(device, query_lens, num_decode):
    num = len(query_lens)
    lengths, table = [10 * b for b in range(num)], [[b, 100 + b] for b in range(num)]
    batch = PagedBatch(np.cumsum([0, *query_lens]), lengths, table, device=device)
    decode, prefill = batch.split_decode()
    assert (decode.num_requests, decode.num_tokens) == (num_decode, num_decode)
    assert prefill.num_tokens == sum(query_lens[num_decode:])
    for part, start, stop in [(decode, 0, num_decode), (prefill, num_decode, num)]:
        assert part.device == batch.device
        assert part.input_row_offsets.tolist() == np.cumsum([0, *query_lens[start:stop]]).tolist()
        assert part.cache_lengths.tolist() == lengths[start:stop]
        assert part.page_table.tolist() == table[start:stop]
        assert part.max_query_len == max(query_lens[start:stop], default=0)
    again = batch.split_decode()
    assert again[0] is decode and again[1] is prefill


# ---- static batches


def make_static(device, **bounds):
    bounds = {
        "max_requests": 4,
        "max_tokens": 6,
        "max_pages": 3,
        "max_query_len": 3,
        "max_seq_len": 12,
    } | bounds
    return PagedBatch.static(**bounds, device=device)


def test_static_batch_starts_with_no_request_and_full_bounds(device):
    batch = make_static(device)
    assert values(batch) == [[0] * 5, [0] * 4, [[-1] * 3] * 4]
    assert facts(batch) == (4, 0, 6, 3, 12, 12)
    assert batch.device.type == device and not batch.can_split
    with pytest.raises(ArgumentError, match=r"split_decode: want .* not refilled"):
        batch.split_decode()


def test_refill_overwrites_in_place_and_keeps_the_bounds(device):
    batch = make_static(device)
    tensors = [batch.input_row_offsets, batch.cache_lengths, batch.page_table]
    addresses = [t.data_ptr() for t in tensors]
    for step, expected in [
        (
            (OFFSETS, LENGTHS, TABLE),
            [[*OFFSETS, 4], [*LENGTHS, 0], [*TABLE, [-1] * 3]],
        ),
        (([0, 2], [1], [[9]]), [[0, 2, 2, 2, 2], [1, 0, 0, 0], [[9, -1, -1], *[[-1] * 3] * 3]]),
        (([0], [], []), [[0] * 5, [0] * 4, [[-1] * 3] * 4]),
    ]:
        batch.refill(*step)
        assert values(batch) == expected
        assert [t.data_ptr() for t in tensors] == addresses
        assert batch.page_table is tensors[2]
        assert facts(batch) == (4, step[0][-1], 6, 3, 12, 12)


def test_host_values_are_the_steps_and_another_object_after_each_refill(device):
    batch = make_static(device)
    seen = [batch.host_values]
    for _ in range(2):  # the same step twice
        batch.refill(OFFSETS, LENGTHS, TABLE)
        assert [x.tolist() for x in batch.host_values] == [OFFSETS, LENGTHS, TABLE]
        assert batch.host_values is batch.host_values
        assert all(batch.host_values is not before for before in seen)
        seen.append(batch.host_values)
    with pytest.raises(ArgumentError):
        batch.refill([0, 1], [-1], [[0]])
    assert batch.host_values is seen[-1]


BAD_REFILLS = {
    "requests": (([0] * 6, [0] * 5, [[0]] * 5), "refill: want at most 4 requests, got 5"),
    "tokens": (([0, 3, 6, 7], [0] * 3, [[0]] * 3), "refill: want at most 6 tokens, got 7"),
    "query": (([0, 4], [0], [[0]]), "refill: want at most 3 new tokens of one request, got 4"),
    "sequence": (([0, 1], [12], [[0]]), "refill: want at most 12 tokens of one sequence, got 13"),
    "columns": (([0, 1], [0], [[0] * 4]), "refill: want at most 3 page table columns, got 4"),
    "page": (([0, 1], [0], [[20]]), "page_table: want page ids below num_pages=20, got 20"),
    "narrow": (([0, 1], [4], [[0]]), "page_table: want at least 2 columns for a sequence of 5"),
    "lengths": (([0, 1], [-1], [[0]]), "cache_lengths: want >= 0, got -1 at 0"),
    "offsets": (([0, 1], [0, 0], [[0], [0]]), r"input_row_offsets: want \[B\+1=3\], got \[2\]"),
}


@pytest.mark.parametrize("case", BAD_REFILLS)
def test_refused_refill_changes_nothing(device, case):
    step, message = BAD_REFILLS[case]
    batch = make_static(device)
    cache = PagedKVCache(
        CacheFormat("bf16", 128, 0), num_layers=1, num_pages=20, page_size=4, device=device
    )
    cache.view(0, batch)
    batch.refill(OFFSETS, LENGTHS, TABLE)
    before = values(batch), facts(batch)
    with pytest.raises(KvkernError, match=message):
        batch.refill(*step)
    assert (values(batch), facts(batch)) == before


def test_only_a_static_batch_is_refilled(device):
    with pytest.raises(ArgumentError, match=r"refill: want a batch made by PagedBatch\.static"):
        PagedBatch(OFFSETS, LENGTHS, TABLE, device=device).refill([0], [], [])


@pytest.mark.parametrize(
    "bound", ["max_requests", "max_tokens", "max_pages", "max_query_len", "max_seq_len"]
)
def test_static_bounds_are_at_least_one(device, bound):
    with pytest.raises(ArgumentError, match=f"{bound}: want >= 1, got 0"):
        make_static(device, **{bound: 0})


def test_static_table_must_hold_the_longest_sequence(device):
    cache = PagedKVCache(
        CacheFormat("bf16", 128, 0), num_layers=1, num_pages=20, page_size=3, device=device
    )
    message = "page_table: want at least 4 columns for max_seq_len=12 at page_size=3, got 3"
    with pytest.raises(ArgumentError, match=message):
        cache.view(0, make_static(device))


def test_too_few_tokens_for_the_step_are_named(device):
    batch = PagedBatch(OFFSETS, LENGTHS, TABLE, device=device)
    batch.check_num_tokens("kv", 4)
    with pytest.raises(ArgumentError, match="kv: want at least 4 tokens, got 3"):
        batch.check_num_tokens("kv", 3)
    static = make_static(device)  # may be refilled up to its bound
    with pytest.raises(ArgumentError, match="q: want at least 6 tokens, got 5"):
        static.check_num_tokens("q", 5)


@pytest.mark.gpu
def test_building_and_refilling_do_not_synchronise():
    static = make_static("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = PagedBatch(OFFSETS, LENGTHS, TABLE, device="cuda")
        static.refill(OFFSETS, LENGTHS, TABLE)
        batch.split_decode()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert values(batch) == [OFFSETS, LENGTHS, TABLE]
    assert values(static)[0] == [*OFFSETS, 4]


@pytest.mark.gpu
def test_refill_is_ordered_between_the_launches_around_it():
    """Page-locked staging memory is not reused before its copy has been made."""
    static = make_static("cuda")
    seen = []
    torch.cuda._sleep(100_000_000)
    for length in range(8):
        static.refill([0, 1], [length], [[length]])
        seen.append(torch.cat([static.cache_lengths[:1], static.page_table[0, :1]]))
    assert torch.stack(seen).tolist() == [[n, n] for n in range(8)]
