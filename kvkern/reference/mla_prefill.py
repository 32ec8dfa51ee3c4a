"""mla_prefill: keys = [cached rows expanded by w_uk, w_uv | new keys]; causal softmax attention."""

import torch
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages
from kvkern.reference.mla_decode import attend, request_rows
from kvkern.reference.paging import place_tokens


def mla_prefill(
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor | None,
    v: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    softmax_scale: float,
    w_uk: Tensor | None,
    w_uv: Tensor | None,
    context_chunk: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """The specification; ``kvkern.mla_prefill`` states the contract. It needs no chunks."""
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    out.zero_()
    lse.fill_(-torch.inf)
    is_real = place_tokens(batch, pages.page_size, q.shape[0]).is_real
    offsets = batch.input_row_offsets.tolist()
    for request, cached in enumerate(batch.cache_lengths.tolist()):
        tokens = slice(offsets[request], offsets[request + 1])
        num_new = tokens.stop - tokens.start
        if num_new == 0:
            continue
        keys = _keys(k_nope[tokens], None if k_rope is None else k_rope[tokens]).to(compute)
        values = torch.where(is_real[tokens, None, None], v[tokens].to(compute), 0.0)
        visible = torch.ones(num_new, num_new, dtype=torch.bool, device=q.device).tril()
        visible = visible & is_real[tokens]
        if cached and w_uk is not None and w_uv is not None:
            rows, is_there = request_rows(pages, batch, request, cached, compute)
            latent, rope = rows.split([pages.format.kv_lora_rank, pages.format.rope_dim], dim=-1)
            nope = torch.einsum("sl,hnl->shn", latent, w_uk.to(compute))
            keys = torch.cat([_keys(nope, rope), keys])
            values = torch.cat([torch.einsum("sl,hlv->shv", latent, w_uv.to(compute)), values])
            visible = torch.cat([is_there.expand(num_new, -1), visible], dim=1)
        visible = visible & is_real[tokens, None]
        result = attend(q[tokens].to(compute), keys, values, visible, softmax_scale)
        out[tokens], lse[tokens] = result[0].to(q.dtype), result[1].float()


def _keys(nope: Tensor, rope: Tensor | None) -> Tensor:
    """``[s, H, N+R]``: the rope key [s, R] is the same for every head."""
    if rope is None:
        return nope
    return torch.cat([nope, rope[:, None].expand(-1, nope.shape[1], -1)], dim=-1)
