"""What tile choices need to know of a card."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

# The option of a launch that may begin before the one before it has ended, some 0.5 us sooner.
# Its kernel calls ``gdc_wait`` before it touches what that one may write or read, and, when little
# is left to do, ``gdc_launch_dependents``: never before it has waited, so that what the next one
# waits for has all before it behind it. Much sooner, the next one's programs would go where there
# is room, and be spread over the card worse than if all of it were free; where memory is the limit
# that costs up to 15%.
EARLY_START: dict[str, Any] = {"launch_pdl": True}


class Gpu(NamedTuple):
    """A card, or one that is only compiled for."""

    capability: int  # 80, 89, 90, ...
    num_sms: int

    @property
    def has_fp8(self) -> bool:
        """Whether it converts e4m3 itself."""
        return self.capability >= 89

    @property
    def has_early_start(self) -> bool:
        """Whether a launch may begin before the one before it has ended, and wait in the kernel."""
        return self.capability >= 90

    @property
    def early_start(self) -> dict[str, Any]:
        """Options of a launch that does."""
        return EARLY_START if self.has_early_start else {}

    @property
    def has_large_shared(self) -> bool:
        """Whether a block may have over 160 KiB of shared memory (the data-centre cards)."""
        return self.capability in (80, 90, 100, 103)


INTERPRETED = Gpu(capability=0, num_sms=2)  # the CPU: integer codecs, two "SMs" so that work splits


@lru_cache
def gpu_of(device: torch.device) -> Gpu:
    """The card behind a device; ``INTERPRETED`` for the CPU."""
    if device.type != "cuda":
        return INTERPRETED
    major, minor = torch.cuda.get_device_capability(device)
    properties = torch.cuda.get_device_properties(device)
    return Gpu(10 * major + minor, properties.multi_processor_count)
