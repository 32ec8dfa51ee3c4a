"""What layers with a quantised copy of their weight have in common: when it is stale."""

import weakref
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

Quantized = TypeVar("Quantized")


class Master(NamedTuple):
    """The state of a weight that something was made of."""

    tensor: "weakref.ref[Tensor]"
    version: int
    address: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Master":
        return cls(weakref.ref(tensor), _version(tensor), tensor.data_ptr())

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether it is the same tensor, and PyTorch has counted no change of it."""
        return self.tensor() is tensor and self[1:] == (_version(tensor), tensor.data_ptr())


class Copy(Generic[Quantized]):
    """A quantised weight, and the state of the master that it was made of."""

    def __init__(self, master: Tensor, weight: Quantized) -> None:
        self.weight, self._master = weight, Master.of(master)

    def is_of(self, master: Tensor) -> bool:
        return self._master.is_unchanged(master)


def _version(tensor: Tensor) -> int:
    """How often PyTorch has changed it; it does not count for tensors made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
