"""Sampling: the right tokens, in the right proportions, whoever else is in the batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvkern.engine import SamplingParams
from kvkern.engine.sampling import INVALID_TOKEN, Draw, sample
from kvkern.errors import ArgumentError

# probabilities 0.4, 0.3, 0.15, 0.1, 0.05 at tokens 3, 0, 4, 1, 2
PROBS = torch.tensor([0.3, 0.1, 0.05, 0.4, 0.15])
NUM_DRAWS = 4000


def draw_many(logits: Tensor, params: SamplingParams) -> Tensor:
    """Frequencies of the tokens over many token indices."""
    draws = [Draw(params, seed=5, token_index=i) for i in range(NUM_DRAWS)]
    tokens = sample(logits.expand(NUM_DRAWS, -1), draws)
    return torch.bincount(tokens, minlength=len(logits)) / NUM_DRAWS


@pytest.mark.parametrize(
    "settings, wanted",
    [
        ({}, [0.3, 0.1, 0.05, 0.4, 0.15]),
        ({"temperature": 0.5}, [0.3182, 0.0353, 0.0088, 0.5618, 0.0795]),  # squares of the above
        ({"top_k": 2}, [3 / 7, 0, 0, 4 / 7, 0]),
        ({"top_k": 99}, [0.3, 0.1, 0.05, 0.4, 0.15]),
        ({"top_p": 0.6}, [3 / 7, 0, 0, 4 / 7, 0]),  # 0.4 is short of it, 0.4 + 0.3 is not
        ({"top_p": 1e-9}, [0, 0, 0, 1, 0]),
        # top_p counts what top_k left: 4/7 of it alone is short of 0.6
        ({"top_k": 2, "top_p": 0.6}, [3 / 7, 0, 0, 4 / 7, 0]),
        ({"top_k": 2, "top_p": 0.5}, [0, 0, 0, 1, 0]),
        ({"top_k": 1}, [0, 0, 0, 1, 0]),
    ],
    ids=str,
)
def test_frequencies_are_the_models_probabilities_within_top_k_and_top_p(
    settings: dict[str, Any], wanted: list[float]
) -> None:
    got = draw_many(PROBS.log(), SamplingParams(**{"temperature": 1.0, **settings}))
    expected = torch.tensor(wanted)
    assert torch.equal(got > 0, expected > 0)
    # four standard deviations of a frequency
    assert ((got - expected).abs() <= 4 * (expected * (1 - expected) / NUM_DRAWS).sqrt()).all()


def test_row_is_drawn_alike_alone_and_beside_any_neighbours() -> None:
    logits = torch.randn(6, 300)
    draws = [
        Draw(SamplingParams(temperature=t, top_k=k, top_p=p), seed, token_index)
        for t, k, p, seed, token_index in [
            (1.0, None, 1.0, 1, 0),
            (0.0, None, 1.0, 1, 0),
            (0.7, 20, 0.9, 1, 3),
            (2.0, None, 0.5, -4, 3),
            (0.0, 3, 0.1, 1, 9),
            (1e-4, None, 1.0, 2**70, 3),
        ]
    ]
    together = sample(logits, draws)
    for row, draw in enumerate(draws):
        assert sample(logits[row : row + 1], [draw]) == together[row]
    order = [3, 0, 5, 4, 1, 2]
    assert torch.equal(sample(logits[order], [draws[i] for i in order]), together[order])
    assert (together == logits.argmax(1))[[1, 4, 5]].all()


def test_draws_differ_by_seed_and_by_token_index() -> None:
    logits = torch.zeros(64, 1000)  # all tokens alike
    params = SamplingParams(temperature=1.0)
    by_seed = sample(logits, [Draw(params, seed, 0) for seed in range(64)])
    by_index = sample(logits, [Draw(params, 0, index) for index in range(64)])
    assert len(set(by_seed.tolist())) > 55
    assert len(set(by_index.tolist())) > 55
    assert not torch.equal(by_seed, by_index)


def test_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((500, 9), -torch.inf)
    logits[:, 4] = 0.0
    draws = [Draw(SamplingParams(temperature=1.0), 0, index) for index in range(500)]
    assert (sample(logits, draws) == 4).all()


def test_row_with_nan_gets_the_invalid_token_and_others_their_own() -> None:
    logits = torch.tensor([[0.0, 9.0], [torch.nan, 0.0], [0.0, torch.nan], [9.0, 0.0]])
    greedy, sampled = SamplingParams(), SamplingParams(temperature=0.1)
    draws = [Draw(p, 0, 0) for p in (greedy, greedy, sampled, sampled)]
    assert sample(logits, draws).tolist() == [1, INVALID_TOKEN, INVALID_TOKEN, 0]


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("max_tokens", 0, r"an int >= 1, got 0"),
        ("max_tokens", 2.0, r"an int >= 1, got 2.0"),
        ("max_tokens", True, r"an int >= 1, got True"),
        ("temperature", -0.1, r"a finite number >= 0, got -0.1"),
        ("temperature", float("nan"), r"a finite number >= 0, got nan"),
        ("temperature", float("inf"), r"a finite number >= 0, got inf"),
        ("temperature", None, r"a finite number >= 0, got None"),
        ("top_k", 0, r"None or an int >= 1, got 0"),
        ("top_p", 0.0, r"a number in \(0, 1\], got 0.0"),
        ("top_p", 1.1, r"a number in \(0, 1\], got 1.1"),
        ("top_p", float("nan"), r"a number in \(0, 1\], got nan"),
        ("seed", "x", r"None or an int, got 'x'"),
        ("stop", "", r"strings that are not empty, got \(''\,\)"),
        ("stop", ["a", 3], r"strings that are not empty, got \('a', 3\)"),
        ("stop_token_ids", [-1], r"ints >= 0, got \(-1,\)"),
    ],
)
def test_bad_setting_is_named_with_wanted_and_got(name: str, value: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: want {message}"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_stop_may_be_one_string_or_several() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
