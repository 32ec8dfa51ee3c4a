"""What the engine asks of a model and of a tokenizer."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import PagedKVCache
from kvkern.layout import CacheFormat


class StepModel(Protocol):
    """A model that computes one ragged step over a paged cache."""

    @property
    def format(self) -> CacheFormat:
        """The format its cache must have."""

    @property
    def num_cache_layers(self) -> int:
        """Layers its cache must have."""

    @property
    def vocab_size(self) -> int:
        """Token ids are in ``[0, vocab_size)``."""

    @property
    def max_position(self) -> int:
        """Positions are in ``[0, max_position)``."""

    @property
    def device(self) -> torch.device:
        """Where token ids go and logits come from."""

    def forward(
        self, token_ids: Tensor, batch: PagedBatch, cache: PagedKVCache, logit_rows: Tensor
    ) -> Tensor:
        """Write the new tokens into the cache and return the logits of some of them.

        Args:
            token_ids: int64 ``[T]``, the packed new tokens of ``batch``. Requests with one new
                token come first.
            batch: whose tokens these are, and the pages that hold or will hold them.
            cache: has this model's format and layers.
            logit_rows: int64 ``[n]``, ascending indices into ``token_ids``; may be empty.

        Returns:
            fp32 ``[n, vocab_size]``.
        """


class Tokenizer(Protocol):
    """Turns generated tokens into text; a Hugging Face tokenizer is one."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """The text of these tokens, with U+FFFD where bytes of a character are missing."""
