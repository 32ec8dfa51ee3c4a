"""Tile and split choices are pure functions, so they are tested for cards that are not there."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kvkern.kernels import matmul_weight_only, mla_decode, mla_prefill, write_kv
from kvkern.kernels.device import INTERPRETED, Gpu
from kvkern.kernels.hopper import matmul_weight_only_few, matmul_weight_only_many, scaled_mm_tiles
from kvkern.kernels.packed_ints import chunk_columns
from kvkern.kernels.paging import power_of_two
from kvkern.kernels.sum_splits import MOST_SPLITS
from kvkern.layout import FORMAT_NAMES, CacheFormat

GPUS = [INTERPRETED, *(Gpu(capability, 108) for capability in (80, 89, 90, 100, 120))]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"sm_{gpu.capability}")
def test_decode_tiles_are_whole_powers_of_two_that_the_tensor_cores_take(gpu):
    for name, dtype, num_heads, max_query_len in itertools.product(
        FORMAT_NAMES, DTYPES, [1, 3, 16, 40, 128, 500], [0, 1, 2, 4, 1000]
    ):
        tiles = mla_decode.choose_tiles(num_heads, max_query_len, CacheFormat(name), dtype, gpu)
        rows = tiles.block_t * tiles.block_h
        assert 16 <= rows <= 64
        for size in (tiles.block_t, tiles.block_h, tiles.block_n):
            assert size & (size - 1) == 0
        padded_heads = max(2 * num_heads - 1, 1)  # heads are padded to the next power
        assert tiles.block_h <= padded_heads or rows == 64


def test_more_heads_and_tokens_share_a_read_of_the_keys():
    fmt, gpu = CacheFormat("bf16"), Gpu(90, 132)

    def rows(num_heads, max_query_len):
        tiles = mla_decode.choose_tiles(num_heads, max_query_len, fmt, torch.bfloat16, gpu)
        return tiles.block_t, tiles.block_h

    assert rows(128, 1) == (1, 64) and rows(16, 1) == (1, 16) and rows(16, 4) == (4, 16)
    assert rows(1, 1) == (16, 1) and rows(128, 4) == (1, 64)


@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8_ds_mla"])
def test_more_than_16_rows_are_64_for_what_sm_90_multiplies_fast(name):
    def tiles(num_heads, max_query_len, capability=90):
        gpu = Gpu(capability, 132)
        return mla_decode.choose_tiles(
            num_heads, max_query_len, CacheFormat(name), torch.bfloat16, gpu
        )

    for num_heads, max_query_len in [(17, 1), (32, 1), (40, 1), (128, 1), (16, 2), (5, 3)]:
        chosen = tiles(num_heads, max_query_len)
        assert chosen.block_t * chosen.block_h == 64 and chosen.share_scores
    assert not tiles(16, 1).share_scores and tiles(16, 1).block_h == 16
    assert not tiles(128, 1, 80).share_scores and not tiles(128, 1, 100).share_scores


@pytest.mark.parametrize(
    ("num_programs", "max_seq_len", "expected"),
    [
        (132, 8192, (1, 1)),  # the card is full already
        (1, 0, (1, 1)),
        (1, 255, (1, 1)),  # under 4 blocks of 64: not worth a split
        (1, 131_072, (128, 128)),  # the most
        (2, 2048, (8, 8)),  # 4 blocks a split
        (66, 8192, (2, 2)),
        (16, 65_536, (8, 8)),  # 9 would be 12 programs in a second round
        (256, 8193, (2, 1)),  # what is longer than the rest cannot be foreseen
        (16, 131_072, (16, 8)),
        (256, 1 << 20, (8, 1)),  # 16 rounds
        (1 << 20, 1 << 20, (1, 1)),
    ],
)
def test_splits_fill_the_card_and_cut_what_is_long(num_programs, max_seq_len, expected):
    gpu = Gpu(90, 132)
    tiles = mla_decode.choose_tiles(128, 1, CacheFormat("bf16"), torch.bfloat16, gpu)
    assert tiles.block_n == 64
    assert mla_decode.choose_splits(num_programs, max_seq_len, tiles, gpu) == expected


def test_splits_are_for_two_programs_an_sm_where_it_holds_two():
    """Few rows of what need not be converted, on sm_80."""

    def splits(num_heads, name):
        gpu = Gpu(80, 108)
        tiles = mla_decode.choose_tiles(num_heads, 1, CacheFormat(name), torch.bfloat16, gpu)
        return mla_decode.choose_splits(27, 1 << 16, tiles, gpu)[1]

    assert splits(16, "bf16") == 8 and splits(128, "bf16") == splits(16, "fp8") == 4


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"sm_{gpu.capability}")
def test_prefill_tiles_are_what_the_tensor_cores_take(gpu):
    for query_len, dim, itemsize in itertools.product([1, 64, 65, 9999], [64, 128, 256], [2, 4]):
        tiles = mla_prefill.choose_tiles(query_len, dim, itemsize, gpu)
        assert tiles.block_t in (16, 32, 64, 128) and tiles.block_n in (16, 32, 64)


def is_power_of_two(count):
    return count > 0 and count & (count - 1) == 0


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"sm_{gpu.capability}")
def test_write_tiles_are_powers_of_two_and_no_wider_than_the_query(gpu):
    for num_tokens, num_heads, rope_dim, nope_dim, q_latent_dim in itertools.product(
        [0, 1, 432, 433, 100_000],
        [0, 1, 5, 16, 128, 500],
        [0, 2, 48, 64, 256],
        [0, 5, 512, 8192],
        [0, 40, 1536, 32_768],
    ):
        tiles = write_kv.choose_tiles(num_tokens, num_heads, rope_dim, nope_dim, q_latent_dim, gpu)
        padded_heads = max(2 * num_heads - 1, 1)  # heads are padded to the next power of two
        for heads, dim in [(tiles.rope_heads, rope_dim), (tiles.nope_heads, nope_dim)]:
            assert is_power_of_two(heads) and heads <= padded_heads
            assert heads == 1 or heads * dim <= 8192  # what 8 warps hold in registers
        assert is_power_of_two(tiles.num_warps) and tiles.num_warps <= 8


def test_write_of_few_tokens_has_more_warps_a_part_than_one_of_many():
    gpu = Gpu(90, 132)

    def tiles(num_tokens):
        return write_kv.choose_tiles(num_tokens, 128, 64, 512, 0, gpu)

    few, many = tiles(4 * 132), tiles(4 * 132 + 1)
    assert few.num_warps == 4 and many.num_warps == 1
    assert few.rope_heads * 64 == many.rope_heads * 64 == 2048
    assert few.nope_heads * 512 == 4096 and many.nope_heads * 512 == 1024  # 1024 values a warp
    assert tiles(1) == few and tiles(1 << 20) == many


@pytest.mark.parametrize(
    "q_latent_dim, num_warps", [(0, 1), (512, 1), (768, 2), (1536, 4), (2048, 4), (16_384, 8)]
)
def test_wider_query_latent_is_spread_over_more_warps(q_latent_dim, num_warps):
    """And nope columns with it, which take what registers there are."""
    tiles = write_kv.choose_tiles(4096, 128, 64, 128, q_latent_dim, Gpu(90, 132))
    assert tiles.num_warps == num_warps
    assert tiles.nope_heads == 8 * num_warps


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"sm_{gpu.capability}")
@pytest.mark.parametrize("bits", [8, 4])
def test_weight_only_splits_have_work_and_tiles_hold_the_rows(gpu, bits):
    for num_rows, num_columns, depth in itertools.product(
        [1, 8, 9, 16, 17, 63, 64, 65, 128, 129, 5000], [1, 129, 4096], [1, 256, 11008]
    ):
        tiles = matmul_weight_only.choose_tiles(num_rows, num_columns, depth, bits, gpu)
        num_chunks = -(-depth // chunk_columns(bits))
        per_split = -(-num_chunks // tiles.num_splits)
        assert 1 <= tiles.num_splits <= MOST_SPLITS
        assert (tiles.num_splits - 1) * per_split < num_chunks  # the last has some too
        assert tiles.rows in (8, 16, 32, 64, 128) and tiles.rows < max(2 * num_rows, 9)


def test_weight_only_products_of_few_rows_fill_the_card():
    gpu = Gpu(90, 132)
    for num_rows, (num_columns, depth), bits in itertools.product(
        [1, 8, 16], [(4096, 11008), (8192, 8192)], [8, 4]
    ):
        tiles = matmul_weight_only.choose_tiles(num_rows, num_columns, depth, bits, gpu)
        num_programs = num_columns / tiles.columns * tiles.num_splits
        assert num_programs > 1.5 * gpu.num_sms
    many = matmul_weight_only.choose_tiles(4096, 8192, 8192, 8, gpu)
    assert many.num_splits == 1 and many.rows == 128


@pytest.mark.parametrize(("bits", "group_size"), [(8, 0), (4, 0), (4, 64), (4, 128)])
def test_hopper_weight_only_tiles_fit_an_sm_and_splits_have_work(bits, group_size):
    gpu = Gpu(90, 132)
    for num_rows, num_columns, depth, has_zero in itertools.product(
        [17, 32, 33, 64, 65, 128, 129, 512, 4096], [1, 4096, 8192], [1, 256, 11008], [True, False]
    ):
        size = group_size or depth
        rows, num_splits, parts, stages_x = matmul_weight_only_many.choose_tiles(
            num_rows, num_columns, depth, bits, size, has_zero, gpu
        )
        assert rows in (32, 64, 128, 256) and (rows == 128 or rows < 2 * num_rows)
        assert parts * 64 <= size or size >= depth  # a step has sums of one group
        assert rows <= 128 or (bits == 8 and num_splits == 1)  # sums of groups need registers too
        num_chunks = -(-depth // chunk_columns(bits))
        assert 1 <= num_splits <= MOST_SPLITS
        assert (num_splits - 1) * -(-num_chunks // num_splits) < num_chunks
        scales = chunk_columns(bits) // size * 128 * 4 if size < depth else 0
        of_words = 4 * (128 * 128 + scales * (1 + has_zero))
        of_tokens, staged = stages_x * parts * rows * 128, 16_384
        assert stages_x >= 4 and of_words + of_tokens + staged < 232_448


def test_hopper_weight_only_products_fill_the_card_once():
    gpu = Gpu(90, 132)
    for num_rows, (num_columns, depth), (bits, group_size) in itertools.product(
        [32, 64, 128], [(4096, 11008), (8192, 8192)], [(8, 11008), (4, 128)]
    ):
        tiles = matmul_weight_only_many.choose_tiles(
            num_rows, num_columns, depth, bits, group_size, False, gpu
        )
        assert 0.9 * 132 < num_columns / 128 * tiles.num_splits <= 132
    for num_rows in (512, 4096):
        tiles = matmul_weight_only_many.choose_tiles(num_rows, 8192, 8192, 4, 128, False, gpu)
        assert tiles.num_splits == 1


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "depth", "rows"),
    [  # the fastest of those measured on an H200
        (256, 4096, 11008, 128), (512, 4096, 11008, 128), (4096, 4096, 11008, 256),
        (256, 8192, 8192, 128), (512, 8192, 8192, 256), (4096, 8192, 8192, 256),
    ],
)  # fmt: skip
def test_hopper_weight_only_products_have_256_rows_in_a_tile_where_those_fill_the_card(
    num_rows, num_columns, depth, rows
):
    tiles = matmul_weight_only_many.choose_tiles(
        num_rows, num_columns, depth, 8, depth, False, Gpu(90, 132)
    )
    assert tiles.rows == rows
    assert tiles.stages_x == 4


def test_hopper_weight_only_products_of_few_rows_have_one_program_an_sm_that_fits():
    gpu = Gpu(90, 132)
    for num_rows, num_columns, (bits, has_groups) in itertools.product(
        [1, 2, 3, 5, 9, 16], [4, 2112, 4096, 4224, 4228, 8192, 24576],
        [(8, False), (4, True), (4, False)],
    ):  # fmt: skip
        rows, columns, stages = matmul_weight_only_few.choose_tiles(
            num_rows, num_columns, bits, has_groups, gpu
        )
        assert rows == {3: 4, 5: 8, 9: 16}.get(num_rows, num_rows)
        assert columns == (32 if num_columns <= 32 * 132 else 64)
        chunks = 128 // columns  # of a step: a warp of four has 32 columns of one
        assert stages in (4, 6)  # some for each of two teams, and more than are on their way
        of_step = chunks * (columns * 128 + rows * 2048 // bits + 8 * columns * has_groups)
        assert stages * of_step + 2 * 4 * chunks * columns * max(rows, 8) < 232_448


SUMS = ["fast", "exact", "groups"]


def hopper_tiles(num_rows, num_columns, depth, sums, num_matrices=1):
    return scaled_mm_tiles.choose_tiles(
        num_rows, num_columns, depth, num_matrices, sums_in_tensor_core=sums == "fast",
        has_groups=sums == "groups", num_sms=132,
    )  # fmt: skip


@pytest.mark.parametrize("sums", SUMS)
def test_hopper_products_have_tiles_that_fit_an_sm_and_parts_that_are_not_empty(sums):
    layers = [(2112, 7168), (24576, 1536), (7168, 16384), (32768, 512), (36864, 7168), (512, 128)]
    layers += [(576, 7168), (7168, 2048), (8, 16)]
    for num_rows, (num_columns, depth), num_matrices in itertools.product(
        [1, 16, 17, 32, 64, 65, 128, 200, 256, 2048, 4096], layers, [1, 16]
    ):
        tiles = hopper_tiles(num_rows, num_columns, depth, sums, num_matrices)
        rows, columns, num_splits, stages, is_few, kept, has_turns, of_stage, extra = tiles
        assert rows == 64 or num_rows > 64 or (rows == 32 < num_rows and is_few)
        # a thread has at most 240 registers: a tile's sums, and beside them a product of 64 rows;
        # where one warpgroup has all 64, of as many rows of a or columns of b, a pair's two
        groups = 1 if has_turns or rows <= 64 else 2
        of_product = 0 if sums == "fast" else 64 * columns / 128
        assert rows * (columns + extra) / 128 / groups + of_product * of_stage <= 200
        assert extra == 0 or (rows == 128 and not has_turns and not kept and num_splits == 1)
        steps = -(-depth // 128)
        assert 1 <= num_splits <= max(steps // 4, 1)
        is_pair = rows == 64 and sums != "fast"
        assert is_few or of_stage == (2 if is_pair else 1)
        assert is_few or columns == 128 or rows != 64 or is_pair
        if is_few:
            in_ring = power_of_two(min(max(num_rows, 8), rows))
            count = -(-num_columns // 64) * -(-num_rows // rows) * num_matrices * num_splits
            programs = min(-(-count // 132), 5)
            assert programs <= 2 or num_rows <= 64
            assert stages == 2 or stages * of_stage <= -(-steps // num_splits) + of_stage
        else:
            in_ring, programs = rows, 1
        assert stages >= 2
        of_step = in_ring * (128 + 4) + (columns + extra) * 128 + 4 * (128 if extra else 64)
        ring = of_step * stages * of_stage + max(kept - stages, 0) * in_ring * (128 + 4)
        staged = 0 if is_few else 2 * 64 * 128 + 4 * 4 * columns
        assert programs * (ring + staged + 1024) <= 228 * 1024


@pytest.mark.parametrize("sums", SUMS)
def test_hopper_products_of_few_rows_leave_no_room_for_one_more_program(sums):
    """Of a launch that begins early an SM gets what has room, while others may get none."""
    layers = [(24576, 1536), (18432, 7168), (7168, 16384), (4096, 7168), (12288, 8192)]
    for num_rows, (num_columns, depth) in itertools.product([1, 8, 16, 24, 32, 64], layers):
        tiles = hopper_tiles(num_rows, num_columns, depth, sums)
        if tiles.is_few:
            of_rows = -(-num_rows // tiles.rows)
            programs = -(-num_columns // 64 * of_rows * tiles.num_splits // 132)
            rows = min(power_of_two(max(num_rows, 8)), tiles.rows)
            ring = tiles.stages * tiles.steps * ((rows + 64) * 128 + 4 * max(rows, 32))
            assert programs <= 3 and 228 * 1024 // (ring + 2048) == programs


@pytest.mark.parametrize("sums", SUMS)
def test_hopper_products_of_few_rows_have_two_steps_a_stage_where_three_fit(sums):
    """Or where a stage is small."""
    for num_rows, num_columns, of_stage in (
        (1, 4096, 2), (1, 36864, 2), (16, 24576, 2), (64, 7168, 2), (32, 36864, 1), (64, 24576, 1),
    ):  # fmt: skip
        tiles = hopper_tiles(num_rows, num_columns, 2048, sums)
        assert tiles.is_few and tiles.steps == of_stage


def test_hopper_products_keep_a_where_it_takes_no_more_room_than_in_a_ring():
    """A step's place is written again once a ring of steps has been multiplied after it."""
    for num_rows, num_columns, depth in itertools.product(
        [65, 128, 129, 256, 4096], [128, 2112, 8192, 32768], [128, 256, 384, 512, 640, 1536]
    ):
        tiles = hopper_tiles(num_rows, num_columns, depth, "fast")
        assert tiles.kept in (0, depth // 128)
        if tiles.kept:
            assert tiles.num_splits == 1 and 3 <= tiles.stages <= tiles.kept <= 4
            assert tiles.rows == 256 or num_rows <= 128
    assert hopper_tiles(4096, 32768, 512, "exact")[:6] == (256, 128, 1, 4, False, 4)


def test_hopper_warpgroups_take_turns_where_small_tiles_fill_the_card_better():
    """And one of them keeps the tensor core busy: it need not add products up."""
    for sums in SUMS:
        assert hopper_tiles(2048, 7168, 2048, sums).has_turns == (sums == "fast")
        for depth in (512, 1536, 16384):
            tiles = hopper_tiles(4096, 24576, depth, sums)
            assert not tiles.has_turns and max(tiles[:2]) == 256


def test_hopper_holds_results_of_large_tiles_that_are_stored_whole():
    def held(tiles, steps=16, is_fast=True, **others):
        given = {"rounds": 2, "is_narrow": False, "sums_in_tensor_core": is_fast} | others
        return scaled_mm_tiles.num_held(tiles, steps, **given)

    wide, high = scaled_mm_tiles.Tiles(128, 256, 1, 4), scaled_mm_tiles.Tiles(256, 128, 1, 4)
    assert held(wide) == held(high) == held(high, is_fast=False) == 4  # of 64 x 64, a warpgroup
    assert held(wide, 4) == held(high, 1, False) == held(high._replace(kept=4), 4, False) == 4
    assert held(wide, is_grouped=True) == 4
    for tiles, is_fast, others in (
        (wide._replace(columns=128), True, {}),
        (wide._replace(extra=16), True, {}),
        (high._replace(num_splits=2), False, {}),
        (high._replace(kept=4), True, {}),  # registers hold where the kept steps are
        (wide, True, {"steps": 3}),  # each of four boxes is stored under a product
        (wide, True, {"is_narrow": True}),
        (high, False, {"bytes_of_value": 4}),
        (high, False, {"is_grouped": True}),
        (wide, True, {"rounds": 1}),  # there is no next tile
    ):
        assert held(tiles, is_fast=is_fast, **others) == 0


def test_hopper_bands_are_rectangles_of_132_tiles_where_k_is_long_and_columns_are_many():
    wide, high = scaled_mm_tiles.Tiles(128, 256, 1, 4), scaled_mm_tiles.Tiles(256, 128, 1, 4)

    def band(tiles, num_columns, depth):
        return scaled_mm_tiles.band_of(tiles, -(-num_columns // tiles.columns), depth, 132)

    assert band(wide, 8192, 8192) == 12 and band(high, 8192, 8192) == 6
    assert band(wide, 2816, 7168) == 12 and band(high, 2816, 7168) == 6
    assert band(wide, 2560, 7168) == 16 and band(high, 2112, 7168) == 8  # less than a round
    assert band(wide, 8192, 2048) == 32 and band(high, 2112, 2048) == 16
    assert band(high._replace(kept=4), 8192, 512) == 1


@pytest.mark.parametrize("in_tensor_core", [True, False])
def test_hopper_tiles_of_experts_fit_an_sm_and_grow_with_their_rows(in_tensor_core):
    rows_before = 64
    for rows_of_expert in (1, 16, 64, 128, 256, 1024, 4096):
        tiles = scaled_mm_tiles.choose_tiles_of_experts(
            rows_of_expert, sums_in_tensor_core=in_tensor_core
        )
        assert tiles.rows >= rows_before and tiles.num_splits == 1
        assert tiles.columns == (256 if in_tensor_core and tiles.rows > 64 else 128)
        assert not tiles.is_few and not tiles.kept and tiles.stages >= 2
        assert tiles.steps == (1 if in_tensor_core or tiles.rows > 64 else 2)
        rows_before = tiles.rows
        of_step = (tiles.rows + tiles.columns) * 128 + 4 * (tiles.rows + 64)
        in_ring = tiles.stages * tiles.steps * of_step
        assert in_ring + 2 * 8192 + 16 * 128 + 4 * 1024 + 512 <= 232_448
    assert rows_before > 64


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "depth", "fast", "exact", "groups"),
    [  # the fastest of those measured on an H200: rows and columns of a tile, parts of K, the few's
        (1, 2112, 7168, (64, 64, 4, True), (64, 64, 4, True), (64, 64, 4, True)),
        (16, 4096, 7168, (64, 64, 1, True), (64, 64, 1, True), (64, 64, 1, True)),
        (64, 4096, 7168, (32, 64, 1, True), (32, 64, 1, True), (32, 64, 1, True)),
        (64, 7168, 16384, (64, 64, 1, True), (64, 64, 1, True), (64, 64, 1, True)),
        (64, 2112, 7168, (64, 64, 4, True), (64, 64, 4, True), (64, 64, 4, True)),
        (128, 2112, 7168, (64, 64, 2, True), (64, 32, 1, False), (64, 32, 1, False)),
        (128, 24576, 1536, (64, 128, 1, False), (64, 128, 1, False), (64, 128, 1, False)),
        (128, 7168, 16384, (64, 128, 1, False), (64, 128, 1, False), (64, 128, 1, False)),
        (128, 4096, 7168, (64, 64, 1, True), (64, 64, 1, False), (64, 64, 1, False)),
        (128, 7168, 2048, (128, 64, 1, True), (64, 64, 1, True), (64, 128, 1, False)),
        (256, 2112, 7168, (64, 64, 1, True), (64, 64, 1, False), (64, 64, 1, False)),
        (160, 24576, 1536, (64, 128, 1, False), (64, 128, 1, False), (64, 128, 1, False)),
        (320, 14336, 4096, None, (64, 128, 1, False), (64, 128, 1, False)),
        (384, 32768, 512, None, (128, 128, 1, False), (128, 128, 1, False)),
        (256, 24576, 1536, (128, 128, 1, False), (128, 128, 1, False), (128, 128, 1, False)),
        (256, 7168, 16384, (128, 128, 1, False), (128, 128, 1, False), (128, 128, 1, False)),
        (256, 4096, 7168, (64, 128, 1, False), (64, 128, 1, False), (64, 128, 1, False)),
        (2048, 7168, 2048, (128, 128, 1, False), None, None),
        (2048, 7168, 16384, (128, 128, 1, False), None, (128, 128, 1, False)),
        (512, 2112, 7168, None, (128, 64, 1, False), (128, 64, 1, False)),
        (512, 4096, 7168, None, (128, 128, 1, False), (128, 128, 1, False)),
        (512, 7168, 16384, None, (256, 128, 1, False), (256, 128, 1, False)),
    ],
)
def test_hopper_products_have_the_tiles_that_were_fastest(
    num_rows, num_columns, depth, fast, exact, groups
):
    for sums, fastest in zip(SUMS, (fast, exact, groups), strict=True):
        tiles = hopper_tiles(num_rows, num_columns, depth, sums)
        assert fastest is None or (*tiles[:3], tiles.is_few) == fastest


def test_hopper_products_fill_the_card():
    """One that would leave SMs idle is cut along K, has narrow tiles or shares columns out."""
    for num_rows in (1, 16, 64, 128):
        for num_columns, depth in ((2112, 7168), (24576, 1536), (7168, 16384)):
            chosen = hopper_tiles(num_rows, num_columns, depth, "fast")
            tiles_m = -(-num_rows // chosen.rows)
            assert tiles_m * num_columns / chosen.columns * chosen.num_splits > 0.45 * 132
    assert hopper_tiles(4096, 7168, 16384, "fast")[:3] == (128, 256, 1)
    for sums in SUMS:  # 64 columns are left
        tiles = hopper_tiles(4096, 2112, 7168, sums)
        is_fast = sums == "fast"
        assert tiles[:3] == ((128, 256, 1) if is_fast else (256, 128, 1))
        assert scaled_mm_tiles.has_narrow(2112, tiles, sums_in_tensor_core=is_fast)
        assert not scaled_mm_tiles.has_narrow(2176, tiles, sums_in_tensor_core=is_fast)


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "depth", "extra"),
    [
        (128, 36864, 7168, 16), (256, 36864, 7168, 64), (4096, 576, 7168, 16),
        (128, 24576, 1536, 0), (128, 32768, 512, 0), (4096, 4096, 7168, 0),  # short; no gain
    ],
)  # fmt: skip
def test_hopper_tiles_share_columns_out_where_another_round_is_saved(
    num_rows, num_columns, depth, extra, sums
):
    """The fastest of those measured on an H200."""
    tiles = hopper_tiles(num_rows, num_columns, depth, sums)
    assert tiles.extra == extra
    if extra:
        rounds = [-(-num_columns // width) * num_rows / 128 / 132 for width in (128, 128 + extra)]
        assert -(-rounds[1] // 1) < -(-rounds[0] // 1)


def test_an_inverse_of_24_bits_is_off_by_one_at_most_below_2_to_21():
    """By which units are found; a card's division may be off by two units in the last place."""
    from kvkern.kernels.hopper.scaled_mm_order import HUGE

    def error(largest):
        counts = torch.tensor([1, 2, 3, 7, 31, 132, 1000, 4095, 65_537, largest])
        numbers = torch.cat([torch.arange(largest - 5000, largest), counts * 5 - 1, counts * 5])
        numbers = numbers[numbers < largest]
        quotient = numbers[:, None] // counts
        inverse = (1 / counts.double()).float()
        ulp = torch.nextafter(inverse, inverse.new_tensor(float("inf"))) - inverse
        return max(
            ((numbers.float()[:, None] * (inverse + ulps * ulp)).int() - quotient).abs().max()
            for ulps in (-2, -1, 0, 1, 2)
        )

    assert error(HUGE) <= 1 < error(8 * HUGE)
