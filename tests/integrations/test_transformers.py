"""PagedModel against transformers' own forward: same weights, same prompts, fp32 on the CPU."""

import copy
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from kvkern import (  # noqa: E402  (after the skip)
    ArgumentError,
    DeviceError,
    PagedBatch,
    PagedKVCache,
    ShapeMismatchError,
    UnsupportedError,
)
from kvkern.integrations import transformers as integration  # noqa: E402
from kvkern.integrations.transformers import SUPPORTED_MODEL_TYPES, PagedModel  # noqa: E402
from kvkern.testing.models import FAMILY_NAMES, tiny_config, tiny_model  # noqa: E402

NUM_NEW = 6
# longer than a chunk, shorter than a page, one token, and one that ends a chunk with one token;
# 37 passes the 32 positions after which mistral4 scales its queries
PROMPT_LENS = (37, 5, 1, 17)


class Generated(NamedTuple):
    tokens: list[int]
    logits: torch.Tensor  # [NUM_NEW, vocab]


@lru_cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 320, (n,), generator=generator).tolist() for n in PROMPT_LENS]


def hf_greedy(hf_model, prompt: list[int]) -> Generated:
    output = hf_model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Generated(output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits).float())


def make_cache(model: PagedModel, page_size: int, num_pages: int = 64) -> PagedKVCache:
    cache = PagedKVCache(
        model.format,
        num_layers=model.num_cache_layers,
        num_pages=num_pages,
        page_size=page_size,
        device=model.device,
    )
    cache.storage.fill_(0xFF)  # NaN in every format
    return cache


def paged_greedy(model: PagedModel, *, page_size: int = 3, chunk: int = 8) -> list[Generated]:
    """All prompts at once: each arrives a step after the last, prefilled in chunks, decoded."""
    cache = make_cache(model, page_size)
    pages_each = -(-(max(PROMPT_LENS) + NUM_NEW) // page_size)
    order = torch.randperm(cache.num_pages, generator=torch.Generator().manual_seed(3))
    tables = order[: len(PROMPT_LENS) * pages_each].view(-1, pages_each).tolist()
    tokens = [list(prompt) for prompt in prompts()]
    cached = [0] * len(tokens)
    logits: list[list[torch.Tensor]] = [[] for _ in tokens]
    for step in range(100):
        new = {
            r: tokens[r][cached[r] : cached[r] + chunk]
            for r in range(min(step + 1, len(tokens)))
            if len(logits[r]) < NUM_NEW
        }
        if not new:
            return [
                Generated(t[-NUM_NEW:], torch.stack(x)) for t, x in zip(tokens, logits, strict=True)
            ]
        requests = sorted(new, key=lambda r: len(new[r]) != 1)
        ends = torch.tensor([0] + [len(new[r]) for r in requests]).cumsum(0)
        batch = PagedBatch(
            ends.tolist(), [cached[r] for r in requests], [tables[r] for r in requests]
        )
        flat = torch.tensor([token for r in requests for token in new[r]])
        last = model.forward(flat, batch, cache, ends[1:] - 1)
        for r, row in zip(requests, last, strict=True):
            cached[r] += len(new[r])
            if cached[r] == len(tokens[r]):
                logits[r].append(row)
                tokens[r].append(int(row.argmax()))
    raise AssertionError("the loop did not end")


def prompt_logits(model: PagedModel, prompt: list[int], page_size: int = 16) -> torch.Tensor:
    """Logits of every token of one prompt, in one step."""
    num_pages = -(-len(prompt) // page_size)
    batch = PagedBatch([0, len(prompt)], [0], [list(range(num_pages))])
    cache = make_cache(model, page_size)
    return model.forward(torch.tensor(prompt), batch, cache, torch.arange(len(prompt)))


def stepwise_logits(
    model: PagedModel, prompt: list[int], steps: tuple[int, ...], page_size: int = 3
) -> torch.Tensor:
    """The same, with so many new tokens in each step."""
    cache, tokens = make_cache(model, page_size), torch.tensor(prompt, device=model.device)
    table = [list(reversed(range(-(-len(prompt) // page_size))))]
    logits, cached = [], 0
    for new in steps:
        batch = PagedBatch([0, new], [cached], table, device=model.device)
        rows = torch.arange(new, device=model.device)
        logits.append(model.forward(tokens[cached : cached + new], batch, cache, rows))
        cached += new
    assert cached == len(prompt)
    return torch.cat(logits)


@torch.no_grad()
def hf_logits(hf_model, prompt: list[int]) -> torch.Tensor:
    return hf_model(torch.tensor([prompt], device=hf_model.device)).logits[0].float()


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def assert_generates_like_transformers(hf_model, model: PagedModel, **how) -> None:
    for prompt, got in zip(prompts(), paged_greedy(model, **how), strict=True):
        expected = hf_greedy(hf_model, prompt)
        assert got.tokens == expected.tokens
        assert relative_error(got.logits, expected.logits) < 3e-5


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_greedy_tokens_and_logits_equal_transformers(family):
    hf_model = tiny_model(family)
    assert_generates_like_transformers(hf_model, PagedModel(hf_model))


def test_tiny_models_cover_every_supported_model_type():
    assert {tiny_config(name).model_type for name in FAMILY_NAMES} == set(SUPPORTED_MODEL_TYPES)


@pytest.mark.parametrize(
    "family, overrides",
    [
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"attention_bias": True}),
        # cos and sin are themselves scaled: 1 + 0.1 ln 4 over 1 + 0.05 ln 4
        (
            "deepseek_v3",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 640,
                    "mscale": 1.0,
                    "mscale_all_dim": 0.5,
                }
            },
        ),
        ("minicpm3", {"q_lora_rank": None, "dim_model_base": None}),
        ("deepseek_v2", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96}),
    ],
    ids=["half-rotation", "biases", "scaled-rotation", "no-query-lora", "three-heads"],
)
def test_config_variants_generate_like_transformers(family, overrides):
    hf_model = tiny_model(family, **overrides)
    assert_generates_like_transformers(hf_model, PagedModel(hf_model), page_size=16, chunk=11)


def test_yarn_correction_reaches_the_softmax():
    hf_model = tiny_model("deepseek_v3")
    attention = hf_model.model.layers[0].self_attn
    plain = attention.qk_head_dim**-0.5
    assert attention.scaling > 1.5 * plain
    expected = hf_logits(hf_model, prompts()[0])
    for layer in hf_model.model.layers:
        layer.self_attn.scaling = plain
    assert relative_error(prompt_logits(PagedModel(hf_model), prompts()[0]), expected) > 0.01


def test_epsilon_is_the_norm_modules_own():
    hf_model = tiny_model("glm4_moe_lite")
    for layer in hf_model.model.layers:
        layer.self_attn.kv_a_layernorm.variance_epsilon = 0.5
    assert_generates_like_transformers(hf_model, PagedModel(hf_model))


def whole_prompt_as_static_batch(prompt: list[int]) -> PagedBatch:
    batch = PagedBatch.static(
        max_requests=3, max_tokens=48, max_pages=4, max_query_len=40, max_seq_len=64, device="cpu"
    )
    batch.refill([0, len(prompt)], [0], [[5, 2, 9]])
    assert not batch.can_split
    return batch


def whole_prompt_as_batch(prompt: list[int]) -> PagedBatch:
    return PagedBatch([0, len(prompt)], [0], [[5, 2, 9]])


@pytest.mark.parametrize("make_batch", [whole_prompt_as_batch, whole_prompt_as_static_batch])
def test_padding_changes_nothing_in_a_batch_that_can_be_split_or_not(make_batch):
    hf_model = tiny_model("mistral4")
    model, prompt = PagedModel(hf_model), prompts()[0]
    padded = torch.tensor(prompt + [11] * 11)
    logits = model.forward(
        padded, make_batch(prompt), make_cache(model, 16), torch.arange(len(padded))
    )
    assert logits.isfinite().all()
    assert relative_error(logits[: len(prompt)], hf_logits(hf_model, prompt)) < 3e-5


def test_rows_asked_for_are_the_rows_returned():
    model = PagedModel(tiny_model("minicpm3"))
    prompt = prompts()[3]
    everything = prompt_logits(model, prompt)
    batch = PagedBatch([0, len(prompt)], [0], [[0, 1]])

    def rows(*indices: int) -> torch.Tensor:
        wanted = torch.tensor(indices, dtype=torch.int64)
        return model.forward(torch.tensor(prompt), batch, make_cache(model, 16), wanted)

    assert relative_error(rows(2, 16), everything[[2, 16]]) < 1e-6
    assert rows().shape == (0, 320)


def test_step_without_tokens_returns_no_logits():
    model = PagedModel(tiny_model("deepseek_v3"))
    nothing = torch.empty(0, dtype=torch.int64)
    for batch in (PagedBatch([0], [], []), PagedBatch([0, 0], [3], [[1]])):
        logits = model.forward(nothing, batch, make_cache(model, 16), nothing)
        assert logits.shape == (0, 320) and logits.dtype == torch.float32


def test_rotary_table_grown_in_pieces_changes_nothing(monkeypatch):
    hf_model = tiny_model("minicpm3")
    whole = paged_greedy(PagedModel(hf_model))
    monkeypatch.setattr(integration, "_MIN_FREQS_ROWS", 1)
    pieces = paged_greedy(PagedModel(hf_model))
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(whole, pieces, strict=True))


class _Wrapped(nn.Module):
    """A projection that is no plain ``nn.Linear``, as quantisation or an adapter makes it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden) * 2.0


def test_weight_of_a_wrapped_projection_is_what_the_wrapper_computes():
    hf_model = tiny_model("glm4_moe_lite")
    for layer in hf_model.model.layers:
        layer.self_attn.kv_b_proj = _Wrapped(layer.self_attn.kv_b_proj)
    assert_generates_like_transformers(hf_model, PagedModel(hf_model))


@pytest.mark.parametrize("family", ["minicpm3", "mistral4"])
def test_triton_kernels_give_the_same_logits(family, device):
    hf_model = tiny_model(family).to(device)
    got = stepwise_logits(PagedModel(hf_model, backend="triton"), prompts()[0], (20, 15, 1, 1))
    assert relative_error(got, hf_logits(hf_model, prompts()[0])) < 3e-5


@pytest.mark.parametrize(
    "cache_format, bound",
    [("bf16", 0.01), ("fp8_ds_mla", 0.2)],  # 2**-9 and 2**-4 of a cached value
)
def test_narrower_cache_moves_logits_by_its_rounding_only(cache_format, bound):
    hf_model = tiny_model("youtu")  # dense: a routing choice that flips would move them by more
    logits = stepwise_logits(PagedModel(hf_model, cache_format=cache_format), prompts()[0], (30, 7))
    error = relative_error(logits[30:], hf_logits(hf_model, prompts()[0])[30:])
    assert 0 < error < bound


def assert_bf16_within_budget(family: str, device: str) -> None:
    """The median token: an expert chosen otherwise, by either model, moves its token by more."""
    hf_model = tiny_model(family, dtype=torch.bfloat16)
    prompt = prompts()[0]
    exact = hf_logits(copy.deepcopy(hf_model).float(), prompt)
    hf_model.to(device)
    rounded = hf_logits(hf_model, prompt)
    got = stepwise_logits(PagedModel(hf_model), prompt, (20, 15, 1, 1))

    def error(logits: torch.Tensor) -> float:
        per_token = (logits.cpu() - exact).norm(dim=-1) / exact.norm(dim=-1)
        return float(per_token.median())

    assert error(got) < 2 * error(rounded) + 2**-8


@pytest.mark.parametrize("family", ["deepseek_v3", "longcat_flash", "mistral4"])
def test_bf16_logits_stay_in_the_error_budget(family):
    assert_bf16_within_budget(family, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_bf16_logits_on_a_gpu_stay_in_the_error_budget(family):
    assert_bf16_within_budget(family, "cuda")


def test_no_mask_is_built_and_no_cache_filled():
    hf_model = tiny_model("deepseek_v2_lite")
    seen = []
    hf_model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    prompt_logits(PagedModel(hf_model), prompts()[0])
    assert seen[0]["attention_mask"].numel() == 1
    assert seen[0]["past_key_values"] is None


def test_hf_model_is_itself_again_after_a_step_even_one_that_failed():
    hf_model = tiny_model("longcat_flash")
    before = {name: dict(module.__dict__) for name, module in hf_model.named_modules()}
    expected = hf_greedy(hf_model, prompts()[0])
    model = PagedModel(hf_model)
    prompt_logits(model, prompts()[0])
    too_narrow = PagedBatch([0, 5], [0], [[0]])
    with pytest.raises(ArgumentError, match="page_table: want at least 2 columns"):
        model.forward(torch.arange(5), too_narrow, make_cache(model, 3), torch.tensor([4]))
    after = {name: dict(module.__dict__) for name, module in hf_model.named_modules()}
    assert all(before[name].keys() == after[name].keys() for name in before)
    assert torch.equal(hf_greedy(hf_model, prompts()[0]).logits, expected.logits)


def test_forward_set_on_an_instance_by_others_survives():
    hf_model = tiny_model("youtu")
    attention = hf_model.model.layers[0].self_attn

    def theirs(*args, **kwargs):
        return type(attention).forward(attention, *args, **kwargs)

    attention.forward = theirs
    prompt_logits(PagedModel(hf_model), prompts()[1])
    assert attention.forward is theirs


@pytest.mark.parametrize("family", ["deepseek_v3", "longcat_flash", "minicpm3"])
def test_bytes_per_token_are_what_the_caches_hold(family):
    hf_model = tiny_model(family)
    model = PagedModel(hf_model, cache_format="bf16")
    output = hf_model(torch.tensor([prompts()[0]]), use_cache=True)
    layers = output.past_key_values.layers
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert model.hf_cache_bytes_per_token == stored // len(prompts()[0])
    assert model.kv_bytes_per_token == make_cache(model, 1, num_pages=1).num_bytes


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "n_routed_experts": 2,
    "vocab_size": 16,
    "pad_token_id": None,
}


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "DeepseekV32ForCausalLM"])
def test_unsupported_architecture_is_named_beside_the_supported_ones(name):
    model_class = getattr(transformers, name)
    hf_model = model_class(model_class.config_class(**SMALL)).eval()
    with pytest.raises(UnsupportedError) as raised:
        PagedModel(hf_model)
    assert f"got '{hf_model.config.model_type}'" in str(raised.value)
    assert all(name in str(raised.value) for name in SUPPORTED_MODEL_TYPES)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
    "original_max_position_embeddings": 64,
}


def test_rope_that_depends_on_the_longest_sequence_is_refused_past_its_limit():
    hf_model = tiny_model("minicpm3", rope_parameters=LONGROPE)
    with pytest.raises(UnsupportedError, match=r"'longrope' .* passes 64 tokens; .* got 512"):
        PagedModel(hf_model)
    assert_generates_like_transformers(hf_model, PagedModel(hf_model, max_position=64))


def test_dynamic_rope_is_refused_past_its_limit():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    hf_model = tiny_model("youtu", rope_parameters=rope, max_position_embeddings=64)
    with pytest.raises(UnsupportedError, match=r"'dynamic' .* passes 64 tokens; .* got 65"):
        PagedModel(hf_model, max_position=65)
    assert_generates_like_transformers(hf_model, PagedModel(hf_model))


@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size"])
def test_windowed_attention_is_refused(field):
    hf_model = tiny_model("deepseek_v3", **{field: 8})
    with pytest.raises(UnsupportedError, match=f"want full attention .* got config.{field}=8"):
        PagedModel(hf_model)


def test_query_scaling_without_its_numbers_is_refused():
    hf_model = tiny_model("mistral4")
    del hf_model.config.rope_parameters["llama_4_scaling_beta"]
    with pytest.raises(UnsupportedError, match=r"llama_4_scaling_beta .* got None and 32"):
        PagedModel(hf_model)


def test_rotary_table_of_another_width_is_refused():
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 32,
    }
    with pytest.raises(UnsupportedError, match="want rotary tables of 64 columns, got 128"):
        PagedModel(tiny_model("mistral4", rope_parameters=rope))


def test_training_mode_is_refused():
    with pytest.raises(ArgumentError, match="hf_model: want eval mode, got training mode"):
        PagedModel(tiny_model("youtu").train())


def test_step_arguments_are_checked():
    model = PagedModel(tiny_model("youtu"), max_position=20)
    cache, row = make_cache(model, 16), torch.tensor([0])
    batch = PagedBatch([0, 5], [16], [[0, 1]])
    tokens = torch.arange(5)
    with pytest.raises(ArgumentError, match="at most max_position=20 tokens, got 21"):
        model.forward(tokens, batch, cache, row)
    with pytest.raises(ShapeMismatchError, match=r"token_ids: want int64 \[T\], got torch.int32"):
        model.forward(tokens.int(), batch, cache, row)
    with pytest.raises(DeviceError, match="token_ids: want device cpu, got meta"):
        model.forward(tokens.to("meta"), batch, cache, row)
    other = PagedModel(tiny_model("youtu"), cache_format="bf16")
    with pytest.raises(ArgumentError, match=r"cache: want .*'fp32'.* got .*'bf16'"):
        model.forward(tokens, batch, make_cache(other, 16), row)
