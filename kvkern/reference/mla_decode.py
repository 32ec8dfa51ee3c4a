"""mla_decode: out_t = softmax(scale * q_t . rows[0..pos_t]) . latents[0..pos_t]."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages
from kvkern.reference.paging import place_tokens, read_rows

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def mla_decode(
    q: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    softmax_scale: float,
    num_splits: int | None,
    is_batch_invariant: bool,
    use_fast_accum: bool,
    out: Tensor,
    lse: Tensor,
    *,
    attend_to: Attend | None = None,
) -> None:
    """The specification; ``kvkern.mla_decode`` states the contract. Nothing is split here.

    Batch-invariant, each token is attended by itself: a product's bits may depend on its shape.
    ``attend_to`` takes the place of ``attend``.
    """
    attend_to = attend_to or attend
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    out.zero_()
    lse.fill_(-torch.inf)
    places = place_tokens(batch, pages.page_size, q.shape[0])
    offsets = batch.input_row_offsets.tolist()
    for request, cached in enumerate(batch.cache_lengths.tolist()):
        start, stop = offsets[request : request + 2]
        if start == stop:
            continue
        rows, is_there = request_rows(pages, batch, request, cached + stop - start, compute)
        for first in range(start, stop, 1 if is_batch_invariant else stop - start):
            tokens = slice(first, first + 1 if is_batch_invariant else stop)
            keys = rows[: cached + tokens.stop - start]
            key_positions = torch.arange(len(keys), device=q.device)
            visible = key_positions <= places.positions[tokens, None]
            visible &= is_there[: len(keys)] & places.is_real[tokens, None]
            latents = keys[:, : pages.format.kv_lora_rank]
            result = attend_to(q[tokens].to(compute), keys, latents, visible, softmax_scale)
            out[tokens], lse[tokens] = result[0].to(q.dtype), result[1].float()


def request_rows(
    pages: LayerPages, batch: PagedBatch, request: int, length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The first ``length`` rows of a request, ``[length, L+R]``, and which of them are there."""
    positions = torch.arange(length, device=pages.device)
    page = batch.page_table[request].long()[positions // pages.page_size]
    is_there = page >= 0
    slots = page.clamp(min=0) * pages.page_size + positions % pages.page_size
    rows = read_rows(pages, slots, dtype)
    return torch.where(is_there[:, None], rows, 0.0), is_there


def attend(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Plain attention of ``q`` [t, H, D] on ``keys`` [s, D] or [s, H, D]; ``visible`` is [t, s].

    Returns out [t, H, V] and lse [t, H]; a row that sees nothing gives 0 and -inf.
    """
    if keys.ndim == 2:
        scores = torch.einsum("thd,sd->ths", q, keys)
    else:
        scores = torch.einsum("thd,shd->ths", q, keys)
    scores = (scores * softmax_scale).masked_fill(~visible[:, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    if values.ndim == 2:
        return torch.einsum("ths,sv->thv", weights, values), lse
    return torch.einsum("ths,shv->thv", weights, values), lse
