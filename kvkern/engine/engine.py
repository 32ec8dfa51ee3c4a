"""Continuous batching: requests come and go at any time, each step computes one ragged batch.

The loop is in ``Engine.step``; what a step holds is ``Scheduler.schedule``'s choice.
"""

import operator
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from kvkern.cache.batch import PagedBatch
from kvkern.cache.pages import PageAllocator, PageCopyPlan
from kvkern.cache.prefix import PrefixIndex
from kvkern.cache.scales import CacheScales
from kvkern.cache.storage import PagedKVCache
from kvkern.engine.model import StepModel, Tokenizer
from kvkern.engine.sampling import INVALID_TOKEN, Draw, SamplingParams, sample
from kvkern.engine.scheduler import Chunk, Request, Scheduler
from kvkern.engine.text import TextStream
from kvkern.errors import ArgumentError
from kvkern.ops.pages import copy_pages

FinishReason: TypeAlias = Literal["eos", "stop", "length", "error"]


class TokenEvent(NamedTuple):
    """One generated token."""

    request_id: int
    token: int  # -1 with finish_reason "error"
    text: str | None  # what to append to the text; None without a tokenizer
    finish_reason: FinishReason | None  # None: there is more to come


class Completion(NamedTuple):
    """All that was generated for one prompt."""

    token_ids: list[int]  # with the token that ended it
    text: str | None  # without what ended it; None without a tokenizer
    finish_reason: FinishReason


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made, and the pages in use now."""

    num_steps: int = 0
    num_computed_tokens: int = 0  # of prompts and generated, recomputed ones included
    num_generated_tokens: int = 0
    num_prefix_hit_tokens: int = 0  # found in the cache at admission instead of computed
    num_preemptions: int = 0
    num_pages_in_use: int = 0  # held by running requests, shared ones once
    num_pages_indexed: int = 0  # kept for later prompts; may be in use as well
    num_pages_free: int = 0  # neither in use nor indexed
    peak_cache_bytes: int = 0  # the most that the pages of one step's requests took


class Engine:
    """Generates text for many requests at once from one paged cache. Not thread-safe.

    Args:
        model: computes the steps.
        num_pages: pages of the cache, which the engine allocates on the model's device.
        page_size: tokens in a page, >= 1.
        max_batch_tokens: tokens computed in one step at most, >= 1.
        max_requests: requests that hold pages at the same time at most, >= 1.
        eos_token_ids: tokens that end any request.
        tokenizer: makes text of tokens; without one there is no text and no stop string.
        prefix_cache: whether to keep full pages for later prompts that begin alike. They are
            given up, the least recently used first, when pages run out.
        latent_scale, rope_scale: as for ``PagedKVCache``.
        scales: for the model's format and layers, in place of the two.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        num_pages: int,
        page_size: int = 64,
        max_batch_tokens: int = 512,
        max_requests: int = 64,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
        prefix_cache: bool = True,
        latent_scale: float | Sequence[float] = 1.0,
        rope_scale: float | Sequence[float] = 1.0,
        scales: CacheScales | None = None,
    ) -> None:
        for name, value in {
            "max_batch_tokens": max_batch_tokens,
            "max_requests": max_requests,
        }.items():
            if value < 1:
                raise ArgumentError(f"{name}: want >= 1, got {value}")
        if scales is not None:
            scales.check(model.format, model.num_cache_layers)
            if (latent_scale, rope_scale) != (1.0, 1.0):
                raise ArgumentError("scales: want None with latent_scale or rope_scale, got both")
        allocator = PageAllocator(num_pages, page_size)
        index = PrefixIndex(allocator) if prefix_cache else None
        self.cache = PagedKVCache(
            model.format,
            num_layers=model.num_cache_layers,
            num_pages=num_pages,
            page_size=page_size,
            device=model.device,
            latent_scale=latent_scale if scales is None else scales.latent,
            rope_scale=rope_scale if scales is None else scales.rope,
        )
        self._model = model
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._allocator = allocator
        self._index = index
        self._scheduler = Scheduler(
            allocator,
            index,
            self._copy_pages,
            max_batch_tokens=max_batch_tokens,
            max_requests=max_requests,
        )
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self._stats = EngineStats()

    def submit(self, prompt_ids: Iterable[int], params: SamplingParams | None = None) -> int:
        """Queue a prompt and return the request's id. May be called between any two steps.

        Args:
            prompt_ids: at least one token.
            params: default: ``SamplingParams()``.

        Raises:
            ArgumentError: a token outside the vocabulary, stop strings without a tokenizer, or a
                request that even an empty cache or the model's positions could not hold.
        """
        request = self._new_request(prompt_ids, params or SamplingParams())
        self._enqueue(request)
        return request.id

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """Compute one batch; return the tokens that it generated. Nothing to do: an empty list.

        If the model raises, no token is lost: the next call computes the same batch again.
        """
        chunks = self._scheduler.schedule()
        if not chunks:
            return []
        tokens = iter(self._run(chunks))
        events = []
        for chunk in chunks:
            token = next(tokens) if chunk.gives_token else None
            if token != INVALID_TOKEN:  # or what was computed is not worth indexing
                self._scheduler.commit(chunk)
            if token is not None:
                events.append(self._advance(chunk.request, token))
        return events

    def cancel(self, request_id: int) -> bool:
        """End a request and free its pages; it gives no more events.

        Returns:
            Whether there was such a request: False if it has finished or never was.
        """
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._scheduler.release(request)
        return request is not None

    def generate(
        self,
        prompts: Sequence[Iterable[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Run these prompts to their end; the result is in their order.

        Args:
            prompts: token ids of each prompt.
            params: for all prompts, or one for each.

        Raises:
            ArgumentError: as ``submit``, then nothing is queued; or other requests are unfinished,
                whose events would be lost.
        """
        if self._requests:
            raise ArgumentError(f"generate: want no other request, got {len(self._requests)}")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ArgumentError(f"params: want one for each of {len(prompts)}, got {len(params)}")
        requests = [self._new_request(*pair) for pair in zip(prompts, params, strict=True)]
        events: dict[int, list[TokenEvent]] = {request.id: [] for request in requests}
        try:
            for request in requests:
                self._enqueue(request)
            while self._requests:
                for event in self.step():
                    events[event.request_id].append(event)
        finally:  # if the model raised, nobody else knows these requests
            for request in requests:
                self.cancel(request.id)
        return [_completion(events[request.id]) for request in requests]

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the counts."""
        return replace(
            self._stats,
            num_prefix_hit_tokens=self._scheduler.num_prefix_hit_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_pages_in_use=self._scheduler.num_held_pages(),
            num_pages_indexed=0 if self._index is None else self._index.num_pages,
            num_pages_free=self._allocator.num_free_pages,
        )

    def check(self) -> None:
        """Raise ``KvkernError`` unless every page is accounted for. Changes nothing."""
        self._scheduler.check()

    def _new_request(self, prompt_ids: Iterable[int], params: SamplingParams) -> Request:
        try:
            prompt = [operator.index(token) for token in prompt_ids]
        except TypeError as error:
            raise ArgumentError(f"prompt_ids: want integers, got {prompt_ids!r}") from error
        if not prompt:
            raise ArgumentError("prompt_ids: want at least 1 token, got 0")
        vocab_size = self._model.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            raise ArgumentError(f"prompt_ids: want tokens in [0, {vocab_size}), got {wrong}")
        capacity = self.cache.num_pages * self.cache.page_size
        for limit, what in [(capacity, "the cache"), (self._model.max_position, "the model")]:
            if len(prompt) + params.max_tokens > limit:
                raise ArgumentError(
                    f"prompt_ids: want prompt and max_tokens within the {limit} tokens of {what}, "
                    f"got {len(prompt)} + {params.max_tokens}"
                )
        if params.stop and self._tokenizer is None:
            raise ArgumentError("stop: want a tokenizer in the engine for stop strings, got None")
        text = None if self._tokenizer is None else TextStream(self._tokenizer, params.stop)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        request_id, self._next_id = self._next_id, self._next_id + 1
        return Request(request_id, prompt, len(prompt), params, seed, text)

    def _enqueue(self, request: Request) -> None:
        self._requests[request.id] = request
        self._scheduler.waiting.append(request)

    def _run(self, chunks: Sequence[Chunk]) -> list[int]:
        """Compute the chunks; return one sampled token for each that gives one."""
        device = self._model.device
        offsets = np.cumsum([0] + [chunk.stop - chunk.start for chunk in chunks])
        table = self._allocator.table([chunk.seq for chunk in chunks])
        lengths = [chunk.start for chunk in chunks]
        batch = PagedBatch(offsets, lengths, table, device=device)
        token_ids = [t for chunk in chunks for t in chunk.request.tokens[chunk.start : chunk.stop]]
        last_rows = zip(chunks, offsets[1:] - 1, strict=True)
        logit_rows = [int(row) for chunk, row in last_rows if chunk.gives_token]
        logits = self._model.forward(
            torch.tensor(token_ids, dtype=torch.int64, device=device),
            batch,
            self.cache,
            torch.tensor(logit_rows, dtype=torch.int64, device=device),
        )
        draws = [
            Draw(chunk.request.params, chunk.request.seed, chunk.request.num_generated)
            for chunk in chunks
            if chunk.gives_token
        ]
        tokens: list[int] = sample(logits, draws).tolist() if draws else []
        self._count_step(len(token_ids), len(draws), table)
        return tokens

    def _advance(self, request: Request, token: int) -> TokenEvent:
        """Add a token to its request, and end the request if it was the last one."""
        request.tokens.append(token)
        finish_reason: FinishReason | None = None
        if token == INVALID_TOKEN:
            finish_reason = "error"
        elif token in self._eos_token_ids:
            finish_reason = "eos"
        elif token in request.params.stop_token_ids:
            finish_reason = "stop"
        text = None
        if request.text is not None:
            text = request.text.push(token) if finish_reason is None else ""
            if request.text.stopped:
                finish_reason = "stop"
        if finish_reason is None and request.num_generated == request.params.max_tokens:
            finish_reason = "length"
        if finish_reason is not None:
            if request.text is not None:
                text = (text or "") + request.text.flush()
            self.cancel(request.id)
        return TokenEvent(request.id, token, text, finish_reason)

    def _copy_pages(self, copies: Sequence[PageCopyPlan]) -> None:
        sources, targets = zip(*copies, strict=True)
        copy_pages(self.cache, self.cache, sources, targets)  # ordered before the next step

    def _count_step(self, num_tokens: int, num_generated: int, table: np.ndarray) -> None:
        num_pages = np.count_nonzero(np.bincount(table.ravel() + 1)[1:])  # without the -1 padding
        stats = self._stats
        self._stats = replace(
            stats,
            num_steps=stats.num_steps + 1,
            num_computed_tokens=stats.num_computed_tokens + num_tokens,
            num_generated_tokens=stats.num_generated_tokens + num_generated,
            peak_cache_bytes=max(stats.peak_cache_bytes, int(num_pages) * self.cache.page_bytes),
        )


def _completion(events: Sequence[TokenEvent]) -> Completion:
    last = events[-1]
    assert last.finish_reason is not None
    text = None if last.text is None else "".join(event.text or "" for event in events)
    return Completion([event.token for event in events], text, last.finish_reason)
