"""From tokens to text while it is generated: whole characters only, and never a stop string."""

from collections.abc import Sequence

from kvkern.engine.model import Tokenizer

_INCOMPLETE = "\ufffd"  # how a tokenizer decodes the first bytes of a character


class TextStream:
    """The text of one request. The deltas that its methods return add up to that text.

    Args:
        tokenizer: decodes any run of tokens.
        stop: the text ends before the first occurrence of one of these.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.stopped = False  # whether a stop string was met
        self._tokenizer = tokenizer
        self._stop = stop
        self._window: list[int] = []  # the tokens of the last delta, then the undecoded ones
        self._num_decoded = 0  # leading tokens of the window whose text is out
        self._held = ""  # decoded, but perhaps the beginning of a stop string

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain."""
        self._window.append(token)
        text = self._undecoded()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        del self._window[: self._num_decoded]
        self._num_decoded = len(self._window)
        return self._release(text, is_last=False)

    def flush(self) -> str:
        """End the text; return what was held back."""
        return self._release(self._undecoded(), is_last=True)

    def _undecoded(self) -> str:
        """The text of the tokens not yet decoded.

        Decoded together with the tokens before them: a tokenizer may join or strip spaces at the
        start of what it is given.
        """
        before = self._tokenizer.decode(self._window[: self._num_decoded])
        return self._tokenizer.decode(self._window)[len(before) :]

    def _release(self, text: str, is_last: bool) -> str:
        text = self._held + text
        found = [start for start in map(text.find, self._stop) if start >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        num_held = 0 if is_last else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest beginning of ``stop`` that ``text`` ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
