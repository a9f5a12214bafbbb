"""MegatronLMPlugin: the layout and the habits of training, field for field as in Accelerate, of all its versions."""

import os
import warnings
from dataclasses import dataclass

from tessera.comm.warnings import warn_once
from tessera.compat.refusals import check_precision
from tessera.errors import ConfigError
from tessera.plugin import fields, megatron_args
from tessera.plugin.parsers import find_parser

# What Megatron can log beyond the usual; `set_all_logging_options` switches them on.
_LOGGING_ARGUMENTS = (
    "log_params_norm", "log_num_zeros_in_grad", "log_throughput", "log_progress", "log_timers_to_tensorboard",
    "log_batch_size_to_tensorboard", "log_learning_rate_to_tensorboard", "log_loss_scale_to_tensorboard",
    "log_validation_ppl_to_tensorboard", "log_memory_to_tensorboard", "log_world_size_to_tensorboard")


@dataclass
class MegatronLMPlugin(fields.PluginFields):
    """How a model is divided among processes and trained.

    A field that is None is read from MEGATRON_LM_<FIELD> where Accelerate does so, and has its default otherwise: those of
    Accelerate up to 1.12 (no context parallelism, no rotary positions or full recomputation unless asked for). What each
    field does: docs/megatron_lm_plugin.md. Errors: tessera.ConfigError for a value that no field may have, and for one
    that changes layout or numbers in a way that is not in this build, by name. A value that concerns only speed is
    answered by one warning.

    After prepare(): `data_parallel_size`, `micro_batch_size` (samples), `global_batch_size` (samples of one optimizer
    step) and the whole `megatron_lm_default_args`, a dict under Megatron's argument names.
    """

    def __post_init__(self):
        self._read_environment()
        if self.other_megatron_args is not None:
            fields.check("other_megatron_args", self.other_megatron_args)
            for name, value in megatron_args.admit(self.other_megatron_args).items():
                setattr(self, name, value)
        for name in fields.FIELDS:
            setattr(self, name, fields.check(name, getattr(self, name)))
        self._check_together()
        for name, row in fields.FIELDS.items():
            if row.effect == "warns" and row.applies(getattr(self, name)):
                warn_once(f"MegatronLMPlugin.{name}={getattr(self, name)!r} has no effect: {row.detail}")
        if self.consumed_samples is not None:
            self.consumed_samples = [*self.consumed_samples, 0, 0][:3]
        self.DDP_impl = "local" if self.pp_degree > 1 or self.use_distributed_optimizer else "torch"
        self._make_arguments()

    def _read_environment(self) -> None:
        for name in fields.FIELDS:
            for variable in fields.variables(name):
                text = os.environ.get(variable)
                if getattr(self, name) is None and text is not None and text.strip() not in ("", "None"):
                    setattr(self, name, fields.parse(name, text, variable))

    def _check_together(self) -> None:
        """Errors: ConfigError for fields that contradict each other, whatever the model."""
        last = self.decoder_last_pipeline_num_layers
        for name, wanted in (("num_layers_per_virtual_pipeline_stage", 2), ("decoder_last_pipeline_num_layers", 2)):
            if getattr(self, name) is not None and self.pp_degree < wanted:
                raise ConfigError(f"MegatronLMPlugin.{name} needs a pipeline: give pp_degree of at least {wanted}, or remove it")
        if last is not None and self.num_layers_per_virtual_pipeline_stage is not None:
            raise ConfigError("MegatronLMPlugin.decoder_last_pipeline_num_layers and num_layers_per_virtual_pipeline_stage "
                              "cannot be had together; remove one")
        if self.lr_mult != 1.0 and self.scale_lr_cond is None:
            raise ConfigError("MegatronLMPlugin.lr_mult is for the parameters that scale_lr_cond(name, parameter) names; "
                              "give that function too, or set the optimizer's lr")
        if self.custom_train_step_kwargs and self.custom_train_step_class is None:
            raise ConfigError("MegatronLMPlugin.custom_train_step_kwargs needs a custom_train_step_class")
        if self.set_all_logging_options and self.tensorboard_dir is None:
            raise ConfigError("MegatronLMPlugin.set_all_logging_options needs a tensorboard_dir to write to")
        if None not in (self.seq_length, self.encoder_seq_length) and self.seq_length != self.encoder_seq_length:
            raise ConfigError(f"MegatronLMPlugin.seq_length is {self.seq_length} and encoder_seq_length {self.encoder_seq_length}; they are "
                              "the same thing, so give one")

    def _make_arguments(self) -> None:
        self.megatron_lm_default_args = {
            (row.megatron or (name,))[0]: getattr(self, name) for name, row in fields.FIELDS.items()
            if not row.later and row.effect != "horizon"}
        self.megatron_lm_default_args["DDP_impl"] = self.DDP_impl
        if self.tensorboard_dir is not None:
            self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
            if self.set_all_logging_options:
                self.set_tensorboard_logging_options()
        # Of Megatron's arguments, those that the script gave: here, or with a MegatronLMDummyDataLoader.
        self.given_arguments = megatron_args.normalised(self.other_megatron_args or {})
        self.megatron_lm_default_args.update(self.given_arguments)

    def set_network_size_args(self, model, batch_data=None) -> None:
        """Describes the model in `megatron_lm_default_args` by the parser for its `model.config.model_type`.

        Errors: ValueError for a type without a parser (see `add_model_config_to_megatron_parser`).
        """
        find_parser(model.config.model_type)(self, model, batch_data)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """no, fp16 or bf16. Errors: ConfigError for fp8, which is not in this build yet, and unknown words."""
        check_precision(mixed_precision)
        if mixed_precision == "no":
            return
        self.megatron_lm_default_args[mixed_precision] = True
        if mixed_precision == "bf16":
            self.DDP_impl = self.megatron_lm_default_args["DDP_impl"] = "local"

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Sets `data_parallel_size`, `micro_batch_size` and `global_batch_size`, here and in the arguments."""
        self.data_parallel_size = dp_degree
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * self.num_micro_batches
        for name in ("data_parallel_size", "micro_batch_size", "global_batch_size"):
            self.megatron_lm_default_args[name] = getattr(self, name)

    def set_optimizer_type(self, optimizer) -> None:
        """Describes a torch optimizer by its class's name and defaults. Errors: ValueError for one that is neither
        Adam, AdamW nor SGD."""
        name = type(optimizer).__name__.lower()
        arguments, defaults = self.megatron_lm_default_args, optimizer.defaults
        if "adam" in name:
            arguments.update(optimizer="adam", adam_beta1=defaults["betas"][0], adam_beta2=defaults["betas"][1],
                             adam_eps=defaults["eps"])
        elif "sgd" in name:
            arguments.update(optimizer="sgd", sgd_momentum=defaults["momentum"])
        else:
            raise ConfigError(f"the optimizer {type(optimizer).__name__} is not supported; use AdamW, Adam or SGD")
        arguments.update(lr=defaults["lr"], weight_decay=defaults["weight_decay"])

    def set_scheduler_args(self, scheduler) -> None:
        """Takes over what a MegatronLMDummyScheduler says where the plugin says nothing: `total_num_steps` as
        train_iters and `warmup_num_steps` as lr_warmup_iters, both counted in undivided batches, hence divided by the
        data ranks and micro-batches. (prepare(), which knows the loader, uses `lr_horizon.resolve_horizon`.)"""
        parts = self.megatron_lm_default_args["data_parallel_size"] * self.num_micro_batches
        if self.train_iters is None:
            if scheduler.total_num_steps is None:
                raise ConfigError("MegatronLMDummyScheduler has no total_num_steps, and the plugin no train_iters; give one")
            self.train_iters = -(-scheduler.total_num_steps // parts)
            if self.train_samples is not None:
                self.train_samples = None
                warnings.warn("train_samples is not used: train_iters follows from the scheduler's total_num_steps")
        if self.lr_warmup_iters is None and self.lr_warmup_fraction is None:
            self.lr_warmup_iters = -(-(scheduler.warmup_num_steps or 0) // parts)
            if self.lr_warmup_samples is not None:
                warnings.warn("lr_warmup_samples is not used: lr_warmup_iters follows from the scheduler's warmup_num_steps")
            self.lr_warmup_samples = 0
        self.megatron_lm_default_args.update(
            {name: getattr(self, name) for name, row in fields.FIELDS.items() if row.effect == "horizon"})

    def set_tensorboard_logging_options(self) -> None:
        """Switches on everything that can be logged: Megatron's log_* arguments."""
        for name in _LOGGING_ARGUMENTS:
            self.megatron_lm_default_args[name] = True
