"""Repeating a call: what a backend returns for it, where addresses are not enough."""

from collections.abc import Callable


class TakesTensors:
    """A way to repeat a call that is given the op's tensors, for a library that takes no addresses.

    They come in the order of the op's arguments, and differ in nothing but addresses from those of
    the first call.
    """

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __call__(self, *tensors: object) -> None:
        self._run(*tensors)
