"""copy_pages: dst[:, dst_pages[i]] = src[:, src_pages[i]]."""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkern.kernels.config import KernelConfig, config_of_call

_BLOCK = 2048  # words a program: 16 KiB of rows


@triton.jit(do_not_specialize=["num_pairs"])
def _copy_pages_kernel(
    src_ptr,  # words [layers, src pages, page_words]
    dst_ptr,  # words [layers, dst pages, page_words]
    pairs_ptr,  # int64 [2, pairs]: sources, then targets
    num_pairs,
    page_words,
    stride_src_layer,
    stride_dst_layer,
    BLOCK: tl.constexpr,
):
    """Program (pair, chunk, layer) copies BLOCK words; only the first axis may pass 65535."""
    pair = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(2).to(tl.int64)
    source = tl.load(pairs_ptr + pair)
    target = tl.load(pairs_ptr + num_pairs + pair)
    mask = offs < page_words
    source_ptr = src_ptr + layer * stride_src_layer + source * page_words
    words = tl.load(source_ptr + offs, mask=mask, other=0)
    tl.store(dst_ptr + layer * stride_dst_layer + target * page_words + offs, words, mask=mask)


def _call(
    src: Tensor, dst: Tensor, pairs: Tensor
) -> tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]:
    # rows are padded to 16 bytes, so their pages are whole int64 words; a page of token scales, 4
    # bytes each, may end on half of one
    word = torch.int64 if src.dtype == torch.uint8 else torch.int32
    src, dst = src.view(word).flatten(2), dst.view(word).flatten(2)
    num_layers, _, page_words = src.shape
    arguments = {
        "src_ptr": src,
        "dst_ptr": dst,
        "pairs_ptr": pairs,
        "num_pairs": pairs.shape[1],
        "page_words": page_words,
        "stride_src_layer": src.stride(0),
        "stride_dst_layer": dst.stride(0),
        "BLOCK": _BLOCK,
    }
    grid = (pairs.shape[1], triton.cdiv(page_words, _BLOCK), num_layers)
    return grid, arguments, {"num_warps": 4, "enable_fp_fusion": True}


def copy_pages(src: Tensor, dst: Tensor, sources: list[int], targets: list[int]) -> None:
    """Launch once. ``kvkern.copy_pages`` has checked the lists; rows are uint8, scales fp32."""
    pairs = torch.tensor([sources, targets], dtype=torch.int64)
    if src.device.type == "cuda":  # from page-locked memory the copy does not wait
        pairs = pairs.pin_memory().to(src.device, non_blocking=True)
    grid, arguments, options = _call(src, dst, pairs)
    _copy_pages_kernel[grid](**arguments, **options)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """The kernel moves words, whatever the format; scales on pages of odd size too."""
    pairs = torch.zeros(2, 1, dtype=torch.int64)
    for name, paged in [
        ("rows", torch.empty(2, 4, 16, 1152, dtype=torch.uint8)),
        ("token-scales", torch.empty(2, 4, 16)),
        ("token-scales-odd", torch.empty(2, 4, 3)),
    ]:
        _, arguments, options = _call(paged, paged, pairs)
        yield config_of_call(_copy_pages_kernel, name, arguments, options)
