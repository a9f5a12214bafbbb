"""What scripts import of Accelerate's Megatron-LM integration: train steps, dummies, and what averages over data ranks."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

from tessera.comm.warnings import name_unread
from tessera.compat.foreign_functions import find
from tessera.data.indexed_loaders import admit, build_loaders, samples_provider, set_plugin_arguments
from tessera.engine.bert_train_step import BertTrainStep
from tessera.engine.t5_train_step import T5TrainStep
from tessera.engine.train_steps import (AbstractTrainStep, GPTTrainStep, avg_losses_across_data_parallel_group,
                                        gather_across_data_parallel_groups, tokens_and_labels)
from tessera.errors import ConfigError
from tessera.scheduler import AcceleratedScheduler as MegatronLMSchedulerWrapper
from tessera.state import AcceleratorState

__all__ = ["AbstractTrainStep", "BertTrainStep", "GPTTrainStep", "MegatronEngine", "MegatronLMDummyDataLoader",
           "MegatronLMDummyScheduler", "MegatronLMOptimizerWrapper", "MegatronLMSchedulerWrapper", "T5TrainStep",
           "avg_losses_across_data_parallel_group", "gather_across_data_parallel_groups", "full_gradients", "tokens_and_labels"]


def __getattr__(name: str) -> Any:
    """The wrappers, whose modules need torch."""
    if name == "MegatronLMOptimizerWrapper":
        from tessera.optimizer import AcceleratedOptimizer

        return AcceleratedOptimizer
    if name == "MegatronEngine":
        from tessera.engine.model import TesseraModel

        return TesseraModel
    refused = find(name)
    if refused is not None:
        return refused
    raise AttributeError(f"module {__name__} has no attribute {name!r}")


class MegatronLMDummyScheduler:
    """Asks prepare() for Megatron's learning-rate schedule, see the plugin's lr_* fields. What `total_num_steps` counts is
    explained in docs/guides/coming_from_accelerate.md; the resolved horizon is logged."""

    def __init__(self, optimizer: Any, total_num_steps: Optional[int] = None, warmup_num_steps: int = 0, **kwargs: Any):
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs
        name_unread("MegatronLMDummyScheduler", kwargs, "the lr_* fields of MegatronLMPlugin")


class MegatronLMDummyDataLoader:
    """Megatron's indexed data (.idx/.bin): passed three times to one prepare() it becomes the loaders of training,
    validation and test. Keywords are Megatron's arguments of data and validation: data_path (prefix, or "weight prefix weight
    prefix ...") with split (also splits_string), or train_data_path, valid_data_path and test_data_path,
    or data_args_path or per_split_data_args_path, files with such lists; seq_length,
    micro_batch_size, data_cache_path, seed, eval_iters, eval_interval, eod_mask_loss and the like (docs/guides/data_in_python.md).
    What is not given is the plugin's. Batches are {"text": int64 [batch, seq_length + 1]}; for BERT and T5 Megatron's of sentences.
    Errors: ConfigError."""

    def __init__(self, **dataset_kwargs: Any):
        self.dataset_args = admit(dataset_kwargs)

    def set_megatron_data_args(self) -> None:
        """The plugin takes these arguments over, as prepare() has it; one line names each that it said otherwise."""
        plugin = AcceleratorState().megatron_lm_plugin
        if plugin is None:
            raise ConfigError("MegatronLMDummyDataLoader needs a MegatronLMPlugin")
        set_plugin_arguments(self.dataset_args, plugin)

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Callable:
        """function(numbers of samples of training, validation and test) -> their data sets, as far as they have samples."""
        return samples_provider(accelerator, self.dataset_args)

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> Tuple:
        """The three iterators, None for a part without a share. Collective; after the scheduler's or the plugin's train_iters is
        known."""
        return build_loaders(accelerator, self.dataset_args)


def full_gradients(model: Any) -> Dict[str, Any]:
    """The whole gradient that the next step would take, unclipped, as fp32 tensors by Hugging Face name on rank 0; {} on
    other ranks. Collective."""
    import torch

    return {name: torch.from_numpy(array.copy()) for name, array in model.session.collect(gradients=True).items()}
