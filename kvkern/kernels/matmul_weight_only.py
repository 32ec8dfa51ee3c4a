"""matmul_w8a16, matmul_w4a16: out = x @ ((stored - zero) * scale).T, weights exact in 16 bits.

Weights are the MMA's rows and tokens its columns, of which it takes as few as 8. A product of few
tokens is cut along K, so that every SM streams weights; the parts are summed in a second launch.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from kvkern.kernels.config import SMALL_SPILLS, KernelConfig, config_of_call
from kvkern.kernels.device import Gpu, gpu_of
from kvkern.kernels.numerics import compute_dtype, round_to
from kvkern.kernels.packed_ints import CHUNK_WORDS, chunk_columns, float_plane, planes_per_group
from kvkern.kernels.sum_splits import (
    MOST_SPLITS,
    new_partials,
    sum_splits_call,
    sum_splits_kernel,
)
from kvkern.warm_up import size_class


@triton.jit(do_not_specialize=["num_rows", "chunks_per_split"])
def _matmul_kernel(
    x_ptr,  # [M, K]
    words_ptr,  # int32 [chunks, N, CHUNK_WORDS]
    scale_ptr,  # fp32 [groups, N]
    zero_ptr,  # fp32 [groups, N], or None
    bias_ptr,  # [N], or None
    out_ptr,  # [S, M, N]: fp32 parts of the sum if S > 1
    num_rows,
    num_columns,
    depth,  # K
    stride_x,
    chunks_per_split,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # columns of x that share a scale; 0: all
    HAS_TAIL: tl.constexpr,  # whether the last chunk has columns that x has not
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    LETS_NEXT_START: tl.constexpr,
):
    """A tile of one split."""
    CHUNK: tl.constexpr = chunk_columns(BITS)
    PLANES: tl.constexpr = 32 // BITS
    PLANES_PER_GROUP: tl.constexpr = planes_per_group(GROUP)
    dtype: tl.constexpr = compute_dtype(x_ptr)
    if LETS_NEXT_START:
        gdc_launch_dependents()
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_w = tl.arange(0, CHUNK_WORDS)
    split = tl.program_id(2)
    mask_n, mask_m = offs_n < num_columns, offs_m < num_rows
    x_ptrs = x_ptr + offs_m.to(tl.int64)[None, :] * stride_x + offs_w[:, None]

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first = split * chunks_per_split
    last = tl.minimum(first + chunks_per_split, tl.cdiv(depth, CHUNK))
    chunk_ptr = words_ptr + first.to(tl.int64) * num_columns * CHUNK_WORDS
    word_offs = offs_n[:, None] * CHUNK_WORDS + offs_w[None, :]
    if GROUP == 0:
        scale = tl.load(scale_ptr + offs_n, mask=mask_n, other=0.0)
        zero = None
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + offs_n, mask=mask_n, other=0.0)[:, None]
    for chunk in tl.range(first, last, num_stages=NUM_STAGES):
        words = tl.load(chunk_ptr + word_offs, mask=mask_n[:, None], other=0)
        chunk_ptr += num_columns * CHUNK_WORDS
        for plane in tl.static_range(PLANES):
            if GROUP > 0 and plane % PLANES_PER_GROUP == 0:
                group = (chunk * CHUNK + plane * CHUNK_WORDS) // GROUP
                mask_group = mask_n
                if HAS_TAIL:
                    mask_group &= chunk * CHUNK + plane * CHUNK_WORDS < depth
                group_offs = group * num_columns + offs_n
                scale = tl.load(scale_ptr + group_offs, mask=mask_group, other=0.0)
                zero = None
                if zero_ptr is not None:
                    zero = tl.load(zero_ptr + group_offs, mask=mask_group, other=0.0)[:, None]
            weight = float_plane(words, zero, plane, BITS, dtype)
            column = chunk * CHUNK + plane * CHUNK_WORDS
            mask_x = mask_m[None, :]
            if HAS_TAIL:
                mask_x &= (column + offs_w < depth)[:, None]
            x = tl.load(x_ptrs + column, mask=mask_x, other=0.0).to(dtype)
            if GROUP == 0:
                acc = tl.dot(weight, x, acc)
            else:
                if plane % PLANES_PER_GROUP == 0:
                    part = tl.dot(weight, x)
                else:
                    part = tl.dot(weight, x, part)
                if plane % PLANES_PER_GROUP == PLANES_PER_GROUP - 1:
                    acc += part * scale[:, None]
    if GROUP == 0:
        acc *= scale[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    row = (split * num_rows + offs_m).to(tl.int64)
    out = round_to(acc, out_ptr.dtype.element_ty)
    mask = mask_n[:, None] & mask_m[None, :]
    tl.store(out_ptr + row[None, :] * num_columns + offs_n[:, None], out, mask=mask)


class Tiles(NamedTuple):
    """What a program computes, and in how many parts along K."""

    rows: int  # of x
    columns: int  # of out
    num_splits: int
    num_warps: int
    num_stages: int


def choose_tiles(num_rows: int, num_columns: int, depth: int, bits: int, gpu: Gpu) -> Tiles:
    """Enough programs to fill the card, in no more splits than that takes.

    A program takes some two chunks' time to begin and to end; one more split a quarter of one.
    """
    most_rows = 128
    if bits == 4:  # sums of a group beside those of all: else registers do not suffice
        most_rows = 64 if gpu.capability == 90 else 32
    rows = next(size for size in _SHAPES if size >= min(num_rows, most_rows))
    columns, num_warps, num_stages, resident = _SHAPES[rows]
    if not gpu.has_large_shared:  # for more there is no memory
        num_stages, resident = 2, 1
    num_chunks = max(triton.cdiv(depth, chunk_columns(bits)), 1)
    num_tiles = triton.cdiv(num_columns, columns) * triton.cdiv(num_rows, rows)

    def time_of(num_splits: int) -> float:
        waves: int = triton.cdiv(num_tiles * num_splits, gpu.num_sms * resident)
        length: int = triton.cdiv(num_chunks, num_splits)
        cost_of_sum = 0.25 * num_splits + 1 if num_splits > 1 else 0.0
        return waves * (length + 2) + cost_of_sum

    num_splits = min(range(1, min(num_chunks, MOST_SPLITS) + 1), key=time_of)
    chunks_per_split = triton.cdiv(num_chunks, num_splits)
    return Tiles(rows, columns, triton.cdiv(num_chunks, chunks_per_split), num_warps, num_stages)


_SHAPES = {  # rows of x: columns of out, warps, stages, programs that an SM holds
    8: (128, 4, 3, 2),
    16: (128, 4, 3, 2),
    32: (128, 8, 3, 2),
    64: (128, 8, 3, 1),
    128: (128, 8, 3, 1),
}


def matmul_weight_only(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    out: Tensor,
) -> None:
    """One launch, or two where K is cut. ``kvkern.ops`` has checked the arguments; M, N > 0."""
    gpu = gpu_of(x.device)
    bits = _bits_of(values)
    tiles = choose_tiles(size_class(out.shape[0]), out.shape[1], x.shape[1], bits, gpu)
    parts = out if tiles.num_splits == 1 else new_partials(tiles.num_splits, out, torch.float32)
    grid, arguments, options = _matmul_call(
        x, values, scale, zero, bias, group_size, parts, tiles, gpu
    )
    _matmul_kernel[grid](**arguments, **options)
    if tiles.num_splits > 1:
        sum_grid, arguments, options = sum_splits_call(parts, bias, out, gpu)
        sum_splits_kernel[sum_grid](**arguments, **options)


def _matmul_call(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    parts: Tensor,
    tiles: Tiles,
    gpu: Gpu,
) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]:
    is_cut = tiles.num_splits > 1
    arguments = {
        **_shared_arguments(x, values, scale, zero, group_size, parts, tiles),
        "bias_ptr": None if is_cut else bias,
        "chunks_per_split": triton.cdiv(values.shape[0], tiles.num_splits),
        "LETS_NEXT_START": is_cut and gpu.has_early_start,
    }
    options = {"num_warps": tiles.num_warps, "enable_fp_fusion": True}
    return (*_tiles_of(parts, tiles), tiles.num_splits), arguments, options


def _shared_arguments(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    group_size: int,
    out: Tensor,
    tiles: Tiles,
) -> dict[str, Any]:
    num_rows, depth = x.shape
    bits = _bits_of(values)
    return {
        "x_ptr": x,
        "words_ptr": values.view(torch.int32),
        "scale_ptr": scale,
        "zero_ptr": zero,
        "out_ptr": out,
        "num_rows": num_rows,
        "num_columns": out.shape[-1],
        "depth": depth,
        "stride_x": x.stride(0),
        "BITS": bits,
        "GROUP": 0 if group_size >= depth else group_size,
        "HAS_TAIL": depth % chunk_columns(bits) != 0,
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.columns,
        "NUM_STAGES": tiles.num_stages,
    }


def _tiles_of(out: Tensor, tiles: Tiles) -> tuple[int, int]:
    num_rows, num_columns = out.shape[-2:]
    return triton.cdiv(num_columns, tiles.columns), triton.cdiv(num_rows, tiles.rows)


def _bits_of(values: Tensor) -> int:
    return 8 if values.dtype == torch.int8 else 4


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Each number of bits and size of group, with zeros and without; few tokens and many."""
    gpu = Gpu(capability, num_sms=132)
    bf16, fp16 = torch.bfloat16, torch.float16
    for bits, group_size, dtype, has_zero, num_rows, is_cut in (
        (8, 11008, bf16, False, 8, True),
        (8, 11008, bf16, False, 16, True),
        (8, 11008, bf16, True, 16, False),
        (8, 11008, fp16, False, 64, False),
        (8, 11008, bf16, False, 128, True),
        (8, 11008, bf16, True, 128, False),
        (4, 128, bf16, False, 8, True),
        (4, 128, bf16, False, 16, True),
        (4, 128, fp16, False, 32, True),
        (4, 128, bf16, False, 128, True),
        (4, 128, bf16, True, 128, False),
        (4, 32, bf16, True, 128, True),
        (4, 11008, bf16, False, 16, True),
    ):
        x = torch.empty(num_rows, 11008, dtype=dtype, device="meta")
        out = torch.empty(num_rows, 4096, dtype=dtype, device="meta")
        num_chunks = 11008 // chunk_columns(bits)
        stored = torch.int8 if bits == 8 else torch.uint8
        values = torch.empty(num_chunks, 4096, 128, dtype=stored, device="meta")
        scale = torch.empty(11008 // group_size, 4096, device="meta")
        zero = torch.empty_like(scale) if has_zero else None
        tiles = choose_tiles(num_rows, 4096, 11008, bits, gpu)
        tiles = tiles._replace(num_splits=4 if is_cut else 1)
        label = f"w{bits}-g{group_size}-M{num_rows}-{dtype}".replace("torch.", "")
        label += "-zero" * has_zero + "-cut" * is_cut
        parts = new_partials(4, out, torch.float32) if is_cut else out
        _, arguments, options = _matmul_call(
            x, values, scale, zero, out[0], group_size, parts, tiles, gpu
        )
        yield config_of_call(_matmul_kernel, label, arguments, options, **SMALL_SPILLS)
        if is_cut:  # few, and so many that a program takes more
            _, arguments, options = sum_splits_call(parts, out[0], out, gpu)
            yield config_of_call(sum_splits_kernel, f"sum-{label}", arguments, options)
