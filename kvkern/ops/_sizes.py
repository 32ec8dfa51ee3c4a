"""Shape checks for public ops: dims are letters, bound at first sight; no value is ever read."""

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from kvkern.errors import DeviceError, LayoutError, ShapeMismatchError, UnsupportedDtypeError

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FLOATS64 = (*FLOATS, torch.float64)  # fp64: the reference only


def check_is_tensor(name: str, given: object) -> None:
    """What is asked for a shape or a device before ``Sizes`` sees it."""
    if not isinstance(given, Tensor):
        raise UnsupportedDtypeError(f"{name}: want a tensor, got {type(given).__name__}")


@lru_cache
def _letters(dims: str) -> tuple[str, ...]:
    return tuple(dims.split())


class Sizes:
    """The dims of one call.

    ``Sizes(device, L=512)`` knows L; ``match("q", q, "T H L", torch.bfloat16)`` checks q against
    what is known and binds the rest.
    """

    def __init__(self, device: torch.device, **known: int) -> None:
        self.device = device
        self.known = known

    def __getitem__(self, letter: str) -> int:
        return self.known[letter]

    def match(
        self,
        name: str,
        tensor: Tensor,
        dims: str,
        *dtypes: torch.dtype,
        strides: Literal["contiguous", "rows", "written", "any"] = "contiguous",
    ) -> None:
        """Check one tensor; ``strides="rows"`` asks only for a contiguous last dim.

        ``"written"`` asks also for each element at a place of its own.

        Raises ``ShapeMismatchError``, ``UnsupportedDtypeError``, ``DeviceError``, ``LayoutError``.
        """
        check_is_tensor(name, tensor)
        letters, shape, known = _letters(dims), tensor.shape, self.known
        if len(shape) != len(letters) or any(
            known.get(letter, size) != size for letter, size in zip(letters, shape, strict=True)
        ):
            raise ShapeMismatchError(f"{name}: want {self._wanted(letters)}, got {list(shape)}")
        known.update(zip(letters, shape, strict=True))
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise UnsupportedDtypeError(f"{name}: want {wanted}, got {tensor.dtype}")
        if tensor.device != self.device:
            raise DeviceError(f"{name}: want device {self.device}, got {tensor.device}")
        if tensor.layout != torch.strided:
            raise LayoutError(f"{name}: want strided, got {tensor.layout}")
        if strides == "contiguous" and not tensor.is_contiguous():
            raise LayoutError(f"{name}: want contiguous, got strides {list(tensor.stride())}")
        if strides in ("rows", "written") and shape[-1] > 1 and tensor.stride(-1) != 1:
            raise LayoutError(
                f"{name}: want a contiguous last dim, got strides {list(tensor.stride())}"
            )
        if strides == "written":
            check_own_places(name, tensor)

    def _wanted(self, letters: tuple[str, ...]) -> str:
        sizes = [f"{letter}={self.known.get(letter, 'any')}" for letter in letters]
        return f"[{', '.join(sizes)}]"


def check_own_places(name: str, tensor: Tensor) -> None:
    """Each element is at a place of its own, by a step in each dim over all that is inside it."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < extent and tensor.numel() > 0:
                raise LayoutError(
                    f"{name}: want each element at a place of its own, "
                    f"got strides {list(tensor.stride())}"
                )
            extent += stride * (size - 1)


def as_rows(name: str, x: Tensor) -> Tensor:
    """``[M, K]`` without a copy; of ``x`` that is not empty."""
    try:
        rows = x.view(-1, x.shape[-1])
        is_folded = rows.shape[1] == 1 or rows.stride(1) == 1
    except RuntimeError:
        is_folded = False
    if not is_folded:
        raise LayoutError(
            f"{name}: want contiguous rows at one distance, got strides {list(x.stride())}"
        )
    return rows
