"""copy_pages: dst[:, dst_pages[i]] = src[:, src_pages[i]]."""

from torch import Tensor


def copy_pages(src: Tensor, dst: Tensor, sources: list[int], targets: list[int]) -> None:
    """The specification; ``kvkern.copy_pages`` states the contract. Storages are uint8."""
    dst[:, targets] = src[:, sources]
