"""What an Accelerator has prepared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Dict, Optional, Tuple


@dataclass(frozen=True)
class Prepared:
    """Another one with each object that prepare() has made; the one before if it fails. Never changed, read by all."""

    models: Tuple[Any, ...] = ()
    optimizers: Tuple[Any, ...] = ()
    schedulers: Tuple[Any, ...] = ()
    dataloaders: Tuple[Any, ...] = ()
    batch_sizes: Tuple[int, ...] = ()  # of the loaders
    loader_facts: Optional[Dict[str, Any]] = None  # of the first loader: what a learning-rate horizon is counted in
    indexed: bool = False  # whether there are loaders over .idx/.bin

    def with_more(self, kind: str, *made: Any) -> "Prepared":
        return replace(self, **{kind: (*getattr(self, kind), *made)})
