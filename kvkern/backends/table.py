"""The table of backends. ``"auto"`` takes the first that neither refuses nor waits to be named."""

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import torch

from kvkern.backends.tuned import ranking
from kvkern.errors import ArgumentError, UnsupportedError
from kvkern.layout import CacheFormat
from kvkern.warm_up import size_class


class DecodeCall(NamedTuple):
    """What a backend of ``mla_decode`` may refuse by, beside the device."""

    q_dtype: torch.dtype
    format: CacheFormat
    page_size: int
    num_splits: int | None
    is_batch_invariant: bool
    max_rows: int | None  # most (token, head) rows of a request, where the host knows it


class MatmulCall(NamedTuple):
    """What a backend of ``scaled_mm`` may refuse by, beside the device.

    Of a cell, the rows and columns that share a scale, 0 is all: ``cell_a`` is (0, 0), (1, 0) or
    (1, 128), ``cell_b`` (0, 0), (0, 1), (128, 128) or (128, 1); K is cut in both or in neither.
    A tensor is aligned if its elements are contiguous along K (``out``: along N) and all else
    begins at multiples of 16 bytes.
    """

    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    num_matrices: int  # b's
    is_grouped: bool  # a's rows are shared out among b's matrices
    num_rows: int
    num_columns: int
    depth: int
    cell_a: tuple[int, int]
    cell_b: tuple[int, int]
    a_is_aligned: bool
    b_is_aligned: bool
    out_is_aligned: bool
    bias_dtype: torch.dtype | None
    is_exact: bool


class AbsorbCall(NamedTuple):
    """What a backend of ``mla_absorb`` may refuse by, beside the device.

    A tensor is aligned as in ``MatmulCall``, w if it is contiguous along K or along N.
    """

    x_dtype: torch.dtype
    num_tokens: int
    num_heads: int
    depth: int
    x_is_aligned: bool
    w_is_aligned: bool
    out_is_aligned: bool


class WeightOnlyCall(NamedTuple):
    """What a backend of ``matmul_w8a16`` and ``matmul_w4a16`` may refuse by, beside the device."""

    bits: int  # of a weight
    num_rows: int  # of x
    num_columns: int  # of out
    depth: int
    group_size: int  # columns of x that share a scale; 0: all
    has_zero: bool
    is_aligned: bool  # x's rows, the weight and its scale begin at multiples of 16 bytes


AnyCall = AbsorbCall | DecodeCall | MatmulCall | WeightOnlyCall


def _takes_any_call(call: Any) -> str | None:
    return None


class Backend(NamedTuple):
    """One implementation of an op.

    ``source`` is ``"module:function"``, imported at first use, so that ``import kvkern`` needs
    neither Triton nor a GPU. ``refuses(device, dtype)`` gives the reason it cannot run, or None;
    ``refuses_call`` the reason it cannot run this call. ``auto_on`` lists the device types where
    ``"auto"`` may take it; ``yields_call`` is the reason that it leaves a call to the next.
    ``takes_e4m3_queries``: it is given them as they are.
    """

    name: str
    source: str
    refuses: Callable[[torch.device, torch.dtype], str | None]
    auto_on: tuple[str, ...]
    refuses_call: Callable[[Any], str | None] = _takes_any_call  # its op's call
    takes_e4m3_queries: bool = False
    yields_call: Callable[[Any], str | None] = _takes_any_call

    def load(self) -> Callable[..., Any]:
        module, function = self.source.split(":")
        loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return loaded


def _triton_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if dtype == torch.float64:
        return "fp64 is for the reference"
    if device.type == "cuda":
        return _card_refuses(device)
    import triton

    if device.type == "cpu" and triton.knobs.runtime.interpret:
        return None
    return f"needs a CUDA device, got {device.type} (TRITON_INTERPRET=1 runs it on the CPU)"


def _hopper_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    reason = _triton_refuses(device, dtype)
    if reason is None and (device.type != "cuda" or torch.version.hip is not None):
        reason = f"needs a CUDA device, got {device.type}: Triton does not interpret Gluon"
    if reason is None and torch.cuda.get_device_capability(device) != (9, 0):
        reason = f"needs compute capability 9.0, {torch.cuda.get_device_name(device)} has another"
    return reason


def _hopper_refuses_call(call: DecodeCall) -> str | None:
    reason = _hopper_refuses_format(call)
    if reason is not None:
        return reason
    if call.num_splits is not None:
        return f"cuts keys by its own schedule: leave num_splits out, got {call.num_splits}"
    if call.is_batch_invariant:
        return "cuts keys where it balances the batch, got batch_invariant"
    if call.max_rows is None:
        return "needs to know max_query_len: build the batch from host data or with check=True"
    if call.max_rows > 512:
        return f"takes up to 512 rows (new tokens x heads) a request, got {call.max_rows}"
    return None


def _hopper_refuses_format(call: DecodeCall) -> str | None:
    fmt = call.format
    if fmt.name not in ("bf16", "fp16", "fp8", "fp8_token", "fp8_ds_mla"):
        return f"takes formats bf16, fp16 and those of 8 bits, got {fmt.name}"
    if not fmt.is_quantised and call.q_dtype != fmt.latent_dtype:
        return f"takes q in the cache's dtype {fmt.latent_dtype}, got {call.q_dtype}"
    if call.q_dtype == torch.float8_e4m3fn:
        if fmt.name != "fp8":
            return f"takes e4m3 queries with an fp8 cache, got {fmt.name}"
    elif call.q_dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {call.q_dtype}"
    latents, ropes = {  # columns
        "fp8": ((256, 512), (0, 32, 64)),
        "fp8_token": ((512,), (64,)),
        "fp8_ds_mla": ((512,), (64,)),
    }.get(fmt.name, ((128, 256, 512), tuple(range(0, 65, 8))))
    if fmt.kv_lora_rank not in latents or fmt.rope_dim not in ropes:
        return (
            f"takes {latents} latent and {ropes} rope columns of {fmt.name}, got "
            f"{fmt.kv_lora_rank} and {fmt.rope_dim}"
        )
    if fmt.is_quantised and call.page_size % 64 and call.page_size not in (16, 32):
        return f"takes pages of 16, 32 or a multiple of 64 tokens of 8 bits, got {call.page_size}"
    return None


def _card_refuses(device: torch.device) -> str | None:
    if not torch.cuda.is_available():
        return "this machine has no CUDA device"
    if torch.version.hip is not None:
        return "needs an NVIDIA card, this is ROCm"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"needs compute capability 8.0, {torch.cuda.get_device_name(device)} is older"
    return None


def _flashinfer_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install 'kvkern[flashinfer]')"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {dtype}"
    if device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    return _card_refuses(device)


def _torch_matmul_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    reason = _card_refuses(device)
    if reason is None and torch.cuda.get_device_capability(device) < (8, 9):
        reason = f"needs compute capability 8.9, {torch.cuda.get_device_name(device)} is older"
    return reason


def _torch_matmul_refuses_call(call: MatmulCall) -> str | None:
    reason = _library_matmul_refuses_call(call)
    if reason is not None:
        return reason
    if call.a_dtype == call.b_dtype == torch.float8_e5m2:
        return "takes e5m2 on one side, got both"
    if call.num_columns % 16 or call.depth % 16:
        return f"takes N and K that are multiples of 16, got {call.num_columns} and {call.depth}"
    if call.cell_a[1] and call.depth % 128:
        return f"takes K that is a multiple of 128 with groups, got {call.depth}"
    if call.cell_b == (128, 128) and (call.depth % 512 or call.num_columns % 128):
        return (
            "takes K that is a multiple of 512 and N that is one of 128 with blocks, got "
            f"{call.depth} and {call.num_columns}"
        )
    if call.bias_dtype is not None and call.bias_dtype != call.out_dtype:
        return f"takes a bias in out's dtype {call.out_dtype}, got {call.bias_dtype}"
    return None


def _hopper_matmul_refuses_call(call: MatmulCall) -> str | None:
    if call.is_grouped and not 0 < call.num_matrices <= 1024:
        return f"takes 1 to 1024 experts, got {call.num_matrices}"
    if call.depth == 0:
        return "takes K > 0"
    if call.cell_b == (128, 1):
        return "takes scales of 128 x 128 beside groups of a's, got 128 x 1"
    if not (call.a_is_aligned and call.b_is_aligned and call.out_is_aligned):
        return (
            "takes a and out of contiguous rows and b of contiguous columns (weight.t()), which "
            "begin at multiples of 16 bytes"
        )
    return None


def _hopper_absorb_refuses_call(call: AbsorbCall) -> str | None:
    if call.x_dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {call.x_dtype}"
    if not 0 < call.depth <= 1024:
        return f"takes K from 1 to 1024, got {call.depth}"
    if not (call.x_is_aligned and call.w_is_aligned and call.out_is_aligned):
        return (
            "takes x, out and w of contiguous rows (w: or columns) that begin at multiples of 16 "
            "bytes"
        )
    return None


def _hopper_absorb_yields_call(call: AbsorbCall) -> str | None:
    """A program fetches its part of w whole: the deeper that is, the more rows it takes to pay.

    By microseconds on an H200, hopper's and triton's. K = 128: 2048 rows 8.4 and 7.2, 8192 9.6 and
    10.0 (16 heads), 16384 14.1 and 15.9. K = 512: 8192 10.1 and 10.3, in e4m3 12.0 and 11.3; 16384
    15.3 and 15.1, in e4m3 16.8 and 14.9; 65536 29.1 and 36.1. By size class, as tiles go: a
    warm-up meets the kernel of each.
    """
    num_tokens, fewest = size_class(call.num_tokens), 64 * max(call.depth, 128)
    if num_tokens < 128 or num_tokens * call.num_heads < fewest:
        return (
            f"is no faster up to 64 tokens, and below {fewest} tokens x heads, got "
            f"{call.num_tokens} x {call.num_heads}"
        )
    return None


def _hopper_weight_only_refuses_call(call: WeightOnlyCall) -> str | None:
    if not call.is_aligned:
        return "takes rows of x, and a weight with its scale, that begin at multiples of 16 bytes"
    if call.num_rows <= 16:
        return _hopper_few_rows_refuses(call)
    if call.group_size == 32:
        return "takes groups of 64 columns, of 128 or all, got 32"
    return None


def _hopper_few_rows_refuses(call: WeightOnlyCall) -> str | None:
    if call.has_zero or call.group_size not in (0, 128):
        zeros = " with zero points" if call.has_zero else ""
        return (
            "takes up to 16 rows of x with groups of 128 or all columns without zero points, got "
            f"{call.group_size or 'all'}{zeros}"
        )
    chunk = 1024 // call.bits
    if call.num_columns % 4 or call.depth % chunk:
        return (
            "takes up to 16 rows of x with N that is a multiple of 4 and K that is one of "
            f"{chunk}, got {call.num_columns} and {call.depth}"
        )
    return None


def _hopper_weight_only_yields_call(call: WeightOnlyCall) -> str | None:
    """Of up to 16 rows a program has tiles of 32 or 64 columns, and all of K.

    On 132 SMs half of those are idle with N below 2112. By microseconds of 1, 8 and 16 rows on an
    H200, hopper's and triton's: in 4 bits 256 x 16384 12.7, 12.3, 13.7 and 10.0, 10.4, 11.0, but
    1024 x 8192 9.3, 9.5, 10.1 and 10.0, 9.8, 10.9, and 28672 x 8192 39.9, 38.6, 40.4 and 47.5,
    48.3, 51.1; in 8 bits 576 x 7168 10.4, 10.4, 10.4 and 8.8, 9.2, 9.9, 22016 x 4096 28.9, 28.6,
    28.8 and 29.2, 31.2, 35.0, but 28672 x 8192 63.6, 63.1, 65.2 and 58.4, 58.9, 65.7.
    """
    if call.num_rows > 16:
        return None
    if call.bits == 4 and call.num_columns < 2112 and call.depth > 8192:
        return (
            "is no faster with 4 bits up to 16 rows where N is less than 2112 and K more than "
            f"8192, got {call.num_columns} and {call.depth}"
        )
    if call.bits == 8 and not 2112 <= call.num_columns <= 22016:
        return (
            "is no faster with 8 bits up to 16 rows but for N from 2112 to 22016, got "
            f"{call.num_columns}"
        )
    return None


def _deepgemm_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    if importlib.util.find_spec("deep_gemm") is None:
        return "deep_gemm is not installed"
    if device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    reason = _card_refuses(device)
    if reason is None and torch.cuda.get_device_capability(device) != (9, 0):
        reason = f"needs compute capability 9.0, {torch.cuda.get_device_name(device)} has another"
    return reason


def _deepgemm_refuses_call(call: MatmulCall) -> str | None:
    reason = _library_matmul_refuses_call(call)
    if reason is not None:
        return reason
    if {call.a_dtype, call.b_dtype} != {torch.float8_e4m3fn}:
        return f"takes e4m3, got {call.a_dtype} and {call.b_dtype}"
    if (call.cell_a, call.cell_b) != ((1, 128), (128, 128)):
        return f"takes scales of 1 x 128 and 128 x 128, got {call.cell_a} and {call.cell_b}"
    if call.out_dtype != torch.bfloat16:
        return f"gives bfloat16, got out_dtype {call.out_dtype}"
    if call.bias_dtype is not None:
        return "takes no bias"
    if call.num_columns % 64 or call.depth % 128:
        return (
            "takes N that is a multiple of 64 and K that is one of 128, got "
            f"{call.num_columns} and {call.depth}"
        )
    if not call.out_is_aligned:
        return "takes an out of contiguous rows that begin at multiples of 16 bytes"
    return None


def _library_matmul_refuses_call(call: MatmulCall) -> str | None:
    if call.is_grouped or call.num_matrices != 1:
        return "takes one matrix: neither batched nor row_offsets"
    if call.depth == 0:
        return "takes K > 0"
    if not (call.a_is_aligned and call.b_is_aligned):
        return (
            "takes a of contiguous rows and b of contiguous columns (weight.t()), which begin at "
            "multiples of 16 bytes"
        )
    return None


def _never_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def _row(module: str, function: str) -> tuple[Backend, ...]:
    """The portable pair: a Triton kernel on GPUs, its reference on CPUs and by name."""
    return (
        Backend("triton", f"kvkern.kernels.{module}:{function}", _triton_refuses, ("cuda",)),
        Backend("reference", f"kvkern.reference.{module}:{function}", _never_refuses, ("cpu",)),
    )


_HOPPER_WEIGHT_ONLY = Backend(
    "hopper",
    "kvkern.kernels.hopper.matmul_weight_only:matmul_weight_only",
    _hopper_refuses,
    ("cuda",),
    _hopper_weight_only_refuses_call,
    yields_call=_hopper_weight_only_yields_call,
)

TABLE: dict[str, tuple[Backend, ...]] = {
    "write_kv": _row("write_kv", "write_kv"),
    "mla_decode": (
        Backend(
            "hopper",
            "kvkern.kernels.hopper.mla_decode:mla_decode",
            _hopper_refuses,
            ("cuda",),
            _hopper_refuses_call,
            takes_e4m3_queries=True,
        ),
        *_row("mla_decode", "mla_decode"),
        Backend("flashinfer", "kvkern.backends.flashinfer:mla_decode", _flashinfer_refuses, ()),
    ),
    "mla_prefill": _row("mla_prefill", "mla_prefill"),
    "mla_absorb": (
        Backend(
            "hopper",
            "kvkern.kernels.hopper.mla_absorb:mla_absorb",
            _hopper_refuses,
            ("cuda",),
            _hopper_absorb_refuses_call,
            yields_call=_hopper_absorb_yields_call,
        ),
        *_row("mla_absorb", "mla_absorb"),
    ),
    "merge_states": _row("merge_states", "merge_states"),
    "gather_kv": _row("gather_kv", "gather_kv"),
    "copy_pages": _row("copy_pages", "copy_pages"),
    "quantize_fp8": _row("quantize_fp8", "quantize_fp8"),
    "dequantize_fp8": _row("quantize_fp8", "dequantize_fp8"),
    "scaled_mm": (
        Backend(
            "hopper",
            "kvkern.kernels.hopper.scaled_mm:scaled_mm",
            _hopper_refuses,
            ("cuda",),
            _hopper_matmul_refuses_call,
        ),
        *_row("scaled_mm", "scaled_mm"),
        Backend(
            "torch",
            "kvkern.backends.torch_scaled_mm:scaled_mm",
            _torch_matmul_refuses,
            (),
            _torch_matmul_refuses_call,
        ),
        Backend(
            "deepgemm",
            "kvkern.backends.deepgemm:scaled_mm",
            _deepgemm_refuses,
            (),
            _deepgemm_refuses_call,
        ),
    ),
    "rms_norm_quant_fp8": _row("rms_norm_quant_fp8", "rms_norm_quant_fp8"),
    "silu_and_mul_quant_fp8": _row("silu_and_mul_quant_fp8", "silu_and_mul_quant_fp8"),
    "quantize_int8": _row("quantize_int", "quantize_int"),
    "quantize_int4": _row("quantize_int", "quantize_int"),
    "dequantize_int8": _row("quantize_int", "dequantize_int"),
    "dequantize_int4": _row("quantize_int", "dequantize_int"),
    "matmul_w8a16": (_HOPPER_WEIGHT_ONLY, *_row("matmul_weight_only", "matmul_weight_only")),
    "matmul_w4a16": (_HOPPER_WEIGHT_ONLY, *_row("matmul_weight_only", "matmul_weight_only")),
    "matmul_w8a8": _row("matmul_w8a8", "matmul_w8a8"),
}


def explain(
    op: str,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    call: AnyCall | None = None,
) -> list[tuple[str, str | None]]:
    """Each backend of ``op`` in order, with why ``"auto"`` passes it over, or None if it would not.

    The first backend with None is the one that ``backend="auto"`` runs; without ``call``, if
    nothing in the call itself keeps it from that.
    """
    device = torch.device(device)
    rows: list[tuple[str, str | None]] = []
    for backend in _backends(op):
        reason = _reason(backend, device, dtype, call)
        if reason is None and device.type not in backend.auto_on:
            reason = f"runs on {device.type} only when named"
        if reason is None and call is not None:
            reason = backend.yields_call(call)
        rows.append((backend.name, reason))
    return _by_time(op, device, dtype, call, rows)


def _by_time(
    op: str,
    device: torch.device,
    dtype: torch.dtype,
    call: AnyCall | None,
    rows: list[tuple[str, str | None]],
) -> list[tuple[str, str | None]]:
    """The same rows; where times are known, with the fastest that takes the call and no other."""
    backends = {backend.name: backend for backend in _backends(op)}
    for name in ranking(op, device, call):
        if name in backends and _reason(backends[name], device, dtype, call) is None:
            slower = f"{name} was measured to be faster for this on this card (kvkern tune)"
            return [(n, None if n == name else reason or slower) for n, reason in rows]
    return rows


def _reason(
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    call: AnyCall | None,
) -> str | None:
    reason = backend.refuses(device, dtype)
    return backend.refuses_call(call) if reason is None and call is not None else reason


@lru_cache
def choose(
    op: str,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    call: AnyCall | None = None,
) -> Callable[..., Any]:
    """The implementation that runs; remembered per argument, so a call costs one lookup.

    Raises:
        ArgumentError: no backend of ``op`` has this name.
        UnsupportedError: the named backend, or each backend, refuses; with its reason.
    """
    backends = _backends(op)
    if name != "auto":
        for backend in backends:
            if backend.name == name:
                reason = _reason(backend, device, dtype, call)
                if reason is not None:
                    raise UnsupportedError(f"{op}: backend {name!r} refuses: {reason}")
                return _implementation(backend, device)
        names = ", ".join(["auto", *(backend.name for backend in backends)])
        raise ArgumentError(f"backend: want one of {names}; got {name!r}")
    rows = explain(op, device, dtype, call)
    for backend, (_, reason) in zip(backends, rows, strict=True):
        if reason is None:
            return _implementation(backend, device)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rows)
    raise UnsupportedError(f"{op}: no backend runs this call ({reasons})")


def _implementation(backend: Backend, device: torch.device) -> Callable[..., Any]:
    run = backend.load()
    if not backend.source.startswith("kvkern.kernels."):
        run = _forward_only(run, device.type)
    return _on_device(run, device)


@lru_cache
def _forward_only(run: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """``run``, made of PyTorch's operations, as unseen by autograd and autocast as a kernel is."""
    has_autocast = torch.amp.is_autocast_available(device_type)

    @wraps(run)
    def run_unseen(*arguments: Any, **options: Any) -> Any:
        no_autocast = torch.autocast(device_type, enabled=False) if has_autocast else nullcontext()
        with torch.no_grad(), no_autocast:
            return run(*arguments, **options)

    return run_unseen


def _on_device(run: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """``run`` with the tensors' card as the current one: Triton launches where the host stands."""
    if device.type != "cuda":
        return run

    @wraps(run)
    def run_there(*arguments: Any, **options: Any) -> Any:
        with torch.cuda.device(device):
            return run(*arguments, **options)

    return run_there


def takes_e4m3_queries(op: str, name: str, device: torch.device, call: DecodeCall) -> bool:
    """Whether the backend of this name multiplies them, or one that ``"auto"`` takes does."""
    for backend in _backends(op):
        if backend.takes_e4m3_queries:
            is_first = name == "auto" and device.type in backend.auto_on
            if is_first and _reason(backend, device, call.q_dtype, call) is None:
                return True
            if backend.name == name:
                return True
    return False


def _backends(op: str) -> tuple[Backend, ...]:
    if op not in TABLE:
        raise ArgumentError(f"op: want one of {', '.join(TABLE)}; got {op!r}")
    return TABLE[op]
