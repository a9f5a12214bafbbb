"""DeepSpeedPlugin and FullyShardedDataParallelPlugin: which of the engine's stages they mean, what is refused, and training."""

import json
from pathlib import Path

import pytest

from tessera.errors import ConfigError
from tessera.plugin.config_map import native_config
from tessera.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

SCRIPT = Path(__file__).parent / "scripts" / "sharding_plugins.py"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_GRADIENT_CLIPPING", "LOCAL_WORLD_SIZE", "ACCELERATE_DEEPSPEED_CONFIG_FILE",
                 "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"):
        monkeypatch.delenv(name, raising=False)


def parallel(plugin):
    config = native_config(sharding=plugin, world_size=8)
    assert config["parallel"]["data"] == 8
    return {key: config["parallel"][key] for key in ("zero_stage", "zero_reshard", "zero_group") if key in config["parallel"]}


@pytest.mark.parametrize("plugin, arguments, expected", [
    (DeepSpeedPlugin, {}, {"zero_stage": 2}),
    *((DeepSpeedPlugin, {"zero_stage": stage}, {"zero_stage": stage}) for stage in range(4)),
    (DeepSpeedPlugin, {"zero_stage": 3, "offload_optimizer_device": "none", "offload_param_device": "none"}, {"zero_stage": 3}),
    (FullyShardedDataParallelPlugin, {}, {"zero_stage": 3}),
    (FullyShardedDataParallelPlugin, {"sharding_strategy": 1}, {"zero_stage": 3}),
    (FullyShardedDataParallelPlugin, {"sharding_strategy": "shard_grad_op"}, {"zero_stage": 2}),
    (FullyShardedDataParallelPlugin, {"sharding_strategy": "NO_SHARD"}, {"zero_stage": 0}),
    (FullyShardedDataParallelPlugin, {"fsdp_version": 2}, {"zero_stage": 3, "zero_reshard": "always"}),
    (FullyShardedDataParallelPlugin, {"fsdp_version": 2, "reshard_after_forward": "false"},
     {"zero_stage": 3, "zero_reshard": "never"}),
])
def test_stages(plugin, arguments, expected):
    assert parallel(plugin(**arguments)) == expected


def test_hybrid_shards_within_a_machine(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    hybrid = lambda name: parallel(FullyShardedDataParallelPlugin(sharding_strategy=name))  # noqa: E731
    assert hybrid("HYBRID_SHARD") == {"zero_stage": 3, "zero_group": 4}
    assert hybrid("HYBRID_SHARD_ZERO2") == {"zero_stage": 2, "zero_group": 4}


def test_torch_strategies():
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    assert parallel(FullyShardedDataParallelPlugin(sharding_strategy=fsdp.ShardingStrategy.SHARD_GRAD_OP)) == {"zero_stage": 2}
    assert FullyShardedDataParallelPlugin(cpu_offload=fsdp.CPUOffload(offload_params=False)).offload == {}
    plugin = FullyShardedDataParallelPlugin(cpu_offload=fsdp.CPUOffload(offload_params=True))
    assert plugin.offload == {"optimizer": "cpu", "gradients": "cpu", "parameters": "cpu"}
    policy = fsdp.CPUOffloadPolicy()
    assert FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=policy).offload["parameters"] == "cpu"


def test_the_rest_of_the_configuration(monkeypatch):
    config = native_config(sharding=DeepSpeedPlugin(zero_stage=1, gradient_clipping=0.5), world_size=2)
    assert config["optimizer"]["clip_grad"] == 0.5 and "recompute" not in config["training"]
    assert native_config(sharding=DeepSpeedPlugin(gradient_clipping="auto"), world_size=2)["optimizer"]["clip_grad"] == 1  # Accelerate's
    assert native_config(sharding=DeepSpeedPlugin(gradient_clipping=0), world_size=2)["optimizer"]["clip_grad"] == 0
    offloading = {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/disk"}
    offload = lambda plugin: native_config(sharding=plugin, world_size=2)["offload"]  # noqa: E731
    assert offload(DeepSpeedPlugin(zero_stage=1, **offloading)) == {"optimizer": "nvme", "path": "/disk"}
    assert offload(DeepSpeedPlugin(offload_optimizer_device="cpu")) == {"optimizer": "cpu", "gradients": "cpu"}
    assert offload(DeepSpeedPlugin(zero_stage=3, offload_param_device="cpu")) == {"optimizer": "none", "parameters": "cpu"}
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True, activation_checkpointing_offload=True)
    assert native_config(sharding=plugin, world_size=2)["training"]["recompute"] == "full" and offload(plugin) == {"activations": "cpu"}
    plugin = FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP", cpu_offload=True)
    assert parallel(plugin) == {"zero_stage": 3, "zero_reshard": "never"}
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.25")
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.clip_grad) == (3, 0.25)


@pytest.mark.parametrize("plugin, arguments, told", [
    (DeepSpeedPlugin, {"zero_stage": 4}, "it is 0, 1, 2 or 3"),
    (DeepSpeedPlugin, {"offload_optimizer_device": "disk"}, "it is none, cpu or nvme"),
    (DeepSpeedPlugin, {"offload_optimizer_device": "nvme"}, "go together"),
    (DeepSpeedPlugin, {"zero_stage": 3, "offload_param_device": "nvme"}, "none or cpu; weights can lie in host memory"),
    (DeepSpeedPlugin, {"offload_param_device": "cpu"}, "is for zero_stage=3"),
    (DeepSpeedPlugin, {"zero_stage": 3, "offload_param_nvme_path": "/tmp"}, "not on disk"),
    (DeepSpeedPlugin, {"offload_optimizer_nvme_path": "/tmp"}, "go together"),
    (DeepSpeedPlugin, {"hf_ds_config": {"a": 1}}, "has no \"zero_optimization\""),
    (DeepSpeedPlugin, {"gradient_accumulation_steps": 0}, "whole number of at least 1"),
    (DeepSpeedPlugin, {"enable_msamp": True}, "MS-AMP"),
    (DeepSpeedPlugin, {"gradient_clipping": "much"}, "a number or 'auto'"),
    (FullyShardedDataParallelPlugin, {"cpu_offload": "some"}, "True or False"),
    (FullyShardedDataParallelPlugin, {"cpu_offload": True, "sharding_strategy": "NO_SHARD"}, "there are no shares"),
    (FullyShardedDataParallelPlugin, {"activation_checkpointing_offload": True}, "needs activation_checkpointing=True"),
    (FullyShardedDataParallelPlugin, {"sharding_strategy": "SOME"}, "is one of FULL_SHARD"),
    (FullyShardedDataParallelPlugin, {"fsdp_version": 2, "reshard_after_forward": 4}, "shares of another size"),
    (FullyShardedDataParallelPlugin, {"mixed_precision_policy": "bf16"}, "give mixed_precision to the Accelerator"),
    (FullyShardedDataParallelPlugin, {"ignored_modules": ["a"]}, "requires_grad_"),
])
def test_what_is_refused(plugin, arguments, told):
    with pytest.raises(ConfigError, match=told):
        plugin(**arguments)


@pytest.mark.parametrize("name", ["DeepSpeedPlugin", "FullyShardedDataParallelPlugin"])
def test_fields_are_accelerates(name):
    import dataclasses

    theirs = getattr(pytest.importorskip("accelerate.utils.dataclasses"), name)
    from tessera.utils import dataclasses as ours

    assert [field.name for field in dataclasses.fields(getattr(ours, name))] == [field.name for field in dataclasses.fields(theirs)]


def test_training(python_build, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    output = tmp_path / "result.json"
    python_build.run(SCRIPT, output, launcher=python_build.launcher("--num_processes", 2))
    results = json.loads(output.read_text())
    plain = results.pop("none")
    clipped = results.pop("clipped")
    assert clipped["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-6)
    for name, result in results.items():
        assert result["losses"] == pytest.approx(plain["losses"], rel=1e-5), name
        assert result["evaluated"] == pytest.approx(plain["evaluated"], rel=1e-5), name
        assert result["weights"] == pytest.approx(plain["weights"], rel=1e-5), name
