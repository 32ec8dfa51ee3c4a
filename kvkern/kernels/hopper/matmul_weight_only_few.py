"""matmul_w4a16 and matmul_w8a16 of few tokens: K is shared out among a program's warps.

Weights are the MMA's rows and tokens its columns. A step is four chunks, of which each has warps of
its own; a program asks by TMA for all steps that it has room for before it multiplies, and sums
what its warps found at the end. All warps do the same: to start one that only fetches takes 1 us.
Nor is K cut: a second launch, that sums, takes longer than it saves.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kvkern.kernels.device import Gpu
from kvkern.kernels.hopper.compat import load_tile, thread_barrier, tile_descriptor
from kvkern.kernels.hopper.packed_ints import (
    inverse_step,
    step_scales_layout,
    step_tokens_layout,
    step_words_layout,
    stored_token,
    tokens_of_step,
    weights_of_step,
)
from kvkern.kernels.hopper.paging import make_barriers, next_stage
from kvkern.kernels.packed_ints import chunk_columns

_STEP: gl.constexpr = gl.constexpr(4)  # chunks
_WARPS: gl.constexpr = gl.constexpr(2)  # of a chunk


@gluon.jit
def _fetch(words, xs, scales, full, words_desc, x_desc, scale_desc, n0, step, stage):
    """A step's words, tokens and scales."""
    bar = full.index(stage)
    num_bytes: gl.constexpr = words_desc.block_type.nbytes + x_desc.block_type.nbytes
    if scale_desc is None:
        mbarrier.expect(bar, num_bytes)
    else:
        mbarrier.expect(bar, num_bytes + scale_desc.block_type.nbytes)
        load_tile(scale_desc, [0, step * _STEP, n0], bar, scales.index(stage))
    load_tile(words_desc, [step * _STEP, n0, 0], bar, words.index(stage))
    load_tile(x_desc, [0, step * _STEP, 0, 0], bar, xs.index(stage))


@gluon.jit
def _multiply(
    acc, acc_2, words, xs, scales, full, stage, phase, A: gl.constexpr, B: gl.constexpr
):  # fmt: skip
    """A step's products, of the first and second half of its chunks, added to the sums of each."""
    PARTS: gl.constexpr = xs.shape[1]  # of a chunk: 64 columns of x; of 4 bits two are a group
    BITS: gl.constexpr = 16 // PARTS
    DTYPE: gl.constexpr = xs.dtype
    COLUMNS: gl.constexpr = words.shape[2]
    WORDS: gl.constexpr = step_words_layout(_STEP, COLUMNS, _WARPS)
    TOKENS: gl.constexpr = step_tokens_layout(PARTS, _STEP, xs.shape[3], _WARPS)
    ACC: gl.constexpr = acc.type.layout
    OF_ROW: gl.constexpr = gl.SliceLayout(2, ACC)
    mbarrier.wait(full.index(stage), phase)
    tile = words.index(stage).load(WORDS)
    tokens = tokens_of_step(xs.index(stage).load(TOKENS), B)
    zero = gl.zeros(acc.shape, gl.float32, ACC)
    part = acc if scales is None else zero
    part_2 = acc_2 if scales is None else zero
    HALF: gl.constexpr = PARTS // 2
    for number in gl.static_range(HALF):  # of each half in turns: a chain of products for each
        weights = weights_of_step(tile, number, BITS, DTYPE, A)
        weights_2 = weights_of_step(tile, number + HALF, BITS, DTYPE, A)
        part = mma_v2(weights, tokens[number], part)
        part_2 = mma_v2(weights_2, tokens[number + HALF], part_2)
    if scales is not None:
        both = scales.index(stage).load(step_scales_layout(_STEP, COLUMNS, _WARPS))
        factor, factor_2 = both.permute((1, 2, 0)).split()
        factor = gl.convert_layout(factor, OF_ROW, assert_trivial=True)
        factor_2 = gl.convert_layout(factor_2, OF_ROW, assert_trivial=True)
        part = acc + part * gl.expand_dims(factor, 2)
        part_2 = acc_2 + part_2 * gl.expand_dims(factor_2, 2)
    return part, part_2


@gluon.jit(do_not_specialize=["num_rows"])
def matmul_few_kernel(
    words_desc,  # int32 [chunks, N, 32] in boxes [_STEP, COLUMNS, 32]
    x_desc,  # [PARTS, chunks, M, 64] in boxes [PARTS, _STEP, ROWS, 64]; PARTS 4 of 4 bits, 2 of 8
    scale_desc,  # fp32 [2, chunks, N] in boxes [2, _STEP, COLUMNS]: of groups of 128; or None
    scale_ptr,  # fp32 [N], or None
    bias_ptr,  # [N], or None
    out_ptr,  # [M, N]
    num_rows,
    num_columns,
    num_chunks,
    STAGES: gl.constexpr,
    IS_WHOLE: gl.constexpr,  # whether each step has a stage of its own
):
    COLUMNS: gl.constexpr = words_desc.block_type.shape[1]
    DTYPE: gl.constexpr = x_desc.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [_STEP, _WARPS, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, _STEP, COLUMNS, 32], words_desc.layout)
    PARTS: gl.constexpr = x_desc.block_type.shape[0]
    ROWS: gl.constexpr = x_desc.block_type.shape[2]
    TOKENS: gl.constexpr = max(ROWS, 8)
    xs = gl.allocate_shared_memory(DTYPE, [STAGES, PARTS, _STEP, ROWS, 64], x_desc.layout)
    if scale_desc is not None:
        scales = gl.allocate_shared_memory(
            gl.float32, [STAGES, 2, _STEP, COLUMNS], scale_desc.layout
        )
    else:
        scales = None
    full = make_barriers(STAGES, 1)
    fence_async_shared()

    n0 = gl.program_id(0) * COLUMNS
    num_steps = gl.cdiv(num_chunks, _STEP)  # beyond the last chunk a box has zeros
    for step in range(gl.minimum(num_steps, STAGES)):
        _fetch(words, xs, scales, full, words_desc, x_desc, scale_desc, n0, step, step)
    # at the end a thread has its columns' sums of all chunks
    SPREAD: gl.constexpr = gl.BlockedLayout(
        [_STEP, COLUMNS // 32, 1], [1, 32, 1], [1, 1, gl.num_warps()], [0, 1, 2]
    )
    OUT: gl.constexpr = gl.SliceLayout(0, SPREAD)
    column = n0 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, OUT))
    mask_n = column < num_columns
    if scale_ptr is not None:
        scale = gl.load(scale_ptr + column, mask=mask_n, other=0.0)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + column, mask=mask_n, other=0.0).to(gl.float32)

    acc = gl.zeros([_STEP, COLUMNS, TOKENS], gl.float32, ACC)
    acc_2 = gl.zeros([_STEP, COLUMNS, TOKENS], gl.float32, ACC)
    stage = 0
    phase = 0
    num_refilled = 0
    if not IS_WHOLE:
        num_refilled = num_steps - STAGES
        for step in range(num_refilled):
            acc, acc_2 = _multiply(acc, acc_2, words, xs, scales, full, stage, phase, A, B)
            thread_barrier()  # all have read the stage
            _fetch(
                words, xs, scales, full, words_desc, x_desc, scale_desc, n0, step + STAGES, stage
            )
            stage, phase = next_stage(stage, phase, STAGES)
    for _ in range(num_steps - num_refilled):
        acc, acc_2 = _multiply(acc, acc_2, words, xs, scales, full, stage, phase, A, B)
        stage, phase = next_stage(stage, phase, STAGES)

    out = gl.sum(gl.convert_layout(acc + acc_2, SPREAD), 0)
    out *= inverse_step(16 // PARTS, DTYPE == gl.bfloat16)
    if scale_ptr is not None:
        out *= gl.expand_dims(scale, 1)
    if bias_ptr is not None:
        out += gl.expand_dims(bias, 1)
    row = stored_token(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, OUT)))
    mask = gl.expand_dims(mask_n, 1) & gl.expand_dims(row < num_rows, 0)
    into = gl.expand_dims(row.to(gl.int64) * num_columns, 0) + gl.expand_dims(column, 1)
    gl.store(out_ptr + into, out.to(out_ptr.dtype.element_ty), mask=mask)


MOST_ROWS = 16


class Tiles(NamedTuple):
    """How a product is cut up: ``rows`` of x, which are all, and ``columns`` of out."""

    rows: int
    columns: int
    stages: int


def choose_tiles(
    num_rows: int, num_columns: int, depth: int, bits: int, has_groups: bool, gpu: Gpu
) -> Tiles:
    """The narrowest with which one program an SM is enough, and all the stages there is room for.

    Where they take turns it is slower: 8192 x 8192 in 4 bits on an H200, 132 SMs, 20.0 us of 32
    columns, 17.2 of 64.
    """
    rows = 1 if num_rows == 1 else 8 if num_rows <= 8 else MOST_ROWS
    columns = 32 if triton.cdiv(num_columns, 32) <= gpu.num_sms else 64
    num_steps: int = triton.cdiv(depth, chunk_columns(bits) * _STEP.value)
    of_chunk = columns * 128 + 16 // bits * rows * 128 + (8 * columns if has_groups else 0)
    summed = 4 * _STEP.value * columns * max(rows, 8)
    room = (_SHARED_BYTES - _BESIDE_BYTES - summed) // (_STEP.value * of_chunk)
    return Tiles(rows, columns, min(room, num_steps))


_SHARED_BYTES = 232_448
_BESIDE_BYTES = 3072  # barriers, and what aligning takes


def few_call(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    out: Tensor,
    gpu: Gpu,
) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]:
    """Grid, arguments and options of the launch."""
    num_rows, depth = x.shape
    num_chunks, num_columns, _ = values.shape
    has_groups = group_size < depth
    bits = 8 if values.dtype == torch.int8 else 4
    rows, columns, stages = choose_tiles(num_rows, num_columns, depth, bits, has_groups, gpu)
    parts_of_x = x.view(num_rows, num_chunks, 16 // bits, 64).permute(2, 1, 0, 3)
    scale_desc = None
    if has_groups:
        of_chunks = scale.view(num_chunks, 2, num_columns).permute(1, 0, 2)
        scale_desc = tile_descriptor(of_chunks, (2, _STEP.value, columns))
    arguments = {
        "words_desc": tile_descriptor(values.view(torch.int32), (_STEP.value, columns, 32)),
        "x_desc": tile_descriptor(parts_of_x, (16 // bits, _STEP.value, rows, 64)),
        "scale_desc": scale_desc,
        "scale_ptr": None if has_groups else scale,
        "bias_ptr": bias,
        "out_ptr": out,
        "num_rows": num_rows,
        "num_columns": num_columns,
        "num_chunks": num_chunks,
        "STAGES": stages,
        "IS_WHOLE": stages * _STEP.value >= num_chunks,
    }
    options = {"num_warps": _STEP.value * _WARPS.value, "enable_fp_fusion": True}
    return (triton.cdiv(num_columns, columns),), arguments, options
