"""Run a Hugging Face MLA model on kvkern: attention over a paged latent cache, the rest its own.

Embeddings, MLP, MoE, norms outside attention, rotary frequencies, the head and loading stay with
transformers. While ``PagedModel.forward`` runs, each attention module's ``forward`` is ours;
before and after, the model is untouched and its own ``generate`` works.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import PagedKVCache
from kvkern.errors import ArgumentError, DeviceError, ShapeMismatchError, UnsupportedError
from kvkern.layout import CacheFormat, FormatName
from kvkern.ops.absorb import absorb_weights, mla_absorb
from kvkern.ops.attention import mla_decode, mla_prefill
from kvkern.ops.write_kv import write_kv

RopeStyle: TypeAlias = Literal["interleaved", "half"]
HFModel: TypeAlias = Any  # transformers' classes are made at run time; there is no useful type


@dataclass(frozen=True)
class _Family:
    """What an architecture's attention does that its config and modules do not say."""

    rope_style: RopeStyle | None = None  # None: config.rope_interleave says
    scales_query_by_position: bool = False  # see _query_scaling
    scales_lora: bool = False  # multiplies query and normed latent by mla_scale_{q,kv}_lora


_FAMILIES: dict[str, _Family] = {
    "axk1": _Family(),
    "deepseek_v2": _Family(rope_style="interleaved"),
    "deepseek_v3": _Family(),
    "glm4_moe_lite": _Family(),
    "longcat_flash": _Family(rope_style="interleaved", scales_lora=True),
    "minicpm3": _Family(rope_style="half"),
    "mistral4": _Family(scales_query_by_position=True),
    "youtu": _Family(),
}
SUPPORTED_MODEL_TYPES: tuple[str, ...] = tuple(_FAMILIES)

_FORMAT_OF_DTYPE: dict[torch.dtype, FormatName] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
_MIN_FREQS_ROWS = 4096


class PagedModel:
    """A loaded Hugging Face causal LM as one ragged step over a paged cache.

    It implements ``kvkern.engine.model.StepModel``. In bf16 and fp16 the rotary table stays in
    fp32, where most of transformers' models round cos and sin to the model's dtype.

    Args:
        hf_model: a causal LM whose ``config.model_type`` is in ``SUPPORTED_MODEL_TYPES``, in eval
            mode, all on one device. It must not run elsewhere while ``forward`` runs.
        cache_format: name of the cache's format; default: the model's own dtype.
        max_position: positions are below this; default ``config.max_position_embeddings``.
        backend: for every op: ``"auto"``, or a name: used or refused, never replaced.

    Raises:
        UnsupportedError: the architecture is not covered, or the config asks for something that
            cannot be honoured; the message says what.
        ArgumentError, DeviceError: another argument is not as above.
    """

    def __init__(
        self,
        hf_model: HFModel,
        *,
        cache_format: FormatName | None = None,
        max_position: int | None = None,
        backend: str = "auto",
    ) -> None:
        config = hf_model.config
        family = _family_of(config)
        if hf_model.training:
            raise ArgumentError("hf_model: want eval mode, got training mode; call .eval()")
        self.hf_model = hf_model
        self.device = _only_device(hf_model)
        self.vocab_size: int = config.vocab_size
        if max_position is not None and max_position < 1:
            raise ArgumentError(f"max_position: want >= 1, got {max_position}")
        self.max_position: int = max_position or config.max_position_embeddings
        _check_rope(config, self.max_position)
        modules = _attention_modules(hf_model)
        self.format = CacheFormat(
            cache_format or _format_of(hf_model.dtype),
            kv_lora_rank=modules[0].kv_lora_rank,
            rope_dim=modules[0].qk_rope_head_dim,
        )
        self._query_scaling = _query_scaling(config) if family.scales_query_by_position else None
        self._attentions = [
            _PagedAttention(module, layer, family, backend) for layer, module in enumerate(modules)
        ]
        self._freqs = torch.empty(0, self.format.rope_dim, dtype=torch.float32, device=self.device)
        self._freqs_up_to(1)
        # a 4-D mask is handed through as it is; without one, transformers would build [T, T]
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device)

    @property
    def num_cache_layers(self) -> int:
        """Attention modules: one cache layer each."""
        return len(self._attentions)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token in the paged cache, over all layers."""
        return self.num_cache_layers * self.format.bytes_per_token

    @cached_property
    def hf_cache_bytes_per_token(self) -> int:
        """Bytes of one token in transformers' own ``DynamicCache``, over all layers.

        Measured, because it depends on the version: older ones store every head's key and value,
        newer ones the latent and the rope key.
        """
        return self.num_cache_layers * self._attentions[0].hf_cache_bytes(
            self._rotary(self.hf_model.dtype)
        )

    @torch.no_grad()
    def forward(
        self, token_ids: Tensor, batch: PagedBatch, cache: PagedKVCache, logit_rows: Tensor
    ) -> Tensor:
        """Write the new tokens into the cache and return the logits of some of them.

        Args:
            token_ids: int64 ``[T]``, the packed new tokens of ``batch``. Requests with one new
                token come first; they take the absorbed path, the others the unabsorbed one. A
                batch that cannot be split (``batch.can_split``) takes the absorbed path whole.
            batch: whose tokens these are, and the pages that hold or will hold them.
            cache: has this model's ``format`` and ``num_cache_layers``.
            logit_rows: int64 ``[n]``, indices into ``token_ids``; may be empty.

        Returns:
            fp32 ``[n, vocab_size]``.

        Raises:
            ArgumentError, DeviceError, ShapeMismatchError: an argument is not as above.
        """
        self._check_step(token_ids, cache)
        if token_ids.numel() == 0:
            return torch.zeros(len(logit_rows), self.vocab_size, device=self.device)
        step = self._plan_step(len(token_ids), batch, cache)
        swaps: list[tuple[nn.Module, Callable[..., Any]]] = [
            (attention.module, attention.bind(step)) for attention in self._attentions
        ]
        swaps.append((self.hf_model.base_model.rotary_emb, _no_position_embeddings))
        with _swapped_forwards(swaps):
            output = self.hf_model(
                input_ids=token_ids[None],
                attention_mask=self._no_mask,
                use_cache=False,
                logits_to_keep=logit_rows,
                return_dict=True,
            )
        logits: Tensor = output.logits[0].float()
        return logits

    def _check_step(self, token_ids: Tensor, cache: PagedKVCache) -> None:
        if token_ids.ndim != 1 or token_ids.dtype != torch.int64:
            raise ShapeMismatchError(
                f"token_ids: want int64 [T], got {token_ids.dtype} {list(token_ids.shape)}"
            )
        if token_ids.device != self.device:
            raise DeviceError(f"token_ids: want device {self.device}, got {token_ids.device}")
        wanted = (self.format, self.num_cache_layers)
        if (cache.format, cache.num_layers) != wanted:
            raise ArgumentError(
                f"cache: want (format, num_layers) {wanted}, got {(cache.format, cache.num_layers)}"
            )

    def _plan_step(self, num_tokens: int, batch: PagedBatch, cache: PagedKVCache) -> "_Step":
        longest = batch.max_seq_len
        if longest is None:  # only the device knows: the most that the page table can hold
            longest = min(batch.max_pages * cache.page_size, self.max_position)
        if longest > self.max_position:
            raise ArgumentError(
                f"batch: want sequences of at most max_position={self.max_position} tokens, "
                f"got {longest}"
            )
        decode, prefill = batch.split_decode() if batch.can_split else (batch, None)
        if prefill is not None and prefill.num_requests == 0:
            prefill = None
        return _Step(
            cache=cache,
            batch=batch,
            decode=decode,
            prefill=prefill,
            num_decode=num_tokens if prefill is None else decode.num_tokens,
            freqs=self._freqs_up_to(longest),
            query_scale=self._query_scale(batch, num_tokens),
        )

    def _freqs_up_to(self, num_positions: int) -> Tensor:
        """The rotary table ``[at least num_positions, R]``, from the model's own rotary module."""
        known = len(self._freqs)
        if known < num_positions:
            wanted = min(max(num_positions, 2 * known, _MIN_FREQS_ROWS), self.max_position)
            positions = torch.arange(known, wanted, device=self.device)[None]
            rows = _as_freqs(self._rotary(torch.float32)(positions))
            if rows.shape[1] != self.format.rope_dim:
                raise UnsupportedError(
                    f"hf_model: want rotary tables of {self.format.rope_dim} columns, "
                    f"got {rows.shape[1]}"
                )
            self._freqs = torch.cat([self._freqs, rows])
        return self._freqs

    def _rotary(self, dtype: torch.dtype) -> Callable[[Tensor], Any]:
        """Maps positions ``[1, n]`` to what the model's rotary module gives in ``dtype``."""
        like = torch.empty(0, dtype=dtype, device=self.device)
        return lambda positions: self.hf_model.base_model.rotary_emb(like, positions)

    def _query_scale(self, batch: PagedBatch, num_tokens: int) -> Tensor | None:
        """Factors ``[T, 1, 1]`` of the queries, or None where the family has none."""
        if self._query_scaling is None or batch.num_requests == 0:
            return None
        beta, original = self._query_scaling
        wraps = torch.floor(_positions(batch, num_tokens) / original)
        scale: Tensor = 1 + beta * torch.log(1 + wraps)
        return scale.to(self.hf_model.dtype)[:, None, None]


@dataclass(frozen=True)
class _Step:
    """What all layers of one step share. Tokens ``[0, num_decode)`` take the absorbed path."""

    cache: PagedKVCache
    batch: PagedBatch
    decode: PagedBatch
    prefill: PagedBatch | None
    num_decode: int
    freqs: Tensor  # [max_positions, R] fp32
    query_scale: Tensor | None  # [T, 1, 1]


class _PagedAttention:
    """One attention module over one layer of the cache: its projections, kvkern's attention."""

    def __init__(self, module: Any, layer: int, family: _Family, backend: str) -> None:
        self.module = module
        self._layer = layer
        self._backend = backend
        self._nope: int = module.qk_nope_head_dim
        self._latent: int = module.kv_lora_rank
        self._w_uk, self._w_uv = _split_kv_b_proj(module)  # [H, nope, L], [H, L, v]
        self._num_heads = self._w_uk.shape[0]
        self._gamma: Tensor = module.kv_a_layernorm.weight
        self._eps: float = module.kv_a_layernorm.variance_epsilon
        self._softmax_scale: float = module.scaling
        if family.scales_lora:
            # fp32: a product rounded to bf16 would bias a whole column
            self._gamma = self._gamma.float() * module.mla_scale_kv_lora
            self._softmax_scale *= module.mla_scale_q_lora
        interleaved = family.rope_style == "interleaved" or (
            family.rope_style is None and bool(module.config.rope_interleave)
        )
        self._rope_style: RopeStyle = "interleaved" if interleaved else "half"

    def bind(self, step: _Step) -> Callable[..., tuple[Tensor, None]]:
        """The module's ``forward`` for one step; position and mask arguments are not needed."""

        def forward(hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
            return self._attend(hidden_states[0], step)[None], None

        return forward

    def _attend(self, hidden: Tensor, step: _Step) -> Tensor:
        """``[T, hidden_size]`` to ``[T, hidden_size]``; stores the tokens, then attends."""
        nope, latent, split = self._nope, self._latent, step.num_decode
        q = self._project_query(hidden)  # [T, H, nope+R]
        if step.query_scale is not None:
            q = q * step.query_scale
        kv = self.module.kv_a_proj_with_mqa(hidden)  # [T, L+R]
        q_absorbed = q.new_empty(split, self._num_heads, kv.shape[1])
        only_decode = step.prefill is None
        kv_out = None if only_decode else torch.empty_like(kv)
        write_kv(
            step.cache.view(self._layer, step.batch),
            kv,
            step.freqs,
            self._gamma,
            q_rope=q[..., nope:],
            q_rope_out=q_absorbed[..., latent:] if only_decode else q[..., nope:],
            kv_out=kv_out,
            eps=self._eps,
            rope_style=self._rope_style,
            rounding="hf",
            backend=self._backend,
        )
        values = q.new_empty(len(hidden), self._num_heads, self._w_uv.shape[2])
        if split:
            if not only_decode:
                q_absorbed[..., latent:] = q[:split, :, nope:]
            self._decode(q[:split, :, :nope], q_absorbed, step, values[:split])
        if kv_out is not None:
            self._prefill(q[split:], kv_out[split:], step, values[split:])
        attended: Tensor = self.module.o_proj(values.flatten(1))
        return attended

    def _project_query(self, hidden: Tensor) -> Tensor:
        module = self.module
        if module.q_lora_rank is None:
            q = module.q_proj(hidden)
        else:
            q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden)))
        heads: Tensor = q.unflatten(-1, (self._num_heads, -1))
        return heads

    def _decode(self, q_nope: Tensor, q_absorbed: Tensor, step: _Step, values: Tensor) -> None:
        """Fill ``values`` ``[T, H, v]``; ``q_absorbed`` has its rope columns."""
        absorbed = q_absorbed[..., : self._latent]
        mla_absorb(q_nope, self._w_uk, out=absorbed, backend=self._backend)
        attended = mla_decode(
            q_absorbed,
            step.cache.view(self._layer, step.decode),
            softmax_scale=self._softmax_scale,
            backend=self._backend,
        )
        mla_absorb(attended.out, self._w_uv, out=values, backend=self._backend)

    def _prefill(self, q: Tensor, kv: Tensor, step: _Step, values: Tensor) -> None:
        """Fill ``values`` ``[T, H, v]``; ``kv`` ``[T, L+R]`` is normed and rotated, as is ``q``."""
        assert step.prefill is not None
        latent, k_rope = kv.tensor_split([self._latent], dim=1)
        keys_values = self.module.kv_b_proj(latent).unflatten(-1, (self._num_heads, -1))
        k_nope, v = keys_values.tensor_split([self._nope], dim=-1)
        mla_prefill(
            q,
            k_nope,
            k_rope,
            v,
            step.cache.view(self._layer, step.prefill),
            softmax_scale=self._softmax_scale,
            w_uk=self._w_uk,
            w_uv=self._w_uv,
            out=values,
            backend=self._backend,
        )

    @torch.no_grad()
    def hf_cache_bytes(self, rotary: Callable[[Tensor], Any]) -> int:
        """Bytes that the module's own ``forward`` leaves in a ``DynamicCache`` for one token."""
        cache = DynamicCache()
        norm, hidden_size = self.module.kv_a_layernorm.weight, self.module.config.hidden_size
        position = torch.zeros(1, 1, dtype=torch.int64, device=norm.device)
        self.module(
            hidden_states=norm.new_zeros(1, 1, hidden_size),
            position_embeddings=rotary(position),
            attention_mask=None,
            position_ids=position,
            past_key_values=cache,
        )
        stored = cache.layers[self.module.layer_idx]
        return int(stored.keys.nbytes + stored.values.nbytes)


@contextmanager
def _swapped_forwards(swaps: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Give each module another ``forward`` while inside; an instance's own comes back after."""
    before = [module.__dict__.get("forward") for module, _ in swaps]
    for module, forward in swaps:
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for (module, _), own in zip(swaps, before, strict=True):
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own


def _no_position_embeddings(*_: object, **__: object) -> None:
    """Stands in for the rotary module: ``write_kv`` rotates, from the table."""


def _family_of(config: Any) -> _Family:
    if config.model_type not in _FAMILIES:
        raise UnsupportedError(
            f"hf_model: want model_type {', '.join(_FAMILIES)}; got {config.model_type!r}"
        )
    for field in ("sliding_window", "attention_chunk_size"):
        if getattr(config, field, None) is not None:
            raise UnsupportedError(
                f"hf_model: want full attention in every layer, got config.{field}="
                f"{getattr(config, field)}"
            )
    return _FAMILIES[config.model_type]


def _check_rope(config: Any, max_position: int) -> None:
    """Refuse frequencies that a longer neighbour, or a later token, would change."""
    rope = config.rope_parameters
    if "dynamic" in rope["rope_type"]:
        limit = config.max_position_embeddings
    elif rope["rope_type"] == "longrope" and rope["short_factor"] != rope["long_factor"]:
        limit = rope["original_max_position_embeddings"]
    else:
        return
    if max_position > limit:
        raise UnsupportedError(
            f"hf_model: rope_type {rope['rope_type']!r} changes the rotation of cached keys when "
            f"a sequence passes {limit} tokens; want max_position <= {limit}, got {max_position}"
        )


def _query_scaling(config: Any) -> tuple[float, int]:
    """``(beta, original length)`` of a query scale of 1 + beta * log(1 + position // length)."""
    names = ("llama_4_scaling_beta", "original_max_position_embeddings")
    beta, length = (config.rope_parameters.get(name) for name in names)
    if beta is None or length is None:
        raise UnsupportedError(
            f"hf_model: want {' and '.join(names)} in config.rope_parameters, "
            f"got {beta} and {length}"
        )
    return beta, length


def _only_device(hf_model: HFModel) -> torch.device:
    devices = {parameter.device for parameter in hf_model.parameters()}
    if len(devices) != 1:
        raise DeviceError(f"hf_model: want one device, got {', '.join(sorted(map(str, devices)))}")
    device: torch.device = devices.pop()
    return device


def _format_of(dtype: torch.dtype) -> FormatName:
    if dtype not in _FORMAT_OF_DTYPE:
        raise UnsupportedError(f"hf_model: want bfloat16, float16 or float32, got {dtype}")
    return _FORMAT_OF_DTYPE[dtype]


def _attention_modules(hf_model: HFModel) -> list[Any]:
    """In the order they run. A layer may hold several; layers past the depth do not run."""
    modules: list[Any] = []
    for layer in hf_model.base_model.layers[: hf_model.config.num_hidden_layers]:
        attention = layer.self_attn
        modules.extend(attention if isinstance(attention, nn.ModuleList) else [attention])
    return modules


def _split_kv_b_proj(module: Any) -> tuple[Tensor, Tensor]:
    """``kv_b_proj`` as ``w_uk`` and ``w_uv``: views of a plain weight, else a dense copy."""
    projection, nope, v_dim = module.kv_b_proj, module.qk_nope_head_dim, module.v_head_dim
    weight: Tensor
    if type(projection) is nn.Linear:
        weight = projection.weight.detach()
    else:  # quantised, or an adapter around it: what it does to the unit vectors is its weight
        like = module.kv_a_layernorm.weight
        with torch.no_grad():
            unit = torch.eye(module.kv_lora_rank, dtype=like.dtype, device=like.device)
            weight = projection(unit).mT
    num_heads = weight.shape[0] // (nope + v_dim)
    return absorb_weights(weight, num_heads=num_heads, nope_dim=nope, v_dim=v_dim)


def _as_freqs(embeddings: Any) -> Tensor:
    """What a rotary module returns for ``[1, n]`` positions, as fp32 rows ``cos0, sin0, ...``."""
    if isinstance(embeddings, Tensor):  # complex [1, n, R/2]
        return torch.view_as_real(embeddings[0]).flatten(1).float()
    cos, sin = (table[0].chunk(2, dim=-1)[0] for table in embeddings)  # each pair twice
    return torch.stack([cos, sin], dim=-1).flatten(1)


def _positions(batch: PagedBatch, num_tokens: int) -> Tensor:
    """Position of each token ``[T]``, without a synchronisation; padding counts on."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=batch.device)
    owner = torch.searchsorted(batch.input_row_offsets[1:], tokens, right=True)
    owner = owner.clamp(max=batch.num_requests - 1)
    return batch.cache_lengths[owner] + tokens - batch.input_row_offsets[owner]
