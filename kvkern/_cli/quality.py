"""``python -m kvkern quality``: what each cache format costs in precision, measured in two ways.

Storage: rows are written and read back, and compared with the same rows in fp64, for three kinds
of RMSNorm weights. Model: the logits with each format in the cache, compared with those with the
model's own dtype in it, on the same tokens. Both are seeded and repeat themselves.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

import kvkern
from kvkern._cli import display
from kvkern._cli.generate import load_model
from kvkern.cache.scales import CacheScales, ScaleObserver
from kvkern.errors import ArgumentError
from kvkern.integrations.transformers import PagedModel
from kvkern.layout import FORMAT_NAMES, FormatName
from kvkern.testing.inputs import rope_freqs

Found: TypeAlias = Literal["calibrated", "unit"] | None  # layer scales; None: it has none

_LATENT, _ROPE = 512, 64
_NUM_ROWS = 1024  # measured; as many others find the scales
_PAGE_SIZE = 16
_CHUNK = 128  # tokens in one step of the model
_MEDIAN, _SIGMA = 0.05, 1.0  # of the log-normal gammas
_LOG_NORMAL = f"log-normal, median {_MEDIAN}, sigma {_SIGMA:g}"
_GAMMAS: dict[str, Callable[[Tensor], Tensor]] = {  # from normal noise
    "near 1": lambda noise: 1 + 0.1 * noise,
    _LOG_NORMAL: lambda noise: _MEDIAN * (_SIGMA * noise).exp(),
    "near 0.002": lambda noise: 0.002 * (1 + 0.1 * noise),
}
_PROMPTS = (
    "The cache of a language model keeps one row for each token that it has read. Every later "
    "token looks at all of these rows, so they are read far more often than they are written.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\nprint(mean([1.5, 2.5, 4.0]))  # 2.6666666666666665\n",
    "Dear Mrs. Okafor, thank you for your letter of 14 March. The two boxes of tiles arrived on "
    "Tuesday; one tile of the second box is cracked. Could you send another, or take off $12.40?",
    "Wasser kocht auf Meereshöhe bei 100 °C, auf einem Berg von 3000 m schon bei etwa 90 °C.",
)


class Variant(NamedTuple):
    """A format, and for those with layer scales how these are found."""

    format_name: FormatName
    scales: Found

    @property
    def label(self) -> str:
        return f"{self.format_name}, scales 1" if self.scales == "unit" else self.format_name

    def pick(self, observer: ScaleObserver) -> CacheScales | None:
        """The scales that a cache of this variant gets; None for 1."""
        return observer.scales(self.format_name) if self.scales == "calibrated" else None


class StorageError(NamedTuple):
    """What is read back against what was to be stored: root mean square of the difference
    relative to that of the truth, and the cosine of the worst token."""

    format: FormatName
    scales: Found
    gamma: str
    bytes_per_token: int
    latent_error: float
    latent_cosine: float
    rope_error: float
    rope_cosine: float


class LogitError(NamedTuple):
    """The logits against those of the baseline, the mean of each token's logits taken off."""

    format: FormatName
    scales: Found
    error: float  # root mean square, relative
    cosine: float  # of the worst token
    kl_mean: float  # KL(baseline || format) in nats
    kl_max: float
    top1_agreement: float  # share of tokens


def run(settings: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for. Returns 1 if any figure is not finite."""
    formats = list(dict.fromkeys(settings.formats or FORMAT_NAMES))
    saved_format = _format_to_save(formats) if settings.save_scales else None
    variants = _variants(formats)
    storage = list(storage_errors(variants, settings.device))
    for gamma in _GAMMAS:
        _show_storage(gamma, [error for error in storage if error.gamma == gamma])
    hf_model, tokenizer = load_model(settings)
    if settings.model is None:
        _spread_gammas(hf_model, settings.seed)
    prompts = [tokenizer.encode(prompt) for prompt in settings.prompt or _PROMPTS]
    comparison = Comparison(hf_model, prompts)
    logits = [comparison.measure(variant) for variant in variants]
    _show_logits(_describe(settings, comparison), logits)
    if saved_format is not None:
        comparison.observer.scales(saved_format).save(settings.save_scales)
    if settings.out:
        report = {
            "kvkern": kvkern.__version__,
            "torch": torch.__version__,
            "device": str(settings.device),
            "storage": [error._asdict() for error in storage],
            "model": _name_model(settings),
            "baseline": comparison.format_name,
            "num_tokens": comparison.num_tokens,
            "logits": [error._asdict() for error in logits],
        }
        settings.out.write_text(json.dumps(report, indent=1) + "\n")
    figures = [x for row in (*storage, *logits) for x in row if isinstance(x, float)]
    return 0 if all(map(math.isfinite, figures)) else 1


def storage_errors(
    variants: Sequence[Variant], device: torch.device | str
) -> Iterator[StorageError]:
    """Write normal noise as latents and rope keys in fp32, and read it back."""
    for gamma_name, draw in _GAMMAS.items():
        case = _StorageCase(draw, torch.device(device))
        for variant in variants:
            yield case.measure(gamma_name, variant)


@dataclass(frozen=True)
class _StorageCase:
    """Two sets of rows of normal noise: one finds the scales, the other is measured."""

    draw_gamma: Callable[[Tensor], Tensor]
    device: torch.device

    def measure(self, gamma_name: str, variant: Variant) -> StorageError:
        cache = self._new_cache(variant.format_name, variant.pick(self._observer))
        self._write(cache, self._noise[1])
        got = kvkern.gather_kv(cache.view(0, self._batch), dtype=torch.float32)[0].double()
        parts = zip(self._split(got), self._split(self._truth), strict=True)
        figures = [figure for pair in parts for figure in _error_and_cosine(*pair)]
        return StorageError(
            variant.format_name, variant.scales, gamma_name, cache.format.bytes_per_token, *figures
        )

    @cached_property
    def _noise(self) -> Tensor:
        return _randn(1, 2, _NUM_ROWS, _LATENT + _ROPE).to(self.device)

    @cached_property
    def _gamma(self) -> Tensor:
        return self.draw_gamma(_randn(2, _LATENT)).to(self.device)

    @cached_property
    def _batch(self) -> kvkern.PagedBatch:
        pages = [range(_NUM_ROWS // _PAGE_SIZE)]
        return kvkern.PagedBatch([0, _NUM_ROWS], [0], pages, device=self.device)

    @cached_property
    def _observer(self) -> ScaleObserver:
        cache = self._new_cache("fp32", None)
        with kvkern.calibrate(cache) as observer:
            self._write(cache, self._noise[0])
        return observer

    @cached_property
    def _truth(self) -> Tensor:
        rows = self._noise[1].double()
        self._write(self._new_cache("fp32", None), rows, kv_out=rows, backend="reference")
        return rows

    def _new_cache(self, name: FormatName, scales: CacheScales | None) -> kvkern.PagedKVCache:
        fmt = kvkern.CacheFormat(name, _LATENT, _ROPE)
        return _new_cache(fmt, scales, 1, _NUM_ROWS, self.device)

    def _write(self, cache: kvkern.PagedKVCache, kv: Tensor, **options: Any) -> None:
        freqs = rope_freqs(_NUM_ROWS, _ROPE, device=str(self.device))
        kvkern.write_kv(cache.view(0, self._batch), kv, freqs, self._gamma, **options)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        latent, rope = rows.split([_LATENT, _ROPE], dim=-1)
        return latent, rope


class Comparison:
    """A model's logits on some prompts: with its own dtype in the cache, then with others.

    Every token is a decode step of its own, so all that attention sees has been in the cache.
    """

    def __init__(self, hf_model: Any, prompts: Sequence[Sequence[int]]) -> None:
        if not all(prompts):
            raise ArgumentError("prompt: want at least 1 token each, got 0")
        self._hf_model = hf_model
        self._prompts = prompts
        baseline = PagedModel(hf_model)
        self.format_name = baseline.format.name
        cache = self._new_cache(baseline, None)
        with kvkern.calibrate(cache) as self.observer:
            self._baseline = [_logits(baseline, cache, prompt) for prompt in prompts]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._prompts))

    def measure(self, variant: Variant) -> LogitError:
        """The same tokens once more, with this format in the cache."""
        model = PagedModel(self._hf_model, cache_format=variant.format_name)
        cache = self._new_cache(model, variant.pick(self.observer))
        pairs = zip(self._prompts, self._baseline, strict=True)
        tokens = [_compare(_logits(model, cache, prompt), want) for prompt, want in pairs]
        difference, size, cosine, kl, agrees = torch.cat(tokens, dim=1)
        return LogitError(
            variant.format_name,
            variant.scales,
            error=float((difference.sum() / size.sum()).sqrt()),
            cosine=float(cosine.min()),
            kl_mean=float(kl.mean()),
            kl_max=float(kl.max()),
            top1_agreement=float(agrees.mean()),
        )

    def _new_cache(self, model: PagedModel, scales: CacheScales | None) -> kvkern.PagedKVCache:
        longest = max(map(len, self._prompts))
        return _new_cache(model.format, scales, model.num_cache_layers, longest, model.device)


def _new_cache(
    fmt: kvkern.CacheFormat,
    scales: CacheScales | None,
    num_layers: int,
    num_tokens: int,
    device: torch.device,
) -> kvkern.PagedKVCache:
    return kvkern.PagedKVCache(
        fmt,
        num_layers=num_layers,
        num_pages=-(-num_tokens // _PAGE_SIZE),
        page_size=_PAGE_SIZE,
        device=device,
        latent_scale=1.0 if scales is None else scales.latent,
        rope_scale=1.0 if scales is None else scales.rope,
    )


def _logits(model: PagedModel, cache: kvkern.PagedKVCache, prompt: Sequence[int]) -> Tensor:
    """fp32 ``[len(prompt), vocab_size]``.

    Each token is a request with one new token, over the same pages as the others. A layer stores
    all of them before any is attended to, and none sees past its own position.
    """
    pages, device = range(cache.num_pages), model.device
    logits = []
    for start in range(0, len(prompt), _CHUNK):
        positions = range(start, min(start + _CHUNK, len(prompt)))
        num = len(positions)
        batch = kvkern.PagedBatch(range(num + 1), positions, [pages] * num, device=device)
        token_ids = torch.tensor(prompt[start : positions.stop], device=device)
        logits.append(model.forward(token_ids, batch, cache, torch.arange(num, device=device)))
    return torch.cat(logits)


def _compare(got: Tensor, want: Tensor) -> Tensor:
    """fp64 ``[5, n]`` on the CPU: squared difference, squared size, cosine, KL, same first."""
    got, want = (x.double() - x.double().mean(-1, keepdim=True) for x in (got, want))
    log_q, log_p = got.log_softmax(-1), want.log_softmax(-1)
    figures = [
        (got - want).square().sum(-1),
        want.square().sum(-1),
        F.cosine_similarity(got, want, dim=-1),
        (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0),  # rounding may lead below 0
        (got.argmax(-1) == want.argmax(-1)).double(),
    ]
    return torch.stack(figures).cpu()


def _error_and_cosine(got: Tensor, want: Tensor) -> tuple[float, float]:
    error = (got - want).norm() / want.norm()
    return float(error), float(F.cosine_similarity(got, want, dim=-1).min())


def _variants(formats: Sequence[FormatName]) -> list[Variant]:
    variants = []
    for name in formats:
        if kvkern.CacheFormat(name).layer_scaled:
            variants += [Variant(name, "calibrated"), Variant(name, "unit")]
        else:
            variants.append(Variant(name, None))
    return variants


def _format_to_save(formats: Sequence[FormatName]) -> FormatName:
    scaled = [name for name in formats if kvkern.CacheFormat(name).layer_scaled]
    if len(scaled) != 1:
        raise ArgumentError(
            f"--save-scales: want one format with layer scales in --formats, got {scaled}"
        )
    return scaled[0]


@torch.no_grad()
def _spread_gammas(hf_model: Any, seed: int) -> None:
    """Draw the norms of the latents, and scale down what follows them by as much as they grew.

    ``tiny_model`` leaves gammas near 1, where scales of 1 do as well as any.
    """
    for number, layer in enumerate(hf_model.base_model.layers):
        attention = layer.self_attn
        gamma = _GAMMAS[_LOG_NORMAL](_randn(seed + number, attention.kv_lora_rank))
        attention.kv_a_layernorm.weight.copy_(gamma)
        attention.kv_b_proj.weight.div_(gamma.square().mean().sqrt())


def _randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _name_model(settings: argparse.Namespace) -> str:
    if settings.model is not None:
        return str(settings.model)
    return f"the small model, seed {settings.seed}, gammas {_LOG_NORMAL}"


def _describe(settings: argparse.Namespace, comparison: Comparison) -> str:
    return (
        f"{_name_model(settings)}: logits of {comparison.num_tokens} tokens against a cache in "
        f"{comparison.format_name}, on {settings.device}; worst token's cosine"
    )


def _show_storage(gamma: str, errors: Sequence[StorageError]) -> None:
    _show_table(
        f"{_NUM_ROWS} rows of {_LATENT} + {_ROPE} columns, gammas {gamma}; worst token's cosines",
        ("format", "bytes/token", "latent error", "cosine", "rope error", "cosine"),
        [
            (
                Variant(error.format, error.scales).label,
                f"{error.bytes_per_token}",
                _percent(error.latent_error),
                f"{error.latent_cosine:.6f}",
                _percent(error.rope_error),
                f"{error.rope_cosine:.6f}",
            )
            for error in errors
        ],
    )


def _show_logits(title: str, errors: Sequence[LogitError]) -> None:
    _show_table(
        title,
        ("format", "error", "cosine", "KL mean", "KL max", "same first"),
        [
            (
                Variant(error.format, error.scales).label,
                _percent(error.error),
                f"{error.cosine:.6f}",
                f"{error.kl_mean:.1e}",
                f"{error.kl_max:.1e}",
                f"{error.top1_agreement:.1%}",
            )
            for error in errors
        ],
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"\n{title}")
    if display.HAS_RICH:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, header_style="dim")
        for number, name in enumerate(header):
            table.add_column(name, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    for row in (header, *rows):
        print(f"{row[0]:18}" + "".join(f"{cell:>14}" for cell in row[1:]), flush=True)
