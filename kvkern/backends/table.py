"""The table of backends. ``"auto"`` takes the first that neither refuses nor waits to be named."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import torch

from kvkern.errors import ArgumentError, UnsupportedError
from kvkern.layout import CacheFormat


class DecodeCall(NamedTuple):
    """What a backend of ``mla_decode`` may refuse by, beside the device."""

    q_dtype: torch.dtype
    format: CacheFormat
    page_size: int
    num_splits: int | None
    is_batch_invariant: bool
    max_rows: int | None  # most (token, head) rows of a request, where the host knows it


def _takes_any_call(call: DecodeCall) -> str | None:
    return None


class Backend(NamedTuple):
    """One implementation of an op.

    ``source`` is ``"module:function"``, imported at first use, so that ``import kvkern`` needs
    neither Triton nor a GPU. ``refuses(device, dtype)`` gives the reason it cannot run, or None;
    ``refuses_call`` the reason it cannot run this call. ``auto_on`` lists the device types where
    ``"auto"`` may take it. ``takes_e4m3_queries``: it is given them as they are.
    """

    name: str
    source: str
    refuses: Callable[[torch.device, torch.dtype], str | None]
    auto_on: tuple[str, ...]
    refuses_call: Callable[[DecodeCall], str | None] = _takes_any_call
    takes_e4m3_queries: bool = False

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


def _never_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def _row(module: str, function: str) -> tuple[Backend, ...]:
    """The portable pair: a Triton kernel on GPUs, its reference on CPUs and by name."""
    return (
        Backend("triton", f"kvkern.kernels.{module}:{function}", _triton_refuses, ("cuda",)),
        Backend("reference", f"kvkern.reference.{module}:{function}", _never_refuses, ("cpu",)),
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
    "merge_states": _row("merge_states", "merge_states"),
    "gather_kv": _row("gather_kv", "gather_kv"),
    "copy_pages": _row("copy_pages", "copy_pages"),
    "quantize_fp8": _row("quantize_fp8", "quantize_fp8"),
    "dequantize_fp8": _row("quantize_fp8", "dequantize_fp8"),
    "quantize_int8": _row("quantize_int", "quantize_int"),
    "quantize_int4": _row("quantize_int", "quantize_int"),
    "dequantize_int8": _row("quantize_int", "dequantize_int"),
    "dequantize_int4": _row("quantize_int", "dequantize_int"),
    "matmul_w8a16": _row("matmul_weight_only", "matmul_weight_only"),
    "matmul_w4a16": _row("matmul_weight_only", "matmul_weight_only"),
    "matmul_w8a8": _row("matmul_w8a8", "matmul_w8a8"),
}


def explain(
    op: str,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    call: DecodeCall | None = None,
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
        rows.append((backend.name, reason))
    return rows


def _reason(
    backend: Backend, device: torch.device, dtype: torch.dtype, call: DecodeCall | None
) -> str | None:
    reason = backend.refuses(device, dtype)
    return backend.refuses_call(call) if reason is None and call is not None else reason


@lru_cache
def choose(
    op: str, name: str, device: torch.device, dtype: torch.dtype, call: DecodeCall | None = None
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
                return _on_device(backend.load(), device)
        names = ", ".join(["auto", *(backend.name for backend in backends)])
        raise ArgumentError(f"backend: want one of {names}; got {name!r}")
    rows = explain(op, device, dtype, call)
    for backend, (_, reason) in zip(backends, rows, strict=True):
        if reason is None:
            return _on_device(backend.load(), device)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rows)
    raise UnsupportedError(f"{op}: no backend runs this call ({reasons})")


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
