"""``python -m kvkern check``: every op, by every backend that runs on this machine.

A kernel is compared with the reference in fp64, and may err twice as much as the reference does
in the kernel's own dtype; where it only moves or stores data, bytes must be equal. The reference
itself is compared with formulas that are written differently here.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

import kvkern
from kvkern.backends import TABLE
from kvkern.errors import UnsupportedError
from kvkern.layout import FORMAT_NAMES, FormatName
from kvkern.ops.quantize import Granularity, RowGranularity

_HEADS, _LATENT, _ROPE, _NOPE, _VALUE, _PAGE_SIZE = 3, 128, 32, 64, 64, 4
_SCALE = (_NOPE + _ROPE) ** -0.5
_CACHED = (9, 0, 3, 8)  # tokens before the step: within a page, none, and a page's end
_NEW = (1, 5, 0, 7)
_ENDS = tuple(cached + new for cached, new in zip(_CACHED, _NEW, strict=True))
_NUM_PAGES = 16
_LAYER_SCALES = (0.05, 0.07)  # latent, rope; not 1: a dropped one shows
_KERNEL_DTYPE = torch.bfloat16
_MOVES_DATA = ("gather_kv", "copy_pages")
_INT_QUANTISERS = ("quantize_int8", "quantize_int4", "dequantize_int8", "dequantize_int4")
_INT_MATMULS = ("matmul_w8a16", "matmul_w4a16", "matmul_w8a8")
_IS_EXACT = (*_MOVES_DATA, "write_kv", "quantize_fp8", "dequantize_fp8", *_INT_QUANTISERS)
_FUSED_WITH_FP8 = ("rms_norm_quant_fp8", "silu_and_mul_quant_fp8")
_WITHOUT_CACHE = (
    "merge_states", "quantize_fp8", "dequantize_fp8", "scaled_mm", "mla_absorb", *_FUSED_WITH_FP8,
    *_INT_QUANTISERS, *_INT_MATMULS,
)  # fmt: skip
_CELLS: dict[Granularity, tuple[int, int]] = {
    "tensor": (130, 200),
    "row": (1, 200),
    "group": (1, 128),
    "block": (128, 128),
}


_ROW_CELLS: tuple[RowGranularity, ...] = ("row", "group")


class Result(NamedTuple):
    """How far one backend is from the truth, and how far it may be."""

    op: str
    backend: str
    case: str
    error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.allowed  # False for NaN


def run(settings: argparse.Namespace) -> int:
    """Print a line for each op, backend and case. Returns 1 if any of them is wrong."""
    num_wrong = 0
    print(f"{'op':24}{'backend':12}{'case':22}{'max error':>11}{'allowed':>11}")
    for result in check_ops(settings.device):
        num_wrong += not result.is_right
        print(
            f"{result.op:24}{result.backend:12}{result.case:22}{result.error:11.1e}"
            f"{result.allowed:11.1e}  {'ok' if result.is_right else 'WRONG'}",
            flush=True,
        )
    print(f"{num_wrong} wrong" if num_wrong else f"all right on {settings.device}")
    return 1 if num_wrong else 0


def check_ops(device: torch.device) -> Iterator[Result]:
    """Compare every backend that does not refuse this device."""
    for op, backends in TABLE.items():
        case = _Case(device, torch.float64, torch.float64, "fp32")
        want = _SECOND_FORMULATIONS[op](case)
        # lse and stored rows are fp32 at best
        eps = 0.0 if op in _MOVES_DATA else 8 * torch.finfo(torch.float32).eps
        allowed = eps * _largest(want)
        got = _OPS[op](case, "reference")
        yield Result(op, "reference", "fp64, second formula", _largest(got - want), allowed)
        for backend in backends:
            dtype = torch.uint8 if op == "copy_pages" else _KERNEL_DTYPE
            if backend.name != "reference" and backend.refuses(device, dtype) is None:
                yield from _check_kernel(op, backend.name, device)


def _check_kernel(op: str, backend: str, device: torch.device) -> Iterator[Result]:
    formats = ("bf16",) if op in _WITHOUT_CACHE else FORMAT_NAMES
    for name in formats:
        case = _Case(device, _KERNEL_DTYPE, _KERNEL_DTYPE, name)
        try:
            got = _OPS[op](case, backend)
        except UnsupportedError:  # it runs on this device, but not this format or these dims
            continue
        same_dtype = _OPS[op](case, "reference")
        if op in _IS_EXACT:
            want, allowed = same_dtype, 0.0
        elif op in _FUSED_WITH_FP8:  # scales have other last bits
            want, allowed = same_dtype, 1e-5 * _largest(same_dtype)
        else:
            want = _OPS[op](replace(case, compute=torch.float64), "reference")
            eps = torch.finfo(_KERNEL_DTYPE).eps
            allowed = 2 * _largest(same_dtype - want) + eps * _largest(want)
        label = name if op in _WITHOUT_CACHE else f"{name} cache"
        yield Result(op, backend, label, _largest(got - want), allowed)


@dataclass(frozen=True)
class _Case:
    """Four ragged requests over shuffled pages; equal arguments give equal inputs."""

    device: torch.device
    rounded: torch.dtype  # what the inputs are rounded to
    compute: torch.dtype  # what the ops get them in
    format_name: FormatName

    def randn(self, seed: int, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return values.to(self.rounded).to(self.device, self.compute)

    @cached_property
    def freqs(self) -> Tensor:
        angles = torch.arange(max(_ENDS))[:, None] * 0.7 ** torch.arange(_ROPE // 2)
        table = torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1)
        return table.to(self.device)

    @cached_property
    def pages(self) -> list[list[int]]:
        """Of each request."""
        shuffled = torch.randperm(_NUM_PAGES, generator=torch.Generator().manual_seed(1)).tolist()
        return [[shuffled.pop() for _ in range(-(-end // _PAGE_SIZE))] for end in _ENDS]

    def batch(self, cached: tuple[int, ...], new: tuple[int, ...]) -> kvkern.PagedBatch:
        offsets = [sum(new[:i]) for i in range(len(new) + 1)]
        width = max(map(len, self.pages))
        table = [pages + [-1] * (width - len(pages)) for pages in self.pages]
        return kvkern.PagedBatch(offsets, cached, table, device=self.device)

    def empty_cache(self) -> kvkern.PagedKVCache:
        fmt = kvkern.CacheFormat(self.format_name, kv_lora_rank=_LATENT, rope_dim=_ROPE)
        latent_scale, rope_scale = _LAYER_SCALES if fmt.layer_scaled else (1.0, 1.0)
        cache = kvkern.PagedKVCache(
            fmt,
            num_layers=1,
            num_pages=_NUM_PAGES,
            page_size=_PAGE_SIZE,
            device=self.device,
            latent_scale=latent_scale,
            rope_scale=rope_scale,
        )
        cache.buffer.zero_()
        return cache

    @cached_property
    def rows(self) -> list[Tensor]:
        """What is cached: ``[end, L+R]`` of each request, at the end of the step."""
        packed = self.randn(2, sum(_ENDS), _LATENT + _ROPE)
        return list(packed.float().to(self.compute).split_with_sizes(_ENDS))

    @cached_property
    def full_view(self) -> kvkern.CacheView:
        """The step after its tokens were written; by the reference, unless plain fp32 is stored."""
        cache = self.empty_cache()
        if self.format_name == "fp32":
            layer = cache.layer(0)
            for pages, rows in zip(self.pages, self.rows, strict=True):
                for position, row in enumerate(rows.float()):
                    page, offset = pages[position // _PAGE_SIZE], position % _PAGE_SIZE
                    layer.latent[page, offset] = row[:_LATENT]
                    layer.rope[page, offset] = row[_LATENT:]
        else:
            rows = torch.cat(self.rows).float()  # in fp64, ties would be stored as other codes
            kvkern.write_kv(
                cache.view(0, self.batch((0,) * len(_ENDS), _ENDS)),
                rows,
                self.freqs,
                torch.ones_like(rows[0, :_LATENT]),
                backend="reference",
            )
        return cache.view(0, self.batch(_CACHED, _NEW))


def _largest(values: Tensor) -> float:
    return float(values.abs().max())  # NaN if there is any


def _flat(*tensors: Tensor) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


# Each op on a case: all that it gives, flat and in fp64.


def _write_kv(case: _Case, backend: str) -> Tensor:
    cache = case.empty_cache()
    kv, q_rope = case.randn(3, sum(_NEW), _LATENT + _ROPE), case.randn(4, sum(_NEW), _HEADS, _ROPE)
    kv_out, q_rope_out = torch.empty_like(kv), torch.empty_like(q_rope)
    kvkern.write_kv(
        cache.view(0, case.batch(_CACHED, _NEW)),
        kv,
        case.freqs,
        case.randn(5, _LATENT),
        q_rope=q_rope,
        q_rope_out=q_rope_out,
        kv_out=kv_out,
        backend=backend,
    )
    # stored numbers of fp32, otherwise bytes
    stored = cache.layer(0) if case.format_name == "fp32" else None
    written = (cache.buffer,) if stored is None else (stored.latent, stored.rope)
    return _flat(*written, q_rope_out, kv_out)


def _mla_decode(case: _Case, backend: str) -> Tensor:
    q = case.randn(6, sum(_NEW), _HEADS, _LATENT + _ROPE)
    return _flat(*kvkern.mla_decode(q, case.full_view, softmax_scale=_SCALE, backend=backend))


def _prefill_weights(case: _Case) -> tuple[Tensor, Tensor]:
    weight = case.randn(7, _HEADS * (_NOPE + _VALUE), _LATENT) / _LATENT**0.5
    return kvkern.absorb_weights(weight, num_heads=_HEADS, nope_dim=_NOPE, v_dim=_VALUE)


def _mla_prefill(case: _Case, backend: str) -> Tensor:
    w_uk, w_uv = _prefill_weights(case)
    new = torch.cat([rows[cached:] for rows, cached in zip(case.rows, _CACHED, strict=True)])
    latent, k_rope = new[:, :_LATENT], new[:, _LATENT:]
    attended = kvkern.mla_prefill(
        case.randn(8, sum(_NEW), _HEADS, _NOPE + _ROPE),
        torch.einsum("tl,hnl->thn", latent, w_uk).contiguous(),
        k_rope,
        torch.einsum("tl,hlv->thv", latent, w_uv).contiguous(),
        case.full_view,
        softmax_scale=_SCALE,
        w_uk=w_uk,
        w_uv=w_uv,
        context_chunk=5,
        backend=backend,
    )
    return _flat(*attended)


def _scores_and_values(case: _Case) -> tuple[Tensor, Tensor]:
    """Of 5 queries and 3 heads, on 12 keys."""
    return case.randn(9, 12, 5, 3), case.randn(10, 12, 5, 3, _VALUE)


def _mla_absorb(case: _Case, backend: str) -> Tensor:
    """Weights of x's dtype, then in e4m3 with each kind of scale."""
    x, weight = _absorbed(case)
    products = [kvkern.mla_absorb(x, weight.to(x.dtype), backend=backend)]
    for name in _CELLS:
        values, scale = kvkern.quantize_fp8(weight.mT, granularity=name, backend="reference")
        scale = scale if name == "tensor" else scale.mT
        products.append(kvkern.mla_absorb(x, values.mT, scale=scale, backend=backend))
    return _flat(*products)


def _absorbed(case: _Case) -> tuple[Tensor, Tensor]:
    """7 tokens of 3 heads, and the weights 3 x 192 x 128."""
    x, weight = case.randn(15, 7, _HEADS, 192), case.randn(16, _HEADS, 128, 192).bfloat16()
    return x, weight.mT


def _merge_states(case: _Case, backend: str) -> Tensor:
    scores, values = (x.double() for x in _scores_and_values(case))
    parts = [slice(0, 1), slice(1, 8), slice(8, 12)]
    outs = [(scores[p].softmax(0)[..., None] * values[p]).sum(0) for p in parts]
    lses = [scores[p].logsumexp(0) for p in parts]
    empty = torch.full_like(outs[0], torch.nan), torch.full_like(lses[0], -torch.inf)
    merged = kvkern.merge_states(
        torch.stack([*outs, empty[0]]).to(case.rounded).to(case.compute),
        torch.stack([*lses, empty[1]]).float(),
        backend=backend,
    )
    return _flat(*merged)


def _gather_kv(case: _Case, backend: str) -> Tensor:
    dtype = torch.float32 if case.compute == torch.float64 else case.compute
    return _flat(kvkern.gather_kv(case.full_view, dtype=dtype, backend=backend))


def _copy_pages(case: _Case, backend: str) -> Tensor:
    cache = case.empty_cache()
    cache.buffer.copy_(_random_bytes(cache))
    kvkern.copy_pages(cache, cache, [3, 0, 9], [5, 15, 1], backend=backend).wait()
    return _flat(cache.buffer)


def _random_bytes(cache: kvkern.PagedKVCache) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    values = torch.randint(256, (cache.num_bytes,), generator=generator, dtype=torch.uint8)
    return values.to(cache.device)


def _numbers_to_quantize(case: _Case) -> Tensor:
    x = case.randn(12, 130, 200)
    return x.float() if case.compute == torch.float64 else x


def _quantize_fp8(case: _Case, backend: str) -> Tensor:
    x = _numbers_to_quantize(case)
    cells = [kvkern.quantize_fp8(x, granularity=name, backend=backend) for name in _CELLS]
    return _flat(*(values.float() for values, _ in cells), *(scale for _, scale in cells))


def _dequantize_fp8(case: _Case, backend: str) -> Tensor:
    x = _numbers_to_quantize(case)
    cells = [kvkern.quantize_fp8(x, granularity=name, backend="reference") for name in _CELLS]
    return _flat(*(kvkern.dequantize_fp8(*q, dtype=x.dtype, backend=backend) for q in cells))


def _scaled_mm(case: _Case, backend: str) -> Tensor:
    """Each pair of scales."""
    out_dtype, products = case.compute, []
    for of_a, of_b in _SCALE_PAIRS:
        a, b = _matrices(case, of_a, of_b)
        scale_b = b.scale if of_b == "tensor" else b.scale.mT
        products.append(
            kvkern.scaled_mm(
                a.values, b.values.mT, a.scale, scale_b, out_dtype=out_dtype, backend=backend
            )
        )
    return _flat(*products)


_SCALE_PAIRS: tuple[tuple[Granularity, Granularity], ...] = (
    ("tensor", "tensor"),
    ("row", "row"),
    ("group", "block"),
    ("group", "group"),
)


def _matrices(
    case: _Case, of_a: Granularity, of_b: Granularity
) -> tuple[kvkern.QuantizedFP8, kvkern.QuantizedFP8]:
    """130 x 256 and the weight 96 x 256."""
    x, weight = case.randn(13, 130, 256).bfloat16(), case.randn(14, 96, 256).bfloat16()
    return (
        kvkern.quantize_fp8(x, granularity=of_a, backend="reference"),
        kvkern.quantize_fp8(weight, granularity=of_b, backend="reference"),
    )


def _rms_norm_quant_fp8(case: _Case, backend: str) -> Tensor:
    x, gamma, residual = _numbers_to_norm(case)
    real = []
    for name, y in zip(_ROW_CELLS, _normed(case)[1:], strict=True):
        quantized = kvkern.rms_norm_quant_fp8(
            x, gamma, residual=residual, granularity=name, backend=backend
        )
        real.append(_real_if_settled(quantized, y, name))
    return _flat(residual, *real)


def _silu_and_mul_quant_fp8(case: _Case, backend: str) -> Tensor:
    x, y = _numbers_to_quantize(case), _gated(case)
    run = kvkern.silu_and_mul_quant_fp8
    cells = {name: run(x, granularity=name, backend=backend) for name in _ROW_CELLS}
    return _flat(*(_real_if_settled(quantized, y, name) for name, quantized in cells.items()))


def _numbers_to_norm(case: _Case) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float32 if case.compute == torch.float64 else case.compute
    x, gamma, residual = case.randn(13, 130, 200), case.randn(14, 200), case.randn(15, 130, 200)
    return x.to(dtype), gamma.to(dtype), residual.to(dtype)


def _real_if_settled(quantized: kvkern.QuantizedFP8, y: Tensor, name: RowGranularity) -> Tensor:
    """0 where y is so near to the middle of two codes that a last bit decides."""
    scale = kvkern.quantize_fp8(y.float(), granularity=name, backend="reference").scale
    below, above = (
        kvkern.quantize_fp8(near.float(), granularity=name, scale=scale, backend="reference")
        for near in (y * (1 - 1e-5), y * (1 + 1e-5))
    )
    real = kvkern.dequantize_fp8(*quantized, dtype=torch.float32, backend="reference")
    return real.where(below.values.float() == above.values.float(), 0.0)


def _quantize_int(case: _Case, backend: str, *, bits: int) -> Tensor:
    """As real numbers: with a zero point and without."""
    weights = _int_weights(case, bits, backend)
    return _flat(*(_dequantized(weight, torch.float32, "reference") for weight in weights))


def _dequantize_int(case: _Case, backend: str, *, bits: int) -> Tensor:
    dtype = torch.float32 if case.compute == torch.float64 else case.compute
    weights = _int_weights(case, bits, "reference")
    return _flat(*(_dequantized(weight, dtype, backend) for weight in weights))


def _matmul_int(case: _Case, backend: str, *, bits: int) -> Tensor:
    x, products = case.randn(13, 5, 200), []
    for weight in _int_weights(case, bits, "reference"):
        if isinstance(weight, kvkern.QuantizedInt8):
            products.append(kvkern.matmul_w8a16(x, weight, backend=backend))
        else:
            products.append(kvkern.matmul_w4a16(x, weight, backend=backend))
    return _flat(*products)


def _matmul_w8a8(case: _Case, backend: str) -> Tensor:
    x, weights = case.randn(13, 5, 200), _int_weights(case, 8, "reference")
    return _flat(
        *(
            kvkern.matmul_w8a8(x, weight, backend=backend)
            for weight in weights
            if isinstance(weight, kvkern.QuantizedInt8)
        )
    )


_IntWeight = kvkern.QuantizedInt8 | kvkern.QuantizedInt4


def _int_weights(case: _Case, bits: int, backend: str) -> list[_IntWeight]:
    x = _numbers_to_quantize(case)
    quantize = kvkern.quantize_int8 if bits == 8 else kvkern.quantize_int4
    return [quantize(x, symmetric=symmetric, backend=backend) for symmetric in (True, False)]


def _dequantized(weight: _IntWeight, dtype: torch.dtype, backend: str) -> Tensor:
    if isinstance(weight, kvkern.QuantizedInt8):
        return kvkern.dequantize_int8(weight, dtype=dtype, backend=backend)
    return kvkern.dequantize_int4(weight, dtype=dtype, backend=backend)


# The same in other words. Cases here are fp64 over an fp32 cache.


def _plain_write_kv(case: _Case) -> Tensor:
    """Pairs as complex numbers, the norm as a length."""
    kv, q_rope = case.randn(3, sum(_NEW), _LATENT + _ROPE), case.randn(4, sum(_NEW), _HEADS, _ROPE)
    cache = case.empty_cache()
    layer = cache.layer(0)
    turns = torch.view_as_complex(case.freqs.double().unflatten(1, (-1, 2)))

    def rotate(x: Tensor, position: int) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns[position]).flatten(-2)

    queries: list[Tensor] = []
    keys: list[Tensor] = []
    for request, (cached, new) in enumerate(zip(_CACHED, _NEW, strict=True)):
        for position in range(cached, cached + new):
            row, query = kv[len(keys)], q_rope[len(keys)]
            length = (row[:_LATENT].square().sum() + _LATENT * 1e-6).sqrt()
            latent = row[:_LATENT] / length * _LATENT**0.5 * case.randn(5, _LATENT)
            keys.append(torch.cat([latent, rotate(row[_LATENT:], position)]))
            queries.append(rotate(query, position))
            page, offset = case.pages[request][position // _PAGE_SIZE], position % _PAGE_SIZE
            layer.latent[page, offset] = keys[-1][:_LATENT].float()
            layer.rope[page, offset] = keys[-1][_LATENT:].float()
    return _flat(layer.latent, layer.rope, torch.stack(queries), torch.stack(keys))


def _plain_mla_decode(case: _Case) -> Tensor:
    """One token and one head at a time."""
    q = case.randn(6, sum(_NEW), _HEADS, _LATENT + _ROPE)
    outs, lses, token = [], [], 0
    for rows, cached, new in zip(case.rows, _CACHED, _NEW, strict=True):
        for position in range(cached, cached + new):
            keys = rows[: position + 1]
            for head in range(_HEADS):
                weights = (keys @ q[token, head] * _SCALE).exp()
                outs.append(weights @ keys[:, :_LATENT] / weights.sum())
                lses.append(weights.sum().log())
            token += 1
    return _flat(torch.stack(outs), torch.stack(lses))


def _absorbed_mla_prefill(case: _Case) -> Tensor:
    """As decode: queries go into the latent space, outputs come back from it."""
    w_uk, w_uv = _prefill_weights(case)
    q_nope, q_rope = case.randn(8, sum(_NEW), _HEADS, _NOPE + _ROPE).split([_NOPE, _ROPE], -1)
    absorbed = torch.cat([torch.einsum("thn,hnl->thl", q_nope, w_uk), q_rope], dim=-1)
    latent, lse = kvkern.mla_decode(
        absorbed, case.full_view, softmax_scale=_SCALE, backend="reference"
    )
    return _flat(torch.einsum("thl,hlv->thv", latent, w_uv), lse)


def _whole_softmax(case: _Case) -> Tensor:
    """All keys at once."""
    scores, values = _scores_and_values(case)
    return _flat((scores.softmax(0)[..., None] * values).sum(0), scores.logsumexp(0))


def _padded_rows(case: _Case) -> Tensor:
    return _flat(torch.nn.utils.rnn.pad_sequence(case.rows, batch_first=True))


def _copied_pages(case: _Case) -> Tensor:
    pages = list(_random_bytes(case.empty_cache()).chunk(_NUM_PAGES))
    for source, target in ((3, 5), (0, 15), (9, 1)):
        pages[target] = pages[source]
    return _flat(*pages)


def _nearest_in_table(case: _Case) -> Tensor:
    """The nearest of all numbers that e4m3 has."""
    codes = torch.arange(256, dtype=torch.uint8, device=case.device).view(torch.float8_e4m3fn)
    numbers = codes.float()[codes.float().isfinite()].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = _numbers_to_quantize(case)
    stored, scales = [], []
    for cell in _CELLS.values():
        values = torch.empty_like(x)
        for part, rounded in zip(_parts(x, cell), _parts(values, cell), strict=True):
            scales.append(part.abs().max() / torch.full_like(part[0, 0], 448))
            rounded.copy_(numbers[torch.bucketize(part * (1 / scales[-1]), middles)])
        stored.append(values)
    return _flat(*stored, torch.stack(scales))


def _times_scale(case: _Case) -> Tensor:
    x, real = _numbers_to_quantize(case), []
    for name, cell in _CELLS.items():
        values, scale = kvkern.quantize_fp8(x, granularity=name, backend="reference")
        product = values.double()
        for part, of_cell in zip(_parts(product, cell), scale.flatten(), strict=True):
            part *= of_cell
        real.append(product)
    return _flat(*real)


def _products_of_real_numbers(case: _Case) -> Tensor:
    """Dequantised first, by cells."""
    products = []
    for of_a, of_b in _SCALE_PAIRS:
        real = []
        for (values, scale), name in zip(_matrices(case, of_a, of_b), (of_a, of_b), strict=True):
            product = values.double()
            cell = {"tensor": (len(values), 256), "row": (1, 256)}.get(name, _CELLS[name])
            for part, of_cell in zip(_parts(product, cell), scale.flatten(), strict=True):
                part *= of_cell
            real.append(product)
        products.append((real[0][:, None] * real[1]).sum(-1))
    return _flat(*products)


def _absorbed_head_by_head(case: _Case) -> Tensor:
    """Dequantised first, by cells."""
    x, weight = _absorbed(case)
    products = [_by_heads(x, weight.to(x.dtype))]
    for name, cell in _CELLS.items():
        values, scale = kvkern.quantize_fp8(weight.mT, granularity=name, backend="reference")
        real = values.double()
        scales = scale.expand(_HEADS) if name == "tensor" else scale.flatten()
        parts = [part for head in real for part in _parts(head, cell)]
        for part, of_cell in zip(parts, scales, strict=True):
            part *= of_cell
        products.append(_by_heads(x, real.mT))
    return _flat(*products)


def _by_heads(x: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([x[:, head] @ weight[head] for head in range(_HEADS)], dim=1)


def _normed(case: _Case) -> list[Tensor]:
    """The sums, the norm as a length, and that of what is left when x has been added again."""
    x, gamma, sums = _numbers_to_norm(case)
    normed = []
    for _ in _ROW_CELLS:
        sums = (x.double() + sums.double()).to(x.dtype)
        length = (sums.double().square().sum(-1, keepdim=True) + 200e-6).sqrt()
        normed.append(sums.double() / length * 200**0.5 * gamma.double())
    return [sums, *normed]


def _gated(case: _Case) -> Tensor:
    """silu by the hyperbolic tangent."""
    gate, up = _numbers_to_quantize(case).double().split(100, dim=-1)
    y: Tensor = gate * (1 + torch.tanh(gate / 2)) / 2 * up
    return y


def _quantized_norms(case: _Case) -> Tensor:
    sums, *normed = _normed(case)
    return _flat(sums, *map(_there_and_back, normed, _ROW_CELLS))


def _quantized_products(case: _Case) -> Tensor:
    return _flat(*(_there_and_back(_gated(case), name) for name in _ROW_CELLS))


def _there_and_back(y: Tensor, name: RowGranularity) -> Tensor:
    quantized = kvkern.quantize_fp8(y.float(), granularity=name, backend="reference")
    return _real_if_settled(quantized, y, name)


def _torch_int(case: _Case, *, bits: int) -> Tensor:
    return _flat(*_torch_int_weights(case, bits))


def _torch_int_product(case: _Case, *, bits: int) -> Tensor:
    x = case.randn(13, 5, 200)
    return _flat(*(x @ weight.double().T for weight in _torch_int_weights(case, bits)))


def _torch_w8a8(case: _Case) -> Tensor:
    x = _torch_quantized(case.randn(13, 5, 200).float(), 8, symmetric=True)
    weights = _torch_int_weights(case, 8)
    return _flat(*(x.double() @ weight.double().T for weight in weights))


def _torch_int_weights(case: _Case, bits: int) -> list[Tensor]:
    """By PyTorch's own rounding, as training has it; groups of 128 columns as rows."""
    x, size = _numbers_to_quantize(case), 200 if bits == 8 else 128
    groups = torch.nn.functional.pad(x, (0, -200 % size)).view(-1, size)
    both = (_torch_quantized(groups, bits, symmetric=symmetric) for symmetric in (True, False))
    return [real.view(130, -1)[:, :200] for real in both]


def _torch_quantized(rows: Tensor, bits: int, *, symmetric: bool) -> Tensor:
    low, high = -(2 ** (bits - 1)) + symmetric, 2 ** (bits - 1) - 1
    least, most = (torch.full_like(rows[:, 0], end) for end in (low, high))
    if symmetric:
        scale, zero = rows.abs().amax(1) / most, torch.zeros_like(most)
    else:
        steps = torch.full_like(most, high - low)
        scale = rows.amax(1) / steps - rows.amin(1) / steps
        zero = torch.round(-rows.amin(1) * (1 / scale)) + least
    return torch.fake_quantize_per_channel_affine(rows, scale, zero.int(), 0, low, high)


def _parts(x: Tensor, cell: tuple[int, int]) -> Iterator[Tensor]:
    for rows in x.split(cell[0]):
        yield from rows.split(cell[1], dim=1)


_OPS: dict[str, Callable[[_Case, str], Tensor]] = {
    "write_kv": _write_kv,
    "mla_decode": _mla_decode,
    "mla_prefill": _mla_prefill,
    "mla_absorb": _mla_absorb,
    "merge_states": _merge_states,
    "gather_kv": _gather_kv,
    "copy_pages": _copy_pages,
    "quantize_fp8": _quantize_fp8,
    "dequantize_fp8": _dequantize_fp8,
    "scaled_mm": _scaled_mm,
    "rms_norm_quant_fp8": _rms_norm_quant_fp8,
    "silu_and_mul_quant_fp8": _silu_and_mul_quant_fp8,
    "quantize_int8": partial(_quantize_int, bits=8),
    "quantize_int4": partial(_quantize_int, bits=4),
    "dequantize_int8": partial(_dequantize_int, bits=8),
    "dequantize_int4": partial(_dequantize_int, bits=4),
    "matmul_w8a16": partial(_matmul_int, bits=8),
    "matmul_w4a16": partial(_matmul_int, bits=4),
    "matmul_w8a8": _matmul_w8a8,
}
_SECOND_FORMULATIONS: dict[str, Callable[[_Case], Tensor]] = {
    "write_kv": _plain_write_kv,
    "mla_decode": _plain_mla_decode,
    "mla_prefill": _absorbed_mla_prefill,
    "mla_absorb": _absorbed_head_by_head,
    "merge_states": _whole_softmax,
    "gather_kv": _padded_rows,
    "copy_pages": _copied_pages,
    "quantize_fp8": _nearest_in_table,
    "dequantize_fp8": _times_scale,
    "scaled_mm": _products_of_real_numbers,
    "rms_norm_quant_fp8": _quantized_norms,
    "silu_and_mul_quant_fp8": _quantized_products,
    "quantize_int8": partial(_torch_int, bits=8),
    "quantize_int4": partial(_torch_int, bits=4),
    "dequantize_int8": partial(_torch_int, bits=8),
    "dequantize_int4": partial(_torch_int, bits=4),
    "matmul_w8a16": partial(_torch_int_product, bits=8),
    "matmul_w4a16": partial(_torch_int_product, bits=4),
    "matmul_w8a8": _torch_w8a8,
}
