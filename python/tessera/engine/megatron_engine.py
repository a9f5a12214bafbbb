"""What Accelerate's MegatronEngine has beside a module's own members: a whole step in one call, evaluation sums, checkpoints."""

from __future__ import annotations

import math
import weakref
from argparse import Namespace
from typing import Any, Dict, Iterator, Optional, Tuple

import torch

from tessera.data.split import bounds
from tessera.engine.own_train_step import make_train_step
from tessera.errors import ConfigError
from tessera.logging import get_logger

logger = get_logger(__name__)


class MegatronEngineMembers:
    """Mixed into TesseraModel. `prepared_by` is the Accelerator whose prepare() made the model."""

    _session: Any
    _train_step: Any

    def prepared_by(self, accelerator: Any) -> None:
        self._accelerator = weakref.ref(accelerator)
        self.total_loss_dict: Dict[str, float] = {}  # sums over the calls of train_step
        self.eval_total_loss_dict: Dict[str, float] = {}  # sums since the last log_eval_results(), and NAME_num_iters

    @property
    def accelerator(self) -> Any:
        accelerator = self._accelerator()
        if accelerator is None:
            raise ConfigError("the Accelerator that prepared this model is gone; keep it as long as the model")
        return accelerator

    @property
    def base_model(self) -> Any:
        return self

    @property
    def optimizer(self) -> Any:
        """The prepared one, None without."""
        return next(iter(self.accelerator._optimizers), None)

    @property
    def scheduler(self) -> Any:
        """The prepared one, None without."""
        return next(iter(self.accelerator._schedulers), None)

    @property
    def iteration(self) -> int:
        """Optimizer steps done."""
        engine = self._session.engine
        return 0 if engine is None else engine.steps_done

    @property
    def train_step_handler(self) -> Any:
        """The train step: the plugin's own, else a GPTTrainStep, which computes what the model's own loss does."""
        if self._train_step is not None:
            return self._train_step.step
        return make_train_step(self.accelerator, self._plugin(), self._session)

    def _plugin(self) -> Any:
        if self._session.plugin is None:
            raise ConfigError("this member is Megatron's: give the Accelerator a MegatronLMPlugin")
        return self._session.plugin

    def get_module_config(self) -> Namespace:
        """The model and its training under Megatron's argument names."""
        return Namespace(**self._plugin().megatron_lm_default_args)

    @property
    def module_config(self) -> Namespace:
        return self.get_module_config()

    def get_batch_data_iterator(self, batch_data: Dict[str, Any]) -> Optional[Iterator[Dict[str, Any]]]:
        """The micro-batches of this data rank's batch, cut as the engine cuts it; None for {}."""
        if not batch_data:
            return None
        rows = len(next(iter(batch_data.values())))
        parts = max(1, min(rows, self._session.num_micro_batches))
        cuts = [bounds(rows, i, parts) for i in range(parts)]
        return iter([{name: value[a:b] for name, value in batch_data.items()} for a, b in cuts])

    def train_step(self, **batch_data: Any) -> Tuple[Dict[str, torch.Tensor], int, float, None]:
        """Forward, backward, optimizer step, scheduler step: (losses by name, 1 if the step was skipped, norm of the gradient before
        clipping, None where Megatron counts zeros). While gradients are accumulated only the first two. Collective. Errors:
        ConfigError without an optimizer, or in eval mode."""
        optimizer, scheduler = self.optimizer, self.scheduler
        if optimizer is None:
            raise ConfigError("train_step() needs an optimizer: give one to prepare()")
        if not self.training or not torch.is_grad_enabled():
            raise ConfigError("train_step() is for training mode: call model.train(), outside of torch.no_grad()")
        loss = self._loss_in(self(**batch_data))
        self.accelerator.backward(loss)
        losses = self._named(loss)
        optimizer.step()
        done = optimizer.gradient_state.sync_gradients
        if done and scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        for name, value in losses.items():
            self.total_loss_dict[name] = self.total_loss_dict.get(name, 0.0) + float(value)
        skipped = bool(done and optimizer.step_was_skipped)
        return losses, int(skipped), optimizer.last_step["grad_norm"] if done else float("nan"), None

    def eval_step(self, **batch_data: Any) -> Dict[str, torch.Tensor]:
        """The losses of a batch by name, forward only, on every rank. Collective."""
        training = self.training
        torch.nn.Module.train(self, False)
        try:
            with torch.no_grad():
                return self._named(self._loss_in(self(**batch_data)))
        finally:
            torch.nn.Module.train(self, training)

    @staticmethod
    def _loss_in(outputs: Any) -> torch.Tensor:
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
        if loss is None:
            raise ConfigError("a step needs labels: a batch with input_ids and labels, or with text")
        return loss

    def _named(self, loss: torch.Tensor) -> Dict[str, torch.Tensor]:
        """The loss of the call just made, by the names that a train step's loss function gives, or Megatron's."""
        logged = self._train_step.logged if self._train_step is not None else {}
        return {name: torch.tensor(value) for name, value in (logged or self._session.losses).items()} or {"lm loss": loss.detach()}

    def note_eval(self, loss: torch.Tensor) -> None:
        """Adds a loss of evaluation to the sums, where there is a tensorboard_dir to write them to."""
        plugin = self._session.plugin
        if plugin is None or plugin.tensorboard_dir is None:
            return
        for name, value in (self._session.losses or {"lm loss": float(loss)}).items():
            for key, number in ((name, value), (name + "_num_iters", 1.0)):
                self.eval_total_loss_dict[key] = self.eval_total_loss_dict.get(key, 0.0) + number

    def log_eval_results(self) -> None:
        """Writes the mean of the losses evaluated since the last time, and its perplexity, into the log and to tensorboard_dir;
        nothing without that folder, before the first step, or without an evaluation. train() calls it."""
        plugin, sums = self._session.plugin, self.eval_total_loss_dict
        if plugin is None or plugin.tensorboard_dir is None or self.iteration == 0 or not sums:
            return
        self.eval_total_loss_dict = {}
        words = [f"validation loss at iteration {self.iteration}"]
        scalars: Dict[str, float] = {}
        for name in [name for name in sums if not name.endswith("_num_iters")]:
            value = sums[name] / sums[name + "_num_iters"]
            words.append(f"{name} value: {value:g}")
            scalars[f"{name} validation"] = value
            if plugin.given_arguments.get("pretraining_flag", not self._session.heads.of_samples):
                scalars[f"{name} validation ppl"] = math.exp(min(20.0, value))
                words.append(f"{name} PPL: {scalars[f'{name} validation ppl']:g}")
        logger.info(" | ".join(words))
        self._session.log_scalars(scalars)

    def save_checkpoint(self, output_dir: str) -> None:
        """Model, optimizer and all else that accelerator.save_state() saves, into that folder. Collective."""
        self.log_eval_results()
        self.accelerator.save_state(output_dir)

    def load_checkpoint(self, input_dir: str) -> None:
        """What save_checkpoint() or accelerator.save_state() saved; `iteration` goes on from there. Collective."""
        self.accelerator.load_state(input_dir)
