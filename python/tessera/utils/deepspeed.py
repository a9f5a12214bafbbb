"""What stands for an optimizer and a scheduler that DeepSpeed's JSON describes, as in Accelerate."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Optional

from tessera.comm.warnings import name_unread
from tessera.compat.deepspeed_config import AUTO
from tessera.errors import ConfigError

__all__ = ["DeepSpeedScheduler", "DummyOptim", "DummyScheduler"]


class DummyOptim:
    """Asks prepare() for the optimizer of DeepSpeed's JSON over `params`; `lr` and `weight_decay` are what is "auto" there. Other
    keywords are kept and named."""

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any):
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs
        name_unread("DummyOptim", kwargs, '"optimizer.params" of DeepSpeed\'s JSON')


class DummyScheduler:
    """Asks prepare() for the schedule of DeepSpeed's JSON, or for what `lr_scheduler_callable(optimizer)` returns. What is "auto" in
    the JSON: `total_num_steps`, of all processes together unless batches are split, and `warmup_num_steps`. Other keywords are kept
    and named."""

    def __init__(self, optimizer: Any, total_num_steps: Optional[int] = None, warmup_num_steps: int = 0,
                 lr_scheduler_callable: Optional[Callable] = None, **kwargs: Any):
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
        name_unread("DummyScheduler", kwargs, '"scheduler.params" of DeepSpeed\'s JSON')


_OPTIMIZER_PARAMS = {"adam": "lr betas eps weight_decay", "adamw": "lr betas eps weight_decay",
                     "sgd": "lr momentum weight_decay nesterov dampening"}
# How DeepSpeed computes it, and what is so here.
_OF_THE_KERNEL = {"adam": {"torch_adam": None, "adam_w_mode": None, "bias_correction": True, "amsgrad": False, "fused": None,
                           "fp32_optimizer_states": True, "set_grad_none": None}}
_OF_THE_KERNEL["adamw"] = _OF_THE_KERNEL["adam"]


def make_optimizer(config: Any, dummy: DummyOptim) -> Any:
    """torch's optimizer for the section "optimizer" of a DeepSpeedConfig. Errors: ConfigError for one that Tessera does not have."""
    import torch

    if config is None or config.get("optimizer.type") is None:
        raise ConfigError('DummyOptim stands for the "optimizer" of DeepSpeed\'s JSON, and there is none: give '
                          "DeepSpeedPlugin(hf_ds_config=...) one with it, or a torch optimizer to prepare()")
    kind, given = str(config.get("optimizer.type")), dict(config.get("optimizer.params", {}))
    name = kind.lower()
    if name not in _OPTIMIZER_PARAMS:
        raise ConfigError(f'{config.where}: "optimizer.type" is {kind!r}; Tessera has Adam, AdamW and SGD')
    for key, value in (("lr", dummy.lr), ("weight_decay", dummy.weight_decay)):
        if given.get(key) == AUTO:
            given[key] = value
            config.fill(f"optimizer.params.{key}", value)
    decoupled = name == "adamw" or given.get("adam_w_mode", True)  # DeepSpeed's Adam is AdamW unless it is told otherwise
    for key, only in _OF_THE_KERNEL.get(name, {}).items():
        if only is not None and given.get(key, only) != only:
            raise ConfigError(f'{config.where}: "optimizer.params.{key}": {given[key]!r} is not done here; remove it')
        given.pop(key, None)
    unknown = set(given) - set(_OPTIMIZER_PARAMS[name].split())
    automatic = [key for key, value in given.items() if value == AUTO]
    if unknown or automatic:
        raise ConfigError(f'{config.where}: "optimizer.params.{sorted(unknown or automatic)[0]}" '
                          + (f"is none of {_OPTIMIZER_PARAMS[name]}" if unknown else 'cannot be "auto": a DummyOptim has lr and weight_decay'))
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    defaults: Dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.0}
    make = torch.optim.SGD if name == "sgd" else torch.optim.AdamW if decoupled else torch.optim.Adam
    return make(dummy.params, **{**defaults, **given})


_SCHEDULES = {"WarmupLR": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration",
              "WarmupDecayLR": "total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration",
              "WarmupCosineLR": "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type last_batch_iteration"}


class DeepSpeedScheduler:
    """DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR, written into an optimizer's groups: the first update is made with the
    smallest rate, as the count begins at -1, and so is the second. `kind` and `values`: the JSON's. Errors: ConfigError."""

    def __init__(self, optimizer: Any, kind: str, values: Dict[str, Any], where: str = "hf_ds_config"):
        if kind not in _SCHEDULES:
            raise ConfigError(f'{where}: "scheduler.type" is {kind!r}; Tessera has {", ".join(_SCHEDULES)}')
        for key, value in values.items():
            if key not in _SCHEDULES[kind].split():
                raise ConfigError(f'{where}: "scheduler.params.{key}" is none of {_SCHEDULES[kind]}')
            if value == AUTO:
                raise ConfigError(f'{where}: "scheduler.params.{key}" is "auto", and nothing says what that is: give total_num_steps to '
                                  "DummyScheduler, or a number")
        self.optimizer, self.kind = optimizer, kind
        self.total = values.get("total_num_steps")
        warmup = values.get("warmup_num_steps", 1000)
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 1:
            raise ConfigError(f'{where}: "scheduler.params.warmup_num_steps" is {warmup!r}; it is a whole number of at least 1')
        if kind != "WarmupLR" and (isinstance(self.total, bool) or not isinstance(self.total, int)):
            raise ConfigError(f'{where}: "scheduler.params.total_num_steps" is {self.total!r}; it is a whole number')
        self.warmup = max(2, warmup)
        self.shape = values.get("warmup_type", "log")
        if self.shape not in ("log", "linear"):
            raise ConfigError(f'{where}: "scheduler.params.warmup_type" is {self.shape!r}; it is log or linear')
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.cosine_end, self.ratio = values.get("cos_min_ratio", 0.0001), values.get("warmup_min_ratio", 0.0)
        self.low, self.high = [0.0] * len(rates), rates
        if kind != "WarmupCosineLR":
            self.low = self._per_group(values.get("warmup_min_lr", 0.0), "warmup_min_lr", where)
            highest = values.get("warmup_max_lr", rates if kind == "WarmupLR" else 0.001)
            self.high = self._per_group(rates if highest is None else highest, "warmup_max_lr", where)
        self.last_epoch = int(values.get("last_batch_iteration", -1))
        self._write()

    def _per_group(self, value: Any, key: str, where: str) -> List[float]:
        groups = len(self.optimizer.param_groups)
        found = list(value) if isinstance(value, (list, tuple)) else [value] * groups
        if len(found) != groups or not all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in found):
            raise ConfigError(f'{where}: "scheduler.params.{key}" is {value!r}; it is a number, or one for each of the {groups} groups')
        return [float(each) for each in found]

    def _share(self) -> float:
        """Of the way from the low rate to the high one."""
        step, cosine = self.last_epoch, self.kind == "WarmupCosineLR"
        if step < 0:
            return 0.0
        if step < self.warmup:
            share = math.log(step + 1) / math.log(self.warmup) if self.shape == "log" else step / self.warmup
            return self.ratio + (1.0 - self.ratio) * share if cosine else share
        if self.kind == "WarmupLR":
            return 1.0
        left = max(1, self.total - self.warmup)
        if not cosine:
            return max(0.0, (self.total - step) / left)
        turn = (1.0 + math.cos(math.pi * min(1.0, (step - self.warmup + 1) / left))) / 2
        return max(0.0, self.cosine_end + (1.0 - self.cosine_end) * turn)

    def _write(self) -> None:
        share = self._share()
        for group, low, high in zip(self.optimizer.param_groups, self.low, self.high):
            group["lr"] = low + (high - low) * share

    def step(self, *_: Any) -> None:
        self.last_epoch += 1
        self._write()

    def get_last_lr(self) -> List[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    get_lr = get_last_lr

    def state_dict(self) -> dict:
        return {"last_batch_iteration": self.last_epoch}

    def load_state_dict(self, state_dict: dict) -> None:
        self.last_epoch = int(state_dict["last_batch_iteration"])
        self._write()


def make_scheduler(config: Any, dummy: DummyScheduler, optimizer: Any, processes: int) -> Any:
    """What a DummyScheduler stands for. `processes`: by which its total_num_steps is divided. Errors: ConfigError."""
    if dummy.lr_scheduler_callable is not None:
        return dummy.lr_scheduler_callable(optimizer)
    if config is None or config.get("scheduler.type") is None:
        raise ConfigError('DummyScheduler stands for the "scheduler" of DeepSpeed\'s JSON, and there is none: give '
                          "DeepSpeedPlugin(hf_ds_config=...) one with it, or lr_scheduler_callable to DummyScheduler")
    total = None if dummy.total_num_steps is None else math.ceil(dummy.total_num_steps / processes)
    values = dict(config.get("scheduler.params", {}))
    for key, value in (("warmup_min_lr", 0), ("warmup_max_lr", float(optimizer.defaults["lr"])),
                       ("warmup_num_steps", max(1, dummy.warmup_num_steps)), ("total_num_steps", total)):
        if values.get(key) == AUTO and value is not None:
            values[key] = value
            config.fill(f"scheduler.params.{key}", value)
    return DeepSpeedScheduler(optimizer, str(config.get("scheduler.type")), values, config.where)
