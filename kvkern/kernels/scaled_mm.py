"""scaled_mm: out = sum over groups of 128 of K of (a @ b) * scale_a * scale_b, + bias.

A program makes one tile of ``out``. Each 128-deep product is summed in fp32 apart from the tensor
core's accumulator, which in fp8 keeps some 13 bits on some cards. Where tiles are too few to fill
the card, K is split among programs, and a second launch adds their parts in order.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkern.kernels.config import FP8_PRODUCT, SMALL_SPILLS, KernelConfig, config_of_call
from kvkern.kernels.device import INTERPRETED, Gpu, gpu_of
from kvkern.kernels.launch import launch
from kvkern.kernels.numerics import INTERPRET, decode_e4m3, decode_e5m2, round_to
from kvkern.kernels.paging import power_of_two
from kvkern.kernels.sum_splits import (
    MOST_SPLITS,
    launch_sum,
    new_partials,
    sum_splits_call,
    sum_splits_kernel,
)
from kvkern.warm_up import size_class

_DEPTH = 128  # of K in a step of the loop, and in a scale's cell
_BLOCK_K: tl.constexpr = tl.constexpr(_DEPTH)
_SWIZZLE: tl.constexpr = tl.constexpr(8)  # rows of tiles side by side in time: they share b in L2
# sizes of a layer are specialised on; a step's, and strides that hold them, are not
_OF_A_STEP = (
    "num_rows", "num_all_rows", "num_row_tiles", "num_matrices", "num_splits", "splits_depth",
    "stride_a_matrix", "stride_a_row", "stride_a_depth",
    "stride_scale_a_matrix", "stride_scale_a_row", "stride_scale_a_group",
    "stride_scale_b_matrix", "stride_scale_b_group", "stride_scale_b_column",
    "stride_bias", "stride_out_split", "stride_out_matrix", "stride_out_row",
)  # fmt: skip


@triton.jit(do_not_specialize=_OF_A_STEP)
def _scaled_mm_kernel(
    a_ptr,  # [G, M, K]; grouped [1, T, K]; fp8, or its codes in uint8
    b_ptr,  # [G, K, N]
    scale_a_ptr,  # fp32 [G, cells of M, cells of K]
    scale_b_ptr,  # fp32 [G, cells of K, cells of N]
    row_offsets_ptr,  # int32 [G + 1], or None
    bias_ptr,  # [G, N], or None
    out_ptr,  # [G, M, N], or partial sums, fp32 [S, G, M, N]
    num_rows,
    num_columns,
    depth,
    num_row_tiles,  # of a matrix; grouped: at most, of all
    num_matrices,
    num_splits,
    splits_depth,  # of K in a split, in steps
    stride_a_matrix,
    stride_a_row,
    stride_a_depth,
    stride_b_matrix,
    stride_b_depth,
    stride_b_column,
    stride_scale_a_matrix,
    stride_scale_a_row,
    stride_scale_a_group,
    stride_scale_b_matrix,
    stride_scale_b_group,
    stride_scale_b_column,
    stride_bias,
    stride_out_split,
    stride_out_matrix,
    stride_out_row,
    CELL_M: tl.constexpr,  # rows of a scale of a; 0: all
    CELL_K: tl.constexpr,  # 128, or 0: all
    CELL_N: tl.constexpr,  # columns of a scale of b; 0: all
    A_IS_E5M2: tl.constexpr,
    B_IS_E5M2: tl.constexpr,
    A_IS_ALIGNED: tl.constexpr,  # rows are contiguous and begin at multiples of 16
    OUT_IS_ALIGNED: tl.constexpr,
    IS_EXACT: tl.constexpr,
    MAX_IMPRECISE: tl.constexpr,  # a step's depth keeps Triton from summing in the tensor core
    NATIVE_FP8: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # <= 128, so that a tile has one column of blocks
    BLOCK_E: tl.constexpr,  # >= G + 1, grouped only
):
    split, matrix, row_tile, column_tile = _place(num_row_tiles, num_columns, num_splits, BLOCK_N)
    first_row, end_row, matrix_a, is_real = row_tile * BLOCK_M, num_rows, matrix, True
    if row_offsets_ptr is not None:
        matrix, first_row, end_row = _expert_of(
            row_tile, row_offsets_ptr, num_rows, num_matrices, BLOCK_M, BLOCK_E
        )
        if matrix > num_matrices:  # fewer tiles than there may be
            return
        is_real = matrix < num_matrices  # or rows past the last expert's: 0
        matrix = tl.minimum(matrix, num_matrices - 1)
    row = first_row.to(tl.int64) + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = row < end_row, column < num_columns
    if A_IS_ALIGNED:  # as specialising on strides would tell, but that they are a step's
        stride_a_depth = 1
        stride_a_row = stride_a_row // 16 * 16
        stride_a_matrix = stride_a_matrix // 16 * 16
    if OUT_IS_ALIGNED:
        stride_out_row = stride_out_row // 16 * 16
        stride_out_matrix = stride_out_matrix // 16 * 16
        stride_out_split = stride_out_split // 16 * 16

    first_step = split * splits_depth
    end_step = tl.minimum(first_step + splits_depth, tl.cdiv(depth, _BLOCK_K))
    if not is_real:
        end_step = first_step
    offs_k = tl.arange(0, _BLOCK_K)
    k = first_step.to(tl.int64) * _BLOCK_K + offs_k
    a_ptrs = a_ptr + matrix_a.to(tl.int64) * stride_a_matrix
    a_ptrs += (row * stride_a_row)[:, None] + (k * stride_a_depth)[None, :]
    b_ptrs = b_ptr + matrix.to(tl.int64) * stride_b_matrix
    b_ptrs += (k * stride_b_depth)[:, None] + (column.to(tl.int64) * stride_b_column)[None, :]
    of_a = scale_a_ptr + matrix_a.to(tl.int64) * stride_scale_a_matrix
    if CELL_M > 0:
        of_a += row * stride_scale_a_row
    of_b = scale_b_ptr + matrix.to(tl.int64) * stride_scale_b_matrix
    if CELL_N == 1:
        of_b += column.to(tl.int64) * stride_scale_b_column
    elif CELL_N > 0:
        of_b += (column_tile * BLOCK_N // CELL_N).to(tl.int64) * stride_scale_b_column

    step_a = tl.full([], _BLOCK_K, tl.int64) * stride_a_depth
    step_b = tl.full([], _BLOCK_K, tl.int64) * stride_b_depth
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(first_step, end_step):
        mask_k = offs_k < depth - step * _BLOCK_K
        a_mask, b_mask = mask_m[:, None], mask_n[None, :]
        if not EVEN_K:
            a_mask, b_mask = a_mask & mask_k[None, :], b_mask & mask_k[:, None]
        a = _operand(tl.load(a_ptrs, mask=a_mask, other=0.0), A_IS_E5M2, NATIVE_FP8)
        b = _operand(tl.load(b_ptrs, mask=b_mask, other=0.0), B_IS_E5M2, NATIVE_FP8)
        if CELL_K > 0:
            of_group_a = of_a + step * stride_scale_a_group.to(tl.int64)
            of_group_b = of_b + step * stride_scale_b_group.to(tl.int64)
            acc += _scaled(tl.dot(a, b), of_group_a, of_group_b, mask_m, mask_n, CELL_M, CELL_N)
        elif IS_EXACT:
            acc += tl.dot(a, b, max_num_imprecise_acc=MAX_IMPRECISE)
        else:
            acc = tl.dot(a, b, acc)
        a_ptrs += step_a
        b_ptrs += step_b

    if is_real:  # the scales of padding may be NaN
        if CELL_K == 0:
            acc = _scaled(acc, of_a, of_b, mask_m, mask_n, CELL_M, CELL_N)
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + matrix.to(tl.int64) * stride_bias + column
            acc += tl.load(bias_ptrs, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + split.to(tl.int64) * stride_out_split
    out_ptrs += matrix_a.to(tl.int64) * stride_out_matrix
    out_ptrs += (row * stride_out_row)[:, None] + column[None, :]
    out = round_to(acc, out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def _place(num_row_tiles, num_columns, num_splits, BLOCK_N: tl.constexpr):
    """Split, matrix, and tile of a program: bands of row tiles, each column after column."""
    column_tiles = tl.cdiv(num_columns, BLOCK_N)
    num_tiles = num_row_tiles * column_tiles
    part, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    band, in_band = tile // (_SWIZZLE * column_tiles), tile % (_SWIZZLE * column_tiles)
    band_rows = tl.minimum(num_row_tiles - band * _SWIZZLE, _SWIZZLE)
    row_tile = band * _SWIZZLE + in_band % band_rows
    return part % num_splits, part // num_splits, row_tile, in_band // band_rows


@triton.jit
def _expert_of(
    row_tile, row_offsets_ptr, num_rows, num_experts, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Expert, first row and end of its rows, of the n-th tile of all.

    Expert E is the rows past the last one's; above is no tile.
    """
    expert = tl.arange(0, BLOCK_E)
    ends = tl.load(row_offsets_ptr + expert + 1, mask=expert < num_experts, other=num_rows)
    starts = tl.load(row_offsets_ptr + expert, mask=expert <= num_experts, other=num_rows)
    starts = tl.maximum(tl.minimum(starts, num_rows), 0)  # whatever they hold, stay in out
    ends = tl.maximum(tl.minimum(ends, num_rows), starts)
    num_tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    tiles_up_to = tl.cumsum(num_tiles, axis=0)
    found = tl.sum((tiles_up_to <= row_tile).to(tl.int32), axis=0)
    is_it = expert == found
    tiles_before = tl.sum(tl.where(is_it, tiles_up_to - num_tiles, 0), axis=0)
    first_row = tl.sum(tl.where(is_it, starts, 0), axis=0) + (row_tile - tiles_before) * BLOCK_M
    found = tl.where(found >= BLOCK_E, num_experts + 1, found)
    return found, first_row, tl.sum(tl.where(is_it, ends, 0), axis=0)


@triton.jit
def _operand(x, IS_E5M2: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """What is multiplied: fp8, or fp16, which holds all of it; fp32 in the interpreter."""
    DTYPE: tl.constexpr = tl.float32 if INTERPRET else tl.float16
    if NATIVE_FP8:
        return x
    elif IS_E5M2:
        return decode_e5m2(x).to(DTYPE)
    else:
        return decode_e4m3(x, DTYPE, False)


@triton.jit
def _scaled(x, of_a, of_b, mask_m, mask_n, CELL_M: tl.constexpr, CELL_N: tl.constexpr):
    """A tile times ``scale_a * scale_b``."""
    if CELL_M > 0:
        scale = tl.load(of_a, mask=mask_m, other=0.0)[:, None]
    else:
        scale = tl.load(of_a)
    if CELL_N == 1:
        return x * scale * tl.load(of_b, mask=mask_n, other=0.0)[None, :]
    else:
        return x * (scale * tl.load(of_b))


class Tiles(NamedTuple):
    """How a product is cut up."""

    rows: int
    columns: int
    num_splits: int  # of K
    num_warps: int
    num_stages: int


def choose_tiles(
    num_rows: int,
    num_columns: int,
    depth: int,
    num_matrices: int,
    gpu: Gpu,
    *,
    is_aligned: bool = True,
    has_column_groups: bool = False,
    can_split: bool = True,
) -> Tiles:
    """128 x 128, fewer rows where a matrix has fewer; K in parts where that leaves SMs idle.

    A part is 512 deep or more, and no more parts than keep their sums, written and read in fp32,
    below what reading b takes. Elements that are loaded one by one want registers: tiles are small.
    """
    most_rows = 128 if gpu.has_fp8 and not has_column_groups else 64
    rows = min(max(power_of_two(num_rows), 16), most_rows if is_aligned else 32)
    columns = 128 if is_aligned and num_columns > 64 else 64
    num_splits = 1
    if can_split:
        num_tiles = num_matrices * triton.cdiv(num_rows, rows) * triton.cdiv(num_columns, columns)
        most = min(depth // 512, depth // (8 * num_rows), MOST_SPLITS)
        num_slots = gpu.num_sms if rows == 128 else 2 * gpu.num_sms
        num_splits = max(1, min(num_slots // num_tiles, most))
    stage_bytes = (rows + columns) * _DEPTH
    if not gpu.has_fp8:
        num_stages = 3
    else:
        num_stages = min((160 if gpu.has_large_shared else 96) * 1024 // stage_bytes, 5)
    return Tiles(rows, columns, num_splits, 8 if rows >= 64 else 4, num_stages)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    cell_a: tuple[int, int],
    cell_b: tuple[int, int],
    row_offsets: Tensor | None,
    bias: Tensor | None,
    is_exact: bool,
    out: Tensor,
) -> Callable[[Sequence[int | None]], None] | None:
    """Launch once, or twice where K is split. ``kvkern.scaled_mm`` has checked the arguments.

    Returns how to repeat it with tensors that differ in nothing but addresses.
    """
    gpu = gpu_of(out.device)
    tiles = _tiles_for(a, b, cell_b, row_offsets, gpu)
    of_product = (a, b, scale_a, scale_b, cell_a, cell_b, row_offsets)
    if tiles.num_splits == 1:
        grid, arguments, options = _product_call(*of_product, bias, is_exact, out, tiles, gpu)
        return launch(_scaled_mm_kernel, grid, arguments, options, out.device, num_varying=7)
    partials = new_partials(tiles.num_splits, out, torch.float32)
    grid, arguments, options = _product_call(*of_product, None, is_exact, partials, tiles, gpu)
    multiply = launch(_scaled_mm_kernel, grid, arguments, options, out.device, num_varying=7)
    add = launch_sum(partials, bias, out)
    if multiply is None or add is None:
        return None

    def again(addresses: Sequence[int | None]) -> None:
        add(lambda into: multiply((*addresses[:5], None, into)), *addresses[5:])

    return again


def _tiles_for(
    a: Tensor, b: Tensor, cell_b: tuple[int, int], row_offsets: Tensor | None, gpu: Gpu
) -> Tiles:
    num_matrices, depth, num_columns = b.shape
    num_rows = a.shape[1]
    if row_offsets is not None:  # as an expert has, if they are shared out evenly
        num_rows = triton.cdiv(num_rows, max(num_matrices, 1))
    addresses_and_strides = {a.data_ptr(), b.data_ptr(), *a.stride(), *b.stride()} - {1}
    return choose_tiles(
        size_class(num_rows),
        num_columns,
        depth,
        num_matrices,
        gpu,
        is_aligned=all(number % 16 == 0 for number in addresses_and_strides),
        has_column_groups=cell_b == (_DEPTH, 1),
        can_split=row_offsets is None,
    )


def _product_call(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    cell_a: tuple[int, int],
    cell_b: tuple[int, int],
    row_offsets: Tensor | None,
    bias: Tensor | None,
    is_exact: bool,
    out: Tensor,  # or partial sums [S, G, M, N]
    tiles: Tiles,
    gpu: Gpu,
) -> tuple[tuple[int], dict[str, Any], dict[str, Any]]:
    num_rows = a.shape[1]
    num_matrices, depth, num_columns = b.shape
    if row_offsets is None:
        num_row_tiles = triton.cdiv(num_rows, tiles.rows)
    else:  # each expert, and the padding, may have a tile that is not full
        num_row_tiles = num_rows // tiles.rows + min(num_matrices + 1, num_rows)
    num_steps = triton.cdiv(depth, _DEPTH)
    stride_out_split = out.stride(0) if out.ndim == 4 else 0
    out_strides = (stride_out_split, *out.stride()[-3:-1])
    arguments = {
        "a_ptr": _loadable(a, gpu),
        "b_ptr": _loadable(b, gpu),
        "scale_a_ptr": scale_a,
        "scale_b_ptr": scale_b,
        "row_offsets_ptr": row_offsets,
        "bias_ptr": bias,
        "out_ptr": out,
        "num_rows": num_rows,
        "num_columns": num_columns,
        "depth": depth,
        "num_row_tiles": num_row_tiles,
        "num_matrices": num_matrices,
        "num_splits": tiles.num_splits,
        "splits_depth": triton.cdiv(num_steps, tiles.num_splits),
        **_strides("a", a, "matrix", "row", "depth"),
        **_strides("b", b, "matrix", "depth", "column"),
        **_strides("scale_a", scale_a, "matrix", "row", "group"),
        **_strides("scale_b", scale_b, "matrix", "group", "column"),
        "stride_bias": 0 if bias is None else bias.stride(0),
        "stride_out_split": out_strides[0],
        "stride_out_matrix": out_strides[1],
        "stride_out_row": out_strides[2],
        "CELL_M": cell_a[0],
        "CELL_K": cell_a[1],
        "CELL_N": cell_b[1],
        "A_IS_E5M2": a.dtype == torch.float8_e5m2,
        "B_IS_E5M2": b.dtype == torch.float8_e5m2,
        "A_IS_ALIGNED": a.stride(2) == 1 and not (a.stride(0) | a.stride(1)) % 16,
        "OUT_IS_ALIGNED": not (out_strides[0] | out_strides[1] | out_strides[2]) % 16,
        # products of fp16 are exact as they are; the interpreter runs what cards with fp8 do
        "IS_EXACT": is_exact and (gpu.has_fp8 or gpu == INTERPRETED),
        "MAX_IMPRECISE": None if gpu.capability == 90 else _DEPTH,  # there None is none
        "NATIVE_FP8": gpu.has_fp8,
        "EVEN_K": depth % _DEPTH == 0,
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.columns,
        "BLOCK_E": 1 if row_offsets is None else power_of_two(num_matrices + 1),
    }
    num_tiles = num_row_tiles * triton.cdiv(num_columns, tiles.columns) * tiles.num_splits
    grid = (num_tiles * (num_matrices if row_offsets is None else 1),)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return grid, arguments, {**options, "enable_fp_fusion": True}


def _loadable(x: Tensor, gpu: Gpu) -> Tensor:
    return x if gpu.has_fp8 else x.view(torch.uint8)


def _strides(name: str, x: Tensor, *dims: str) -> dict[str, int]:
    return {f"stride_{name}_{dim}": stride for dim, stride in zip(dims, x.stride(), strict=True)}


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Each pair of scales, both accumulations, tile sizes, dtypes, forms; split and not."""
    gpu = Gpu(capability, num_sms=132)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for label, cells, rows, options in (
        ("tensor", ((0, 0), (0, 0)), 4096, {}),
        ("tensor-fast", ((0, 0), (0, 0)), 4096, {"is_exact": False}),
        ("row", ((1, 0), (0, 1)), 4096, {"has_bias": True}),
        ("row-64", ((1, 0), (0, 1)), 64, {"dtypes": (e4m3, e4m3, fp16)}),
        ("row-1", ((1, 0), (0, 1)), 1, {"dtypes": (e4m3, e4m3, bf16), "has_bias": True}),
        ("block", ((1, 128), (128, 128)), 4096, {}),
        ("block-32", ((1, 128), (128, 128)), 32, {}),
        ("group", ((1, 128), (128, 1)), 4096, {"dtypes": (e5m2, e4m3, fp32)}),
        ("block-grouped", ((1, 128), (128, 128)), 4096, {"num_experts": 256}),
        ("row-untransposed", ((1, 0), (0, 1)), 4096, {"is_transposed": False}),
        ("row-odd", ((1, 0), (0, 1)), 4096, {"depth": 7150, "dtypes": (e4m3, e5m2, bf16)}),
    ):
        yield from _shipped(label, *cells, rows, gpu, **options)


def _shipped(
    label: str,
    cell_a: tuple[int, int],
    cell_b: tuple[int, int],
    num_rows: int,
    gpu: Gpu,
    *,
    dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16),
    depth: int = 7168,
    num_experts: int | None = None,
    is_exact: bool = True,
    has_bias: bool = False,
    is_transposed: bool = True,
) -> Iterator[KernelConfig]:
    """The launches of one call, on tensors without memory."""
    num_matrices, num_columns = num_experts or 1, 2112

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    a, out = empty(1, num_rows, depth, dtype=dtypes[0]), empty(1, num_rows, 2112, dtype=dtypes[2])
    b = empty(num_matrices, num_columns, depth, dtype=dtypes[1]).mT
    if not is_transposed:
        b = empty(num_matrices, depth, num_columns, dtype=dtypes[1])
    scale_a, scale_b = empty(1, num_rows, 56), empty(num_matrices, 56, 2112)
    row_offsets = None if num_experts is None else empty(num_experts + 1, dtype=torch.int32)
    bias = empty(num_matrices, num_columns, dtype=dtypes[2]) if has_bias else None
    tiles = _tiles_for(a, b, cell_b, row_offsets, gpu)
    into = out if tiles.num_splits == 1 else empty(tiles.num_splits, *out.shape)
    of_product = None if into is not out else bias
    _, arguments, options = _product_call(
        a, b, scale_a, scale_b, cell_a, cell_b, row_offsets, of_product, is_exact, into, tiles, gpu
    )
    # wgmma and tcgen05 take 64 rows; for fewer Triton multiplies the same numbers in fp16
    is_native = gpu.has_fp8 and (tiles.rows >= 64 or gpu.capability in (89, 120))
    product = FP8_PRODUCT if is_native else r"mma\S*\.f16"
    yield config_of_call(
        _scaled_mm_kernel, label, arguments, options, **SMALL_SPILLS, product=product
    )
    if into is not out:
        _, arguments, options = sum_splits_call(into, bias, out, gpu)
        yield config_of_call(sum_splits_kernel, f"sum-{label}", arguments, options)
