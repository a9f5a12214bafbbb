"""torch.optim's state of a prepared optimizer, moments and steps by parameter: into the engine, and out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from tessera.engine.optimizer_groups import OptimizerDescription
from tessera.engine.session import Session
from tessera.engine.whole_weights import split
from tessera.errors import ConfigError
from tessera.utils.objects import decode, encode

_KINDS = {"exp_avg": "adam_m", "exp_avg_sq": "adam_v", "momentum_buffer": "momentum"}
_MOST_SETS = 255  # of parameters that differ in their group or in their steps: kMostGroups


@dataclass
class ImportedState:
    """What every rank knows of it; `states`, by Hugging Face name, are rank 0's alone."""

    counts: Optional[Dict[str, int]]  # steps of each of the engine's parameters; None: of options alone
    groups: List[dict]  # rank 0's options of each parameter group
    states: Dict[str, dict] = field(default_factory=dict)


class TorchState:
    """`groups`: the Hugging Face names of the parameters in each of torch's groups."""

    def __init__(self, session: Session, description: OptimizerDescription, groups: List[List[str]]):
        self.session = session
        self.groups = groups
        self._kind = description.kind
        momentum = [group.origin for group in description.groups if group.momentum]
        self._without = {name for i, names in enumerate(groups) for name in names if i not in momentum}
        if self._kind != "sgd":
            self._keys: Tuple[str, ...] = ("exp_avg", "exp_avg_sq")
        else:
            self._keys = ("momentum_buffer",) if momentum else ()
        self._place = {name: i for i, group in enumerate(description.groups) for name in group.names}
        self._shapes = {name: tuple(shape) for parts in session.mappings.values() for name, shape, *_ in parts}

    # In.

    def agree(self, saved: dict) -> ImportedState:
        """What rank 0's `saved`, torch's state_dict, comes to. Collective. Errors: ConfigError on every rank; nothing is
        changed."""
        session, main = self.session, self.session.state.is_main_process
        session.meet("prepare() or load_state_dict() of an optimizer")
        error, counts, states, groups = "", None, {}, []
        if main:
            try:
                if len(saved["param_groups"]) != len(self.groups):
                    raise ConfigError(f"the saved optimizer has {len(saved['param_groups'])} parameter groups, this one "
                                      f"{len(self.groups)}")
                if "state" in saved:
                    states = self._by_name(saved)
                    counts = self._counts(states)
                groups = [{key: value for key, value in group.items() if key != "params"} for group in saved["param_groups"]]
            except ConfigError as problem:
                error = str(problem)
        if session.state.num_processes > 1:
            told = session.state.world.broadcast_bytes(encode((error, counts, groups)) if main else None)
            error, counts, groups = decode(told)
        if error:
            raise ConfigError(error)
        return ImportedState(counts, groups, states)

    def load(self, imported: ImportedState) -> None:
        """Into the engine of every rank, in place of what it had. Collective."""
        session = self.session
        for key in self._keys:
            views, keep = self._views(imported.states, key) if session.state.is_main_process else ([], [])
            session.engine.load_moments(_KINDS[key], session.plan.architecture, views)
            del keep
        session.engine.set_update_counts(imported.counts)

    def _names(self) -> List[str]:
        """In torch's order; a tied one under the name that its weight has in a file."""
        ours = {parameter.name: parameter.ours for parameter in self.session.parameters}
        mappings = self.session.mappings
        return [name if name in self._shapes else mappings[ours[name][0]][0][0] for group in self.groups for name in group]

    def _by_name(self, saved: dict) -> Dict[str, dict]:
        sizes, own = [len(group["params"]) for group in saved["param_groups"]], [len(group) for group in self.groups]
        if sizes != own:
            raise ConfigError(f"the saved optimizer has groups of {sizes} parameters, this one of {own}: it is another one's")
        names = dict(zip((index for group in saved["param_groups"] for index in group["params"]), self._names()))
        unknown = [index for index in saved["state"] if index not in names]
        if unknown:
            raise ConfigError(f"the optimizer's state is of a parameter {unknown[0]!r} that is in none of its groups")
        states = {names[index]: state for index, state in saved["state"].items() if state}
        for name, state in states.items():
            self._check(name, state)
        return states

    def _check(self, name: str, state: dict) -> None:
        wanted = self._keys if self._kind == "sgd" else ("step", *self._keys)
        for key, value in state.items():
            if key not in wanted and value is not None:
                raise ConfigError(f"the optimizer's state of {name} has '{key}', which {self._kind} here does not keep: it is "
                                  "another optimizer's")
            if key in self._keys and value is not None and tuple(value.shape) != self._shapes[name]:
                raise ConfigError(f"the optimizer's {key} of {name} has the shape {tuple(value.shape)}, its weight "
                                  f"{self._shapes[name]}: it is another model's")
        missing = [key for key in wanted if key not in state and self._kind != "sgd"]
        if missing:
            raise ConfigError(f"the optimizer's state of {name} has no {', '.join(missing)}, which {self._kind} needs")
        step = float(state.get("step", 0))
        if step < 0 or step != int(step):
            raise ConfigError(f"the optimizer's state of {name} is of {step} steps, which is no number of them")

    def _counts(self, states: Dict[str, dict]) -> Dict[str, int]:
        """Steps of each of the engine's parameters. torch's SGD counts none: what has momentum had one."""
        counts: Dict[str, int] = {}
        sets = set()
        for ours, parts in self.session.mappings.items():
            steps = {name: int(states[name].get("step", 1)) if name in states else 0 for name, *_ in parts}
            first = next(iter(steps))
            other = next((name for name in steps if steps[name] != steps[first]), first)
            if other != first:
                raise ConfigError(f"the optimizer has made {steps[first]} steps of {first} and {steps[other]} of {other}, but "
                                  f"they are one parameter in Tessera ({ours})")
            counts[ours] = steps[first]
            sets.add((self._place.get(first), steps[first]))
        if len(sets) > _MOST_SETS:
            raise ConfigError(f"{len(sets)} sets of parameters differ in their group or in their steps; up to {_MOST_SETS} can")
        return counts

    def _views(self, states: Dict[str, dict], key: str) -> Tuple[list, list]:
        """(name, dtype, shape, address) of the moment of every parameter, zeros where there is none; and what owns them."""
        zeros = np.zeros(max(int(np.prod(shape)) for shape in self._shapes.values()), dtype=np.float32)
        views, keep = [], [zeros]
        for name, shape in self._shapes.items():
            value = states.get(name, {}).get(key)
            array = zeros if value is None else np.ascontiguousarray(value.detach().float().cpu().numpy())
            keep.append(array)
            views.append((name, "float32", list(shape), array.ctypes.data))
        return views, keep

    # Out.

    def collect(self) -> Dict[int, dict]:
        """torch's state by index on rank 0, {} elsewhere. Collective."""
        import torch

        session = self.session
        session.meet("full_optimizer_state()")
        counts = session.engine.update_counts()
        moments: Dict[str, Dict[str, Any]] = {}
        for key in self._keys:
            whole = moments[key] = {}
            session.engine.collect_moments(_KINDS[key], lambda name, array: split(session, name, array, whole))
        state: Dict[int, dict] = {}
        if not session.state.is_main_process or not moments:
            return state
        for index, name in enumerate(self._names()):
            steps = counts[session.of_part[name][0]]
            if steps == 0 or (self._kind == "sgd" and name in self._without):
                continue
            state[index] = {key: torch.from_numpy(np.array(whole[name])) for key, whole in moments.items()}
            if self._kind != "sgd":
                state[index]["step"] = torch.tensor(float(steps))
        return state
