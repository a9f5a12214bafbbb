"""The learning-rate scheduler that prepare() returns."""

from __future__ import annotations

from typing import Any, List, Optional

from tessera.plugin.lr_horizon import Horizon

__all__ = ["AcceleratedScheduler", "MegatronScheduler"]


class AcceleratedScheduler:
    """A scheduler of torch's kind, stepped once for each optimizer step that was made: not while gradients are
    accumulated, and not after a step that was skipped."""

    def __init__(self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False,
                 gradient_state: Any = None):
        self.scheduler = scheduler
        self.optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.gradient_state = gradient_state

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self.step_with_optimizer:
            if not self.gradient_state.sync_gradients:
                return
            if any(optimizer is not None and optimizer.step_was_skipped for optimizer in self.optimizers):
                return
        self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> List[float]:
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict:
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        self.scheduler.load_state_dict(state_dict)

    def get_lr(self) -> Any:
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        return self.scheduler.print_lr(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


class MegatronScheduler:
    """What a MegatronLMDummyScheduler becomes: Megatron's rates over a resolved horizon, written into the optimizer's
    groups. A group's own rate is a factor: the schedule is that of the first group."""

    def __init__(self, optimizer: Any, horizon: Horizon):
        self.optimizer = optimizer
        self.horizon = horizon
        self.last_epoch = 0
        self._base = [float(group.setdefault("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self._decay = [float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups]
        self._write()

    def _write(self) -> None:
        for group, base, decay in zip(self.optimizer.param_groups, self._base, self._decay):
            group["lr"] = self.horizon.lr_at(self.last_epoch, base)
            if decay:
                group["weight_decay"] = self.horizon.weight_decay_at(self.last_epoch, decay)

    def step(self, increment: Optional[int] = None) -> None:
        self.last_epoch += 1
        self._write()

    def get_last_lr(self) -> List[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_lr(self) -> List[float]:
        return self.get_last_lr()

    def state_dict(self) -> dict:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict) -> None:
        self.last_epoch = int(state_dict["last_epoch"])
        self._write()


MegatronLMSchedulerWrapper = AcceleratedScheduler
