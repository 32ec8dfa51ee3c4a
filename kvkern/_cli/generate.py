"""``python -m kvkern generate``: a model served from a paged latent cache, and what it came to."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from kvkern._cli.display import Stream, open_display, show_summary, tracked
from kvkern.cache.scales import CacheScales
from kvkern.engine import Engine, SamplingParams
from kvkern.integrations.transformers import PagedModel
from kvkern.layout import FormatName
from kvkern.testing.models import tiny_model

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHARED = "A page holds a few tokens of one sequence. "
_PROMPTS = (
    _SHARED + "Who may share it?",
    _SHARED + "And what becomes of it when the sequence ends, or has to make room for others?",
    _SHARED + "When is it copied?",
    "Hello",
    _SHARED + "Who may write to it?",
    _SHARED + "Who may share it?",
)
_STEPS_BETWEEN_ARRIVALS = 3
_TIGHTNESS = 0.45  # of the pages that all requests of the small model would need at once


class ByteTokenizer:
    """A token is a byte. What is not a visible ASCII character shows as a sign in Braille."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], /) -> str:
        return "".join(chr(byte if 32 <= byte < 127 else 0x2800 + byte) for byte in token_ids)


class CheckpointTokenizer:
    """The tokenizer of a checkpoint, without special tokens in the text."""

    def __init__(self, folder: str) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text)["input_ids"]
        return token_ids

    def decode(self, token_ids: Sequence[int], /) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


@dataclass(frozen=True)
class _Served:
    """A model, its tokenizer, and what the command's arguments make of them."""

    hf_model: Any
    model: PagedModel
    tokenizer: ByteTokenizer | CheckpointTokenizer
    params: SamplingParams
    eos_token_ids: list[int]

    @property
    def is_exact(self) -> bool:
        """Whether the tokens must equal transformers': fp32 leaves no room for near ties."""
        return self.hf_model.dtype == torch.float32 and self.model.format.name == "fp32"


def run(settings: argparse.Namespace) -> int:
    """Serve the prompts, then sum up. Returns 1 if tokens differ that must be equal."""
    served = _load(settings)
    prompts = settings.prompt or _PROMPTS
    streams = [
        Stream(prompt, served.tokenizer.encode(prompt), settings.max_tokens) for prompt in prompts
    ]
    num_pages = settings.num_pages or _default_num_pages(settings, streams)
    engine = Engine(
        served.model,
        num_pages=num_pages,
        page_size=settings.page_size,
        max_batch_tokens=settings.max_batch_tokens,
        eos_token_ids=served.eos_token_ids,
        tokenizer=served.tokenizer,
        scales=None if settings.scales is None else CacheScales.load(settings.scales),
    )
    if served.model.device.type == "cuda":
        _warm_up(served, engine, streams)
    start = time.perf_counter()
    _serve(engine, streams, served.params)
    seconds = time.perf_counter() - start
    summary = _summarise(served.model, engine, streams, seconds)
    differences: list[str] = []
    if settings.verify:
        differences = _differences_from_transformers(served, streams)
        verdict = f"{len(differences)} of {len(streams)} differ from"
        if not differences:
            verdict = f"tokens of all {len(streams)} equal"
        summary.append(("verified", f"{verdict} transformers' own greedy output"))
    show_summary(summary)
    for difference in differences:
        print(difference)
    if differences and not served.is_exact:
        print("Near ties may fall either way: model and cache are not both in fp32.")
    return 1 if differences and served.is_exact else 0


def _load(settings: argparse.Namespace) -> _Served:
    hf_model, tokenizer = load_model(settings)
    cache_format: FormatName | None = settings.cache_format
    eos = hf_model.generation_config.eos_token_id
    return _Served(
        hf_model=hf_model,
        model=PagedModel(hf_model, cache_format=cache_format),
        tokenizer=tokenizer,
        params=SamplingParams(max_tokens=settings.max_tokens),
        eos_token_ids=[] if eos is None else [eos] if isinstance(eos, int) else list(eos),
    )


def load_model(settings: argparse.Namespace) -> tuple[Any, ByteTokenizer | CheckpointTokenizer]:
    """The checkpoint or the small model, on the device, and its tokenizer."""
    device, on_cpu = settings.device, settings.device.type == "cpu"
    # the small model is there to compare tokens, which only fp32 promises to be equal
    default = "fp32" if on_cpu or settings.model is None else "bf16"
    dtype = _DTYPES[settings.dtype or default]
    if settings.model is None:
        if on_cpu:  # so small that more threads would only wait for one another
            torch.set_num_threads(1)
        small = tiny_model("deepseek_v3", seed=settings.seed, dtype=dtype, vocab_size=256)
        return small.to(device), ByteTokenizer()
    loaded: Any = _model_class(settings.model).from_pretrained(settings.model, dtype=dtype)
    return loaded.eval().to(device), CheckpointTokenizer(str(settings.model))


def _model_class(folder: str) -> Any:
    """The class that the checkpoint names: transformers' own choice does not know every family."""
    names = AutoConfig.from_pretrained(folder).architectures or [""]
    return getattr(transformers, names[0], AutoModelForCausalLM)


def _default_num_pages(settings: argparse.Namespace, streams: list[Stream]) -> int:
    needs = [-(-(len(s.prompt_ids) + s.max_tokens) // settings.page_size) for s in streams]
    return sum(needs) if settings.model else max(*needs, int(_TIGHTNESS * sum(needs)))


def _warm_up(served: _Served, engine: Engine, streams: list[Stream]) -> None:
    """Compile the kernels and fill the allocator's pools, in a cache that is thrown away."""
    print("compiling kernels ...", flush=True)
    cache = engine.cache
    scratch = Engine(served.model, num_pages=cache.num_pages, page_size=cache.page_size)
    scratch.generate([stream.prompt_ids for stream in streams[:2]], SamplingParams(max_tokens=2))


def _serve(engine: Engine, streams: list[Stream], params: SamplingParams) -> None:
    """Run the loop: a prompt arrives every few steps, and every step is shown."""
    running: dict[int, Stream] = {}
    arrivals = iter(streams)
    num_turns = 0
    with open_display(streams, engine.cache.num_pages) as display:
        while engine.has_requests or num_turns < _STEPS_BETWEEN_ARRIVALS * len(streams):
            if num_turns % _STEPS_BETWEEN_ARRIVALS == 0 and (stream := next(arrivals, None)):
                running[engine.submit(stream.prompt_ids, params)] = stream
                stream.arrived = True
            for event in engine.step():
                running[event.request_id].add(event)
            num_turns += 1
            display.update(engine.stats)


def _summarise(
    model: PagedModel, engine: Engine, streams: list[Stream], seconds: float
) -> list[tuple[str, str]]:
    stats = engine.stats
    num_tokens = sum(len(s.prompt_ids) + len(s.token_ids) for s in streams)
    ours, theirs = model.kv_bytes_per_token, model.hf_cache_bytes_per_token
    return [
        (
            "speed",
            f"{stats.num_generated_tokens / seconds:.1f} tokens/s generated, "
            f"{stats.num_computed_tokens / seconds:.1f} computed, on {engine.cache.device}",
        ),
        ("steps", f"{stats.num_steps} in {seconds:.1f} s"),
        (
            "cache in use",
            f"{_kib(stats.peak_cache_bytes)} at most ({ours} bytes a token, {model.format.name})",
        ),
        (
            "cache of transformers",
            f"{_kib(num_tokens * theirs)} for these {num_tokens} tokens ({theirs} bytes a token)",
        ),
        ("prefix hits", f"{stats.num_prefix_hit_tokens} tokens not computed again"),
        ("preemptions", f"{stats.num_preemptions}"),
    ]


def _kib(num_bytes: int) -> str:
    return f"{num_bytes / 1024:,.0f} KiB"


@torch.inference_mode()
def _differences_from_transformers(served: _Served, streams: list[Stream]) -> list[str]:
    """What is different, in words; one line for each stream that is."""
    eos = served.eos_token_ids
    # in place of the checkpoint's, which may ask for sampling or penalties
    served.hf_model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=served.params.max_tokens,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
    )
    differences = []
    for number, stream in enumerate(tracked(streams, "transformers' own generate")):
        prompt = torch.tensor([stream.prompt_ids], device=served.model.device)
        output = served.hf_model.generate(prompt, attention_mask=torch.ones_like(prompt))
        theirs = output[0, prompt.shape[1] :].tolist()
        if theirs != stream.token_ids:
            differences.append(f"prompt {number}: " + _first_difference(served, stream, theirs))
    return differences


def _first_difference(served: _Served, stream: Stream, theirs: list[int]) -> str:
    ours = stream.token_ids
    pairs = enumerate(zip(ours, theirs, strict=False))
    where = next((i for i, (a, b) in pairs if a != b), None)
    if where is None:
        return f"{len(ours)} tokens here, {len(theirs)} there"
    tokens = torch.tensor([stream.prompt_ids + ours[:where]], device=served.model.device)
    logits = served.hf_model(tokens).logits[0, -1].float()
    gap = float(logits[theirs[where]] - logits[ours[where]])
    return (
        f"token {where} is {ours[where]} here and {theirs[where]} there, "
        f"where transformers' logits for them are {gap:.3g} apart"
    )
