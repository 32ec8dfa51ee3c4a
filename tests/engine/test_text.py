"""Streaming text: deltas add up to the whole, characters stay whole, stop strings stay out."""

import random
from collections.abc import Sequence

import pytest

from kvkern.engine.text import TextStream
from tests.engine.toy import ByteTokenizer


class WordTokenizer:
    """Joins words by spaces, and so decodes a word alone without the space before it."""

    WORDS = ("to", "be", "or", "not", "question")

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(self.WORDS[token] for token in token_ids)


def stream(tokens: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    """The deltas up to the stop, the flush being the last."""
    text = TextStream(ByteTokenizer(), stop)
    deltas = []
    for token in tokens:
        deltas.append(text.push(token))
        if text.stopped:
            break
    return [*deltas, text.flush()], text


def test_space_between_tokens_is_kept() -> None:
    text = TextStream(WordTokenizer(), stop=["question"])
    deltas = [text.push(token) for token in (0, 1, 2, 3, 0, 1, 4)]
    assert deltas == ["to", " be", " or", " not", " to", " be", " "]
    assert text.stopped


def test_incomplete_character_at_the_end_is_flushed_as_the_tokenizer_shows_it() -> None:
    deltas, _ = stream("ab€".encode()[:-1])
    assert deltas == ["a", "b", "", "", "\ufffd"]


@pytest.mark.parametrize("seed", range(20))
def test_deltas_add_up_to_the_decoded_tokens_up_to_the_first_stop(seed: int) -> None:
    """Letters few enough that beginnings of stop strings, and overlaps of them, abound."""
    rng = random.Random(seed)
    alphabet = ["a", "b", "c", "é", "€", "😀"]
    stop = ["".join(rng.choices(alphabet, k=rng.randrange(2, 5))) for _ in range(2)]
    text = "".join(rng.choices(alphabet, k=60))
    expected = text
    for end in range(len(text) + 1):
        if complete := [len(s) for s in stop if text[:end].endswith(s)]:
            expected = text[: end - max(complete)]
            break
    deltas, state = stream(text.encode(), stop)
    assert "".join(deltas) == expected
    assert state.stopped == (expected != text)


def test_text_is_held_back_only_while_it_may_begin_a_stop_string() -> None:
    deltas, state = stream(b"xababc", stop=["abc"])
    assert deltas == ["x", "", "", "ab", "", "", ""]
    assert state.stopped
    deltas, state = stream(b"xabab", stop=["abc"])
    assert deltas == ["x", "", "", "ab", "", "ab"]
    assert not state.stopped


def test_the_stop_string_that_is_complete_first_ends_the_text() -> None:
    deltas, _ = stream(b"abcdef", stop=["bcdef", "cd"])
    assert "".join(deltas) == "ab"


def test_token_with_whole_stop_strings_inside_is_cut_before_the_first() -> None:
    text = TextStream(WordTokenizer(), stop=["ion", "es", "st"])
    assert text.push(4) == "qu"
    assert text.stopped
    assert text.flush() == ""
