"""Cards that are not there: where the host stands, and where it has been."""

from typing import Any


def stand_on(host: Any) -> type:
    """In place of ``torch.cuda.device``: keeps ``host.card``, and adds to ``host.visits``."""

    class StandOn:
        def __init__(self, card: Any) -> None:
            self.card = card

        def __enter__(self) -> None:
            self.before, host.card = host.card, self.card
            host.visits.append(self.card)

        def __exit__(self, *_: object) -> None:
            host.card = self.before

    return StandOn
