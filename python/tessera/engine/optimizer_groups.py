"""How parameters are updated: the caller's parameter groups, and the engine's that they become. No torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Dict, List, Optional, Sequence, Tuple

from tessera.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from tessera.engine.plan import ModelParameter
    from tessera.engine.session import Session

_FROZEN = "frozen"


@dataclass
class Group:
    """How some parameters are updated: the values of one of the caller's parameter groups."""

    names: List[str]
    betas: Tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    origin: int = 0  # the caller's group it is a part of
    lr_mult: float = 1.0
    weight_decay: Optional[float] = None  # instead of that group's
    begins: Tuple[float, float] = (0.0, 0.0)  # learning rate and weight decay at prepare()

    def rates(self, origins: Sequence[Tuple[float, float]]) -> Tuple[float, float]:
        """Learning rate and weight decay, where those of the caller's groups are `origins`."""
        lr, weight_decay = origins[self.origin]
        return lr * self.lr_mult, weight_decay if self.weight_decay is None else self.weight_decay


@dataclass
class OptimizerDescription:
    kind: str = "adamw"  # adamw, adam or sgd
    nesterov: bool = False
    groups: List[Group] = field(default_factory=list)


class EngineGroups:
    """The engine's groups: one for each of the caller's, and the last one for what is not trained. `of`: the group of each of its
    parameters. Empty where nothing is trained."""

    def __init__(self, optimizer: Optional[OptimizerDescription] = None, parameters: Sequence[ModelParameter] = ()):
        """Errors: ConfigError for groups of different values that share a parameter of the engine's."""
        self._optimizer = optimizer or OptimizerDescription()
        self._joint: Dict[Tuple[int, int], str] = {}  # groups that share a parameter of the engine's, and its parts
        self.of: Dict[str, int] = {}
        self.values: List[dict] = [self._values(group) for group in self._optimizer.groups]
        if self.values:
            self.values.append({_FROZEN: True})
            self._place(parameters)

    def _place(self, parameters: Sequence[ModelParameter]) -> None:
        groups, frozen = self._optimizer.groups, len(self.values) - 1
        begin = [(value, group.begins, group.lr_mult, group.weight_decay) for value, group in zip(self.values, groups)]
        begin.append((self.values[-1], (0.0, 0.0), 1.0, None))
        place = {name: i for i, group in enumerate(groups) for name in group.names}
        chosen: Dict[str, Tuple[int, str]] = {}
        for parameter in parameters:
            number = place.get(parameter.name, frozen)
            tied = parameter.name == "lm_head.weight" and parameter.ours != ("output_layer.weight",)
            if tied and parameter.name not in place:
                continue  # the table's own name decides
            for ours in parameter.ours:
                other = chosen.setdefault(ours, (number, parameter.name))
                if other[0] != number and not parameter.requires_grad:
                    chosen[ours] = (frozen, parameter.name)  # frozen for good: no group is all of it
                elif other[0] != number and begin[other[0]] != begin[number]:
                    raise ConfigError(f"'{other[1]}' and '{parameter.name}' are one parameter in Tessera ({ours}), so they "
                                      "must be in the same parameter group, in groups of equal values, or both be frozen")
                elif other[0] != number:  # one group for the engine, as long as their values stay equal
                    self._joint.setdefault((other[0], number), f"'{other[1]}' and '{parameter.name}'")
        self.of = {ours: number for ours, (number, _) in chosen.items()}

    def _values(self, group: Group) -> dict:
        if self._optimizer.kind == "sgd":
            return {"momentum": group.momentum}
        return {"beta1": group.betas[0], "beta2": group.betas[1], "eps": group.eps}

    def follow(self, options: Sequence[dict]) -> List[Tuple[int, dict]]:
        """Number and values of the groups that the caller's options change."""
        changed = []
        for number, group in enumerate(self._optimizer.groups):
            values = self._values(Group([], **options[group.origin]))
            if values != self.values[number]:
                self.values[number] = values
                changed.append((number, values))
        return changed

    def check_joint(self, rates: Sequence[Tuple[float, float]], options: Sequence[dict]) -> None:
        """Groups that share a parameter of the engine's must go on alike. Errors: InvalidArgument, on every rank, as rates are
        equal there."""
        groups = self._optimizer.groups
        for (a, b), parts in self._joint.items():
            if rates[a] != rates[b] or options[groups[a].origin] != options[groups[b].origin]:
                raise InvalidArgument(f"optimizer.step(): {parts} are one parameter in Tessera, and the values of their parameter groups "
                                      f"{groups[a].origin} and {groups[b].origin} are not equal any more; put both into one group")


def check_rates(session: Session, rates: Sequence[Tuple[float, float]], options: Sequence[dict]) -> None:
    """Every rank must step with the same rates and options. Errors: InvalidArgument naming two ranks and their values."""
    own = [{"lr": lr, "weight_decay": weight_decay, **option} for (lr, weight_decay), option in zip(rates, options)]
    text = json.dumps(own)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    if len({values[0] for values in session.meet("optimizer.step()", digest)}) == 1:
        return
    everyone = [json.loads(each) for each in session.state.world.all_gather_bytes(text.encode())]
    for rank, theirs in enumerate(everyone):
        if len(theirs) != len(everyone[0]):
            raise InvalidArgument(f"optimizer.step() with {len(everyone[0])} parameter groups on rank 0 and {len(theirs)} on rank "
                                  f"{rank}")
        for number, (a, b) in enumerate(zip(everyone[0], theirs)):
            for key in a:
                if repr(a[key]) != repr(b[key]):  # a nan is equal to another one here
                    raise InvalidArgument(
                        f"optimizer.step() with different values: {key} of parameter group {number} is {a[key]} on rank 0 and "
                        f"{b[key]} on rank {rank}. Schedulers must be stepped alike on every rank")
