"""Seeds and the states of random generators."""

from __future__ import annotations

import random
import sys
from typing import Any, List, Optional, Union

from tessera.comm.agreement import CALL
from tessera.comm.process_group import meet
from tessera.compat.enums import RNGType
from tessera.compat.refusals import not_ours
from tessera.logging import get_logger
from tessera.state import PartialState
from tessera.utils.operations import broadcast_object_list

_last_seed: Optional[int] = None


def last_seed() -> Optional[int]:
    """The seed of the last `set_seed`, the same on every process; None if there was none. The engine's own numbers
    (initial weights, dropout) follow from it."""
    return _last_seed


def seed_in_force(world: Any) -> Optional[int]:
    """Rank 0's seed, on every rank of `world` (None: this one alone): that of set_seed, else PyTorch's where the script
    uses it, else None. Collective. A warning says so where scripts gave ranks different ones."""
    seed, chosen = _last_seed, _last_seed is not None
    torch = sys.modules.get("torch")
    if seed is None and torch is not None:
        seed = int(torch.initial_seed())
        chosen = seed < 2**32  # PyTorch draws 53 bits where nobody has chosen one
    seed = None if seed is None else seed & (2**63 - 1)
    if world is None or world.size == 1:
        return seed
    seeds = [values[:2] for values in meet(world, CALL, -1 if seed is None else seed, int(chosen))]
    first, other = seeds[0], next((rank for rank in range(1, world.size) if seeds[rank][0] != seeds[0][0]), None)
    if other is not None and any(given for _, given in seeds):
        texts = [str(number) if given else "none" for number, given in (first, seeds[other])]
        get_logger(__name__).warning(f"the seed is that of rank 0, {texts[0]}, on every rank (rank {other} was given {texts[1]}): "
                                     "initial weights and dropout must not depend on the rank")
    return None if first[0] < 0 else first[0]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seeds Python's, NumPy's and (where it is installed) PyTorch's generators, and the engine that is prepared after
    it.

    `device_specific` adds the number of the process; the engine keeps the common seed, as its numbers must not depend
    on the layout. `deterministic` asks PyTorch for deterministic algorithms; the engine's are."""
    global _last_seed
    import numpy as np

    _last_seed = int(seed)
    own = _last_seed + (PartialState().process_index if device_specific else 0)
    random.seed(own)
    np.random.seed(own % 2**32)
    try:
        import torch  # also where nobody has yet: a model that is made later draws from its generator
    except ImportError:
        return
    torch.manual_seed(own)  # of all GPUs too
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: Optional[Union[str, RNGType]] = None, generator: Any = None) -> None:
    """All processes take the state of rank 0's generator: `torch`, `cuda` or `generator` (the torch.Generator given).
    Collective. Errors: ValueError without a generator; NotImplementedError for other devices."""
    kind = RNGType(rng_type)
    if kind == RNGType.GENERATOR and generator is None:
        raise ValueError("synchronize_rng_state('generator') needs the generator")
    if kind not in (RNGType.TORCH, RNGType.CUDA, RNGType.GENERATOR):
        raise not_ours(f"the generator '{kind}'", f"{kind} devices", "name 'torch', 'cuda' or 'generator'")
    import torch

    if kind == RNGType.CUDA and not torch.cuda.is_available():
        raise ValueError("there is no CUDA generator: this PyTorch has no GPU")
    state = {
        RNGType.TORCH: torch.get_rng_state,
        RNGType.CUDA: torch.cuda.get_rng_state,
        RNGType.GENERATOR: lambda: generator.get_state(),
    }[kind]()
    state = broadcast_object_list([state])[0]
    {
        RNGType.TORCH: torch.set_rng_state,
        RNGType.CUDA: torch.cuda.set_rng_state,
        RNGType.GENERATOR: lambda value: generator.set_state(value),
    }[kind](state)


def synchronize_rng_states(rng_types: List[Union[str, RNGType]], generator: Any = None) -> None:
    """synchronize_rng_state for each of them."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator=generator)
