"""Other libraries, and kvkern's other kernels, on the same inputs, where they take the case.

What a library wants prepared (split or joined tensors, plans, schedules) is prepared outside the
timed call. ``$PEERS`` is the folder of the libraries that are loaded from a file.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import absorb, matmul
from benchmarks.cases import DecodeStep, Implementation, PrefillStep, Step, WriteStep
from benchmarks.linear import LinearStep, cublas
from kvkern import explain
from kvkern.layout import E4M3_MAX, MIN_GROUP_SCALE, CacheFormat
from kvkern.reference.paging import place_tokens

_E4M3 = torch.float8_e4m3fn
_ERRORS = (  # what importing, compiling and calling somebody else's code raises
    AssertionError,
    AttributeError,
    ImportError,
    OSError,
    RuntimeError,
    subprocess.SubprocessError,
    TypeError,
    ValueError,
)


def peers_of(
    step: Step | matmul.MatmulStep | absorb.AbsorbStep | LinearStep,
) -> Iterator[Implementation | str]:
    """Each peer that takes the case, called once; or a line that says why it isn't here."""
    for make in _PEERS[step.case.op]:
        try:
            peer = make(step)
            if peer is not None:
                if peer.first is not None:
                    peer.first()
                peer.call()
                if step.device.type == "cuda":
                    torch.cuda.synchronize()
                yield peer
        except _ERRORS as error:
            reason = (str(error).splitlines() or [""])[0]
            yield f"{make.__name__}: not here: {type(error).__name__}: {reason[:160]}"


def separate_launches(step: WriteStep) -> Implementation | None:
    """RMSNorm, RoPE of the key, RoPE of the query, quantise and store, each torch.compile'd."""
    if step.case.cache_format.is_packed or step.case.packed_query:
        return None
    torch.compiler.reset()  # or shapes pile up until the compiler gives in
    norm, rotate, store = (torch.compile(f, dynamic=False) for f in (_norm, _rotate, _store))
    fmt, cache = step.case.cache_format, step.new_cache()
    pages, q_rope_out = cache.layer(0), step.rope_columns(step.new_q_packed())
    latents, ropes = (torch.zeros_like(x).flatten(0, 1) for x in (pages.latent, pages.rope))
    scales = pages.group_scales
    scales = None if scales is None else torch.zeros_like(scales).flatten(0, 1)
    places = place_tokens(step.batch, pages.page_size, step.case.num_tokens)
    latent, k_rope = step.kv.tensor_split([fmt.kv_lora_rank], dim=-1)
    rotated = torch.empty_like(k_rope)
    fields = (_bytes_if_e4m3(latents), _bytes_if_e4m3(ropes), scales)

    def call() -> None:
        normed = norm(latent, step.gamma)
        rotate(k_rope[:, None], step.freqs, places.positions, rotated[:, None])
        rotate(step.q_rope, step.freqs, places.positions, q_rope_out)
        store(*fields, places.slots, normed, rotated, pages.layer_scales, fmt)

    def check() -> None:
        call()
        pages.latent.copy_(latents.view(pages.latent.shape))
        pages.rope.copy_(ropes.view(pages.rope.shape))
        if pages.group_scales is not None:
            pages.group_scales.copy_(scales.view(pages.group_scales.shape))
        step.check_rounded_elsewhere(cache, q_rope_out)

    return Implementation("separate_launches", call, check)


def _norm(latent: Tensor, gamma: Tensor) -> Tensor:
    x = latent.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gamma.float()
    return x.to(latent.dtype)


def _rotate(x: Tensor, freqs: Tensor, positions: Tensor, out: Tensor) -> None:
    cos, sin = freqs[positions][:, None].unflatten(-1, (-1, 2)).unbind(-1)
    a, d = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    out.copy_(torch.stack([a * cos - d * sin, a * sin + d * cos], dim=-1).flatten(-2))


def _store(
    latents: Tensor,  # uint8 here and below: e4m3
    ropes: Tensor,
    scales: Tensor | None,
    slots: Tensor,
    latent: Tensor,
    rope: Tensor,
    layer_scales: Tensor | None,
    fmt: CacheFormat,
) -> None:
    latent, rope = latent.float(), rope.float()
    if scales is not None:
        groups = latent.unflatten(-1, (-1, fmt.group_size))
        group_scales = (groups.abs().amax(-1) / E4M3_MAX).clamp(min=MIN_GROUP_SCALE)
        if not fmt.token_scaled:
            group_scales = torch.exp2(torch.ceil(torch.log2(group_scales)))
        scales[slots] = group_scales
        latent = (groups / group_scales[..., None]).flatten(-2)
    if layer_scales is not None:
        latent, rope = latent / layer_scales[0], rope / layer_scales[1]
    for field, values in ((latents, latent), (ropes, rope)):
        if field.dtype == torch.uint8:
            stored = values.clamp(-E4M3_MAX, E4M3_MAX).to(_E4M3).view(torch.uint8)
        else:
            stored = values.to(field.dtype)
        field[slots] = stored


def _bytes_if_e4m3(field: Tensor) -> Tensor:
    return field.view(torch.uint8) if field.dtype == _E4M3 else field


def flashinfer_write(step: WriteStep) -> Implementation | None:
    """FlashInfer's RMSNorm, then its fused RoPE, quantisation and store of an fp8 cache."""
    if step.case.format != "fp8":
        return None
    from flashinfer.norm import rmsnorm
    from flashinfer.rope import rope_quantize_fp8_append_paged_kv_cache

    case, rank, pages = step.case, step.case.model.kv_lora_rank, step.view.pages
    q_rope = step.q_rope.contiguous()
    q_nope = step.randn(case.num_tokens, case.model.num_heads, rank)
    latent, k_rope = (x.contiguous() for x in step.kv.tensor_split([rank], dim=-1))
    normed = torch.empty_like(latent)
    cos_sin = torch.cat([step.freqs[:, 0::2], step.freqs[:, 1::2]], dim=-1)
    fields = tuple(torch.zeros_like(x).contiguous() for x in (pages.latent, pages.rope))
    positions = place_tokens(step.batch, pages.page_size, case.num_tokens).positions.int()
    requests = torch.arange(case.num_requests, dtype=torch.int32, device=step.device)
    requests = requests.repeat_interleave(case.query_len)
    indices, indptr = _page_indices(step), _page_indptr(step)
    quant_scale = 1 / step.cache.host_scales[-1][0]

    def call() -> object:
        rmsnorm(latent, step.gamma, 1e-6, out=normed)
        return rope_quantize_fp8_append_paged_kv_cache(
            q_rope, k_rope, q_nope, normed, None, cos_sin, positions, fields, indices, indptr,
            requests, positions, is_neox=False, quant_scale_kv=quant_scale,
            page_size=pages.page_size,
        )  # fmt: skip

    note = "" if case.packed_query else "other work: all of q in fp8"
    return Implementation("flashinfer", call, None, note)


def kvkern_hopper(step: DecodeStep) -> Implementation | None:
    """kvkern's Gluon kernels, where ``auto`` takes others."""
    return _named(step, "hopper")


def kvkern_triton(step: DecodeStep) -> Implementation | None:
    """kvkern's portable kernel, where ``auto`` takes another."""
    return _named(step, "triton")


def kvkern_invariant(step: DecodeStep) -> Implementation | None:
    """Keys cut at fixed positions: what a token's bits not depending on its batch costs."""
    if step.device.type != "cuda":
        return None
    return step.by("kvkern_invariant", deterministic="batch_invariant")


def kvkern_fast(step: DecodeStep) -> Implementation | None:
    """Sums over keys within fp8 tensor cores, as other libraries' fp8 kernels have them."""
    if step.device.type != "cuda" or step.case.format != "fp8":
        return None
    return step.by("kvkern_fast", use_fast_accum=True)


def kvkern_fp8_query(step: DecodeStep) -> Implementation | None:
    """The query in e4m3, as ``write_kv`` can make it and fp8 kernels elsewhere want it."""
    if step.device.type != "cuda" or step.case.format != "fp8":
        return None
    q, q_scale = step.q.to(_E4M3), torch.ones(1, device=step.device)
    mine = step.by("kvkern_fp8_query", q=q, q_scale=q_scale)

    def check() -> None:
        assert mine.first is not None
        mine.first()
        step.check(mine.call(), q=q.to(step.q.dtype))

    return mine._replace(check=check, note="fp8 query")


def _named(step: DecodeStep, backend: str) -> Implementation | None:
    if step.device.type != "cuda":
        return None
    rows = explain("mla_decode", step.device, step.q.dtype)
    if next(name for name, reason in rows if reason is None) == backend:
        return None
    return step.by(f"kvkern_{backend}", backend=backend)


def flash_mla(step: DecodeStep) -> Implementation | None:
    """FlashMLA, dense."""
    if step.case.format != "bf16" or step.case.page_size != 64:
        return None
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    table, lengths, (schedule, _) = _table(step), _seq_lens(step), get_mla_metadata()
    rank, scale = step.case.model.kv_lora_rank, step.case.model.softmax_scale
    q, pages = _by_request(step.q, step), _joined_pages(step)

    def call() -> Tensor:
        return flash_mla_with_kvcache(
            q, pages, table, lengths, rank, schedule, softmax_scale=scale, causal=True
        )[0]

    return Implementation("flash_mla", call, lambda: step.check([call().flatten(0, 1)]))


def flashinfer_mla(step: DecodeStep) -> Implementation | None:
    """FlashInfer's paged MLA, for Hopper."""
    if step.case.format != "bf16":
        return None
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    model, pages = step.case.model, step.view.pages
    workspace = torch.empty(512 << 20, dtype=torch.int8, device=step.device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
    wrapper.plan(
        _q_indptr(step), _page_indptr(step), _page_indices(step), _seq_lens(step),
        model.num_heads, model.kv_lora_rank, model.rope_dim, pages.page_size, True,
        model.softmax_scale, step.q.dtype, pages.latent.dtype,
    )  # fmt: skip
    q_nope, q_rope = _split_q(step)

    def call() -> Tensor:
        return wrapper.run(q_nope, q_rope, pages.latent, pages.rope)

    return Implementation("flashinfer", call, lambda: step.check([call()]))


def fa3_mla(step: DecodeStep) -> Implementation | None:
    """FlashAttention 3 as vLLM builds it: the rope columns are q and k, the latent is q_v and v."""
    if step.case.format != "bf16":
        return None
    ops, case, model = _load("_vllm_fa3_C"), step.case, step.case.model
    q_nope, q_rope = _split_q(step)
    latent, k_rope = _joined_pages(step).tensor_split([model.kv_lora_rank], dim=-1)
    lengths, indptr, table = _seq_lens(step), _q_indptr(step), _table(step)
    max_lens = (case.query_len, int(case.seq_lens.max()))
    schedule = ops.get_scheduler_metadata(
        case.num_requests, *max_lens, model.num_heads, 1, model.rope_dim, model.kv_lora_rank,
        step.q.dtype, lengths, indptr, *[None] * 4, case.page_size, 0, True, -1, -1, False, 0,
        None, 0,
    )  # fmt: skip

    def call() -> Tensor:
        return _fa3(
            ops, (q_rope, k_rope, latent), q_nope, indptr, None, lengths, max_lens, table,
            model.softmax_scale, schedule,
        )  # fmt: skip

    return Implementation("fa3", call, lambda: step.check([call()]))


def flash_mla_fp8(step: DecodeStep) -> Implementation | None:
    """The dense fp8 decode of vLLM's fork of FlashMLA; its query is fp8 too."""
    if step.case.format != "fp8" or step.case.page_size != 64:
        return None
    ops, case, model = _load("_flashmla_extension_C"), step.case, step.case.model
    q8, table, lengths = step.q.to(_E4M3), _table(step), _seq_lens(step)
    q, pages = _by_request(q8, step), _joined_pages(step)
    descale_q = torch.ones(1, device=step.device)
    descale_k = descale_q * step.cache.host_scales[-1][0]
    schedule = ops.get_mla_decoding_metadata_dense_fp8(lengths, model.num_heads * case.query_len, 1)

    def call() -> Tensor:
        return ops.fwd_kvcache_mla_fp8(
            q, pages, model.kv_lora_rank, lengths, table, model.softmax_scale, True, *schedule,
            descale_q, descale_k,
        )[0]  # fmt: skip

    def check() -> None:
        step.check([call().flatten(0, 1)], q=q8.to(step.q.dtype))

    return Implementation("flash_mla_fp8", call, check, "fp8 query")


def fa3_prefill(step: PrefillStep) -> Implementation | None:
    """FlashAttention 3 on keys with the rope key copied to every head."""
    if step.case.cached_len:
        return None
    ops, indptr, qkv = _load("_vllm_fa3_C"), _q_indptr(step), _joined_qkv(step)
    max_lens, scale = (step.case.query_len,) * 2, step.case.model.softmax_scale

    def call() -> Tensor:
        return _fa3(ops, qkv, None, indptr, indptr, None, max_lens, None, scale, None)

    return Implementation("fa3", call, lambda: step.check([call()]), "keys joined beforehand")


def cudnn_prefill(step: PrefillStep) -> Implementation | None:
    """cuDNN as PyTorch calls it, on keys with the rope key copied to every head."""
    if step.case.cached_len:
        return None
    q, k, v = (_by_request(x, step).transpose(1, 2) for x in _joined_qkv(step))
    scale, attend = (
        step.case.model.softmax_scale,
        torch.ops.aten._scaled_dot_product_cudnn_attention,
    )

    def call() -> Tensor:
        return attend(q, k, v, None, False, 0.0, True, False, scale=scale)[0]

    def check() -> None:
        step.check([call().transpose(1, 2).flatten(0, 1)])

    return Implementation("cudnn", call, check, "keys joined beforehand")


def _fa3(
    ops: Any,
    qkv: tuple[Tensor, ...],
    q_v: Tensor | None,
    q_indptr: Tensor,
    k_indptr: Tensor | None,
    lengths: Tensor | None,
    max_lens: tuple[int, int],
    table: Tensor | None,
    scale: float,
    schedule: Tensor | None,
) -> Tensor:
    """FlashAttention 3, causal; all its options go by position."""
    new_kv, cos_sin_and_the_like, descales, no_window = [None] * 2, [None] * 5, [None] * 3, [-1] * 2
    return ops.fwd(
        *qkv, *new_kv, q_v, None, q_indptr, k_indptr, None, None, lengths, *max_lens, table,
        *cos_sin_and_the_like, *descales, scale, True, *no_window, 0.0, True, schedule, 0, None, 0,
        None, 1, 0, None,
    )[0]  # fmt: skip


def _load(library: str) -> Any:
    torch.ops.load_library(str(Path(os.environ.get("PEERS", ".")) / f"{library}.abi3.so"))
    return getattr(torch.ops, library)


def _split_q(step: DecodeStep) -> tuple[Tensor, Tensor]:
    nope, rope = step.q.tensor_split([step.case.model.kv_lora_rank], dim=-1)
    return nope.contiguous(), rope.contiguous()


def _by_request(packed: Tensor, step: Step) -> Tensor:
    return packed.unflatten(0, (-1, step.case.query_len))


def _joined_pages(step: DecodeStep) -> Tensor:
    """``[P, page_size, 1, L+R]``: latent and rope key lie side by side."""
    return step.cache.storage[-1].view(step.view.pages.latent.dtype)[:, :, None]


def _joined_qkv(step: PrefillStep) -> tuple[Tensor, Tensor, Tensor]:
    k_rope = step.k_rope[:, None].expand(-1, step.case.model.num_heads, -1)
    return step.q, torch.cat([step.k_nope, k_rope], dim=-1), step.v


def _seq_lens(step: Step) -> Tensor:
    return step.batch.cache_lengths + step.case.query_len


def _q_indptr(step: Step) -> Tensor:
    return step.batch.input_row_offsets.clone()  # aligned, which a part of the batch's buffer isn't


def _table(step: Step) -> Tensor:
    """Padded with page 0: a library may look up what lies past a request's end."""
    return step.batch.page_table.clamp(min=0)


def _page_indices(step: Step) -> Tensor:
    """The pages in use, request by request, without padding."""
    return step.batch.page_table[step.batch.page_table >= 0]


def _page_indptr(step: Step) -> Tensor:
    counts = (step.batch.page_table >= 0).sum(1, dtype=torch.int32)
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


_PEERS: dict[str, tuple[Callable[..., Implementation | None], ...]] = {
    "write_kv": (separate_launches, flashinfer_write),
    "mla_decode": (
        kvkern_hopper,
        kvkern_triton,
        kvkern_invariant,
        kvkern_fast,
        kvkern_fp8_query,
        flash_mla,
        flashinfer_mla,
        fa3_mla,
        flash_mla_fp8,
    ),
    "mla_prefill": (fa3_prefill, cudnn_prefill),
    "scaled_mm": matmul.PEERS,
    "mla_absorb": absorb.PEERS,
    "matmul_w8a16": (cublas,),
    "matmul_w4a16": (cublas,),
    "matmul_w8a8": (cublas,),
}
