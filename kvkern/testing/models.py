"""Tiny seeded Hugging Face models of every MLA family: published head dims, everything else small.

Weights are drawn wide enough that greedy tokens are well separated, and norm weights, biases and
the router's correction are random too, so that leaving one out changes the tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from kvkern.errors import ArgumentError

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MOE: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
# As published for DeepSeek V3, but for the length it extends from.
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_YARN_V2: dict[str, Any] = {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
_YARN_LENGTH = 2560  # factor x original length

# name -> (architecture, what differs from the family's defaults and from _COMMON)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {
            **_MOE,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "max_position_embeddings": _YARN_LENGTH,
            "rope_parameters": _YARN_V2,
        },
    ),
    "deepseek_v2_lite": (  # no query LoRA
        "DeepseekV2ForCausalLM",
        {
            **_MOE,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "max_position_embeddings": _YARN_LENGTH,
            "rope_parameters": _YARN_V2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **_MOE,
            "first_k_dense_replace": 1,
            "max_position_embeddings": _YARN_LENGTH,
            "rope_parameters": _YARN,
        },
    ),
    "axk1": ("AXK1ForCausalLM", {**_MOE, "first_k_dense_replace": 1}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {**_MOE, "n_group": 1}),
    "minicpm3": (
        "MiniCPM3ForCausalLM",
        {
            "v_head_dim": 64,
            "initializer_range": 0.2,
            "scale_emb": 2.0,
            "dim_model_base": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "factor": 1.0,
                "short_factor": [1.0 + 0.1 * i for i in range(16)],
                "long_factor": [1.0 + 0.1 * i for i in range(16)],
                "original_max_position_embeddings": 512,
            },
        },
    ),
    "mistral4": (
        "Mistral4ForCausalLM",
        {
            **_MOE,
            "n_group": 1,
            "rope_parameters": {
                **_YARN,
                "factor": 16.0,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "youtu": ("YoutuForCausalLM", {}),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        {
            "hidden_size": 160,
            "num_layers": 1,  # each holds two attention sublayers
            "ffn_hidden_size": 192,
            "expert_ffn_hidden_size": 64,
            "n_routed_experts": 6,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
}

FAMILY_NAMES: tuple[str, ...] = tuple(_FAMILIES)


def tiny_config(family: str, **overrides: Any) -> PretrainedConfig:
    """A config of ``family`` (one of ``FAMILY_NAMES``): published head dims, the rest small.

    Args:
        overrides: config fields that replace the tiny ones.
    """
    architecture, differences = _family(family)
    fields = {**_COMMON, **differences, **overrides}
    # a config may write into the dicts it is given
    fields = {k: dict(v) if isinstance(v, Mapping) else v for k, v in fields.items()}
    config: PretrainedConfig = architecture.config_class(**fields)
    return config


def tiny_model(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A seeded causal LM of ``tiny_config(family, **overrides)`` in eval mode, on the CPU."""
    architecture, _ = _family(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = architecture._from_config(tiny_config(family, **overrides), dtype=dtype)
        _randomise_constants(model)
    evaluated: PreTrainedModel = model.eval()
    return evaluated


def _family(name: str) -> tuple[Any, dict[str, Any]]:
    if name not in _FAMILIES:
        raise ArgumentError(f"family: want one of {', '.join(_FAMILIES)}; got {name!r}")
    architecture, differences = _FAMILIES[name]
    return getattr(transformers, architecture), differences


@torch.no_grad()
def _randomise_constants(model: nn.Module) -> None:
    """Give a random value to what initialisation leaves at 1 or 0."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.get_parameter("weight").uniform_(0.5, 1.5)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.normal_(std=0.1)
        for name, buffer in module.named_buffers(recurse=False):
            if name == "e_score_correction_bias":
                buffer.normal_(std=0.1)
