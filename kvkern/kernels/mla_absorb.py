"""mla_absorb: out[t, h] = x[t, h] @ (w[h] * scale[h]).

A program makes one tile of one head. With few tokens reading w is all the work: programs are many,
and each asks for all of its part of w before it multiplies: most of w is on its way at once.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkern.kernels.config import SMALL_SPILLS, KernelConfig, config_of_call
from kvkern.kernels.device import Gpu, gpu_of
from kvkern.kernels.launch import Launch, launch
from kvkern.kernels.numerics import compute_dtype, decode_e4m3, round_to
from kvkern.kernels.paging import power_of_two

# sizes of a layer are specialised on; a step's, and strides that may hold them, are not
_OF_A_STEP = (
    "num_tokens", "stride_x_token", "stride_x_head", "stride_out_token", "stride_out_head",
)  # fmt: skip


@triton.jit(do_not_specialize=_OF_A_STEP)
def _mla_absorb_kernel(
    x_ptr,  # [T, H, K]
    w_ptr,  # [H, K, N]; e4m3 as its codes in uint8
    scale_ptr,  # fp32 [H, cells of K, cells of N], or None
    out_ptr,  # [T, H, N]
    num_tokens,
    num_heads,
    stride_x_token,
    stride_x_head,
    stride_w_head,
    stride_w_depth,
    stride_w_column,
    stride_scale_head,
    stride_scale_depth,
    stride_scale_column,
    stride_out_token,
    stride_out_head,
    DEPTH: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    CELL_K: tl.constexpr,  # rows of w that share a scale, a multiple of BLOCK_K; 0: all
    CELL_N: tl.constexpr,  # its columns, 1 or a multiple of BLOCK_N; 0: all
    X_IS_ALIGNED: tl.constexpr,  # rows begin at multiples of 16
    OUT_IS_ALIGNED: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Programs that follow each other have the tiles of a head, then the next head's."""
    COLUMN_TILES: tl.constexpr = (NUM_COLUMNS + BLOCK_N - 1) // BLOCK_N
    DTYPE: tl.constexpr = compute_dtype(x_ptr)
    if X_IS_ALIGNED:  # as specialising on strides would tell, but that they are a step's
        stride_x_token = stride_x_token // 16 * 16
        stride_x_head = stride_x_head // 16 * 16
    if OUT_IS_ALIGNED:
        stride_out_token = stride_out_token // 16 * 16
        stride_out_head = stride_out_head // 16 * 16
    column_tile, part = tl.program_id(0) % COLUMN_TILES, tl.program_id(0) // COLUMN_TILES
    head = (part % num_heads).to(tl.int64)
    token = (part // num_heads).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    mask_t, mask_n = token < num_tokens, column < NUM_COLUMNS

    x_ptrs = x_ptr + head * stride_x_head + (token * stride_x_token)[:, None] + k[None, :]
    w_ptrs = w_ptr + head * stride_w_head + (column.to(tl.int64) * stride_w_column)[None, :]
    w_ptrs += (k.to(tl.int64) * stride_w_depth)[:, None]
    step_w = tl.full([], BLOCK_K, tl.int64) * stride_w_depth
    if scale_ptr is not None:
        step_scale = tl.full([], 1, tl.int64) * stride_scale_depth
        scale_ptr += head * stride_scale_head
        if CELL_N == 1:
            scale_ptr += column.to(tl.int64) * stride_scale_column
        elif CELL_N > 0:
            scale_ptr += (column_tile * BLOCK_N // CELL_N).to(tl.int64) * stride_scale_column
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        x_mask, w_mask = mask_t[:, None], mask_n[None, :]
        if DEPTH % BLOCK_K != 0:
            mask_k = k < DEPTH - start
            x_mask, w_mask = x_mask & mask_k[None, :], w_mask & mask_k[:, None]
        x = tl.load(x_ptrs, mask=x_mask, other=0.0).to(DTYPE)
        w = tl.load(w_ptrs, mask=w_mask, other=0)
        w = decode_e4m3(w, DTYPE, NATIVE_FP8) if scale_ptr is not None else w.to(DTYPE)
        if CELL_K > 0:
            of_step = _load_scale(scale_ptr + start // CELL_K * step_scale, mask_n, CELL_N)
            acc += tl.dot(x, w, input_precision="ieee") * of_step
        else:
            acc = tl.dot(x, w, acc, input_precision="ieee")
        x_ptrs += BLOCK_K
        w_ptrs += step_w
    if scale_ptr is not None and CELL_K == 0:
        acc *= _load_scale(scale_ptr, mask_n, CELL_N)

    out_ptrs = out_ptr + head * stride_out_head + (token * stride_out_token)[:, None]
    out = round_to(acc, out_ptr.dtype.element_ty)
    tl.store(out_ptrs + column[None, :], out, mask=mask_t[:, None] & mask_n[None, :])


@triton.jit
def _load_scale(scale_ptrs, mask_n, CELL_N: tl.constexpr):
    """One for each column, or one for all that the program has."""
    if CELL_N == 1:
        return tl.load(scale_ptrs, mask=mask_n, other=0.0)[None, :]
    else:
        return tl.load(scale_ptrs)


class Tiles(NamedTuple):
    """What a program holds."""

    tokens: int
    columns: int
    depth: int  # of K in a step
    num_warps: int
    num_stages: int


def choose_tiles(
    num_tokens: int,
    num_heads: int,
    depth: int,
    num_columns: int,
    itemsize: int,  # bytes of an element of x
    gpu: Gpu,
    *,
    is_aligned: bool = True,
) -> Tiles:
    """Tiles of 128 x 128 at most, smaller where those would leave SMs idle.

    With few tokens all of K is on its way before the first step is multiplied. Elements that are
    loaded one by one want registers: tiles are small.
    """

    def num_programs(rows: int, columns: int) -> int:
        tiles: int = triton.cdiv(num_tokens, rows) * triton.cdiv(num_columns, columns)
        return num_heads * tiles

    rows = min(max(power_of_two(num_tokens), 16), 128)
    if itemsize == 4 or not is_aligned:
        return Tiles(min(rows, 32), 32, 32, 4, 2)
    if rows > 32:
        columns = 64 if num_columns <= 64 else 128
        if num_programs(rows, columns) < gpu.num_sms:
            rows, columns = 64, 64
        return Tiles(rows, columns, 64, rows // 16, 3)
    most_depth = min(max(power_of_two(depth) // 4, 32), 128)
    num_steps = triton.cdiv(depth, most_depth)
    columns = min(max(power_of_two(num_columns), 16), 128)
    while columns > 16 and (
        depth * columns > 16384  # 32 KiB in 16 bits
        or 2 * num_programs(rows, columns) < 3 * gpu.num_sms
    ):
        columns //= 2
    return Tiles(rows, columns, most_depth, 4, min(num_steps, 4) + 1)


def mla_absorb(
    x: Tensor,
    w: Tensor,
    scale: Tensor | None,
    cell: tuple[int, int],
    out: Tensor,
) -> Launch | None:
    """One launch. ``kvkern.mla_absorb`` has checked the arguments; ``out`` is not empty.

    Returns how to repeat it with tensors that differ in nothing but addresses.
    """
    grid, arguments, options = _call(x, w, scale, cell, out, gpu_of(out.device))
    return launch(_mla_absorb_kernel, grid, arguments, options, out.device, num_varying=4)


def _call(
    x: Tensor, w: Tensor, scale: Tensor | None, cell: tuple[int, int], out: Tensor, gpu: Gpu
) -> tuple[tuple[int], dict[str, Any], dict[str, Any]]:
    num_tokens, num_heads, depth = x.shape
    num_columns = w.shape[2]
    x_is_aligned = _is_aligned(x.data_ptr(), *x.stride()[:2])
    tiles = choose_tiles(
        num_tokens,
        num_heads,
        depth,
        num_columns,
        x.element_size(),
        gpu,
        is_aligned=x_is_aligned and _is_aligned(w.data_ptr(), *({*w.stride()} - {1})),
    )
    of_scale = (0, 0, 0) if scale is None else scale.stride()
    arguments = {
        "x_ptr": x,
        "w_ptr": w if scale is None else w.view(torch.uint8),
        "scale_ptr": scale,
        "out_ptr": out,
        "num_tokens": num_tokens,
        "num_heads": num_heads,
        "stride_x_token": x.stride(0),
        "stride_x_head": x.stride(1),
        "stride_w_head": w.stride(0),
        "stride_w_depth": w.stride(1),
        "stride_w_column": w.stride(2),
        "stride_scale_head": of_scale[0],
        "stride_scale_depth": of_scale[1],
        "stride_scale_column": of_scale[2],
        "stride_out_token": out.stride(0),
        "stride_out_head": out.stride(1),
        "DEPTH": depth,
        "NUM_COLUMNS": num_columns,
        "CELL_K": cell[0],
        "CELL_N": cell[1],
        "X_IS_ALIGNED": x_is_aligned,
        "OUT_IS_ALIGNED": _is_aligned(*out.stride()[:2]),
        "NATIVE_FP8": gpu.has_fp8,
        "BLOCK_T": tiles.tokens,
        "BLOCK_N": tiles.columns,
        "BLOCK_K": tiles.depth,
    }
    num_tiles = triton.cdiv(num_tokens, tiles.tokens) * triton.cdiv(num_columns, tiles.columns)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return (num_tiles * num_heads,), arguments, {**options, "enable_fp_fusion": True}


def _is_aligned(*numbers: int) -> bool:
    """Bytes and elements alike, as Triton has it."""
    return all(number % 16 == 0 for number in numbers)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Both sides of a layer, each tile size, dtypes, scales; and rows that are not aligned."""
    gpu = Gpu(capability, num_sms=132)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for label, tokens, dtype, cell, is_output in (
        ("bf16-1", 1, bf16, None, False),
        ("bf16-1", 1, bf16, None, True),
        ("bf16-64", 64, bf16, None, False),
        ("bf16-4096", 4096, bf16, None, True),
        ("fp16-32", 32, fp16, None, True),
        ("fp32-32", 32, fp32, None, False),
        ("fp8-tensor-1", 1, bf16, (0, 0), False),
        ("fp8-column-4096", 4096, fp16, (0, 1), True),
        ("fp8-block-1", 1, bf16, (128, 128), True),
        ("fp8-block-4096", 4096, bf16, (128, 128), False),
        ("fp8-group-32", 32, bf16, (128, 1), False),
    ):
        if is_output:
            label = f"{label}-output"
            yield _shipped(label, tokens, 512, 128, dtype, cell, gpu, is_transposed=True)
        else:
            yield _shipped(f"{label}-query", tokens, 128, 512, dtype, cell, gpu)
    yield _shipped("bf16-192-1", 1, 192, 256, bf16, None, gpu)
    yield _shipped("bf16-odd-4096", 4096, 99, 65, bf16, None, gpu)
    yield _shipped("fp8-odd-4096", 4096, 99, 65, bf16, (0, 1), gpu, is_transposed=True)


def _shipped(
    label: str,
    num_tokens: int,
    depth: int,
    num_columns: int,
    dtype: torch.dtype,
    cell: tuple[int, int] | None,  # None: w in dtype
    gpu: Gpu,
    *,
    is_transposed: bool = False,  # as absorb_weights gives w_uv
) -> KernelConfig:
    """One call on tensors without memory."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, out = (empty(num_tokens, 128, size + 64, dtype=dtype) for size in (depth, num_columns))
    w_dtype = dtype if cell is None else torch.float8_e4m3fn
    w = empty(128, depth, num_columns, dtype=w_dtype)
    if is_transposed:
        w = empty(128, num_columns, depth, dtype=w_dtype).mT
    scale = None if cell is None else empty(128, 4, num_columns)
    _, arguments, options = _call(
        x[..., :depth], w, scale, cell or (0, 0), out[..., :num_columns], gpu
    )
    return config_of_call(_mla_absorb_kernel, label, arguments, options, **SMALL_SPILLS)
