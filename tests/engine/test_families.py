"""Every family of models, served: the tokens are those of transformers' own greedy generate."""

import pytest
import torch

pytest.importorskip("transformers")

from kvkern.engine import Engine, SamplingParams
from kvkern.integrations.transformers import PagedModel
from kvkern.testing.models import FAMILY_NAMES, tiny_model
from tests.engine.toy import assert_idle, prompts_of, serve

NUM_NEW = 10


def generate_alone(hf_model: torch.nn.Module, prompt: list[int]) -> list[int]:
    tokens = hf_model.generate(
        torch.tensor([prompt], device=hf_model.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=hf_model.device),
        max_new_tokens=NUM_NEW,
        do_sample=False,
    )
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_tokens_equal_transformers_under_arrival_chunking_reuse_and_preemption(family, device):
    hf_model = tiny_model(family, seed=3).to(device)
    stem, long, *tails = prompts_of(20, 41, 3, 9, seed=5)
    prompts = [stem + tails[0], long, [7], stem + tails[1], stem]
    engine = Engine(PagedModel(hf_model), num_pages=18, page_size=4, max_batch_tokens=16)
    tokens = serve(engine, prompts, SamplingParams(max_tokens=NUM_NEW), num_steps=2)
    assert tokens == [generate_alone(hf_model, prompt) for prompt in prompts]
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_prefix_hit_tokens > 0
    assert_idle(engine)
