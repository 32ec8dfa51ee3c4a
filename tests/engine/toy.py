"""A small MLA model that runs on the ops, and the same model without cache, pages or engine."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import PagedKVCache
from kvkern.engine import Engine, SamplingParams, TokenEvent
from kvkern.engine.sampling import Draw, sample
from kvkern.layout import CacheFormat
from kvkern.ops.attention import mla_decode
from kvkern.ops.write_kv import write_kv

VOCAB, HIDDEN, HEADS, LATENT, ROPE, NOPE, VALUE, LAYERS = 256, 32, 2, 16, 8, 8, 8, 2
MAX_POSITION = 160
SCALE = (NOPE + ROPE) ** -0.5
EPS = 1e-6


class ToyModel:
    """Two MLA layers with random weights. ``forward`` is a ``StepModel``'s."""

    format = CacheFormat("fp32", kv_lora_rank=LATENT, rope_dim=ROPE)
    num_cache_layers = LAYERS
    vocab_size = VOCAB
    max_position = MAX_POSITION
    device = torch.device("cpu")

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) / shape[-2] ** 0.5

        self.embedding = weight(VOCAB, HIDDEN) * VOCAB**0.5
        self.head = weight(HIDDEN, VOCAB) * 3
        self.w_q = weight(LAYERS, HIDDEN, HEADS * (NOPE + ROPE)) * 3
        self.w_kv = weight(LAYERS, HIDDEN, LATENT + ROPE)
        self.w_uk = weight(LAYERS, HEADS, NOPE, LATENT)
        self.w_uv = weight(LAYERS, HEADS, LATENT, VALUE)
        self.w_o = weight(LAYERS, HEADS * VALUE, HIDDEN) * 3
        self.gamma = weight(LAYERS, 1, LATENT)[:, 0] + 1
        angles = torch.arange(MAX_POSITION)[:, None] * 0.5 ** torch.arange(ROPE // 2)
        self.freqs = torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1)
        self.batches: list[list[int]] = []  # new tokens per request, of every step

    def forward(
        self, token_ids: Tensor, batch: PagedBatch, cache: PagedKVCache, logit_rows: Tensor
    ) -> Tensor:
        self.batches.append(batch.input_row_offsets.diff().tolist())
        x = self.embedding[token_ids]
        for layer in range(LAYERS):
            view = cache.view(layer, batch)
            q_nope, q_rope = self._query(x, layer)
            q = torch.empty(len(x), HEADS, LATENT + ROPE)
            q[..., :LATENT] = torch.einsum("thn,hnl->thl", q_nope, self.w_uk[layer])
            write_kv(
                view,
                x @ self.w_kv[layer],
                self.freqs,
                self.gamma[layer],
                q_rope=q_rope,
                q_rope_out=q[..., LATENT:],
                eps=EPS,
            )
            latent = mla_decode(q, view, softmax_scale=SCALE).out
            value = torch.einsum("thl,hlv->thv", latent, self.w_uv[layer])
            x = x + value.flatten(1) @ self.w_o[layer]
        return x[logit_rows] @ self.head

    def dense_logits(self, tokens: Sequence[int]) -> Tensor:
        """fp32 logits after the last of ``tokens``, all computed at once and in the open."""
        x = self.embedding[torch.tensor(tokens)]
        hidden = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        for layer in range(LAYERS):
            latent, k_rope = (x @ self.w_kv[layer]).split([LATENT, ROPE], dim=-1)
            rms = latent.square().mean(-1, keepdim=True).add(EPS).sqrt()
            latent = latent / rms * self.gamma[layer]
            q_nope, q_rope = self._query(x, layer)
            k_nope = torch.einsum("tl,hnl->thn", latent, self.w_uk[layer])
            scores = torch.einsum("qhn,khn->hqk", q_nope, k_nope)
            scores += torch.einsum("qhr,kr->hqk", self._rotate(q_rope), self._rotate(k_rope))
            probs = (scores * SCALE).masked_fill(hidden, -torch.inf).softmax(-1)
            value = torch.einsum("tl,hlv->thv", latent, self.w_uv[layer])
            x = x + torch.einsum("hqk,khv->qhv", probs, value).flatten(1) @ self.w_o[layer]
        return x[-1] @ self.head

    def _query(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        q = (x @ self.w_q[layer]).view(-1, HEADS, NOPE + ROPE)
        return q[..., :NOPE], q[..., NOPE:]

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotate the pairs of ``[T, ..., R]`` as complex numbers."""
        turns = torch.view_as_complex(self.freqs.unflatten(1, (-1, 2)))[: len(x)]
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        shape = (len(x), *[1] * (x.ndim - 2), ROPE // 2)
        return torch.view_as_real(pairs * turns.reshape(shape)).flatten(-2)


class ByteTokenizer:
    """One token is one byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


def oracle(
    model: ToyModel,
    prompt: Sequence[int],
    params: SamplingParams,
    ends: Iterable[int] = (),
) -> list[int]:
    """What the request must generate, ``ends`` being the tokens that end it."""
    tokens = list(prompt)
    for index in range(params.max_tokens):
        draw = Draw(params, params.seed or 0, index)
        tokens.append(int(sample(model.dense_logits(tokens)[None], [draw])))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def serve(
    engine: Engine, prompts: Iterable[Sequence[int]], params: SamplingParams, num_steps: int
) -> list[list[int]]:
    """Submit the prompts ``num_steps`` steps apart; the tokens of each."""
    ids: list[int] = []
    events: dict[int, list[TokenEvent]] = {}
    for prompt in prompts:
        ids.append(engine.submit(prompt, params))
        for event in [event for _ in range(num_steps) for event in engine.step()]:
            events.setdefault(event.request_id, []).append(event)
    for request_id, rest in drain(engine).items():
        events.setdefault(request_id, []).extend(rest)
    return [tokens_of(events[request_id]) for request_id in ids]


def drain(engine: Engine) -> dict[int, list[TokenEvent]]:
    """Step until nothing is left to do; the events by request."""
    events: dict[int, list[TokenEvent]] = {}
    while engine.has_requests:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def tokens_of(events: Sequence[TokenEvent]) -> list[int]:
    """The request's tokens; the last event, and only it, has a reason."""
    assert [event.finish_reason is not None for event in events] == [False] * (len(events) - 1) + [
        True
    ]
    return [event.token for event in events]


def assert_idle(engine: Engine) -> None:
    """Nothing runs, and every page is free or in the index alone."""
    engine.check()
    stats = engine.stats
    assert not engine.has_requests
    assert stats.num_pages_in_use == 0
    assert stats.num_pages_free + stats.num_pages_indexed == engine.cache.num_pages
