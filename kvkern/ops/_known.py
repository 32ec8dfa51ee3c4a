"""Calls that have been checked once, and are repeated for what their arguments are and no more."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class KnownCalls(dict[Any, Callable[..., None]]):
    """How to repeat a call, by all of it that is not an address; forgets all when it is full.

    A server meets as many kinds of call as it has numbers of tokens in a step.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def remember(self, key: Any, again: Callable[..., None] | None) -> None:
        """Nothing, where a backend has no way to repeat a call."""
        if again is None:
            return
        if len(self) >= self.most:
            self.clear()
        self[key] = again


def kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """Everything about a tensor that a check or a kernel looks at, except where it begins.

    That is shape, strides, dtype, device and alignment. ``AttributeError`` if it is no tensor,
    ``RuntimeError`` if it is one without an address, as a sparse one is.
    """
    address = tensor.data_ptr()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), address & 15


def addresses_and_kinds(tensors: Sequence[Tensor | None]) -> tuple[list[int | None], list[Any]]:
    """Where tensors begin, and what ``kind_of`` tells of them, in less time where they are many."""
    addresses: list[int | None] = []
    kinds: list[Any] = []
    low_bits = 0
    for tensor in tensors:
        if tensor is None:
            addresses.append(None)
            kinds.append(None)
        else:
            address = tensor.data_ptr()
            low_bits |= address
            addresses.append(address)
            kinds += (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())
    if low_bits & 15:
        kinds += [address and address & 15 for address in addresses]
    return addresses, kinds
