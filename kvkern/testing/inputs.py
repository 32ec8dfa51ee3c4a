"""Ragged, shuffled, poisoned inputs for paged ops: what a test or a user's own check feeds them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import CacheView, PagedKVCache
from kvkern.layout import CacheFormat
from kvkern.ops.pages import gather_kv
from kvkern.ops.write_kv import write_kv

POISON = 0xFF  # NaN in e4m3, bf16, fp16 and fp32; in nvfp4 the scales of a row are NaN then


def shuffled_table(seq_lens: Sequence[int], page_size: int, num_pages: int) -> list[list[int]]:
    """A page table with the pages of all requests shuffled together, -1 where unused."""
    counts = [-(-seq_len // page_size) for seq_len in seq_lens]
    pages = torch.randperm(num_pages)[: sum(counts)].tolist()
    width = max([*counts, 1])
    rows = [[pages.pop() for _ in range(count)] for count in counts]
    return [row + [-1] * (width - len(row)) for row in rows]


@dataclass
class PagedCase:
    """A poisoned cache, and a step's batch whose earlier tokens are already in it.

    ``rows`` holds what was written, ``[B][seq_len, L+R]``, dequantised, new tokens included.
    """

    cache: PagedKVCache
    batch: PagedBatch
    rows: list[Tensor]

    @property
    def view(self) -> CacheView:
        return self.cache.view(0, self.batch)

    def fill_unwritten(self, byte: int) -> None:
        """Set every byte of the slots that hold no row: pages' tails, spare pages."""
        is_free = torch.ones(self.cache.num_pages * self.cache.page_size, dtype=torch.bool)
        is_free[self._slots()] = False
        for field in _fields_by_slot(self.cache):
            field.view(torch.uint8)[is_free.to(field.device)] = byte

    def repaged(self, page_size: int, num_spare_pages: int = 3) -> "PagedCase":
        """The same rows, bit for bit, in other pages of another size."""
        offsets = self.batch.input_row_offsets.tolist()
        seq_lens = [len(rows) for rows in self.rows]
        num_pages = sum(-(-n // page_size) for n in seq_lens) + num_spare_pages
        old = self.cache
        scales = old.host_scales[0]
        cache = PagedKVCache(
            old.format,
            num_layers=1,
            num_pages=num_pages,
            page_size=page_size,
            device=old.device,
            latent_scale=scales[0],
            rope_scale=scales[1],
        )
        cache.buffer.fill_(POISON)
        table = shuffled_table(seq_lens, page_size, num_pages)
        sources, targets = self._slots(), _slots(table, seq_lens, page_size)
        for new, stored in zip(_fields_by_slot(cache), _fields_by_slot(old), strict=True):
            new[targets] = stored[sources]
        batch = PagedBatch(offsets, self.batch.cache_lengths.cpu(), table, device=old.device)
        return PagedCase(cache, batch, self.rows)

    def _slots(self) -> list[int]:
        """Where each of ``rows`` is, request by request."""
        seq_lens = [len(rows) for rows in self.rows]
        return _slots(self.batch.page_table.tolist(), seq_lens, self.cache.page_size)


def make_paged_case(
    fmt: CacheFormat,
    cache_lengths: Sequence[int],
    query_lens: Sequence[int],
    *,
    page_size: int = 16,
    device: str = "cpu",
    num_spare_pages: int = 3,
    mean: float = 0.0,
) -> PagedCase:
    """Fill a poisoned cache with random tokens on shuffled pages, through ``write_kv``.

    Layers that have scales get others than 1, so that a dropped one shows: latents up to 9 and
    rope keys up to 13 are not clipped. ``mean`` is added to the rope key and, before the norm, to
    the latent.
    """
    seq_lens = [c + q for c, q in zip(cache_lengths, query_lens, strict=True)]
    num_pages = sum(-(-n // page_size) for n in seq_lens) + num_spare_pages
    cache = PagedKVCache(
        fmt,
        num_layers=1,
        num_pages=num_pages,
        page_size=page_size,
        device=device,
        latent_scale=9 / fmt.latent_reach if fmt.layer_scaled else 1.0,
        rope_scale=0.03 if fmt.layer_scaled else 1.0,
    )
    cache.buffer.fill_(POISON)
    table = shuffled_table(seq_lens, page_size, num_pages)
    before = PagedBatch(_offsets(seq_lens), [0] * len(seq_lens), table, device=device)
    num_tokens, rope_dim = sum(seq_lens), fmt.rope_dim
    kv = (torch.randn(num_tokens, fmt.row_dim) + mean).to(device)
    freqs = rope_freqs(max([*seq_lens, 1]), rope_dim, device=device)
    gamma = (torch.rand(fmt.kv_lora_rank) + 0.5).to(device)
    write_kv(cache.view(0, before), kv, freqs, gamma, backend="reference")
    batch = PagedBatch(_offsets(query_lens), cache_lengths, table, device=device)
    dense = gather_kv(cache.view(0, batch), dtype=torch.float64, backend="reference")
    return PagedCase(cache, batch, [dense[b, :n] for b, n in enumerate(seq_lens)])


def rope_freqs(
    num_positions: int, rope_dim: int, *, base: float = 10_000.0, device: str = "cpu"
) -> Tensor | None:
    """The table ``write_kv`` takes: cos, sin interleaved per pair; None if there is no RoPE."""
    if rope_dim == 0:
        return None
    inverse = base ** (-torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * inverse
    return torch.stack([angles.cos(), angles.sin()], -1).flatten(1).float().to(device)


def _fields_by_slot(cache: PagedKVCache) -> list[Tensor]:
    """All that layer 0 stores, one row a slot: rows, and the scales beside them."""
    beside = [] if cache.token_scales is None else [cache.token_scales[..., None]]
    return [field[0].flatten(0, 1) for field in (cache.storage, *beside)]


def _slots(table: Sequence[Sequence[int]], seq_lens: Sequence[int], page_size: int) -> list[int]:
    return [
        pages[position // page_size] * page_size + position % page_size
        for pages, seq_len in zip(table, seq_lens, strict=True)
        for position in range(seq_len)
    ]


def _offsets(lens: Sequence[int]) -> list[int]:
    offsets = [0]
    for length in lens:
        offsets.append(offsets[-1] + length)
    return offsets
