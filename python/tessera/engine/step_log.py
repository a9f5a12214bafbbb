"""What the engine writes to the plugin's `tensorboard_dir` at each optimizer step, under Megatron's names."""

from __future__ import annotations

import time
from typing import Any, Dict, Optional

from tessera.errors import ConfigError
from tessera.plugin.config_map import tensorboard_scalars


class StepLog:
    """Writes on rank 0; nothing without a `tensorboard_dir`."""

    def __init__(self, state: Any):
        self._plugin = state.megatron_lm_plugin
        self._names = tensorboard_scalars(self._plugin) if state.is_main_process else ()
        self._processes = state.num_processes
        self._writer: Any = None
        self._last: Optional[float] = None
        if self._names:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ConfigError("MegatronLMPlugin.tensorboard_dir needs the package tensorboard (pip install tensorboard), "
                                  f"which cannot be loaded: {error}") from error
            self._writer = SummaryWriter(self._plugin.tensorboard_dir)

    def write(self, step: int, loss: Optional[float], lr: float, result: Dict[str, Any], tokens: int,
              memory: int) -> None:
        """After update number `step`; `tokens`: of its global batch; `memory`: the most this rank held, in bytes."""
        if self._writer is None:
            return
        now = time.perf_counter()
        values: Dict[str, Optional[float]] = {
            "lm loss": loss, "learning-rate": lr, "grad-norm": result["grad_norm"], "loss-scale": result["loss_scale"],
            "batch-size": getattr(self._plugin, "global_batch_size", None), "world-size": self._processes,
            "memory": memory}
        if self._last is not None:
            values["iteration-time"] = now - self._last
            values["tokens-per-second"] = tokens / (now - self._last)
        self._last = now
        self.write_scalars(step, {name: value for name in self._names if (value := values.get(name)) is not None})

    def write_scalars(self, step: int, values: Dict[str, float]) -> None:
        if self._writer is None:
            return
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
