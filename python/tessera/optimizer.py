"""The optimizer that prepare() returns: torch's in all that schedulers and scripts look at, Tessera's in step()."""

from __future__ import annotations

import inspect
from typing import Any, List, Optional, Tuple

import torch

from tessera.comm.warnings import warn_once
from tessera.engine.optimizer_groups import Group, OptimizerDescription
from tessera.engine.optimizer_state import ImportedState, TorchState
from tessera.engine.session import Session
from tessera.errors import ConfigError

__all__ = ["AcceleratedOptimizer", "describe"]

_REFUSED = {"amsgrad": "the amsgrad variant", "maximize": "maximising", "differentiable": "differentiating through a step"}


def _check_step(optimizer: Any, base: Any) -> None:
    """Errors: ConfigError for a step() of the caller's: the engine makes the update."""
    step = getattr(optimizer.step, "__func__", optimizer.step)
    while hasattr(step, "__wrapped__") and _of_torch(step):
        step = step.__wrapped__
    if step is not inspect.unwrap(base.step):
        raise ConfigError(f"{type(optimizer).__name__}.step is not torch.optim.{base.__name__}'s own, and Tessera makes the update in "
                          "its engine, where it would not count. Use the optimizer itself, and do what is beside the update in "
                          "the training loop")
    check_hooks(optimizer)


def _of_torch(function: Any) -> bool:
    return getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0] == "torch"


def check_hooks(optimizer: Any) -> None:
    """Errors: ConfigError for hooks of its step, which see tensors that the engine has."""
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        for hook in hooks.values():
            raise _refused_hook(getattr(hook, "__qualname__", repr(hook)))


def _refused_hook(name: str) -> ConfigError:
    return ConfigError(f"the optimizer has the step hook {name}, which would not be called: the engine makes the update. Do it in the "
                       "training loop, before or after optimizer.step()")


def kind_of(optimizer: Any) -> str:
    """adamw, adam or sgd. Errors: ConfigError naming what is supported."""
    adam, sgd = torch.optim.Adam, torch.optim.SGD
    if isinstance(optimizer, torch.optim.AdamW):
        _check_step(optimizer, torch.optim.AdamW)
        return "adamw"
    if type(optimizer) is adam:
        _check_step(optimizer, adam)
        return "adamw" if optimizer.defaults.get("decoupled_weight_decay") else "adam"
    if type(optimizer) is sgd:
        _check_step(optimizer, sgd)
        return "sgd"
    raise ConfigError(f"the optimizer {type(optimizer).__module__}.{type(optimizer).__name__} is not supported: its step would "
                      "have to run on sharded weights. Use torch.optim.AdamW, Adam or SGD")


def group_values(group: dict) -> dict:
    """What the engine needs of a torch parameter group. Errors: ConfigError for options it does not have."""
    for key, what in _REFUSED.items():
        if group.get(key):
            raise ConfigError(f"the optimizer's option {key}=True ({what}) is not supported")
    if group.get("dampening"):
        raise ConfigError(f"the optimizer's dampening={group['dampening']} is not supported; use 0")
    return {"betas": tuple(float(beta) for beta in group.get("betas", (0.9, 0.999))),
            "eps": float(group.get("eps", 1e-8)), "momentum": float(group.get("momentum", 0.0))}


def rates_of(group: dict) -> Tuple[float, float]:
    """Learning rate and weight decay."""
    return float(group["lr"]), float(group.get("weight_decay", 0.0))


def describe(optimizer: Any, names: dict) -> OptimizerDescription:
    """`names`: id of a parameter -> its name in the model."""
    kind = kind_of(optimizer)
    groups: List[Group] = []
    for number, group in enumerate(optimizer.param_groups):
        unknown = [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in names]
        if unknown:
            raise ConfigError(f"parameter group {number} of the optimizer has {len(unknown)} parameters (the first of shape "
                              f"{unknown[0]}) that are not the model's; give prepare() the model they belong to, or make the "
                              "optimizer after the model has its last form")
        own = [names[id(parameter)] for parameter in group["params"]]
        groups.append(Group(names=own, origin=number, begins=rates_of(group), **group_values(group)))
    nesterov = {bool(group.get("nesterov")) for group in optimizer.param_groups}
    if len(nesterov) > 1:
        raise ConfigError("nesterov must be the same in all parameter groups")
    return OptimizerDescription(kind, nesterov.pop(), groups)


class AcceleratedOptimizer(torch.optim.Optimizer):
    """`param_groups` are the caller's: whatever a scheduler writes there is what the next step() uses. With gradient
    accumulation step() and zero_grad() act when the gradients are synchronised, as in Accelerate. A step uses the
    gradient up: it is zero afterwards even without zero_grad()."""

    def __init__(self, optimizer: Any, session: Session, gradient_state: Any, torch_state: TorchState,
                 moments: ImportedState):
        self.optimizer = optimizer
        self._session = session
        self._torch_state = torch_state
        self._moments: Optional[ImportedState] = moments  # until the engine has them
        self.gradient_state = gradient_state
        self._is_overflow = False
        self.scaler = None
        self.device_placement = True
        self.last_step: dict = {}

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> dict:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict) -> None:
        self.optimizer.defaults = defaults

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def take_moments(self) -> None:
        """What the optimizer had before prepare() goes into the engine, and `state` is empty from then on. Collective."""
        if self._moments is not None and self._moments.counts and any(self._moments.counts.values()):
            self._torch_state.load(self._moments)
        self._moments = None
        self.optimizer.state.clear()

    def full_state_dict(self) -> dict:
        """torch's state_dict with all moments on rank 0, {} elsewhere. Collective."""
        state = self._torch_state.collect()
        if not self._session.state.is_main_process:
            return {}
        return {"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]}

    def add_param_group(self, param_group: dict) -> None:
        raise ConfigError("parameter groups cannot be added after prepare(): give the optimizer all of them before")

    def state_dict(self) -> dict:
        """Rates and options of the groups. Moments are sharded over the ranks: save_state() saves them, and
        tessera.utils.full_optimizer_state() gives all of them to rank 0."""
        return {"param_groups": [{key: value for key, value in group.items() if key != "params"}
                                 for group in self.param_groups]}

    def check_state_dict(self, state_dict: dict) -> None:
        """Whether load_state_dict() would take it. Collective. Errors: ConfigError on every rank."""
        self._torch_state.agree(state_dict)

    def load_state_dict(self, state_dict: dict) -> None:
        """What state_dict() gave, or a state_dict of torch's optimizer with its moments. Collective; what rank 0 gives
        counts. Errors: ConfigError on every rank if it is another optimizer's; then nothing was changed."""
        imported = self._torch_state.agree(state_dict)
        if imported.counts is not None:
            self._torch_state.load(imported)
        for group, values in zip(self.param_groups, imported.groups):
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})

    def register_step_pre_hook(self, hook: Any) -> None:
        raise _refused_hook(getattr(hook, "__qualname__", repr(hook)))

    register_step_post_hook = register_step_pre_hook

    def zero_grad(self, set_to_none: Optional[bool] = None) -> None:
        if self.gradient_state.sync_gradients:
            self._session.zero_grad()

    def train(self) -> None:
        """Nothing to do: no optimizer here has a mode."""

    def eval(self) -> None:
        """Nothing to do: no optimizer here has a mode."""

    def step(self, closure: Any = None) -> None:
        """One update of the weights on all ranks (collective). Errors: TrainingError after too many steps in a row whose
        gradient was not finite."""
        if closure is not None:
            raise ConfigError("step(closure) is not supported: compute the loss and call backward before step()")
        self._session.check_open()
        if not self.gradient_state.sync_gradients:
            return
        if not self._session.has_gradient():
            self._is_overflow = False
            warn_once("optimizer.step() without a gradient does nothing: no loss was backwarded since the last step")
            return
        check_hooks(self.optimizer)
        self.last_step = self._session.update([rates_of(group) for group in self.param_groups], [group_values(group) for group in self.param_groups])
        self._is_overflow = self.last_step["skipped"]
        # torch's schedulers warn when the optimizer they know was not stepped before them.
        self.optimizer._opt_called = True

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step() changed nothing because the gradient was not finite."""
        return self._is_overflow


MegatronLMOptimizerWrapper = AcceleratedOptimizer
