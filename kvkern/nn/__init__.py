"""Modules over the ops."""

from kvkern.nn.fp8_linear import FP8Linear

__all__ = ["FP8Linear"]
