"""Accelerator: what a training script holds in its hands."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Callable, Dict, Optional

from tessera.accelerator.checkpoints import Checkpoints
from tessera.accelerator.foreign import Foreign
from tessera.accelerator.prepare import Preparation
from tessera.accelerator.prepared import Prepared
from tessera.accelerator.processes import Processes
from tessera.accelerator.trackers import Trackers
from tessera.checkpoint.background import PendingSave
from tessera.comm.process_group import write_dumps_to
from tessera.comm.warnings import warn_once
from tessera.compat.refusals import not_ours
from tessera.data_loader import skip_first_batches
from tessera.errors import ConfigError
from tessera.launch.preemption import Preemption
from tessera.logging import get_logger
from tessera.state import AcceleratorState, GradientState
from tessera.utils.dataclasses import (AutocastKwargs, DataLoaderConfiguration, DistributedDataParallelKwargs,
                                       DistributedType, GradientAccumulationPlugin, GradScalerKwargs,
                                       InitProcessGroupKwargs, ProfileKwargs, ProjectConfiguration)
from tessera.utils.memory import release_memory

__all__ = ["Accelerator"]

logger = get_logger(__name__)
_LOADER_OPTIONS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")


class Accelerator(Processes, Trackers, Checkpoints, Foreign):
    """Accelerate's Accelerator over Tessera's engine; its guide to differences is docs/guides/coming_from_accelerate.md.

    Without a MegatronLMPlugin (given, or asked for by ACCELERATE_USE_MEGATRON_LM) it is plain data parallelism. Making it
    connects the processes of the job (collective). Errors: tessera.ConfigError; NotImplementedError for what belongs to
    other engines."""

    def __init__(self, device_placement: bool = True, split_batches: bool = False, mixed_precision: Any = None,
                 gradient_accumulation_steps: int = 1, cpu: bool = False, dataloader_config: Any = None,
                 deepspeed_plugin: Any = None, fsdp_plugin: Any = None, torch_tp_plugin: Any = None,
                 megatron_lm_plugin: Any = None, rng_types: Optional[list] = None, log_with: Any = None,
                 project_dir: Any = None, project_config: Optional[ProjectConfiguration] = None,
                 gradient_accumulation_plugin: Optional[GradientAccumulationPlugin] = None,
                 step_scheduler_with_optimizer: bool = True, kwargs_handlers: Optional[list] = None,
                 dynamo_backend: Any = None, dynamo_plugin: Any = None, deepspeed_plugins: Any = None,
                 parallelism_config: Any = None, *, logging_dir: Any = None, even_batches: Optional[bool] = None,
                 dispatch_batches: Optional[bool] = None, use_seedable_sampler: Optional[bool] = None):
        self.trackers: list = []
        self.project_configuration = project_config or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and self.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        if logging_dir is not None:
            self.project_configuration.logging_dir = logging_dir
        if dynamo_backend is not None and str(dynamo_backend).upper().rsplit(".", 1)[-1] != "NO":
            warn_once("torch.compile is not used: Tessera's kernels are compiled already; dynamo_backend has no effect")
        handlers = self._sort(kwargs_handlers or [])
        init = handlers.get(InitProcessGroupKwargs)
        self.state = AcceleratorState(
            mixed_precision=None if mixed_precision is None else str(mixed_precision), cpu=cpu, dynamo_plugin=dynamo_plugin,
            deepspeed_plugin=deepspeed_plugins or deepspeed_plugin, fsdp_plugin=fsdp_plugin, torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin, parallelism_config=parallelism_config, _from_accelerator=True,
            **({} if init is None else init.to_kwargs()))
        write_dumps_to(self.project_configuration.logging_dir or self.project_configuration.project_dir or ".")
        self.scaler_handler = handlers.get(GradScalerKwargs)
        self.autocast_handler = handlers.get(AutocastKwargs)
        self.profile_handler = handlers.get(ProfileKwargs)
        self.ddp_handler = handlers.get(DistributedDataParallelKwargs)
        self.device_placement = device_placement
        self.dataloader_config = self._loader_config(dataloader_config, split_batches=split_batches or None,
                                                     even_batches=even_batches, dispatch_batches=dispatch_batches,
                                                     use_seedable_sampler=use_seedable_sampler)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = rng_types
        self.gradient_state = GradientState(self._accumulation(gradient_accumulation_steps, gradient_accumulation_plugin))
        self._take_deepspeed(self.state.deepspeed_plugin)
        self.scaler = None  # of torch's; the engine scales fp16's loss by itself
        self.native_amp = False
        self.step = 0
        self._triggered = False
        self._preemption = Preemption()
        self._prepared = Prepared()
        self._custom_objects: list = []
        self._save_hooks: Dict[int, Callable] = {}
        self._pending_save: Optional[PendingSave] = None
        self._load_hooks: Dict[int, Callable] = {}
        self._choose_trackers(log_with)

    @staticmethod
    def _sort(handlers: list) -> Dict[type, Any]:
        known = (AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs)
        found: Dict[type, Any] = {}
        for handler in handlers:
            kind = next((kind for kind in known if isinstance(handler, kind)), None)
            if kind is None:
                raise ConfigError(f"kwargs_handlers: {type(handler).__name__} is not one of "
                                  f"{', '.join(each.__name__ for each in known)}")
            if kind in found:
                raise ConfigError(f"kwargs_handlers has two {kind.__name__}; give one")
            found[kind] = handler
        return found

    @staticmethod
    def _loader_config(config: Optional[DataLoaderConfiguration], **given: Any) -> DataLoaderConfiguration:
        if config is None:
            return DataLoaderConfiguration(**{name: value for name, value in given.items() if value is not None})
        twice = [name for name, value in given.items() if value is not None]
        if twice:
            raise ConfigError(f"{', '.join(twice)} stands both in dataloader_config and beside it; keep it in dataloader_config")
        return config

    @staticmethod
    def _accumulation(steps: int, plugin: Optional[GradientAccumulationPlugin]) -> GradientAccumulationPlugin:
        if plugin is not None:
            if steps != 1:
                raise ValueError("give gradient_accumulation_steps or gradient_accumulation_plugin, not both")
            return plugin
        return GradientAccumulationPlugin(
            num_steps=int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps) if steps == 1 else steps))

    def _take_deepspeed(self, plugin: Any) -> None:
        """Its gradient_accumulation_steps count, as in Accelerate. Errors: ConfigError where batch sizes contradict each other."""
        if plugin is None:
            return
        if plugin.accumulation not in (None, self.gradient_accumulation_steps):
            if self.gradient_accumulation_steps != 1:
                warn_once(f"gradient_accumulation_steps={self.gradient_accumulation_steps} of the Accelerator has no effect: the "
                          f"DeepSpeedPlugin says {plugin.accumulation}")
            self.gradient_accumulation_steps = plugin.accumulation
        if plugin.json is not None:
            if self.scaler_handler is not None and plugin.loss_scaling:
                raise ConfigError("GradScalerKwargs and the section fp16 of DeepSpeed's JSON both say how losses are scaled; keep one")
            plugin.json.fill("gradient_accumulation_steps", self.gradient_accumulation_steps)
            plugin.json.check_batch_sizes(self.state.mesh.dp, self.gradient_accumulation_steps)
            for name in ("fp16", "bf16"):
                plugin.json.fill(f"{name}.enabled", self.mixed_precision == name)

    # prepare

    def prepare(self, *args: Any, device_placement: Optional[list] = None) -> Any:
        """The objects as the engine uses them, in their order: a model, an optimizer, loaders, a scheduler; what is none of
        these passes through. Collective. The model's weights go into the engine, each rank its part. Errors: ConfigError for
        what Tessera cannot train, naming it."""
        if device_placement is not None and self.distributed_type == DistributedType.MEGATRON_LM:
            raise ValueError("device_placement cannot be chosen with a MegatronLMPlugin: the engine places what it holds")
        results = Preparation(self).run(args)
        return results[0] if len(results) == 1 else tuple(results)

    @property
    def _models(self) -> tuple:
        return self._prepared.models

    @property
    def _optimizers(self) -> tuple:
        return self._prepared.optimizers

    @property
    def _schedulers(self) -> tuple:
        return self._prepared.schedulers

    @property
    def _dataloaders(self) -> tuple:
        return self._prepared.dataloaders

    def prepare_model(self, model: Any, device_placement: Optional[bool] = None, evaluation_mode: bool = False) -> Any:
        """As prepare(model): the engine is made when the optimizer comes, or with the first call."""
        return self.prepare(model)

    def prepare_optimizer(self, optimizer: Any, device_placement: Optional[bool] = None) -> Any:
        return self.prepare(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        return self.prepare(scheduler)

    def prepare_data_loader(self, data_loader: Any, device_placement: Optional[bool] = None,
                            slice_fn_for_dispatch: Optional[Callable] = None) -> Any:
        """This data rank's part of a loader, or of any iterable of batches. Collective. Errors: ConfigError where ranks differ."""
        return Preparation(self).loader_alone(data_loader, device_placement, slice_fn_for_dispatch)

    # The step.

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """loss.backward(), the loss divided by gradient_accumulation_steps. Its gradient is averaged over data ranks."""
        if kwargs.pop("learning_rate", None) is not None:
            raise not_ours("backward(learning_rate=)", "LOMO optimizers", "use torch.optim.AdamW")
        if self.gradient_accumulation_steps > 1:
            loss = loss / self.gradient_accumulation_steps
        loss.backward(**kwargs)

    @property
    def sync_gradients(self) -> bool:
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.plugin_kwargs.update({"num_steps": steps})

    def _do_sync(self) -> None:
        if self.gradient_state.sync_with_dataloader and self.gradient_state.end_of_dataloader:
            self.step = 0
            self.gradient_state._set_sync_gradients(True)
        else:
            self.step += 1
            self.gradient_state._set_sync_gradients(self.step % self.gradient_state.num_steps == 0)

    @contextlib.contextmanager
    def accumulate(self, *models: Any):
        """Within it step() and zero_grad() act every gradient_accumulation_steps times, and at the end of the loader."""
        self._do_sync()
        yield

    @contextlib.contextmanager
    def no_sync(self, model: Any):
        """Gradients are added up over calls either way; nothing is left undone here."""
        yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: Any):
        """Every backward synchronises its gradient here, so nothing has to be triggered."""
        yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: Optional[bool] = None):
        """Prepared loaders give every data rank the same number of steps, so nothing has to be joined."""
        if even_batches is not None:
            warn_once("join_uneven_inputs(even_batches=) has no effect: prepared loaders are exact without repeats")
        yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Gradients are never scaled where a script can see them."""

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """The true norm of the whole model's gradient (a torch scalar, or a float without torch); the next step() clips to
        `max_norm`. Collective. Errors: ConfigError for parameters that are not the whole model's, or another norm."""
        if float(norm_type) != 2.0:
            raise ConfigError(f"clip_grad_norm_: norm_type {norm_type} is not supported; the norm is the 2-norm")
        model = self._model_of(parameters)
        if not self.sync_gradients or not model.session.has_gradient():
            return self._scalar(0.0)
        return self._scalar(model.session.clip_grad_norm(float(max_norm)))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Errors: NotImplementedError: single elements are not clipped."""
        raise NotImplementedError("clip_grad_value_ is not supported: gradients are sharded over ranks and reach the optimizer "
                                  "in one pass; use clip_grad_norm_, or the plugin's gradient_clipping")

    def _model_of(self, parameters: Any) -> Any:
        if not self._models:
            raise ConfigError("clip_grad_norm_ needs a model that went through prepare()")
        model = self._models[0]
        given = [parameters] if hasattr(parameters, "requires_grad") else list(parameters)
        own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        if not own <= {id(parameter) for parameter in given}:
            raise ConfigError("clip_grad_norm_ clips the norm of the whole model: pass model.parameters() of the model that "
                              "prepare() returned")
        return model

    def _scalar(self, value: float) -> Any:
        torch = sys.modules.get("torch")
        return value if torch is None else torch.tensor(value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step changed nothing because the gradient was not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    # Models and loaders.

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The prepared model itself: it has config, save_pretrained and state_dict."""
        return model

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The rest of an epoch, from batch `num_batches` on."""
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list:
        """Lets go of everything prepared, the engine included; returns None for each object. What is saved in the background is
        in place then."""
        pending, self._pending_save = self._pending_save, None
        if pending is not None:
            pending.wait_here()
        for model in self._models:
            model._session.close()
        self._prepared = Prepared()
        self.step = 0
        return release_memory(*objects)

    clear = free_memory

    @contextlib.contextmanager
    def autocast(self, autocast_handler: Any = None):
        """torch.autocast for the caller's own torch code; the engine has its precision from mixed_precision."""
        torch = sys.modules.get("torch")
        handler = autocast_handler or self.autocast_handler
        if torch is None or self.mixed_precision == "no" or (handler is not None and not handler.enabled):
            yield
            return
        dtype = torch.bfloat16 if self.mixed_precision == "bf16" else torch.float16
        with torch.autocast(self.device.type, dtype=dtype):
            yield

    @contextlib.contextmanager
    def profile(self, profile_handler: Any = None):
        """torch.profiler around the block. Needs torch; the engine's kernels appear as one block each."""
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            os.makedirs(handler.output_trace_dir, exist_ok=True)
            profiler.export_chrome_trace(os.path.join(handler.output_trace_dir, f"profile_{self.process_index}.json"))
        self.wait_for_everyone()

    def __deepcopy__(self, memo: dict) -> "Accelerator":
        return self
