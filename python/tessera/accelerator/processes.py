"""The Accelerator's members about processes: who am I, wait, gather."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Callable, Optional, Union

from tessera.accelerator.metrics import holds_objects, objects_of_samples, rows_of_samples
from tessera.comm.process_group import meet
from tessera.errors import ConfigError
from tessera.launch.preemption import PREEMPTED, Preemption
from tessera.state import PartialState
from tessera.utils.operations import gather, gather_object, pad_across_processes, reduce


class Processes:
    state: Any
    gradient_state: Any
    project_configuration: Any
    dataloader_config: Any
    _triggered: bool
    _preemption: Preemption
    save_state: Callable[..., str]
    end_training: Callable[[], None]

    use_distributed = property(lambda self: self.state.use_distributed)
    multi_device = property(lambda self: self.state.num_processes > 1)
    distributed_type = property(lambda self: self.state.distributed_type)
    num_processes = property(lambda self: self.state.num_processes)
    process_index = property(lambda self: self.state.process_index)
    local_process_index = property(lambda self: self.state.local_process_index)
    device = property(lambda self: self.state.device)
    mixed_precision = property(lambda self: self.state.mixed_precision)
    is_main_process = property(lambda self: self.state.is_main_process, doc="Whether this is rank 0.")
    is_local_main_process = property(lambda self: self.state.is_local_main_process)
    is_last_process = property(lambda self: self.state.is_last_process)
    split_batches = property(lambda self: self.dataloader_config.split_batches)
    dispatch_batches = property(lambda self: self.dataloader_config.dispatch_batches)
    use_seedable_sampler = property(lambda self: self.dataloader_config.use_seedable_sampler)
    non_blocking = property(lambda self: self.dataloader_config.non_blocking)
    use_stateful_dataloader = property(lambda self: self.dataloader_config.use_stateful_dataloader)
    project_dir = property(lambda self: self.project_configuration.project_dir)
    logging_dir = property(lambda self: self.project_configuration.logging_dir)
    save_iteration = property(lambda self: self.project_configuration.iteration)
    should_save_model = property(lambda self: True, doc="Saving is collective: every rank takes part.")
    tensor_parallel_rank = property(lambda self: self.state.mesh.coordinates["tp"])
    pipeline_parallel_rank = property(lambda self: self.state.mesh.coordinates["pp"])
    data_parallel_rank = property(lambda self: self.state.mesh.coordinates["dp"])
    data_parallel_shard_rank = property(lambda self: self.state.mesh.coordinates["dp"])
    context_parallel_rank = property(lambda self: self.state.mesh.coordinates["cp"])

    @property
    def even_batches(self) -> bool:
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Any:
        """This process's part of the inputs: of its data rank."""
        return PartialState().split_between_processes(inputs, apply_padding=apply_padding)

    def on_main_process(self, function: Optional[Callable] = None) -> Callable:
        return PartialState().on_main_process(_function(self, function, "on_main_process"))

    def on_local_main_process(self, function: Optional[Callable] = None) -> Callable:
        return PartialState().on_local_main_process(_function(self, function, "on_local_main_process"))

    def on_last_process(self, function: Callable) -> Callable:
        return PartialState().on_last_process(_function(self, function, "on_last_process"))

    def on_process(self, function: Optional[Callable] = None, process_index: Optional[int] = None) -> Callable:
        return PartialState().on_process(function, process_index)

    def on_local_process(self, function: Optional[Callable] = None, local_process_index: Optional[int] = None) -> Callable:
        return PartialState().on_local_process(function, local_process_index)

    @contextlib.contextmanager
    def main_process_first(self):
        """Rank 0 runs the block first, for as long as it takes; then the others."""
        with self.state.main_process_first():
            yield

    @contextlib.contextmanager
    def local_main_process_first(self):
        with self.state.local_main_process_first():
            yield

    def wait_for_everyone(self) -> None:
        """A barrier of all processes."""
        self.state.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """print() on the first process of each machine."""
        self.state.print(*args, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """Of all data ranks, one after the other along dim 0."""
        return gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """gather(), for what was computed of a prepared loader's batches: a row for each sample, on every layout as many as
        Accelerate keeps (tessera.accelerator.metrics). What holds anything but tensors is gathered as lists of objects."""
        loader = self.gradient_state.active_dataloader
        if holds_objects(input_data, loader, use_gather_object):
            return gather_object(objects_of_samples(input_data, loader))
        return gather(rows_of_samples(input_data, loader))

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Over all data ranks: "sum" or "mean", times scale."""
        return reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        return pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Raises a flag that check_trigger() finds on every process."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any process has called set_trigger(); lowers the flag. Collective."""
        told = meet(self.state.world, "check_trigger()", int(self._triggered))
        self._triggered = False
        return any(values[0] for values in told)


    def preemption_requested(self) -> bool:
        """Whether any process was asked to end by SIGTERM or SIGUSR1; those that came before the first call had their usual
        effect. Collective: all ranks get one answer, so all of them stop after the same step."""
        self._preemption.listen()
        told = meet(self.state.world, "accelerator.preemption_requested()", int(self._preemption.requested))
        return any(values[0] for values in told)

    def exit_if_preempted(self, save: Union[str, os.PathLike, Callable[[], Any], None] = None) -> None:
        """To be called after every step: once preemption_requested(), saves, ends the training and the process with exit code
        75, which launchers and schedulers know as "start me again". Collective.

        `save`: a folder for save_state(), a function that saves, called on every rank, or nothing where
        ProjectConfiguration(automatic_checkpoint_naming=True) names the folder. Nothing is saved when a rank was lost: then
        this raises CommunicationError, as every collective call does. Errors: ConfigError where it is not said what to save."""
        if save is None and not self.project_configuration.automatic_checkpoint_naming:
            raise ConfigError("exit_if_preempted() must know where to save: give a folder or a function, or use "
                              "ProjectConfiguration(automatic_checkpoint_naming=True)")
        if not self.preemption_requested():
            return
        if callable(save):
            save()
        else:
            self.save_state(save)
        self.end_training()
        raise SystemExit(PREEMPTED)


def _function(self: Any, function: Optional[Callable], name: str) -> Callable:
    """Used as `@accelerator.on_main_process`, or as a decorator in a class body that is looked up by name."""
    if function is None:
        raise ValueError(f"{name} is a decorator: write @accelerator.{name} above a function")
    return function
