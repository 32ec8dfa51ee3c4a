"""What is measured: a row a shape, the work it holds, its inputs, and the check of its result."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvkern import (
    CacheFormat,
    CacheView,
    PagedBatch,
    PagedKVCache,
    gather_kv,
    mla_decode,
    mla_prefill,
    write_kv,
)
from kvkern.layout import E4M3_MAX, FormatName
from kvkern.reference.mla_decode import attend, request_rows
from kvkern.testing.budget import assert_within_budget, decode_by_e4m3_weights
from kvkern.testing.inputs import POISON, rope_freqs

_PAGE_SIZE = 64  # the one that every peer takes
_REACH = 7.0  # of formats with layer scales; normalised latents seldom reach 5
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Model:
    """The attention dims of one card's share of a model."""

    name: str
    num_heads: int
    kv_lora_rank: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    v_dim: int = 128

    @property
    def softmax_scale(self) -> float:
        return (self.nope_dim + self.rope_dim) ** -0.5


@dataclass(frozen=True)
class Case:
    """One shape; every request has ``query_len`` new tokens and, with them, ``seq_len`` tokens.

    ``ragged``: lengths are log-normal with ``seq_len`` as their mean, so the total is the same.
    """

    op: Literal["write_kv", "mla_decode", "mla_prefill"]
    model: Model
    num_requests: int
    query_len: int
    seq_len: int
    format: FormatName = "bf16"
    packed_query: bool = False  # write_kv: also q_nope; all of q in e4m3 if the cache is fp8
    page_size: int = _PAGE_SIZE
    ragged: bool = False

    def __post_init__(self) -> None:
        if self.ragged and self.op != "mla_decode":
            raise ValueError(f"ragged: want mla_decode, got {self.op}")

    @property
    def name(self) -> str:
        shape = f"B{self.num_requests}-H{self.model.num_heads}-q{self.query_len}-s{self.seq_len}"
        unusual = {
            f"page{self.page_size}": self.page_size != _PAGE_SIZE,
            "ragged": self.ragged,
            "packed": self.packed_query,
        }
        words = [word for word, is_so in unusual.items() if is_so]
        return "-".join([self.op, self.model.name, self.format, shape, *words])

    @property
    def q_out_dtype(self) -> torch.dtype:
        """Of what ``write_kv`` makes of the query."""
        is_fp8 = self.packed_query and self.format == "fp8"
        return torch.float8_e4m3fn if is_fp8 else _DTYPE

    @property
    def cache_format(self) -> CacheFormat:
        return CacheFormat(self.format, self.model.kv_lora_rank, self.model.rope_dim)

    @property
    def num_tokens(self) -> int:
        return self.num_requests * self.query_len

    @property
    def may_have_e4m3_weights(self) -> bool:
        """Whether fp8 tensor cores multiply weights and values, as kvkern's do with many rows."""
        rows = self.model.num_heads * self.query_len
        return self.op == "mla_decode" and self.format == "fp8" and rows > 32

    @property
    def cached_len(self) -> int:
        return self.seq_len - self.query_len

    @cached_property
    def seq_lens(self) -> np.ndarray:
        """``[B]``, new tokens included."""
        if self.ragged:
            return self.query_len + log_normal_lens(self.num_requests, self.cached_len)
        return np.full(self.num_requests, self.seq_len)

    @property
    def num_bytes(self) -> int:
        """Every input read once and every output written once; not the page table and the like."""
        model, fmt, tokens = self.model, self.cache_format, self.num_tokens
        token_heads = tokens * model.num_heads
        if self.op == "write_kv":
            rows = tokens * (2 * fmt.row_dim + fmt.bytes_per_token) + 2 * fmt.kv_lora_rank
            q_dim = fmt.row_dim if self.packed_query else fmt.rope_dim
            query = token_heads * q_dim * (2 + self.q_out_dtype.itemsize)
            return rows + 4 * self.query_len * fmt.rope_dim + query
        if self.op == "mla_decode":
            rows = int(self.seq_lens.sum()) * fmt.bytes_per_token
            return rows + token_heads * (2 * (fmt.row_dim + fmt.kv_lora_rank) + 4)
        head_dims = (model.nope_dim + model.rope_dim) + model.nope_dim + 2 * model.v_dim
        num_bytes = token_heads * (2 * head_dims + 4) + 2 * tokens * model.rope_dim
        if self.cached_len:
            num_bytes += self.num_requests * self.cached_len * fmt.bytes_per_token
            num_bytes += 2 * self._num_expansion_weights
        return num_bytes

    @property
    def num_flops(self) -> int:
        """Of the matrix products, without what the causal mask hides; none in ``write_kv``."""
        model, q = self.model, self.query_len
        if self.op == "write_kv":
            return 0
        num_pairs = q * int(self.seq_lens.sum()) - self.num_requests * q * (q - 1) // 2
        if self.op == "mla_decode":
            dims = 2 * model.kv_lora_rank + model.rope_dim
            return 2 * num_pairs * model.num_heads * dims
        dims = model.nope_dim + model.rope_dim + model.v_dim
        expansion = 2 * self.num_requests * self.cached_len * self._num_expansion_weights
        return 2 * num_pairs * model.num_heads * dims + expansion

    @property
    def _num_expansion_weights(self) -> int:
        """Of W_UK and W_UV, which make keys and values of the cached tokens."""
        model = self.model
        return model.num_heads * model.kv_lora_rank * (model.nope_dim + model.v_dim)


def log_normal_lens(num: int, mean: int) -> np.ndarray:
    """``num * mean`` tokens in ``num`` requests, as a log-normal of sigma 1 spreads them.

    Its quantiles in a fixed order, not draws: no chance outlier decides what so few requests cost.
    """
    quantiles = (np.random.default_rng(0).permutation(num) + 0.5) / num
    shares = np.cumsum(np.exp([NormalDist().inv_cdf(quantile) for quantile in quantiles]))
    ends = np.rint(num * mean * shares / shares[-1]).astype(np.int64)
    return np.diff(ends, prepend=0)


_V3 = Model("deepseek_v3", 128)
_V3_TP2 = Model("deepseek_v3_tp2", 64)
_V3_TP4 = Model("deepseek_v3_tp4", 32)
_V3_TP8 = Model("deepseek_v3_tp8", 16)
_V3_TP16 = Model("deepseek_v3_tp16", 8)
_MISTRAL4_TP2 = Model("mistral4_tp2", 16, kv_lora_rank=256, nope_dim=64)


def _write(model: Model, num_tokens: int, format: FormatName, packed_query: bool = False) -> Case:
    """Up to 256 tokens decode, one a request; more come in chunks of 512. 1024 tokens before."""
    query_len = 1 if num_tokens <= 256 else 512
    seq_len = 1024 + query_len
    return Case(
        "write_kv", model, num_tokens // query_len, query_len, seq_len, format, packed_query
    )


_DECODE = (  # model, B, q, s
    (_V3, 128, 1, 4096),
    (_V3, 64, 1, 8192),
    (_V3, 32, 2, 8192),
    (_V3_TP8, 128, 1, 4096),
    (_V3_TP8, 16, 1, 8192),
    (_V3, 1, 1, 32768),
    (_V3_TP8, 1, 1, 131072),
    (_V3, 4, 1, 131072),
    (_V3, 256, 1, 1024),
)
_DECODE_BY_HEADS = tuple(
    (model, *shape)
    for model in (_V3_TP16, _V3_TP4, _V3_TP2)
    for shape in ((128, 1, 4096), (16, 1, 8192))
)
_DECODE_BY_QUERY = (  # beside 2 new tokens of 128 heads, above
    (_V3, 32, 4, 8192),
    (_V3_TP8, 32, 2, 8192),
    (_V3_TP8, 32, 4, 8192),
)
_SERVED_FORMATS: tuple[FormatName, ...] = ("bf16", "fp8", "fp8_token", "fp8_ds_mla", "nvfp4")
CASES: tuple[Case, ...] = (
    *(
        _write(_V3, tokens, name)
        for name in _SERVED_FORMATS
        for tokens in (1, 16, 64, 128, 256, 512, 4096, 16384)
    ),
    *(
        _write(_V3_TP8, tokens, name)
        for name in _SERVED_FORMATS
        for tokens in (16, 128, 512, 4096, 8192, 16384)
    ),
    *(
        _write(_V3, tokens, name, packed_query=True)
        for name in ("bf16", "fp8")
        for tokens in (16, 128, 4096)
    ),
    *(
        Case("mla_decode", *shape, name)
        for name in ("bf16", "fp8")
        for shape in (*_DECODE, *_DECODE_BY_HEADS, *_DECODE_BY_QUERY)
    ),
    *(Case("mla_decode", *_DECODE[row], "fp8_ds_mla") for row in (0, 3, 4, 5, 6)),
    *(Case("mla_decode", *_DECODE[row], "fp8_token") for row in (3, 4, 6)),
    *(  # to hold against the same rows of _DECODE: as many tokens, equal lengths, pages of 64
        Case("mla_decode", *_DECODE[row], name, **other)
        for other in (dict(page_size=16), dict(page_size=1), dict(ragged=True))
        for name in ("bf16", "fp8")
        for row in (0, 3)
    ),
    Case("mla_prefill", _V3_TP8, 1, 8192, 8192),
    Case("mla_prefill", _V3, 1, 4096, 4096),
    Case("mla_prefill", _V3_TP8, 4, 4096, 4096),
    Case("mla_prefill", _V3_TP8, 1, 32768, 32768),
    Case("mla_prefill", _MISTRAL4_TP2, 1, 8192, 8192),
    Case("mla_prefill", _V3_TP8, 4, 1024, 1024 + 8192),  # chunks of prompts, mostly cached
)


class Implementation(NamedTuple):
    """One way to do a case's work."""

    name: str
    call: Callable[[], object]
    check: Callable[[], None] | None  # AssertionError if the result is wrong; None: not comparable
    note: str = ""
    first: Callable[[], object] | None = None  # called before, untimed: once a step, for all layers


class Step:
    """A case's cache and batch on a device; the same every time."""

    num_layers = 1  # the last is timed

    def __init__(self, case: Case, device: torch.device | str) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, torch.device(device)
        counts = -(-case.seq_lens // case.page_size)
        self.num_pages = int(counts.sum())
        self.page_table = np.full((case.num_requests, counts.max()), -1)
        is_used = np.arange(counts.max()) < counts[:, None]
        self.page_table[is_used] = torch.randperm(self.num_pages).numpy()
        self.batch = self.batch_of(range(case.num_requests))
        self.cache = self.new_cache()
        self.view = self.view_of(self.cache, self.batch)
        self.freqs = rope_freqs(int(case.seq_lens.max()), case.model.rope_dim, device=str(device))
        self.gamma = torch.rand(case.model.kv_lora_rank, device=device).add_(0.5).to(_DTYPE)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=_DTYPE, device=self.device)

    def rows(self, num_tokens: int) -> Tensor:
        """Latents and rope keys with a mean, without which a sum's bias would not show."""
        return self.randn(num_tokens, self.case.cache_format.row_dim).add_(1.0)

    def new_cache(self) -> PagedKVCache:
        fmt = self.case.cache_format
        latent_scale = rope_scale = 1.0
        if fmt.layer_scaled:
            latent_scale, rope_scale = _REACH / fmt.latent_reach, _REACH / E4M3_MAX
        cache = PagedKVCache(
            fmt, num_layers=self.num_layers, num_pages=self.num_pages,
            page_size=self.case.page_size, device=self.device, latent_scale=latent_scale,
            rope_scale=rope_scale,
        )  # fmt: skip
        cache.buffer.fill_(POISON)
        return cache

    def view_of(self, cache: PagedKVCache, batch: PagedBatch) -> CacheView:
        return cache.view(self.num_layers - 1, batch)

    def batch_of(self, requests: Sequence[int], *, all_new: bool = False) -> PagedBatch:
        """Some of the requests; ``all_new``: as if none of their tokens were cached yet."""
        seq_lens = self.case.seq_lens[list(requests)]
        query_lens = seq_lens if all_new else np.full_like(seq_lens, self.case.query_len)
        offsets, table = np.cumsum([0, *query_lens]), self.page_table[list(requests)]
        return PagedBatch(offsets, seq_lens - query_lens, table, device=self.device)

    def fill_cache(self) -> None:
        """Store all tokens of all requests."""
        every = self.batch_of(range(self.case.num_requests), all_new=True)
        rows = self.rows(int(self.case.seq_lens.sum()))
        write_kv(self.view_of(self.cache, every), rows, self.freqs, self.gamma)

    def sampled_requests(self) -> list[int]:
        """The first, one in the middle, the last; the shortest and the longest."""
        num, seq_lens = self.case.num_requests, self.case.seq_lens
        return sorted({0, num // 2, num - 1, int(seq_lens.argmin()), int(seq_lens.argmax())})


class WriteStep(Step):
    """``write_kv``, with the query's rope columns on their way into the packed query."""

    def __init__(self, case: Case, device: torch.device | str) -> None:
        super().__init__(case, device)
        model, num_tokens = case.model, case.num_tokens
        self.kv = self.rows(num_tokens)
        projected = self.randn(num_tokens, model.num_heads, model.nope_dim + model.rope_dim)
        self.q_rope = projected[..., model.nope_dim :]
        self.q_packed = self.new_q_packed()
        self.q_nope: Tensor | None = None
        if case.packed_query:  # as the absorbing matmul leaves it, a batch of heads
            absorbed = self.randn(model.num_heads, num_tokens, model.kv_lora_rank)
            self.q_nope = absorbed.transpose(0, 1)
        self.q_scale: Tensor | None = None
        if case.q_out_dtype != _DTYPE:
            self.q_scale = torch.full((1,), _REACH / E4M3_MAX, device=device)

    def new_q_packed(self) -> Tensor:
        shape = (self.case.num_tokens, self.case.model.num_heads, self.case.cache_format.row_dim)
        return torch.zeros(shape, dtype=self.case.q_out_dtype, device=self.device)

    def rope_columns(self, q_packed: Tensor) -> Tensor:
        return q_packed[..., self.case.cache_format.kv_lora_rank :]

    def kvkern(self) -> Implementation:
        query = self._query(self.q_packed)

        def call() -> None:
            write_kv(self.view, self.kv, self.freqs, self.gamma, q_rope=self.q_rope, **query)

        def check() -> None:
            call()
            cache, q_packed = self.new_cache(), self.new_q_packed()
            write_kv(
                self.view_of(cache, self.batch), self.kv, self.freqs, self.gamma,
                q_rope=self.q_rope, **self._query(q_packed), backend="reference",
            )  # fmt: skip
            assert torch.equal(self.cache.buffer, cache.buffer), "stored bytes: not the reference's"
            assert torch.equal(*(q.view(torch.uint8) for q in (self.q_packed, q_packed))), (
                "query: not the reference's"
            )

        return Implementation("kvkern", call, check)

    def _query(self, q_packed: Tensor) -> dict[str, Tensor]:
        outputs = {"q_rope_out": self.rope_columns(q_packed)}
        if self.q_nope is not None:
            nope_out = q_packed[..., : self.case.cache_format.kv_lora_rank]
            outputs |= {"q_nope": self.q_nope, "q_nope_out": nope_out}
        if self.q_scale is not None:
            outputs["q_scale"] = self.q_scale
        return outputs

    def check_rounded_elsewhere(self, cache: PagedKVCache, q_rope_out: Tensor) -> None:
        """By the budget, for one whose bytes may differ."""
        rounded = self.new_cache()
        exact_q = torch.empty_like(self.q_rope, dtype=torch.float64)
        exact_rows = torch.empty_like(self.kv, dtype=torch.float64)
        write_kv(
            self.view_of(rounded, self.batch), self.kv.double(), self.freqs, self.gamma,
            q_rope=self.q_rope.double(), q_rope_out=exact_q, kv_out=exact_rows, backend="reference",
        )  # fmt: skip
        some = slice(None, None, max(1, self.case.num_tokens // 512))
        exact_q, exact_rows = exact_q[some], exact_rows[some]
        assert_within_budget(q_rope_out[some], exact_q, exact_q.to(_DTYPE))
        got, want = (self._stored_rows(c)[some] for c in (cache, rounded))
        assert_within_budget(got, exact_rows, want, eps_of=self.case.cache_format.latent_dtype)

    def _stored_rows(self, cache: PagedKVCache) -> Tensor:
        view, start = self.view_of(cache, self.batch), self.case.cached_len
        rows = gather_kv(view, start=start, dtype=torch.float32, backend="reference")
        return rows.flatten(0, 1)


class DecodeStep(Step):
    """``mla_decode`` of the second layer, on a full cache: the first made the step's schedule."""

    num_layers = 2

    def __init__(self, case: Case, device: torch.device | str) -> None:
        super().__init__(case, device)
        self.fill_cache()
        self.q = self.randn(case.num_tokens, case.model.num_heads, case.cache_format.row_dim)

    def kvkern(self) -> Implementation:
        return self.by("kvkern")

    def by(self, name: str, q: Tensor | None = None, **options: Any) -> Implementation:
        """kvkern's op, with other options than the defaults; ``q``: another query."""
        scale, query = self.case.model.softmax_scale, self.q if q is None else q

        def call() -> tuple[Tensor, ...]:
            return mla_decode(query, self.view, softmax_scale=scale, **options)

        def first() -> None:
            first_layer = self.cache.view(0, self.batch)
            mla_decode(query, first_layer, softmax_scale=scale, **options)

        def check() -> None:
            first()
            self.check(call())

        return Implementation(name, call, check, first=first)

    def check(self, got: Iterable[Tensor], q: Tensor | None = None) -> None:
        """Compare ``out`` and, if given, ``lse`` on sampled requests; ``q``: another query."""
        requests = self.sampled_requests()
        view = self.view_of(self.cache, self.batch_of(requests))

        def sample(packed: Tensor) -> Tensor:
            return packed.unflatten(0, (-1, self.case.query_len))[requests].flatten(0, 1)

        def reference(q: Tensor) -> tuple[Tensor, ...]:
            scale = self.case.model.softmax_scale
            return mla_decode(q, view, softmax_scale=scale, backend="reference")

        q = sample(self.q if q is None else q)
        rounded = reference(q)
        if self.case.may_have_e4m3_weights:
            scale = self.case.model.softmax_scale
            rounded = (decode_by_e4m3_weights(q, view, softmax_scale=scale), *rounded[1:])
        _judge(got, sample, reference(q.double()), rounded)


class PrefillStep(Step):
    """``mla_prefill`` of all requests' new tokens, and of what is cached before them."""

    def __init__(self, case: Case, device: torch.device | str) -> None:
        super().__init__(case, device)
        self.fill_cache()
        model, num_tokens, heads = case.model, case.num_tokens, case.model.num_heads
        self.q = self.randn(num_tokens, heads, model.nope_dim + model.rope_dim)
        self.k_nope = self.randn(num_tokens, heads, model.nope_dim)
        self.k_rope = self.randn(num_tokens, model.rope_dim)
        self.v = self.randn(num_tokens, heads, model.v_dim).add_(1.0)
        rank = model.kv_lora_rank
        self.w_uk = self.randn(heads, model.nope_dim, rank).mul_(rank**-0.5)
        self.w_uv = self.randn(heads, rank, model.v_dim).mul_(rank**-0.5)

    def kvkern(self) -> Implementation:
        weights = {"w_uk": self.w_uk, "w_uv": self.w_uv} if self.case.cached_len else {}

        def call() -> tuple[Tensor, ...]:
            inputs = (self.q, self.k_nope, self.k_rope, self.v, self.view)
            return mla_prefill(*inputs, softmax_scale=self.case.model.softmax_scale, **weights)

        return Implementation("kvkern", call, lambda: self.check(call()))

    def check(self, got: Iterable[Tensor]) -> None:
        """Compare ``out`` and, if given, ``lse`` on a few tokens and heads of sampled requests."""
        got, query_len, num_heads = tuple(got), self.case.query_len, self.case.model.num_heads
        tokens = sorted({0, 1, query_len // 2, query_len - 1} & set(range(query_len)))
        heads = sorted({0, num_heads // 2, num_heads - 1})
        for request in self.sampled_requests():

            def sample(packed: Tensor, request: int = request) -> Tensor:
                return packed.unflatten(0, (-1, query_len))[request, tokens][:, heads]

            exact = self._attend(request, tokens, heads, torch.float64)
            out, lse = self._attend(request, tokens, heads, torch.float32)
            _judge(got, sample, exact, (out.to(_DTYPE), lse))

    def _attend(
        self, request: int, tokens: list[int], heads: list[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        cached, query_len = self.case.cached_len, self.case.query_len
        own = slice(request * query_len, (request + 1) * query_len)

        def keys(nope: Tensor, rope: Tensor) -> Tensor:
            return torch.cat([nope, rope[:, None].expand(-1, len(heads), -1)], dim=-1)

        key = keys(self.k_nope[own, heads].to(dtype), self.k_rope[own].to(dtype))
        value = self.v[own, heads].to(dtype)
        if cached:
            rows, _ = request_rows(self.view.pages, self.batch, request, cached, dtype)
            latent, rope = rows.tensor_split([self.case.model.kv_lora_rank], dim=-1)
            nope = torch.einsum("sl,hnl->shn", latent, self.w_uk[heads].to(dtype))
            key = torch.cat([keys(nope, rope), key])
            old_value = torch.einsum("sl,hlv->shv", latent, self.w_uv[heads].to(dtype))
            value = torch.cat([old_value, value])
        positions = torch.tensor(tokens, device=self.device) + cached
        visible = torch.arange(len(key), device=self.device) <= positions[:, None]
        q = self.q[own][tokens][:, heads].to(dtype)
        return attend(q, key, value, visible, self.case.model.softmax_scale)


def make_step(case: Case, device: torch.device | str) -> WriteStep | DecodeStep | PrefillStep:
    """The case's inputs; on a GPU they are made there."""
    if case.op == "write_kv":
        return WriteStep(case, device)
    return DecodeStep(case, device) if case.op == "mla_decode" else PrefillStep(case, device)


def _judge(
    got: Iterable[Tensor],
    sample: Callable[[Tensor], Tensor],
    exact: Iterable[Tensor],
    rounded: Iterable[Tensor],
) -> None:
    for tensor, want, same_dtype in zip(got, exact, rounded, strict=False):  # a peer gives no lse
        assert tensor.isfinite().all(), "result: want finite"
        assert_within_budget(sample(tensor), want, same_dtype, eps_of=_DTYPE)
