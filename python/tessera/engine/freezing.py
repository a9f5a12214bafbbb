"""What is trained: requires_grad of the caller's parameters, as the engine follows it from call to call."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Dict, List, Set

from tessera.comm.warnings import warn_once
from tessera.errors import ConfigError


class Freezing:
    """Of one session. `live`: by name, the objects whose requires_grad the caller changes; they begin as the session's
    parameters."""

    def __init__(self, session: Any):
        self._session = session
        self.live: Dict[str, Any] = {parameter.name: parameter for parameter in session.parameters}
        self.applied: List[bool] = []  # requires_grad of each, as the engine has it; empty before it is there
        self.reading: Callable[[], ContextManager] = nullcontext  # around reading them, where that makes it cheap

    def wanted(self) -> List[bool]:
        with self.reading():
            return [parameter.requires_grad for parameter in self.live.values()]

    def follow(self) -> None:
        """What is trained in the calls that come. Costs nothing where nothing has changed. Errors: ConfigError for parts of
        one parameter that are not alike; the engine stays as it was."""
        wanted = self.wanted()
        if wanted == self.applied:
            return
        names = self._frozen(dict(zip(self.live, wanted)))
        before = self.applied or [False] * len(wanted)
        self._tell_of_strangers([name for name, now, then in zip(self.live, wanted, before) if now and not then])
        self._session.engine.set_frozen(names)
        self.applied = wanted

    def _frozen(self, wanted: Dict[str, bool]) -> Dict[str, str]:
        """The engine's name of each frozen parameter, and the caller's."""
        chosen: Dict[str, str] = {}
        for parameter in self._session.parameters:
            if parameter.name == "lm_head.weight" and parameter.ours != ("output_layer.weight",):
                continue  # tied: the table's own name decides
            for ours in parameter.ours:
                other = chosen.setdefault(ours, parameter.name)
                if wanted[other] != wanted[parameter.name]:
                    frozen, trained = (parameter.name, other) if wanted[other] else (other, parameter.name)
                    raise ConfigError(f"'{frozen}' is frozen and '{trained}' is trained, but they are one parameter in Tessera "
                                      f"({ours}): set requires_grad of both alike")
        return {ours: name for ours, name in chosen.items() if not wanted[name]}

    def _tell_of_strangers(self, names: List[str]) -> None:
        optimizer = self._session.training.optimizer
        if optimizer is None or not optimizer.groups:
            return
        known: Set[str] = {name for group in optimizer.groups for name in group.names}
        strangers = [name for name in names if name not in known]
        if strangers:
            warn_once(f"{len(strangers)} parameters have requires_grad=True and are in none of the optimizer's groups (the first is "
                      f"{strangers[0]}): no step trains them, as in PyTorch, but they have no gradient here either, so "
                      "clip_grad_norm_() and full_gradients() leave them out. Set requires_grad=False to say so, or give them to "
                      "the optimizer before prepare(), in a group with lr=0 and weight_decay=0 if only their gradient is to count")

    def changed_since(self, applied: List[bool]) -> str:
        """The first parameter whose requires_grad is not what a call was made with; "" if none."""
        return next((name for name, now, then in zip(self.live, self.wanted(), applied) if now != then), "")

    def state(self) -> List[str]:
        """For checkpoints: the names of what is frozen."""
        return [name for name, parameter in self.live.items() if not parameter.requires_grad]

    def restore(self, frozen: List[str]) -> None:
        """requires_grad as it was saved; a line says where that is a change."""
        changed = [name for name, parameter in self.live.items() if parameter.requires_grad == (name in frozen)]
        for name in changed:
            self.live[name].requires_grad = name not in frozen
        if changed:
            now = "frozen" if changed[0] in frozen else "trained"
            warn_once(f"load_state() set requires_grad of {len(changed)} parameters as it was saved ({changed[0]} is {now}); "
                      "call requires_grad_() after it for another choice")
