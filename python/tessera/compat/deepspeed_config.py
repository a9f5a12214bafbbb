"""DeepSpeed's JSON: what of it Tessera takes over, what has no effect here because it is about how DeepSpeed does its work, and what
is refused by name because numbers or memory would be others. "auto" is what Accelerate makes of it: what the script says."""

import copy
import json
import os
from pathlib import Path
from typing import Any, Dict, Optional

from tessera.errors import ConfigError

AUTO = "auto"

_TAKEN = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping zero_optimization fp16 bf16 "
        "optimizer scheduler",
    "zero_optimization": "stage offload_optimizer offload_param",
    "zero_optimization.offload_optimizer": "device nvme_path pin_memory ratio",
    "zero_optimization.offload_param": "device nvme_path pin_memory",
    "fp16": "enabled loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale",
    "bf16": "enabled",
    "optimizer": "type params",
    "scheduler": "type params",
}
_WITHOUT_EFFECT = {
    "": "steps_per_print wall_clock_breakdown memory_breakdown dump_state zero_allow_untested_optimizer zero_force_ds_cpu_optimizer aio "
        "comms_logger checkpoint timers log_level disable_python_gc disable_allgather dataloader_drop_last fp32_allreduce check_overflow",
    "zero_optimization": "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions "
        "allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint sub_group_size prefetch_bucket_size "
        "stage3_prefetch_bucket_size param_persistence_threshold stage3_param_persistence_threshold model_persistence_threshold "
        "stage3_model_persistence_threshold max_live_parameters stage3_max_live_parameters max_reuse_distance stage3_max_reuse_distance "
        "gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "module_granularity_threshold stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
        "ignore_unused_parameters legacy_stage1 round_robin_gradients memory_efficient_linear pipeline_loading_checkpoint "
        "override_module_apply log_trace_cache_warnings",
    "zero_optimization.offload_optimizer": "buffer_count pipeline pipeline_read pipeline_write fast_init",
    "zero_optimization.offload_param": "buffer_count buffer_size max_in_cpu",
    "fp16": "auto_cast",
    "bf16": "auto_cast immediate_grad_update check_grad_overflow",
    "optimizer": "legacy_fusion",
}
# Nothing but these values is what happens here.
_ONLY: Dict[str, Dict[str, tuple]] = {
    "": {"prescale_gradients": (False,), "gradient_predivide_factor": (1,), "sparse_gradients": (False,), "gradient_allreduce_op": ("mean",),
         "communication_data_type": (None, "fp32", "float32"), "seq_parallel_communication_data_type": (None, "fp32", "float32")},
    "zero_optimization": {"zero_hpz_partition_size": (1,), "zero_quantized_weights": (False,), "zero_quantized_gradients": (False,),
                          "zero_quantized_nontrainable_weights": (False,), "cpu_offload": (None, False), "cpu_offload_param": (None, False),
                          "mics_shard_size": (-1,), "zenflow": (None,)},
    "zero_optimization.offload_optimizer": {"super_offload": (False,)},
    "fp16": {"fp16_master_weights_and_grads": (False,), "consecutive_hysteresis": (False,)},
    "bf16": {"bf16_master_weights_and_grads": (False,), "bf16_optimizer_states": (False,)},
}
_INSTEAD = {
    "communication_data_type": "gradients are summed in fp32; remove it",
    "cpu_offload": 'write "offload_optimizer": {"device": "cpu"}', "cpu_offload_param": 'write "offload_param": {"device": "cpu"}',
    "mics_shard_size": "FullyShardedDataParallelPlugin(sharding_strategy='HYBRID_SHARD') shares out within a machine",
    "zero_hpz_partition_size": "FullyShardedDataParallelPlugin(sharding_strategy='HYBRID_SHARD') shares out within a machine",
    "activation_checkpointing": "call gradient_checkpointing_enable() on the model",
    "tensorboard": "give log_with='tensorboard' to the Accelerator", "wandb": "give log_with='wandb' to the Accelerator",
    "comet": "give log_with='comet_ml' to the Accelerator", "amp": "give mixed_precision to the Accelerator",
    "tensor_parallel": "a MegatronLMPlugin(tp_degree=...) cuts layers over ranks",
    "torch_autocast": "give mixed_precision to the Accelerator", "msamp": "MS-AMP's fp8 is not in this build; use bf16",
}


def _idle(section: Any) -> bool:
    """Whether a section asks for nothing: not enabled, or nothing but nothings in it."""
    if not isinstance(section, dict):
        return section in (None, False)
    if "enabled" in section:
        return section["enabled"] in (False, None)
    return all(value in (None, False, 0) for value in section.values())


def _without_repetition(pairs: list) -> dict:
    found: dict = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f'"{key}" stands twice')
        found[key] = value
    return found


def value_at(config: Any, name: str, default: Any = None) -> Any:
    """Of nested dicts by a dotted name; the default where it, or what it stands in, is None or not there."""
    for key in name.split("."):
        if not isinstance(config, dict) or config.get(key) is None:
            return default
        config = config[key]
    return config


class DeepSpeedConfig:
    """The JSON `source` holds: a dict, a path to a file, or an object of Transformers' or Accelerate's that has it as `config`.
    Errors: ConfigError for what is no such JSON, and for keys that mean something Tessera does not do."""

    def __init__(self, source: Any):
        self.where = "hf_ds_config"
        source = getattr(source, "config", source)
        if isinstance(source, (str, os.PathLike)):
            self.where = str(source)
            source = self._file(Path(source))
        if not isinstance(source, dict):
            raise ConfigError(f"{self.where}: DeepSpeed's settings are an object of JSON or a dict, not a {type(source).__name__}")
        self.config: Dict[str, Any] = copy.deepcopy(source)
        if "bfloat16" in self.config:  # DeepSpeed's older name
            self.config.setdefault("bf16", self.config.pop("bfloat16"))
        if "zero_optimization" not in self.config:
            raise ConfigError(f'{self.where} has no "zero_optimization": {{"stage": ...}}, which says what is shared out')
        self._check("", self.config)

    @staticmethod
    def _file(path: Path) -> Any:
        try:
            return json.loads(path.read_text(), object_pairs_hook=_without_repetition)
        except OSError as error:
            raise ConfigError(f"DeepSpeed's JSON {path} cannot be read: {error.strerror}") from None
        except ValueError as error:  # of UnicodeDecodeError and JSONDecodeError too
            raise ConfigError(f"DeepSpeed's JSON {path} is not JSON: {error} (comments are none either)") from None

    def _check(self, place: str, section: Dict[str, Any]) -> None:
        for key, value in section.items():
            name = f"{place}.{key}" if place else key
            if key in _TAKEN[place].split():
                if name in _TAKEN:
                    if value is None:
                        continue
                    if not isinstance(value, dict):
                        raise ConfigError(f'{self.where}: "{name}" is {value!r}; it is an object')
                    self._check(name, value)
            elif key in _WITHOUT_EFFECT.get(place, "").split():
                continue
            elif key in _ONLY.get(place, {}):
                if value not in _ONLY[place][key]:
                    self._refuse(name, key, value)
            elif place or not _idle(value):
                self._refuse(name, key, value)

    def _refuse(self, name: str, key: str, value: Any) -> None:
        raise ConfigError(f'{self.where}: "{name}": {json.dumps(value, default=str)} is not done here; '
                          f'{_INSTEAD.get(key, "remove it from the JSON")}')

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a dotted name; the default where it, or what it stands in, is not there."""
        return value_at(self.config, name, default)

    def number(self, name: str, whole: bool = False) -> Any:
        """A number; None where it is "auto" or not there. Errors: ConfigError for anything else."""
        value = self.get(name)
        if value is None or value == AUTO:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or (whole and value != int(value)):
            raise ConfigError(f'{self.where}: "{name}" is {value!r}; it is a {"whole " if whole else ""}number or "auto"')
        return int(value) if whole else float(value)

    def flag(self, name: str) -> Optional[bool]:
        """True or False; None where it is "auto" or not there. Errors: ConfigError for anything else."""
        value = self.get(name)
        if value is None or value == AUTO:
            return None
        if not isinstance(value, bool):
            raise ConfigError(f'{self.where}: "{name}" is {value!r}; it is true, false or "auto"')
        return value

    def precision(self, asked: str) -> str:
        """What is trained in, where the script asks for `asked`. Errors: ConfigError where both say something else."""
        says = {"fp16": self.flag("fp16.enabled"), "bf16": self.flag("bf16.enabled")}
        if says["fp16"] and says["bf16"]:
            raise ConfigError(f"{self.where} enables fp16 and bf16; one of the two")
        enabled = next((name for name, on in says.items() if on), None)
        if asked != "no" and (enabled not in (None, asked) or says[asked] is False):
            raise ConfigError(f'{self.where} has {enabled or f"{asked} disabled"} and the Accelerator mixed_precision={asked!r}: say the '
                              f'same, or "enabled": "auto" in the JSON')
        return enabled or asked

    def loss_scaling(self) -> Dict[str, Any]:
        """Keys of the section `training`, with DeepSpeed's defaults, where the JSON has a section fp16."""
        if self.get("fp16") is None:
            return {}
        fixed, power = self.number("fp16.loss_scale"), self.number("fp16.initial_scale_power")
        if fixed:
            return {"loss_scale": fixed}
        found = {"initial_loss_scale": 2.0 ** (16 if power is None else power)}
        for key, default in (("loss_scale_window", 1000), ("hysteresis", 2), ("min_loss_scale", 1)):
            value = self.number(f"fp16.{key}", whole=key != "min_loss_scale")
            found[key] = default if value is None else value
        return found

    def offload(self) -> Dict[str, Any]:
        """Keys of the section `offload` beside the devices."""
        pinned, ratio = self.flag("zero_optimization.offload_optimizer.pin_memory"), self.number("zero_optimization.offload_optimizer.ratio")
        return ({} if pinned is None else {"pin_memory": pinned}) | ({} if ratio is None else {"ratio": ratio})

    def check_batch_sizes(self, data_ranks: int, accumulation: int) -> None:
        """Errors: ConfigError where train_batch_size is not what the others make."""
        whole, part = self.number("train_batch_size", True), self.number("train_micro_batch_size_per_gpu", True)
        if whole is None:
            return
        if part is not None and whole != part * accumulation * data_ranks:
            raise ConfigError(f"{self.where}: train_batch_size is {whole}, and train_micro_batch_size_per_gpu {part} x "
                              f"gradient_accumulation_steps {accumulation} x {data_ranks} data ranks are {part * accumulation * data_ranks}")
        if whole % (accumulation * data_ranks):
            raise ConfigError(f"{self.where}: train_batch_size {whole} cannot be divided by gradient_accumulation_steps {accumulation} x "
                              f"{data_ranks} data ranks")
        if part is None:
            self.config["train_micro_batch_size_per_gpu"] = whole // (accumulation * data_ranks)

    def fill(self, name: str, value: Any) -> None:
        """What "auto" has become."""
        *path, key = name.split(".")
        section = self.get(".".join(path)) if path else self.config
        if isinstance(section, dict) and section.get(key) == AUTO:
            section[key] = value
