"""Plain PyTorch beside a script: what it hands to prepare() is trained once more by PyTorch alone, from rank 0's weights, on the
samples of all data ranks."""

import copy
from typing import Any, List

import torch
import transformers

import tessera
from tessera.engine.model import TesseraModel
from tessera.state import PartialState
from tessera.utils import MegatronLMDummyScheduler


class Beside:
    """From `begin` to `end` the accelerator's prepare and backward, and calls of the model, are followed. `losses` is what the
    script got, `expected` PyTorch's (on rank 0)."""

    def begin(self) -> None:
        self.losses: List[float] = []
        self.expected: List[float] = []
        self.accelerator: Any = None
        self.reference = self.scheduler = None
        self.prepare, self.backward = tessera.Accelerator.prepare, tessera.Accelerator.backward
        self.call = TesseraModel.__call__
        tessera.Accelerator.prepare = lambda accelerator, *args, **kwargs: self._prepare(accelerator, args, kwargs)
        tessera.Accelerator.backward = lambda accelerator, loss, **kwargs: self._backward(accelerator, loss, kwargs)
        TesseraModel.__call__ = lambda model, *args, **batch: self._call(model, args, batch)

    def end(self) -> None:
        tessera.Accelerator.prepare, tessera.Accelerator.backward = self.prepare, self.backward
        TesseraModel.__call__ = self.call

    def _prepare(self, accelerator: Any, args: tuple, kwargs: dict) -> Any:
        self.accelerator = accelerator
        model = next((each for each in args if isinstance(each, torch.nn.Module)), None)
        if model is not None and PartialState().is_main_process:
            self.reference = copy.deepcopy(model)
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            optimizer = next(each for each in args if isinstance(each, torch.optim.Optimizer))
            copies = dict(self.reference.named_parameters())
            self.optimizer = type(optimizer)([{**group, "params": [copies[names[id(p)]] for p in group["params"]]}
                                              for group in optimizer.param_groups])
        prepared = self.prepare(accelerator, *args, **kwargs)
        dummy = next((each for each in args if isinstance(each, MegatronLMDummyScheduler)), None)
        loaders = [(given, made) for given, made in zip(args, prepared if isinstance(prepared, tuple) else (prepared,))
                   if isinstance(given, torch.utils.data.DataLoader)]
        if dummy is not None and PartialState().is_main_process:
            # Counted in batches that are not divided, where there is a loader to count them by.
            parts = len(loaders[0][0]) / len(loaders[0][1]) if loaders else 1
            self.scheduler = transformers.get_scheduler("linear", self.optimizer, dummy.warmup_num_steps // parts,
                                                        round(dummy.total_num_steps / parts))
        return prepared

    def _call(self, model: Any, args: tuple, batch: dict) -> Any:
        if torch.is_grad_enabled() and model.training:
            self.batch = batch
        return self.call(model, *args, **batch)

    def _backward(self, accelerator: Any, loss: Any, kwargs: dict) -> None:
        whole = {name: accelerator.gather_for_metrics(self.batch[name]) for name in sorted(self.batch)
                 if name in ("input_ids", "labels", "text")}
        self.backward(accelerator, loss, **kwargs)
        self.losses.append(loss.item())
        if self.reference is None:
            return
        plugin = accelerator.state.megatron_lm_plugin
        expected = self._loss(whole, plugin.custom_train_step_kwargs if plugin else None)
        (expected / accelerator.gradient_accumulation_steps).backward()
        self.expected.append(expected.item())
        if not accelerator.sync_gradients:
            return
        if plugin is not None and plugin.gradient_clipping:
            torch.nn.utils.clip_grad_norm_(self.reference.parameters(), plugin.gradient_clipping)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()

    def _loss(self, batch: dict, weighted: Any) -> Any:
        if weighted is None and "labels" in batch:
            return self.reference(**batch).loss
        ids = batch.get("text", batch.get("input_ids"))
        logits = self.reference(ids[:, :-1]).logits.transpose(1, 2)
        each = torch.nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none").mean(dim=1)
        if weighted is None:
            return each.mean()
        seen = ids[:, :-1] if "text" in batch else ids
        counts = sum((seen == number).sum(dim=1) for number in weighted["keytoken_ids"])
        return ((1 + weighted["alpha"] * counts) * each).mean()
