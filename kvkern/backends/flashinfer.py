"""mla_decode by FlashInfer's paged MLA kernels: a backend by name, planned once a step.

FlashInfer cuts a step's attention into pieces of work on the host. kvkern plans from the batch's
host values, so nothing is read back from the device, and keeps the plan with the batch: all layers
of a step share it. No other file imports flashinfer.
"""

import math
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages
from kvkern.errors import UnsupportedError

_LATENT_DIM, _ROPE_DIM = 512, 64
_ALIGNMENT = 16  # bytes of each of its loads and stores
_MIN_TILE_ROWS = 64  # rows (token, head) of a tile: this or twice as many
# its plan has room for 16384 pieces of work and does not look: each tile, and one more an SM
_MAX_TILES = 16384 - 1024
_WORKSPACE_BYTES = 128 << 20  # for partial results; what FlashInfer's documentation recommends
_LN_2 = math.log(2)


class _Requests(NamedTuple):
    """What FlashInfer plans from: the N requests that have new tokens. int32 on the host."""

    qo_indptr: Tensor  # [N+1], into the packed tokens
    kv_indptr: Tensor  # [N+1], into kv_indices
    kv_indices: Tensor  # page ids of one request behind another, without padding
    kv_len_arr: Tensor  # [N], new tokens included
    max_query_len: int


class _Plans(NamedTuple):
    """The plans of one step; ``values`` are the batch's until it is refilled."""

    values: object
    wrappers: dict[tuple[object, ...], Any]


_PLANS: WeakKeyDictionary[PagedBatch, _Plans] = WeakKeyDictionary()


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
) -> None:
    """Plan if this step is new, and run. ``kvkern.mla_decode`` states the contract."""
    if is_batch_invariant:
        _refuse('it cuts keys by the whole batch: backend="auto" can be batch_invariant')
    _refuse(_unsupported_call(q, pages, batch, num_splits, out))
    num_tokens = batch.num_tokens
    if num_tokens and q.shape[1]:
        wrapper = _planned(q, pages, batch, softmax_scale)
        q_latent, q_rope = _loadable(q[:num_tokens]).split([_LATENT_DIM, _ROPE_DIM], dim=-1)
        wrapper.run(
            q_nope=q_latent,
            q_pe=q_rope,
            ckv_cache=pages.latent,
            kpe_cache=pages.rope,
            out=out[:num_tokens],
            lse=lse[:num_tokens],
            return_lse=True,
        )
        lse[:num_tokens].mul_(_LN_2)  # FlashInfer's is of base 2
    out[num_tokens:].zero_()
    lse[num_tokens:].fill_(-torch.inf)


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise UnsupportedError(f"mla_decode: backend 'flashinfer' refuses: {reason}")


def _unsupported_call(
    q: Tensor, pages: LayerPages, batch: PagedBatch, num_splits: int | None, out: Tensor
) -> str | None:
    """Why this call cannot run, and what to do; what only the step's values tell comes later."""
    fmt = pages.format
    if fmt.name not in ("bf16", "fp16"):
        return f'want a cache of format bf16 or fp16, got {fmt.name}, which backend="auto" reads'
    if (fmt.kv_lora_rank, fmt.rope_dim) != (_LATENT_DIM, _ROPE_DIM):
        return (
            f"want {_LATENT_DIM} latent and {_ROPE_DIM} rope columns, got {fmt.kv_lora_rank} and "
            f'{fmt.rope_dim}, which backend="auto" takes'
        )
    if q.dtype != fmt.latent_dtype:
        return f"want q in the cache's dtype {fmt.latent_dtype}, got {q.dtype}: cast it"
    if num_splits is not None:
        return f"it cuts keys by its own plan: leave num_splits out, got {num_splits}"
    if out.data_ptr() % _ALIGNMENT:
        return f"want out to start at a multiple of {_ALIGNMENT} bytes: leave it out"
    if batch.host_values is None:
        return (
            "it plans on the host, and only the device knows the lengths: build the batch from "
            "host data or with check=True"
        )
    if torch.cuda.is_current_stream_capturing():
        return 'it plans on the host, which a CUDA graph cannot capture: backend="auto" can be'
    return None


def _planned(q: Tensor, pages: LayerPages, batch: PagedBatch, softmax_scale: float) -> Any:
    """The wrapper with this step's plan. One for each stream, as it owns its workspace."""
    plans = _PLANS.get(batch)
    if plans is None or plans.values is not batch.host_values:
        plans = _PLANS[batch] = _Plans(batch.host_values, {})
    stream = torch.cuda.current_stream(q.device)
    key = (q.shape[1], q.dtype, pages.page_size, softmax_scale, stream.cuda_stream)
    wrapper = plans.wrappers.get(key)
    if wrapper is None:
        wrapper = plans.wrappers[key] = _plan(q, pages, batch, softmax_scale)
        # The plan is copied from page-locked memory that PyTorch would hand out again, not knowing
        # of this copy, if the wrapper were dropped before it is done.
        stream.synchronize()
    return wrapper


def _plan(q: Tensor, pages: LayerPages, batch: PagedBatch, softmax_scale: float) -> Any:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    requests = _busy_requests(batch, pages.page_size)
    num_heads = q.shape[1]
    _refuse(_unsupported_rows(requests, num_heads))
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.int8, device=q.device)
    is_hopper = torch.cuda.get_device_capability(q.device)[0] == 9
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa3" if is_hopper else "fa2")
    wrapper.plan(
        qo_indptr=requests.qo_indptr,
        kv_indptr=requests.kv_indptr,
        kv_indices=requests.kv_indices,
        kv_len_arr=requests.kv_len_arr,
        num_heads=num_heads,
        head_dim_ckv=_LATENT_DIM,
        head_dim_kpe=_ROPE_DIM,
        page_size=pages.page_size,
        causal=requests.max_query_len > 1,  # a single token sees all keys; see _unsupported_rows
        sm_scale=softmax_scale,
        q_data_type=q.dtype,
        kv_data_type=pages.latent.dtype,
    )
    return wrapper


def _busy_requests(batch: PagedBatch, page_size: int) -> _Requests:
    """The requests with new tokens, as FlashInfer wants them.

    The others own no row of the result: what they have cached, or pages of -1, is not looked at.
    """
    values = batch.host_values
    assert values is not None  # refused before
    is_busy = values.query_lens > 0
    query_lens, seq_lens = values.query_lens[is_busy], values.seq_lens[is_busy]
    table = values.page_table[is_busy]  # [N, max_pages]
    num_pages = -(-seq_lens // page_size)
    in_use = np.arange(table.shape[1]) < num_pages[:, None]
    if (table[in_use] < 0).any():
        row, column = np.argwhere(in_use & (table < 0))[0].tolist()
        _refuse(
            f"request {int(np.flatnonzero(is_busy)[row])} has {int(seq_lens[row])} tokens but page "
            f'{column} of its row is -1, which no plan can express: backend="auto" takes it'
        )
    return _Requests(
        qo_indptr=_offsets(query_lens),
        kv_indptr=_offsets(num_pages),
        kv_indices=torch.from_numpy(table[in_use]),
        kv_len_arr=torch.from_numpy(seq_lens.astype(np.int32)),
        max_query_len=int(query_lens.max()),
    )


def _unsupported_rows(requests: _Requests, num_heads: int) -> str | None:
    """Why FlashInfer would be wrong on these rows (token, head) of a request.

    Its causal kernels take ``(first row + rows of a tile) // heads`` for the queries up to a
    tile's end. Where that leaves a query cut in two, its last key may be left out.
    """
    queries_are_whole = 128 % num_heads == 0 or requests.max_query_len * num_heads <= _MIN_TILE_ROWS
    if requests.max_query_len > 1 and not queries_are_whole:
        return (
            "with more than one new token in a request want 1, 2, 4, ... 64 or 128 heads, or at "
            f"most {_MIN_TILE_ROWS} tokens x heads, got {requests.max_query_len} x {num_heads}: "
            'backend="auto" takes any'
        )
    query_lens = requests.qo_indptr.long().diff()
    num_tiles = int((-(-query_lens * num_heads // _MIN_TILE_ROWS)).sum())
    if num_tiles > _MAX_TILES:
        return (
            f"its plan has room for {_MAX_TILES} tiles of {_MIN_TILE_ROWS} tokens x heads, got "
            f"{num_tiles}: cut the step"
        )
    return None


def _offsets(counts: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], counts.cumsum()]).astype(np.int32))


def _loadable(q: Tensor) -> Tensor:
    """``q``, or a copy where its rows are not aligned to what one load takes."""
    strides = (stride * q.element_size() for stride in q.stride()[:2])
    if any(offset % _ALIGNMENT for offset in (q.data_ptr(), *strides)):
        return q.clone(memory_format=torch.contiguous_format)
    return q
