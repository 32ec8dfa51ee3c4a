"""The engine over a toy model: its tokens are those of the model run densely, one at a time."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvkern.cache.prefix import PrefixIndex
from kvkern.cache.scales import CacheScales, calibrate
from kvkern.engine import Engine, SamplingParams, TokenEvent
from kvkern.errors import ArgumentError
from tests.engine.toy import (
    MAX_POSITION,
    VOCAB,
    ByteTokenizer,
    ToyModel,
    assert_idle,
    drain,
    oracle,
    prompts_of,
    serve,
    tokens_of,
)

GREEDY = SamplingParams(max_tokens=12)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, top_k=40, top_p=0.95, seed=7)
AMPLE: dict[str, Any] = {"num_pages": 64, "page_size": 4, "max_batch_tokens": 16}
TIGHT: dict[str, Any] = {"num_pages": 13, "page_size": 4, "max_batch_tokens": 16}


@pytest.fixture
def model() -> ToyModel:
    return ToyModel()


def test_requests_that_arrive_at_any_step_get_the_tokens_of_the_dense_model(
    model: ToyModel,
) -> None:
    engine = Engine(model, **AMPLE)
    prompts = prompts_of(5, 9, 1, 30)
    tokens = serve(engine, prompts, GREEDY, num_steps=3)
    assert tokens == [oracle(model, prompt, GREEDY) for prompt in prompts]
    assert_idle(engine)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_prompt_longer_than_the_token_budget_is_computed_in_chunks(
    model: ToyModel, page_size: int
) -> None:
    prompts = prompts_of(50, 3, 41)
    engine = Engine(model, num_pages=160, page_size=page_size, max_batch_tokens=8)
    completions = engine.generate(prompts, GREEDY)
    assert [c.token_ids for c in completions] == [oracle(model, p, GREEDY) for p in prompts]
    assert {c.finish_reason for c in completions} == {"length"}
    assert_idle(engine)


def test_steps_fill_the_token_budget_with_decode_tokens_first(model: ToyModel) -> None:
    engine = Engine(model, **AMPLE, prefix_cache=False)
    prompts = prompts_of(3, 4, 60)
    for prompt in prompts[:2]:
        engine.submit(prompt, GREEDY)
    engine.step()
    engine.submit(prompts[2], GREEDY)
    drain(engine)
    assert model.batches[:6] == [[3, 4], [1, 1, 14], [1, 1, 14], [1, 1, 14], [1, 1, 14], [1, 1, 4]]
    assert all(sum(batch) <= 16 for batch in model.batches)


def test_chunk_of_one_token_comes_before_longer_ones(model: ToyModel) -> None:
    """Whatever it is a chunk of, it is then computed as a decode token."""
    prompts = prompts_of(15, 9)
    completions = Engine(model, **AMPLE).generate(prompts, GREEDY)
    assert model.batches[:2] == [[1, 15], [1, 8]]
    assert [c.token_ids for c in completions] == [oracle(model, p, GREEDY) for p in prompts]


def test_each_token_is_indexed_once_however_the_request_grows(
    model: ToyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks and token by token: work that grew with the square of the length would show."""
    num_offered = 0
    insert = PrefixIndex.insert

    def counting_insert(index: PrefixIndex, tokens: list[int], *args: Any, **kwargs: Any) -> int:
        nonlocal num_offered
        num_offered += len(tokens)
        return insert(index, tokens, *args, **kwargs)

    monkeypatch.setattr(PrefixIndex, "insert", counting_insert)
    engine = Engine(model, **AMPLE)
    engine.generate(prompts_of(61, 30), GREEDY)
    assert 60 + 28 <= num_offered <= 61 + 30 + 2 * GREEDY.max_tokens
    assert_idle(engine)


def test_shared_prefix_is_computed_once(model: ToyModel) -> None:
    shared, *tails = prompts_of(22, 5, 1, 9)
    prompts = [shared + tail for tail in tails]
    engine = Engine(model, **AMPLE)
    (first,) = engine.generate(prompts[:1], GREEDY)
    computed = engine.stats.num_computed_tokens
    rest = engine.generate(prompts[1:], GREEDY)
    for completion, prompt in zip([first, *rest], prompts, strict=True):
        assert completion.token_ids == oracle(model, prompt, GREEDY)
    assert engine.stats.num_prefix_hit_tokens == 2 * 20  # whole pages of 4 within the 22
    new = sum(len(prompt) + GREEDY.max_tokens - 1 for prompt in prompts[1:])
    assert engine.stats.num_computed_tokens - computed == new - 2 * 20
    assert_idle(engine)


def test_prefix_of_a_running_request_is_shared(model: ToyModel) -> None:
    (prompt,) = prompts_of(15)
    engine = Engine(model, **AMPLE)
    first = engine.submit(prompt, GREEDY)
    events = engine.step()
    second = engine.submit(prompt, GREEDY)
    events += engine.step()
    assert engine.stats.num_prefix_hit_tokens == 12
    streams = drain(engine)
    got = [event.token for event in events if event.request_id == first]
    assert got + tokens_of(streams[first]) == oracle(model, prompt, GREEDY)
    got = [event.token for event in events if event.request_id == second]
    assert got + tokens_of(streams[second]) == oracle(model, prompt, GREEDY)


@pytest.mark.parametrize("page_size", [1, 4])
def test_repeated_prompt_of_whole_pages_computes_only_its_last_token(
    model: ToyModel, page_size: int
) -> None:
    """The last page is shared, so it is copied before that token is written again."""
    (prompt,) = prompts_of(16)
    engine = Engine(model, num_pages=40, page_size=page_size, max_batch_tokens=32)
    for _ in range(3):
        (completion,) = engine.generate([prompt], GREEDY)
        assert completion.token_ids == oracle(model, prompt, GREEDY)
    assert engine.stats.num_prefix_hit_tokens == 2 * 15
    assert model.batches[12][0] == model.batches[24][0] == 1
    assert_idle(engine)


def test_without_prefix_cache_nothing_is_kept(model: ToyModel) -> None:
    (prompt,) = prompts_of(16)
    engine = Engine(model, **AMPLE, prefix_cache=False)
    for _ in range(2):
        (completion,) = engine.generate([prompt], GREEDY)
        assert completion.token_ids == oracle(model, prompt, GREEDY)
    assert engine.stats.num_prefix_hit_tokens == 0
    assert engine.stats.num_pages_free == engine.cache.num_pages
    assert_idle(engine)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_preempted_requests_lose_and_repeat_nothing(
    model: ToyModel, params: SamplingParams, prefix_cache: bool
) -> None:
    prompts = prompts_of(9, 14, 20, 6, 11)
    engine = Engine(model, **TIGHT, prefix_cache=prefix_cache)
    completions = engine.generate(prompts, params)
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_generated_tokens == 5 * 12
    assert [c.token_ids for c in completions] == [oracle(model, p, params) for p in prompts]
    assert_idle(engine)


def test_youngest_request_is_preempted_and_the_oldest_never(model: ToyModel) -> None:
    prompts = prompts_of(12, 12, 12, 12)
    engine = Engine(model, **TIGHT, prefix_cache=False)
    ids = [engine.submit(prompt, GREEDY) for prompt in prompts]
    last_step: dict[int, int] = {}
    while engine.has_requests:
        last_step |= {event.request_id: engine.stats.num_steps for event in engine.step()}
    assert engine.stats.num_preemptions > 0
    assert sorted(ids, key=last_step.__getitem__) == ids
    assert last_step[ids[0]] == 12  # one token in every step


def test_preempted_request_comes_back_before_those_behind_it(model: ToyModel) -> None:
    old, young, small = prompts_of(20, 20, 1)
    params = replace(GREEDY, max_tokens=10)
    engine = Engine(model, **TIGHT, max_requests=2)
    old_id, _, small_id = [engine.submit(prompt, params) for prompt in (old, young, small)]
    order = []
    while engine.has_requests:
        order += [event.request_id for event in engine.step()]
    assert engine.stats.num_preemptions == 1
    # the small one would have fitted beside the old one
    assert old_id not in order[order.index(small_id) :]


def test_pages_kept_for_later_prompts_go_before_anybody_is_preempted(model: ToyModel) -> None:
    engine = Engine(model, num_pages=16, page_size=4, max_batch_tokens=64)
    old, *new = prompts_of(30, 20, 20)
    engine.generate([old], GREEDY)
    assert engine.stats.num_pages_indexed == 10
    completions = engine.generate(new, GREEDY)  # two requests that need all 16 pages
    assert engine.stats.num_preemptions == 0
    assert [c.token_ids for c in completions] == [oracle(model, p, GREEDY) for p in new]


@pytest.mark.parametrize("length", range(25, 30))
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_request_that_needs_every_page_runs(
    model: ToyModel, length: int, prefix_cache: bool
) -> None:
    (prompt,) = prompts_of(length)
    params = replace(GREEDY, max_tokens=32 - length)
    engine = Engine(model, num_pages=8, page_size=4, max_batch_tokens=7, prefix_cache=prefix_cache)
    for _ in range(3):
        (completion,) = engine.generate([prompt], params)
        assert completion.token_ids == oracle(model, prompt, params)
    assert_idle(engine)


def test_same_prompts_side_by_side_with_every_page_in_use(model: ToyModel) -> None:
    """Their equal pages are indexed once, under parents that only one of them holds."""
    (prompt,) = prompts_of(14)
    params = replace(GREEDY, max_tokens=18)
    engine = Engine(model, num_pages=8, page_size=4, max_batch_tokens=32)
    completions = engine.generate([prompt] * 4, params)
    assert [c.token_ids for c in completions] == [oracle(model, prompt, params)] * 4
    assert engine.stats.num_preemptions > 0
    assert_idle(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 8])
def test_cancelled_request_gives_its_pages_back_and_no_more_events(
    model: ToyModel, num_steps: int
) -> None:
    """Cancelled while it waits, between chunks of its prompt, and while it decodes."""
    engine = Engine(model, **AMPLE, prefix_cache=False)
    other, victim = prompts_of(5, 40)
    other_id, victim_id = engine.submit(other, GREEDY), engine.submit(victim, GREEDY)
    seen = [event for _ in range(num_steps) for event in engine.step()]
    assert engine.cancel(victim_id)
    assert engine.stats.num_pages_in_use <= 5  # the other's 5 + 12 tokens
    engine.check()
    streams = drain(engine)
    assert victim_id not in streams
    tokens = [event.token for event in seen if event.request_id == other_id]
    assert tokens + tokens_of(streams[other_id]) == oracle(model, other, GREEDY)
    assert not engine.cancel(victim_id)
    assert not engine.cancel(other_id)
    assert not engine.cancel(12345)
    assert_idle(engine)


def test_preempted_request_can_be_cancelled(model: ToyModel) -> None:
    engine = Engine(model, **TIGHT)
    old, young = prompts_of(20, 20)
    engine.submit(old, replace(GREEDY, max_tokens=30))
    young_id = engine.submit(young, GREEDY)
    while engine.stats.num_preemptions == 0:
        engine.step()
    assert engine.cancel(young_id)
    engine.check()
    assert young_id not in drain(engine)
    assert_idle(engine)


def test_seed_decides_whoever_shares_the_batch(model: ToyModel) -> None:
    (prompt, *others) = prompts_of(7, 3, 12, 20)
    (alone,) = Engine(model, **AMPLE).generate([prompt], SAMPLED)
    crowd = [replace(SAMPLED, seed=seed, temperature=1.5) for seed in range(3)]
    together = Engine(model, **TIGHT).generate([*others, prompt], [*crowd, SAMPLED])
    assert together[-1].token_ids == alone.token_ids
    (other,) = Engine(model, **AMPLE).generate([prompt], replace(SAMPLED, seed=8))
    assert other.token_ids != alone.token_ids


def test_requests_without_a_seed_differ(model: ToyModel) -> None:
    (prompt,) = prompts_of(7)
    params = SamplingParams(max_tokens=12, temperature=2.0)
    first, second = Engine(model, **AMPLE).generate([prompt, prompt], params)
    assert first.token_ids != second.token_ids


def test_end_of_sequence_and_stop_tokens_end_a_request(model: ToyModel) -> None:
    (prompt,) = prompts_of(7)
    free = oracle(model, prompt, GREEDY)
    engine = Engine(model, **AMPLE, eos_token_ids=[free[4]], tokenizer=ByteTokenizer())
    (completion,) = engine.generate([prompt], GREEDY)
    assert completion.token_ids == free[: free.index(free[4]) + 1]
    assert completion.finish_reason == "eos"
    assert completion.text == bytes(completion.token_ids[:-1]).decode(errors="replace")
    (completion,) = engine.generate([prompt], replace(GREEDY, stop_token_ids=[free[2], 999]))
    assert completion.token_ids == free[: free.index(free[2]) + 1]
    assert completion.finish_reason == "stop"
    assert_idle(engine)


class ScriptedModel(ToyModel):
    """Says the same bytes over and over after any prompt of one token."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self.script = script.encode()

    def forward(self, token_ids: Tensor, batch: Any, cache: Any, logit_rows: Tensor) -> Tensor:
        positions = batch.cache_lengths[logit_rows]  # one token per request
        script = torch.tensor(list(self.script))[positions % len(self.script)]
        return torch.nn.functional.one_hot(script, VOCAB).float()


def run_script(
    script: str, max_tokens: int, stop: tuple[str, ...] = ()
) -> tuple[list[TokenEvent], str]:
    engine = Engine(ScriptedModel(script), **AMPLE, tokenizer=ByteTokenizer())
    engine.submit([0], SamplingParams(max_tokens=max_tokens, stop=stop))
    (events,) = drain(engine).values()
    assert_idle(engine)
    return events, "".join(event.text or "" for event in events)


def test_stop_string_split_across_tokens_ends_the_text_before_it() -> None:
    events, text = run_script("to be or not to be", 18, stop=("nor", "not"))
    assert text == "to be or "
    assert len(events) == len("to be or not")
    assert events[-1].finish_reason == "stop"
    # "n" and "no" might have been the beginning
    assert [event.text for event in events[-4:]] == [" ", "", "", ""]


def test_held_back_text_appears_when_the_request_ends() -> None:
    events, text = run_script("to be or not to be", 11, stop=("not",))
    assert text == "to be or no"
    assert events[-1].finish_reason == "length"


def test_characters_of_several_tokens_are_streamed_whole() -> None:
    events, text = run_script("é€😀!", 10)
    assert text == "é€😀!"
    assert [event.text for event in events] == ["", "é", "", "", "€", "", "", "", "😀", "!"]


def test_text_is_what_the_tokenizer_makes_of_the_tokens(model: ToyModel) -> None:
    """Random bytes: most are not UTF-8, and the request ends within a character."""
    prompts = prompts_of(4, 11, 23)
    engine = Engine(model, **TIGHT, tokenizer=ByteTokenizer())
    for completion in engine.generate(prompts, replace(GREEDY, max_tokens=25)):
        assert completion.text == ByteTokenizer().decode(completion.token_ids)


def test_without_a_tokenizer_there_is_no_text(model: ToyModel) -> None:
    (completion,) = Engine(model, **AMPLE).generate(prompts_of(3), GREEDY)
    assert completion.text is None


def test_bad_token_ends_only_its_own_request(model: ToyModel) -> None:
    """NaN logits are an error of one request; its pages serve no later prompt."""
    bad, good = prompts_of(20, 5)
    model.embedding[bad[3]] = torch.nan
    engine = Engine(model, num_pages=64, page_size=4, max_batch_tokens=64)
    failed, fine = engine.generate([bad, good], GREEDY)
    assert (failed.finish_reason, failed.token_ids) == ("error", [-1])
    assert fine.token_ids == oracle(model, good, GREEDY)
    assert engine.stats.num_pages_indexed == (5 + 12 - 1) // 4
    assert_idle(engine)


class FlakyModel(ToyModel):
    """Raises in every third step, after it has written to the cache."""

    calls = 0

    def forward(self, *args: Any) -> Tensor:
        logits = super().forward(*args)
        self.calls += 1
        if self.calls % 3 == 0:
            raise RuntimeError("out of luck")
        return logits


def test_step_that_raised_can_be_repeated() -> None:
    model = FlakyModel()
    prompts = prompts_of(9, 14, 20, 6)
    engine = Engine(model, **TIGHT)
    ids = [engine.submit(prompt, GREEDY) for prompt in prompts]
    events: dict[int, list[TokenEvent]] = {}
    num_failures = 0
    while engine.has_requests:
        try:
            for event in engine.step():
                events.setdefault(event.request_id, []).append(event)
        except RuntimeError:
            num_failures += 1
    assert num_failures > 3
    assert engine.stats.num_preemptions > 0
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert tokens_of(events[request_id]) == oracle(model, prompt, GREEDY)
    assert_idle(engine)


def test_generate_that_raised_leaves_nothing_behind() -> None:
    engine = Engine(FlakyModel(), **AMPLE)
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.generate(prompts_of(5, 6), GREEDY)
    assert_idle(engine)


def stress(seed: int) -> Iterator[tuple[list[int], SamplingParams]]:
    """Requests whose prompts share beginnings, of all kinds of settings."""
    rng = random.Random(seed)
    (stem,) = prompts_of(24, seed=seed)
    while True:
        prompt = stem[: rng.choice([0, 4, 8, 11, 24])]
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 16))]
        yield (
            prompt,
            SamplingParams(
                max_tokens=rng.randrange(1, 12),
                temperature=rng.choice([0.0, 0.0, 1.0]),
                top_k=rng.choice([None, 5]),
                top_p=rng.choice([1.0, 0.8]),
                seed=rng.randrange(100),
            ),
        )


@pytest.mark.parametrize("seed", range(3))
def test_random_arrivals_and_cancellations_keep_every_token_and_page(
    model: ToyModel, seed: int
) -> None:
    rng = random.Random(seed)
    ends = [17, 99, 200]
    page_size, max_batch_tokens = [(4, 16), (1, 5), (3, 40)][seed]
    engine = Engine(
        model,
        num_pages=60 // page_size,
        page_size=page_size,
        max_batch_tokens=max_batch_tokens,
        max_requests=5,
        eos_token_ids=ends,
    )
    source = stress(seed)
    wanted: dict[int, tuple[list[int], SamplingParams]] = {}
    events: dict[int, list[TokenEvent]] = {}
    cancelled: set[int] = set()
    for _ in range(200):
        if rng.random() < 0.25:
            prompt, params = next(source)
            wanted[engine.submit(prompt, params)] = prompt, params
        if wanted and rng.random() < 0.04:
            request_id = rng.choice(list(wanted))
            if engine.cancel(request_id):
                cancelled.add(request_id)
        for event in engine.step():
            assert event.request_id not in cancelled
            events.setdefault(event.request_id, []).append(event)
        engine.check()
    for request_id, rest in drain(engine).items():
        events.setdefault(request_id, []).extend(rest)

    assert len(wanted) > 30
    for request_id, (prompt, params) in wanted.items():
        expected = oracle(model, prompt, params, ends)
        if request_id in cancelled:
            tokens = [event.token for event in events.get(request_id, [])]
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens_of(events[request_id]) == expected
    assert cancelled
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_prefix_hit_tokens > 0
    assert_idle(engine)


def test_peak_counts_shared_pages_once(model: ToyModel) -> None:
    (prompt,) = prompts_of(33)
    engine = Engine(model, num_pages=64, page_size=4, max_batch_tokens=64)
    engine.generate([prompt], replace(GREEDY, max_tokens=1))
    engine.generate([prompt] * 3, replace(GREEDY, max_tokens=1))
    # 8 shared pages and one each
    assert engine.stats.peak_cache_bytes == 11 * engine.cache.page_bytes


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([], GREEDY, r"prompt_ids: want at least 1 token, got 0"),
        ([1, 2.0], GREEDY, r"prompt_ids: want integers, got \[1, 2.0\]"),
        ("text", GREEDY, r"prompt_ids: want integers, got 'text'"),
        ([1, VOCAB], GREEDY, r"prompt_ids: want tokens in \[0, 256\), got 256"),
        ([-1, 2], GREEDY, r"prompt_ids: want tokens in \[0, 256\), got -1"),
        (
            [1] * 41,
            GREEDY,
            r"want prompt and max_tokens within the 52 tokens of the cache, got 41 \+ 12",
        ),
        ([1], replace(GREEDY, stop="x"), r"stop: want a tokenizer in the engine .*, got None"),
    ],
)
def test_request_that_can_never_run_is_refused_at_once(
    model: ToyModel, prompt: list[int], params: SamplingParams, message: str
) -> None:
    engine = Engine(model, **TIGHT)
    with pytest.raises(ArgumentError, match=message):
        engine.submit(prompt, params)
    with pytest.raises(ArgumentError, match=message):
        engine.generate([[1, 2], prompt], params)
    assert not engine.has_requests


def test_request_past_the_models_positions_is_refused(model: ToyModel) -> None:
    engine = Engine(model, num_pages=100, page_size=4)
    with pytest.raises(ArgumentError, match=r"within the 160 tokens of the model, got 150 \+ 12"):
        engine.submit([1] * (MAX_POSITION - 10), GREEDY)
    (prompt,) = prompts_of(MAX_POSITION - 12)
    (completion,) = engine.generate([prompt], GREEDY)
    assert completion.token_ids == oracle(model, prompt, GREEDY)


def test_generate_wants_an_idle_engine_and_params_for_every_prompt(model: ToyModel) -> None:
    engine = Engine(model, **AMPLE)
    with pytest.raises(ArgumentError, match=r"params: want one for each of 2, got 1"):
        engine.generate([[1], [2]], [GREEDY])
    engine.submit([1], GREEDY)
    with pytest.raises(ArgumentError, match=r"generate: want no other request, got 1"):
        engine.generate([[1]], GREEDY)


def test_prompt_may_be_an_array_or_a_tensor(model: ToyModel) -> None:
    (prompt,) = prompts_of(6)
    tensor, array = torch.tensor(prompt), np.array(prompt)
    for completion in Engine(model, **AMPLE).generate([tensor, array], GREEDY):
        assert completion.token_ids == oracle(model, prompt, GREEDY)


def test_scales_of_an_fp8_cache_are_the_callers(model: ToyModel) -> None:
    model.format = replace(ToyModel.format, name="fp8")
    engine = Engine(model, **AMPLE, latent_scale=0.5, rope_scale=[0.25, 2.0])
    assert engine.cache.layer_scales.tolist() == [[0.5, 0.25], [0.5, 2.0]]
    (completion,) = engine.generate(prompts_of(6), GREEDY)
    assert len(completion.token_ids) == GREEDY.max_tokens


def test_scales_found_while_one_engine_serves_are_those_of_the_next(model: ToyModel) -> None:
    with calibrate(Engine(model, **AMPLE).cache) as unused:
        pass
    assert not unused.amax.any()
    engine = Engine(model, **AMPLE)
    with calibrate(engine.cache) as observer:
        engine.generate(prompts_of(20, 6), GREEDY)
    scales = observer.scales("fp8")
    model.format = replace(ToyModel.format, name="fp8")
    engine = Engine(model, **AMPLE, scales=scales)
    assert engine.cache.layer_scales[:, 0].tolist() == scales.latent.tolist()
    assert engine.cache.layer_scales[:, 1].tolist() == scales.rope.tolist()
    (completion,) = engine.generate(prompts_of(6), GREEDY)
    assert len(completion.token_ids) == GREEDY.max_tokens


def test_scales_that_are_not_for_the_models_cache_are_refused(model: ToyModel) -> None:
    scales = CacheScales("fp8", torch.ones(2), torch.ones(2))
    with pytest.raises(ArgumentError, match=r"scales: want .*\('fp32', 2\), got \('fp8', 2\)"):
        Engine(model, **AMPLE, scales=scales)
    model.format = replace(ToyModel.format, name="fp8")
    with pytest.raises(ArgumentError, match=r"scales: want .*\('fp8', 2\), got \('fp8', 3\)"):
        Engine(model, **AMPLE, scales=CacheScales("fp8", torch.ones(3), torch.ones(3)))
    with pytest.raises(ArgumentError, match="scales: want None with latent_scale or rope_scale"):
        Engine(model, **AMPLE, scales=scales, rope_scale=[1.0, 2.0])


@pytest.mark.parametrize("name", ["max_batch_tokens", "max_requests", "num_pages", "page_size"])
def test_engine_without_room_is_refused(model: ToyModel, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: want .*1.*, got 0"):
        Engine(model, **{**AMPLE, name: 0})


def test_idle_engine_steps_for_free(model: ToyModel) -> None:
    engine = Engine(model, **AMPLE)
    assert engine.step() == []
    assert engine.stats.num_steps == 0
    assert model.batches == []
