"""Modules over the ops: linear layers whose weights are quantised anew whenever they change."""

from kvkern.nn.fp8_linear import FP8Linear
from kvkern.nn.weight_only import W4A16Linear, W8A16Linear

__all__ = ["FP8Linear", "W4A16Linear", "W8A16Linear"]
