"""matmul_w8a16, matmul_w4a16 of few tokens: K is shared out among a program's warps.

Weights are the MMA's rows and tokens its columns. A step is four chunks, of which each has warps of
its own; a program asks by TMA for all steps that it has room for before it multiplies, and sums
what its warps found at the end. All warps do the same: to start one that only fetches takes 1 us.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from kvkern.kernels.config import KernelConfig, config_of_call
from kvkern.kernels.hopper.compat import box_descriptor, load_tile, thread_barrier, view_tile
from kvkern.kernels.hopper.packed_ints import (
    PART,
    inverse_step,
    next_stage,
    step_scales_layout,
    step_words_layout,
    weights_of_step,
)
from kvkern.kernels.hopper.paging import make_barriers
from kvkern.kernels.packed_ints import chunk_columns
from kvkern.kernels.sum_splits import new_partials

STEP: gl.constexpr = gl.constexpr(4)  # chunks


@gluon.jit
def _fetch(
    words, xs, scales, full, words_desc, x_desc, scale_desc, n0, m0, step, stage,
    HAS_GROUPS: gl.constexpr,
):  # fmt: skip
    """A step's words, tokens and scales."""
    bar = full.index(stage)
    num_bytes: gl.constexpr = words_desc.block_type.nbytes + x_desc.block_type.nbytes
    if HAS_GROUPS:
        mbarrier.expect(bar, num_bytes + scale_desc.block_type.nbytes)
    else:
        mbarrier.expect(bar, num_bytes)
    load_tile(words_desc, [step * STEP, n0, 0], bar, words.index(stage))
    load_tile(x_desc, [0, step * STEP, m0, 0], bar, xs.index(stage))
    if HAS_GROUPS:
        load_tile(scale_desc, [0, step * STEP, n0], bar, scales.index(stage))


@gluon.jit(do_not_specialize=["num_rows", "steps_per_split"])
def _few_kernel(
    words_desc,  # int32 [chunks, N, 32] in boxes [STEP, COLUMNS, 32]
    x_desc,  # [parts of a chunk, chunks, M, 64] in boxes [parts, STEP, ROWS, 64]
    scale_desc,  # fp32 [2, chunks, N] in boxes [2, STEP, COLUMNS]: of groups of 128; or None
    scale_ptr,  # fp32 [N], or None
    bias_ptr,  # [N], or None
    out_ptr,  # [S, M, N]: fp32 parts of the sum if S > 1
    num_rows,
    num_columns,
    num_chunks,
    steps_per_split,
    BITS: gl.constexpr,
    STAGES: gl.constexpr,
    LETS_NEXT_START: gl.constexpr,
):
    HAS_GROUPS: gl.constexpr = scale_ptr is None
    COLUMNS: gl.constexpr = words_desc.block_type.shape[1]
    PARTS: gl.constexpr = x_desc.block_type.shape[0]
    ROWS: gl.constexpr = x_desc.block_type.shape[2]
    DTYPE: gl.constexpr = x_desc.dtype
    WARPS: gl.constexpr = gl.num_warps() // STEP  # of a chunk
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [STEP, WARPS, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    WORDS: gl.constexpr = step_words_layout(STEP, COLUMNS, WARPS)
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    BACK: gl.constexpr = inverse_step(BITS, DTYPE == gl.bfloat16)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, STEP, COLUMNS, 32], words_desc.layout)
    xs = gl.allocate_shared_memory(DTYPE, [STAGES, PARTS, STEP, ROWS, PART], x_desc.layout)
    if HAS_GROUPS:
        scales = gl.allocate_shared_memory(
            gl.float32, [STAGES, 2, STEP, COLUMNS], scale_desc.layout
        )
    else:
        scales = None
    full = make_barriers(STAGES, 1)
    fence_async_shared()
    if LETS_NEXT_START:
        gdc_launch_dependents()

    n0 = gl.program_id(0) * COLUMNS
    m0 = gl.program_id(2) * ROWS
    first = gl.program_id(1) * steps_per_split
    num_steps = gl.minimum(steps_per_split, gl.cdiv(num_chunks, STEP) - first)
    for step in range(gl.minimum(num_steps, STAGES)):
        _fetch(
            words, xs, scales, full, words_desc, x_desc, scale_desc, n0, m0, first + step, step,
            HAS_GROUPS,
        )  # fmt: skip
    VEC: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    LANES_N: gl.constexpr = min(COLUMNS // VEC, 32)
    OUT: gl.constexpr = gl.BlockedLayout(
        [VEC, 1], [LANES_N, 32 // LANES_N], [1, gl.num_warps()], [0, 1]
    )
    column = n0 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, OUT))
    mask_n = column < num_columns
    if not HAS_GROUPS:
        scale = gl.load(scale_ptr + column, mask=mask_n, other=0.0)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + column, mask=mask_n, other=0.0).to(gl.float32)

    acc = gl.zeros([STEP, COLUMNS, ROWS], gl.float32, ACC)
    stage = 0
    phase = 0
    for step in range(num_steps):
        mbarrier.wait(full.index(stage), phase)
        tile = words.index(stage).load(WORDS)
        x = view_tile(xs.index(stage), DTYPE, [PARTS, STEP, ROWS, PART], X)
        if HAS_GROUPS:
            factor_1, factor_2 = _factors(scales.index(stage), ACC, WARPS)
        for part in gl.static_range(PARTS):
            weights = weights_of_step(tile, part, BITS, DTYPE, A)
            tokens = x.index(part).permute((0, 2, 1)).load(B)
            if HAS_GROUPS:
                if part % (PARTS // 2) == 0:
                    part_sum = gl.zeros([STEP, COLUMNS, ROWS], gl.float32, ACC)
                part_sum = mma_v2(weights, tokens, part_sum)
                if (part + 1) % (PARTS // 2) == 0:
                    factor = factor_1 if part < PARTS // 2 else factor_2
                    acc += part_sum * gl.expand_dims(factor, 2)
            else:
                acc = mma_v2(weights, tokens, acc)
        if step + STAGES < num_steps:
            thread_barrier()  # all have read the stage
            _fetch(
                words, xs, scales, full, words_desc, x_desc, scale_desc, n0, m0,
                first + step + STAGES, stage, HAS_GROUPS,
            )  # fmt: skip
        stage, phase = next_stage(stage, phase, STAGES)

    total = gl.sum(acc, 0) * BACK
    ordered = total.reshape([COLUMNS // 8, 2, 4, ROWS]).permute([0, 2, 1, 3])  # see ``stored_row``
    out = gl.convert_layout(ordered.reshape([COLUMNS, ROWS]), OUT)
    if not HAS_GROUPS:
        out *= gl.expand_dims(scale, 1)
    if bias_ptr is not None:
        out += gl.expand_dims(bias, 1)
    token = m0 + gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    into = (gl.program_id(1) * num_rows + token).to(gl.int64) * num_columns
    mask = gl.expand_dims(mask_n, 1) & gl.expand_dims(token < num_rows, 0)
    ptrs = out_ptr + gl.expand_dims(into, 0) + gl.expand_dims(column, 1)
    gl.store(ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _factors(scales, ACC: gl.constexpr, WARPS: gl.constexpr):
    """Scales of both groups of each chunk, ``[STEP, COLUMNS]``, in the order of the MMA's rows."""
    COLUMNS: gl.constexpr = scales.shape[2]
    both = scales.load(step_scales_layout(STEP, COLUMNS, WARPS)).permute((1, 2, 0))
    ordered = both.reshape([STEP, COLUMNS // 8, 4, 2, 2]).permute([0, 1, 3, 2, 4])
    first, second = ordered.reshape([STEP, COLUMNS, 2]).split()
    OF_ROW: gl.constexpr = gl.SliceLayout(2, ACC)
    first = gl.convert_layout(first, OF_ROW, assert_trivial=True)
    return first, gl.convert_layout(second, OF_ROW, assert_trivial=True)


class Tiles(NamedTuple):
    """How a product is cut up: ``rows`` of x and ``columns`` of out, K in ``num_splits``."""

    rows: int
    columns: int
    num_splits: int
    stages: int
    warps: int


def tiles_for(
    num_rows: int,
    num_columns: int,
    depth: int,
    bits: int,
    has_groups: bool,
    columns: int,
    num_splits: int,
    per_sm: int,
    warps: int = 8,
) -> Tiles:
    """Tiles of this many columns, with as many stages as ``per_sm`` programs leave room for."""
    rows = 8 if num_rows <= 8 else 16
    num_steps: int = triton.cdiv(triton.cdiv(depth, chunk_columns(bits)), 4)
    num_splits = triton.cdiv(num_steps, triton.cdiv(num_steps, num_splits))
    parts = chunk_columns(bits) // 64
    stage_bytes = 4 * (columns * 128 + parts * rows * 128 + (8 * columns if has_groups else 0))
    room = _SHARED_BYTES // per_sm - 3072 - 4 * columns * rows * 4
    stages = min(room // stage_bytes, triton.cdiv(num_steps, num_splits))
    return Tiles(rows, columns, num_splits, stages, warps)


_SHARED_BYTES = 232_448


def few_call(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    out: Tensor,  # or parts of the sum [S, M, N]
    tiles: Tiles,
) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]:
    """Grid, arguments and options of the launch."""
    num_rows, depth = x.shape
    num_chunks, num_columns, _ = values.shape
    bits = 8 if values.dtype == torch.int8 else 4
    chunk = chunk_columns(bits)
    is_cut = tiles.num_splits > 1
    has_groups = group_size < depth
    parts_of_x = x.view(num_rows, num_chunks, chunk // 64, 64).permute(2, 1, 0, 3)
    boxes: dict[str, Any] = {"scale_desc": None}
    if has_groups:
        groups = chunk // group_size
        of_chunks = scale.view(num_chunks, groups, num_columns).permute(1, 0, 2)
        boxes["scale_desc"] = box_descriptor(of_chunks, (groups, 4, tiles.columns))
    arguments = {
        "words_desc": box_descriptor(values.view(torch.int32), (4, tiles.columns, 32)),
        "x_desc": box_descriptor(parts_of_x, (chunk // 64, 4, tiles.rows, 64)),
        **boxes,
        "scale_ptr": None if has_groups else scale,
        "bias_ptr": None if is_cut else bias,
        "out_ptr": out,
        "num_rows": num_rows,
        "num_columns": num_columns,
        "num_chunks": num_chunks,
        "steps_per_split": triton.cdiv(triton.cdiv(num_chunks, 4), tiles.num_splits),
        "BITS": bits,
        "STAGES": tiles.stages,
        "LETS_NEXT_START": is_cut,
    }
    grid = (
        triton.cdiv(num_columns, tiles.columns),
        tiles.num_splits,
        triton.cdiv(num_rows, tiles.rows),
    )
    options = {"num_warps": tiles.warps, "enable_fp_fusion": True, "maxnreg": 128}
    return grid, arguments, options


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Both numbers of bits, with groups and without, few and more rows, split and not."""
    if capability != 90:
        return
    bf16, fp16 = torch.bfloat16, torch.float16
    for bits, group_size, dtype, num_rows, columns, num_splits in (
        (4, 128, bf16, 8, 32, 1),
        (4, 128, fp16, 16, 64, 2),
        (8, 11008, bf16, 16, 32, 1),
    ):
        chunk = chunk_columns(bits)
        x = torch.empty(num_rows, 11008, dtype=dtype, device="meta")
        stored = torch.int8 if bits == 8 else torch.uint8
        values = torch.empty(11008 // chunk, 4096, 128, dtype=stored, device="meta")
        scale = torch.empty(11008 // group_size, 4096, device="meta")
        tiles = tiles_for(
            num_rows, 4096, 11008, bits, group_size < 11008, columns, num_splits, 1, columns // 4
        )
        out = torch.empty(num_rows, 4096, dtype=dtype, device="meta")
        parts = out if num_splits == 1 else new_partials(tiles.num_splits, out, torch.float32)
        _, arguments, options = few_call(x, values, scale, out[0], group_size, parts, tiles)
        label = f"w{bits}-g{group_size}-M{num_rows}-N{columns}-{dtype}".replace("torch.", "")
        yield config_of_call(_few_kernel, label, arguments, options)
