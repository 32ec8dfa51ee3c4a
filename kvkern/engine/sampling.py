"""How the next token is chosen: settings of one request, and the draw for a whole batch.

A draw depends on the request's logits, its seed and the index of the token alone: it is the same
whoever shares the batch, and after a preemption.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvkern.errors import ArgumentError

INVALID_TOKEN = -1  # stands for the token of a row whose logits hold NaN


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Args:
        max_tokens: tokens to generate at most, >= 1.
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: sample among the k most likely tokens; ``None`` for all.
        top_p: then among the fewest of those whose probabilities sum to at least this; in (0, 1].
        seed: equal seeds give equal tokens; ``None`` draws a fresh one for the request.
        stop: strings that end the generation; neither they nor what follows is in the text.
        stop_token_ids: tokens that end the generation, beside the engine's ``eos_token_ids``.

    Raises:
        ArgumentError: a value outside the above.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _want("max_tokens", self.max_tokens, "an int >= 1", _is_int(self.max_tokens, 1))
        is_finite = _is_number(self.temperature) and 0 <= self.temperature < math.inf
        _want("temperature", self.temperature, "a finite number >= 0", is_finite)
        is_top_k = self.top_k is None or _is_int(self.top_k, 1)
        _want("top_k", self.top_k, "None or an int >= 1", is_top_k)
        is_top_p = _is_number(self.top_p) and 0 < self.top_p <= 1
        _want("top_p", self.top_p, "a number in (0, 1]", is_top_p)
        _want("seed", self.seed, "None or an int", self.seed is None or _is_int(self.seed))
        is_text = all(isinstance(text, str) and text for text in stop)
        _want("stop", self.stop, "strings that are not empty", is_text)
        are_tokens = all(_is_int(token, 0) for token in self.stop_token_ids)
        _want("stop_token_ids", self.stop_token_ids, "ints >= 0", are_tokens)


class Draw(NamedTuple):
    """The choice of one token: how, with which seed, and as which of the request's tokens."""

    params: SamplingParams
    seed: int
    token_index: int  # among the generated tokens, from 0


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Choose one token per row.

    Args:
        logits: fp32 ``[n, vocab_size]``.
        draws: one per row.

    Returns:
        int64 ``[n]`` on the logits' device; ``INVALID_TOKEN`` where the row holds NaN.
    """
    tokens = logits.argmax(dim=-1)
    rows = [row for row, draw in enumerate(draws) if draw.params.temperature > 0]
    if rows:
        where = torch.tensor(rows, device=logits.device)
        tokens[where] = _sample_rows(logits[where], [draws[row] for row in rows])
    return tokens.masked_fill_(logits.isnan().any(dim=-1), INVALID_TOKEN)


def _sample_rows(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Invert the cumulative distribution of each row, its tokens sorted by probability."""
    vocab_size = logits.shape[1]
    settings = [
        (
            draw.params.temperature,
            draw.params.top_k or vocab_size,
            draw.params.top_p,
            _uniform(draw),
        )
        for draw in draws
    ]
    columns = torch.tensor(settings, dtype=torch.float64, device=logits.device).T[..., None]
    temperature, top_k, top_p, uniform = columns  # each [n, 1]

    ordered, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab_size, device=logits.device)
    ordered = ordered.double() / temperature
    probs = ordered.masked_fill(rank >= top_k, -torch.inf).softmax(dim=-1)
    # a token stays if those before it do not reach top_p, so the first one always does
    probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, 0.0)
    cumulative = probs.cumsum(dim=-1)
    chosen = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    # rounding may lead past the last token with any probability; a row of NaN has none
    last = (probs > 0).sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
    return token_ids.gather(1, torch.minimum(chosen, last)).squeeze(1)


def _uniform(draw: Draw) -> float:
    """A number in [0, 1): a function of the seed and the token's index alone, on any machine."""
    digest = hashlib.blake2b(f"{draw.seed}/{draw.token_index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _want(name: str, value: object, wanted: str, is_right: bool) -> None:
    if not is_right:
        raise ArgumentError(f"{name}: want {wanted}, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_int(value: object, at_least: int | None = None) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and (at_least is None or value >= at_least)  # type: ignore[operator]
