"""gather_kv: out[b, i] = dequantised row of position start + i, 0 past the end."""

import torch
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages
from kvkern.reference.mla_decode import request_rows


def gather_kv(
    pages: LayerPages, batch: PagedBatch, start: int, include_new: bool, out: Tensor
) -> None:
    """The specification; ``kvkern.gather_kv`` states the contract."""
    compute = torch.float64 if out.dtype == torch.float64 else torch.float32
    out.zero_()
    ends = batch.cache_lengths
    if include_new:
        ends = ends + batch.input_row_offsets.diff()
    for request, end in enumerate(ends.tolist()):
        if end > start:
            rows, _ = request_rows(pages, batch, request, end, compute)
            rows = rows[start : start + out.shape[1]]
            out[request, : len(rows)] = rows
