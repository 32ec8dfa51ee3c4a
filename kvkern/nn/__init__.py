"""Modules over the ops."""

from kvkern.nn.weight_only import W4A16Linear, W8A16Linear

__all__ = ["W4A16Linear", "W8A16Linear"]
