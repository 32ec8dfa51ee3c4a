"""copy_pages: dst[:, dst_pages[i]] = src[:, src_pages[i]]."""

from torch import Tensor


def copy_pages(src: Tensor, dst: Tensor, sources: list[int], targets: list[int]) -> None:
    """The specification; of ``[layers, pages, ...]``; ``kvkern.copy_pages`` states the contract."""
    dst[:, targets] = src[:, sources]
