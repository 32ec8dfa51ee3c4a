"""scaled_mm by DeepGEMM: a backend by name. No other file imports deep_gemm."""

from torch import Tensor

from kvkern.backends.again import TakesTensors


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    cell_a: tuple[int, int],
    cell_b: tuple[int, int],
    row_offsets: None,
    bias: None,
    is_exact: bool,
    out: Tensor,
) -> TakesTensors:
    """One matrix, groups by blocks; always exact.

    ``kvkern.scaled_mm`` states the contract, the table what DeepGEMM refuses. Scales are copied
    into its layout. Returns how to repeat it with tensors that differ in nothing but addresses.
    """
    from deep_gemm import fp8_gemm_nt, get_mn_major_tma_aligned_tensor

    groups, blocks = scale_b.shape[1:]

    def run(
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        row_offsets: None,
        bias: None,
        out: Tensor,
    ) -> None:
        """Of the op's own arguments, or of those that it made ``[1, ...]`` of them."""
        a, b, scale_a, scale_b, out = (
            x[0] if x.ndim == 3 else x for x in (a, b, scale_a, scale_b, out)
        )
        for_rows = get_mn_major_tma_aligned_tensor(scale_a.expand(len(a), groups).contiguous())
        for_blocks = scale_b.expand(groups, blocks).T.contiguous()
        fp8_gemm_nt((a, for_rows), (b.T, for_blocks), out)

    run(a, b, scale_a, scale_b, row_offsets, bias, out)
    return TakesTensors(run)
