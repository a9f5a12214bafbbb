"""What an engine begins with: rank 0's weights and seed, whatever the other ranks have brought."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from tessera.comm.agreement import CALL
from tessera.comm.process_group import meet
from tessera.errors import CheckpointError
from tessera.logging import get_logger
from tessera.utils.random import seed_in_force

logger = get_logger(__name__)
_NONE, _TENSORS, _FOLDER = range(3)
_OWN_HEAD = "model.tied_head: false there, true here"


@dataclass
class Source:
    """Where weights come from: a folder, tensors in memory (name, dtype, shape, address; `owner` keeps them; `read`: they
    were read from files), or neither: drawn at random."""

    folder: Optional[Path] = None
    tensors: Optional[List[Tuple[str, str, Sequence[int], int]]] = None
    owner: Any = None
    read: bool = False
    follow_symlinks: bool = False  # of files in `folder` that are links out of it
    architecture: Optional[str] = None  # the config.json of `folder`, where that holds a model with another head

    @property
    def from_files(self) -> bool:
        return self.read or self.folder is not None

    @property
    def kind(self) -> int:
        return _TENSORS if self.tensors is not None else _NONE if self.folder is None else _FOLDER


@dataclass
class Start:
    """Where each rank has its weights, and the seed of all."""

    kinds: List[int]
    seed: Optional[int]

    @classmethod
    def of(cls, source: Source, world: Any) -> "Start":
        """Collective over `world`."""
        return cls([values[0] for values in meet(world, CALL, source.kind)], seed_in_force(world))

    @property
    def pretrained(self) -> bool:
        return self.kinds[0] != _NONE


def engine_facts(config: Any, groups: List[dict], group_of: Dict[str, int], trainable: bool) -> Dict[str, Any]:
    """What of an engine's configuration must be equal on all ranks: all but a process's own device, threads and patience."""
    own = {"device.index", "device.threads", "parallel.timeout_s"}
    facts: Dict[str, Any] = {key: value for key, value in config.values().items() if key not in own}
    facts.update({f"the group of {name}": groups[number] for name, number in group_of.items()})
    facts.update({"groups": groups, "training (not evaluation only)": trainable})
    return facts


def load_weights(engine: Any, config_json: str, source: Source, start: Start, changed: bool) -> None:
    """Gives the engine the weights of rank 0, a model of this config, and lets go of this rank's; of a `changed` model what
    fits. Collective."""
    if start.pretrained:
        if start.kinds[0] == _FOLDER:
            logger.info(f"weights from {source.folder}")
        if source.architecture is not None:
            _tell_of_head(source, config_json)
        try:
            _tell(engine.load_weights(source.architecture or config_json, source.tensors, source.folder,
                                      changed or source.architecture is not None, source.follow_symlinks))
        except CheckpointError as error:
            if _OWN_HEAD not in str(error):
                raise
            raise CheckpointError(f"{error}. The model given to prepare() has no weights and ties its head to its embedding, as Transformers makes "
                                  "it of the config, and the folder's head is its own: read it by from_pretrained(), or give the object one before "
                                  "prepare(): model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))") from error
    else:
        logger.info("the model has no weights yet: they are drawn at random")
        others = [rank for rank, kind in enumerate(start.kinds) if kind != _NONE]
        if others:
            logger.warning(f"prepare() draws the weights at random, as rank 0's model has none; those that rank {others[0]}"
                           + (f" and {len(others) - 1} more ranks" if others[1:] else "") + " had are not used")
    source.tensors = source.owner = None


def _tell_of_head(source: Source, config_json: str) -> None:
    from tessera import _C

    has, wants = ((json.loads(text).get("architectures") or ["model"])[0] for text in (source.architecture, config_json))
    logger.warning(f"{source.folder} holds a {has}, and a {wants} begins with it: {_C.weight_fit(source.architecture, config_json)[2]}")


def _tell(differences: Sequence[Tuple[int, int, str]]) -> None:
    alike: Dict[Tuple[int, str], List[int]] = {}
    for rank, count, first in differences:
        alike.setdefault((count, first), []).append(rank)
    texts = [f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks[:8]))}{', ...' if ranks[8:] else ''} in {count} "
             f"tensor{'s' if count > 1 else ''} ({first}{' first' if count > 1 else ''})" for (count, first), ranks in alike.items()]
    if texts:
        logger.warning(f"prepare() trains the weights of rank 0; other ranks had different ones: {'; '.join(texts[:8])}")
