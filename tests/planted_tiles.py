"""Tiles that Hopper's kernels have no loop for, or one that goes wrong: refused."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from kvkern.kernels.config import KernelConfig, config_of_call
from kvkern.kernels.device import Gpu
from kvkern.kernels.hopper import matmul_weight_only_few, scaled_mm
from kvkern.kernels.hopper.scaled_mm_tiles import Tiles


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """By name: what is wrong with them."""
    one, two = Tiles(64, 64, 1, 4, steps=2), Tiles(128, 64, 1, 4, steps=2)
    few = Tiles(64, 64, 1, 1, is_few=True, steps=2)
    turns, extra = Tiles(128, 128, 1, 4, has_turns=True), Tiles(128, 128, 1, 4, extra=16)
    planted: list[tuple[str, Tiles, dict[str, Any]]] = [
        ("sums-in-tensor-core", one, {}),
        ("two-warpgroups", two, {"is_exact": True}),
        ("kept", one._replace(kept=4), {"of_groups": "row"}),
        ("one-stage", few, {}),
        ("turns-of-groups", turns, {"of_groups": "row"}),
        ("extra-of-256", extra._replace(rows=256), {"is_exact": True}),
        ("extra-of-turns", extra._replace(has_turns=True), {}),
        ("sound", one, {"is_exact": True}),
        ("sound-turns", turns, {}),
        ("sound-extra", extra, {"is_exact": True}),
        ("sound-few", few._replace(stages=2), {}),
    ]
    for name, tiles, options in planted:
        with mock.patch.object(scaled_mm, "_tiles_for", return_value=tiles):
            yield scaled_mm._shipped(name, 64, 4096, 512, **options)
    for name, stages in (("stages-of-both-teams", 5), ("sound-teams", 4)):
        x = torch.empty(8, 8192, dtype=torch.bfloat16, device="meta")
        values = torch.empty(32, 8192, 128, dtype=torch.uint8, device="meta")
        scale, out = torch.empty(64, 8192, device="meta"), x.new_empty(8, 8192)
        tiles = matmul_weight_only_few.Tiles(8, 64, stages)
        with mock.patch.object(matmul_weight_only_few, "choose_tiles", return_value=tiles):
            gpu = Gpu(90, num_sms=132)
            _, *call = matmul_weight_only_few.few_call(x, values, scale, None, 128, out, gpu)
        yield config_of_call(matmul_weight_only_few.matmul_few_kernel, name, *call)
