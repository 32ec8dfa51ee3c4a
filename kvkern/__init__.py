"""kvkern: paged latent KV cache and attention kernels for Multi-head Latent Attention."""

from kvkern.backends import explain
from kvkern.cache.batch import PagedBatch
from kvkern.cache.pages import PageAllocator
from kvkern.cache.prefix import PrefixIndex
from kvkern.cache.scales import CacheScales, calibrate
from kvkern.cache.storage import CacheView, LayerPages, PagedKVCache
from kvkern.errors import (
    ArgumentError,
    DeviceError,
    KvkernError,
    LayoutError,
    OutOfPagesError,
    ShapeMismatchError,
    UnsupportedDtypeError,
    UnsupportedError,
)
from kvkern.layout import CacheFormat
from kvkern.ops.absorb import absorb_weights, mla_absorb
from kvkern.ops.attention import AttentionOutput, merge_states, mla_decode, mla_prefill
from kvkern.ops.matmul import fp8_gemm, scaled_mm
from kvkern.ops.pages import PageCopy, copy_pages, gather_kv
from kvkern.ops.quantize import (
    QuantizedFP8,
    dequantize_fp8,
    quantize_fp8,
    rms_norm_quant_fp8,
    silu_and_mul_quant_fp8,
)
from kvkern.ops.weight_only import (
    QuantizedInt4,
    QuantizedInt8,
    dequantize_int4,
    dequantize_int8,
    matmul_w4a16,
    matmul_w8a8,
    matmul_w8a16,
    quantize_int4,
    quantize_int8,
)
from kvkern.ops.write_kv import write_kv
from kvkern.warm_up import warm_up_sizes

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "AttentionOutput",
    "CacheFormat",
    "CacheScales",
    "CacheView",
    "DeviceError",
    "KvkernError",
    "LayerPages",
    "LayoutError",
    "OutOfPagesError",
    "PageAllocator",
    "PageCopy",
    "PagedBatch",
    "PagedKVCache",
    "PrefixIndex",
    "QuantizedFP8",
    "QuantizedInt4",
    "QuantizedInt8",
    "ShapeMismatchError",
    "UnsupportedDtypeError",
    "UnsupportedError",
    "absorb_weights",
    "calibrate",
    "copy_pages",
    "dequantize_fp8",
    "dequantize_int4",
    "dequantize_int8",
    "explain",
    "fp8_gemm",
    "gather_kv",
    "matmul_w4a16",
    "matmul_w8a8",
    "matmul_w8a16",
    "merge_states",
    "mla_absorb",
    "mla_decode",
    "mla_prefill",
    "quantize_fp8",
    "quantize_int4",
    "quantize_int8",
    "rms_norm_quant_fp8",
    "scaled_mm",
    "silu_and_mul_quant_fp8",
    "warm_up_sizes",
    "write_kv",
]
