"""Which text is generated next. No torch."""

from __future__ import annotations

from typing import List, Optional, Sequence


class TextNumbers:
    """What a text draws depends on (seed, its number, position): numbers go on from call to call, and are saved."""

    def __init__(self) -> None:
        self.seed: Optional[int] = None  # None: the engine's
        self.taken = 0

    def restart(self, seed: int) -> None:
        self.seed, self.taken = seed, 0

    def take(self, texts: int) -> int:
        """The number of the first of so many texts."""
        first, self.taken = self.taken, self.taken + texts
        return first

    def state(self) -> List[Optional[int]]:
        return [self.seed, self.taken]

    def restore(self, state: Sequence[Optional[int]]) -> None:
        self.seed, self.taken = state[0], int(state[1] or 0)
