"""DeepSpeed's and FSDP's settings as the engine's own ZeRO stages: what data ranks share out. Settings that change numbers or memory
and have no counterpart here are refused by name; those about how the other engines do it have no effect."""

import json
import os
from dataclasses import dataclass, fields
from typing import Any, Dict, Optional

from tessera.compat.deepspeed_config import AUTO, DeepSpeedConfig, value_at
from tessera.compat.refusals import boolean
from tessera.errors import ConfigError


def _refuse(plugin: Any, given: Dict[str, str]) -> None:
    for name, why in given.items():
        value = getattr(plugin, name)
        if value is not None and boolean(value) is not False and str(value).lower() not in ("none", "[]", "{}"):
            raise ConfigError(f"{type(plugin).__name__}({name}={value!r}): {why}")


class ShardingPlugin:
    """What `Accelerator` reads of either plugin: keys of the section `parallel`, the norm gradients are clipped to in every step
    (None: only where the script clips), and whether activations are recomputed."""

    clip_grad: Optional[float] = None
    recompute = False
    offload: Dict[str, Any] = {}  # keys of the section `offload`
    loss_scaling: Dict[str, Any] = {}  # keys of the section `training`

    @property
    def parallel(self) -> Dict[str, Any]:
        raise NotImplementedError

    def facts(self) -> Dict[str, str]:
        """All that ranks compare."""
        return {f"{type(self).__name__}.{each.name}": str(getattr(self, each.name)) for each in fields(self)}


@dataclass
class DeepSpeedPlugin(ShardingPlugin):
    """`zero_stage` (2; ACCELERATE_DEEPSPEED_ZERO_STAGE), `gradient_clipping` (as in Accelerate 1.0 unless it is given; 0 is none),
    `gradient_accumulation_steps` (over the Accelerator's), `offload_optimizer_device` (cpu, or nvme with
    `offload_optimizer_nvme_path`; from stage 2 on this takes gradients to host memory too, as DeepSpeed's does) and, with stage 3,
    `offload_param_device` (cpu) as in Accelerate; updates of offloaded state are computed on the device. Stage 3 keeps nothing gathered
    between passes. `hf_ds_config` (ACCELERATE_DEEPSPEED_CONFIG_FILE): DeepSpeed's JSON, a path or a dict, which counts before the
    arguments; "auto" in it is what they say. Errors: ConfigError for parameters on nvme, for what of the JSON is not done here, for MS-AMP,
    and for a stage there is not."""

    hf_ds_config: Any = None
    gradient_accumulation_steps: Optional[int] = None
    gradient_clipping: Optional[float] = None
    zero_stage: Optional[int] = None
    is_train_batch_min: bool = True
    offload_optimizer_device: Optional[str] = None
    offload_param_device: Optional[str] = None
    offload_optimizer_nvme_path: Optional[str] = None
    offload_param_nvme_path: Optional[str] = None
    zero3_init_flag: Optional[bool] = None
    zero3_save_16bit_model: Optional[bool] = None
    transformer_moe_cls_names: Optional[str] = None
    enable_msamp: Optional[bool] = None
    msamp_opt_level: Optional[str] = None

    def __post_init__(self):
        for name, variable in (("hf_ds_config", "CONFIG_FILE"), ("zero_stage", "ZERO_STAGE"), ("offload_optimizer_device", "OFFLOAD_OPTIMIZER_DEVICE"),
                               ("offload_param_device", "OFFLOAD_PARAM_DEVICE"),
                               ("offload_optimizer_nvme_path", "OFFLOAD_OPTIMIZER_NVME_PATH")):
            if getattr(self, name) is None:
                setattr(self, name, os.environ.get(f"ACCELERATE_DEEPSPEED_{variable}"))
        if self.gradient_clipping is None:
            self.gradient_clipping = os.environ.get("ACCELERATE_GRADIENT_CLIPPING", AUTO)
        none = self.hf_ds_config is None or (isinstance(self.hf_ds_config, str) and self.hf_ds_config.lower() == "none")
        self.json = None if none else DeepSpeedConfig(self.hf_ds_config)
        if self.json is not None:
            self._take_json(self.json)
        _refuse(self, {"offload_param_nvme_path": "weights can lie in host memory, not on disk: offload_param_device='cpu'",
                       "transformer_moe_cls_names": "weights come together by layers, experts among them; leave it out",
                       "enable_msamp": "MS-AMP's fp8 is not in this build; use mixed_precision='bf16'",
                       "msamp_opt_level": "MS-AMP's fp8 is not in this build; use mixed_precision='bf16'"})
        stage = 2 if self.zero_stage is None else self.zero_stage
        if str(stage) not in ("0", "1", "2", "3"):
            raise ConfigError(f"DeepSpeedPlugin(zero_stage={stage!r}): it is 0, 1, 2 or 3")
        self.zero_stage = int(stage)
        self.offload = self._offload()
        clipping = {"none": None, AUTO: 1.0}.get(str(self.gradient_clipping).lower(), self.gradient_clipping)
        try:
            self.clip_grad = None if clipping is None else float(clipping)
        except (TypeError, ValueError):
            raise ConfigError(f"DeepSpeedPlugin(gradient_clipping={self.gradient_clipping!r}): it is a number or 'auto'") from None
        steps = self.gradient_accumulation_steps
        if steps not in (None, AUTO) and (isinstance(steps, bool) or not str(steps).isdigit() or int(steps) < 1):
            raise ConfigError(f"DeepSpeedPlugin(gradient_accumulation_steps={steps!r}): it is a whole number of at least 1 or 'auto'")
        self.accumulation = None if steps in (None, AUTO) else int(steps)

    def _take_json(self, config: DeepSpeedConfig) -> None:
        """What the JSON says counts; what is "auto" there, or missing, is the argument's."""
        zero = "zero_optimization"
        for name, place in (("gradient_accumulation_steps", "gradient_accumulation_steps"), ("gradient_clipping", "gradient_clipping"),
                            ("zero_stage", f"{zero}.stage"), ("offload_optimizer_device", f"{zero}.offload_optimizer.device"),
                            ("offload_optimizer_nvme_path", f"{zero}.offload_optimizer.nvme_path"),
                            ("offload_param_device", f"{zero}.offload_param.device"),
                            ("offload_param_nvme_path", f"{zero}.offload_param.nvme_path")):
            value = config.get(place)
            if value is not None and value != AUTO:
                setattr(self, name, value)
            elif value == AUTO:
                config.fill(place, getattr(self, name))
        if config.get(f"{zero}.stage") is None:
            raise ConfigError(f'{config.where}: "zero_optimization" has no "stage"; it is 0, 1, 2 or 3')
        self.loss_scaling = config.loss_scaling()

    def facts(self) -> Dict[str, str]:
        """All that ranks compare: of a JSON what it says, wherever it lies."""
        return super().facts() | {"DeepSpeedPlugin.hf_ds_config": json.dumps(self.deepspeed_config, sort_keys=True, default=str)}

    @property
    def deepspeed_config(self) -> Dict[str, Any]:
        """The JSON as far as it is settled; without one what the arguments come to."""
        if self.json is not None:
            return self.json.config
        return {"gradient_accumulation_steps": self.accumulation or AUTO, "zero_optimization": {"stage": self.zero_stage},
                **({} if self.clip_grad is None else {"gradient_clipping": self.clip_grad})}

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Of the JSON, by its dotted name."""
        return value_at(self.deepspeed_config, ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the JSON still says "auto" there."""
        return self.get_value(ds_key_long) == AUTO

    def _offload(self) -> Dict[str, Any]:
        device, path = str(self.offload_optimizer_device or "none").lower(), self.offload_optimizer_nvme_path
        if device not in ("none", "cpu", "nvme"):
            raise ConfigError(f"DeepSpeedPlugin(offload_optimizer_device={self.offload_optimizer_device!r}): it is none, cpu or nvme")
        path = None if str(path).lower() == "none" else str(path)
        if (device == "nvme") != (path is not None):
            raise ConfigError("DeepSpeedPlugin: offload_optimizer_device='nvme' and offload_optimizer_nvme_path, a folder, go together")
        offload = {"optimizer": device} | ({"path": path} if path is not None else {})
        if device != "none":
            offload.update({} if self.json is None else self.json.offload())
            if self.zero_stage >= 2:
                offload["gradients"] = "cpu"
        weights = str(self.offload_param_device or "none").lower()
        if weights not in ("none", "cpu"):
            raise ConfigError(f"DeepSpeedPlugin(offload_param_device={self.offload_param_device!r}): it is none or cpu; weights can lie in "
                              "host memory, not on disk")
        if weights == "cpu" and self.zero_stage != 3:
            raise ConfigError(f"DeepSpeedPlugin(offload_param_device='cpu') is for zero_stage=3, which brings weights together layer by "
                              f"layer, not {self.zero_stage}")
        return offload | ({"parameters": "cpu"} if weights == "cpu" else {})

    @property
    def parallel(self) -> Dict[str, Any]:
        return {"zero_stage": self.zero_stage}

    def is_zero3_init_enabled(self) -> bool:
        """False: models are made whole on each process, and `prepare` takes each rank's share of them."""
        return False


# PyTorch's numbers and names of ShardingStrategy, and how each is done here.
_STRATEGIES: Dict[str, Dict[str, Any]] = {
    "FULL_SHARD": {"zero_stage": 3}, "SHARD_GRAD_OP": {"zero_stage": 2}, "NO_SHARD": {"zero_stage": 0},
    "HYBRID_SHARD": {"zero_stage": 3, "zero_group": "machine"}, "HYBRID_SHARD_ZERO2": {"zero_stage": 2, "zero_group": "machine"},
}


@dataclass
class FullyShardedDataParallelPlugin(ShardingPlugin):
    """`sharding_strategy` FULL_SHARD (the default: ZeRO stage 3), SHARD_GRAD_OP (stage 2), NO_SHARD, HYBRID_SHARD and
    HYBRID_SHARD_ZERO2 (the same stages within a machine, copies across machines); with `fsdp_version=2` `reshard_after_forward`
    True or False (weights kept from forward to backward). `activation_checkpointing=True` recomputes activations, and
    `activation_checkpointing_offload=True` keeps what that begins from in host memory. `cpu_offload` (True or PyTorch's `CPUOffload`)
    takes each rank's share of weights, gradients and optimizer state there; updates are computed on the device. Errors: ConfigError for
    shares of another size, which are not in this build yet, and for modules or dtypes of one's own."""

    fsdp_version: Optional[int] = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: Optional[bool] = None
    param_init_fn: Any = None
    sync_module_states: Optional[bool] = None
    forward_prefetch: Optional[bool] = None
    activation_checkpointing: Optional[bool] = None
    activation_checkpointing_offload: Optional[bool] = None
    cpu_ram_efficient_loading: Optional[bool] = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: Optional[int] = None

    def __post_init__(self):
        _refuse(self, {"mixed_precision_policy": "give mixed_precision to the Accelerator: sums of gradients are fp32",
                       "ignored_modules": "every parameter is shared out; requires_grad_(False) freezes what is not to be trained",
                       "param_init_fn": "weights are those of the model given to prepare()"})
        self._parallel = self._of_version_2() if str(self.fsdp_version or 1) == "2" else self._of_strategy()
        self.recompute = boolean(self.activation_checkpointing) is True
        self.offload = self._offload()

    def _offload(self) -> Dict[str, Any]:
        offload: Dict[str, Any] = {}
        asked = getattr(self.cpu_offload, "offload_params", self.cpu_offload)
        if asked is not None and type(asked).__name__ not in ("CPUOffloadPolicy", "OffloadPolicy") and boolean(asked) is None:
            raise ConfigError(f"FullyShardedDataParallelPlugin(cpu_offload={self.cpu_offload!r}): it is True or False")
        if type(asked).__name__ == "CPUOffloadPolicy" or boolean(asked) is True:
            if self._parallel["zero_stage"] == 0:
                raise ConfigError("FullyShardedDataParallelPlugin(cpu_offload=True) takes each rank's share to host memory, and with "
                                  "NO_SHARD there are no shares")
            if self._parallel["zero_stage"] == 2:  # weights are whole from forward to backward, and shares otherwise
                self._parallel.update(zero_stage=3, zero_reshard="never")
            offload.update(optimizer="cpu", gradients="cpu", parameters="cpu")
        if boolean(self.activation_checkpointing_offload) is True:
            if not self.recompute:
                raise ConfigError("FullyShardedDataParallelPlugin(activation_checkpointing_offload=True) is of what recomputation begins "
                                  "from: it needs activation_checkpointing=True")
            offload["activations"] = "cpu"
        return offload

    def _of_version_2(self) -> Dict[str, Any]:
        asked = True if self.reshard_after_forward is None else self.reshard_after_forward
        again = boolean(asked)
        if again is None or (isinstance(asked, int) and not isinstance(asked, bool)):
            raise ConfigError(f"FullyShardedDataParallelPlugin(reshard_after_forward={asked!r}): it is True or False; shares of "
                              "another size after the forward pass are not in this build")
        return {"zero_stage": 3, "zero_reshard": "always" if again else "never"}

    def _of_strategy(self) -> Dict[str, Any]:
        asked = self.sharding_strategy if self.sharding_strategy is not None else "FULL_SHARD"
        name = str(getattr(asked, "name", asked)).upper()
        if name.isdigit() and 1 <= int(name) <= len(_STRATEGIES):
            name = list(_STRATEGIES)[int(name) - 1]
        if name not in _STRATEGIES:
            raise ConfigError(f"FullyShardedDataParallelPlugin(sharding_strategy={asked!r}): it is one of {', '.join(_STRATEGIES)}")
        self.sharding_strategy = name
        parallel = dict(_STRATEGIES[name])
        if parallel.pop("zero_group", None):
            local = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)  # not set: all processes are on one machine
            parallel.update({"zero_group": local} if local > 0 else {})
        return parallel

    @property
    def parallel(self) -> Dict[str, Any]:
        return dict(self._parallel)
