"""DeepSpeedPlugin(hf_ds_config=...): what DeepSpeed's JSON says is done, told, or refused by name; training by it equals PyTorch's."""

import json
from pathlib import Path

import pytest

from tessera.errors import ConfigError
from tessera.plugin.config_map import native_config
from tessera.utils import DeepSpeedPlugin

SCRIPT = Path(__file__).parent / "scripts" / "deepspeed_config.py"
WHOLE = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
    "steps_per_print": 10, "wall_clock_breakdown": True, "communication_data_type": "fp32",
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True, "offload_optimizer": {"device": "cpu", "pin_memory": False, "ratio": 0.5},
        "offload_param": {"device": "cpu", "pin_memory": True}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 200, "hysteresis": 1, "min_loss_scale": 2},
    "bf16": {"enabled": False}, "tensorboard": {"enabled": False}, "flops_profiler": {"enabled": False, "profile_step": 1},
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_GRADIENT_CLIPPING", "ACCELERATE_DEEPSPEED_CONFIG_FILE",
                 "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"):
        monkeypatch.delenv(name, raising=False)


def test_what_it_says_is_done(tmp_path, monkeypatch):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(WHOLE))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    for plugin in (DeepSpeedPlugin(hf_ds_config=WHOLE), DeepSpeedPlugin(hf_ds_config=path), DeepSpeedPlugin()):
        config = native_config(sharding=plugin, world_size=8, mixed_precision="fp16")
        assert config["parallel"]["zero_stage"] == 3 and config["optimizer"]["clip_grad"] == 0.5
        assert config["offload"] == {"optimizer": "cpu", "gradients": "cpu", "parameters": "cpu", "pin_memory": False, "ratio": 0.5}
        scaling = ("initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale", "loss_scale")
        assert [config["training"].get(key) for key in scaling] == [4096, 200, 1, 2, None]
        assert plugin.accumulation == 2 and plugin.json.precision("no") == "fp16"
        assert plugin.get_value("zero_optimization.stage") == 3 and plugin.is_auto("train_batch_size")
    assert WHOLE["train_batch_size"] == "auto"  # the caller's dict is left as it is


def test_automatic_values_are_the_arguments(monkeypatch):
    given = {"gradient_clipping": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"},
             "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto", "nvme_path": "auto"}}}
    plugin = DeepSpeedPlugin(hf_ds_config=given, zero_stage=1, gradient_clipping=0.25, gradient_accumulation_steps=4,
                             offload_optimizer_device="nvme", offload_optimizer_nvme_path="/disk")
    assert (plugin.zero_stage, plugin.clip_grad, plugin.accumulation) == (1, 0.25, 4)
    assert plugin.offload == {"optimizer": "nvme", "path": "/disk"} and plugin.json.precision("bf16") == "bf16"
    assert plugin.deepspeed_config["zero_optimization"]["stage"] == 1
    assert DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}}, zero_stage=1).zero_stage == 2  # the JSON counts
    fixed = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "loss_scale": 128}})
    assert native_config(sharding=fixed, mixed_precision="fp16")["training"]["loss_scale"] == 128
    assert "loss_scale" not in native_config(sharding=fixed, mixed_precision="no")["training"]


def zero(**more):
    return {"zero_optimization": {"stage": 2, **more}}


@pytest.mark.parametrize("given, told", [
    ([1], "not a list"), ("/nowhere/ds.json", "cannot be read: No such file"), ({"zero_optimization": {}}, 'no "stage"'),
    ({"zero_optimization": 2}, "it is an object"), (zero(stage=4), "it is 0, 1, 2 or 3"), (zero(stages=1), '"zero_optimization.stages"'),
    (zero() | {"communication_data_type": "fp16"}, "gradients are summed in fp32"), (zero() | {"amp": {"enabled": True}}, "mixed_precision"),
    (zero() | {"activation_checkpointing": {"partition_activations": True}}, "gradient_checkpointing_enable"),
    (zero() | {"prescale_gradients": True}, '"prescale_gradients": true is not done'), (zero(zero_quantized_weights=True), "not done here"),
    (zero() | {"elasticity": {"enabled": True}}, '"elasticity"'), (zero() | {"gradient_clip": 1.0}, '"gradient_clip": 1.0 is not done'),
    (zero(cpu_offload=True), "offload_optimizer"), (zero(offload_optimizer={"device": "cpu", "super_offload": True}), "super_offload"),
    (zero() | {"fp16": {"enabled": "yes"}}, 'true, false or "auto"'), (zero() | {"fp16": {"loss_scale": "auto ", "enabled": True}}, "a number"),
    (zero() | {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "one of the two"),
])
def test_what_is_refused(given, told):
    with pytest.raises(ConfigError) as raised:
        DeepSpeedPlugin(hf_ds_config=given).json.precision("no")
    assert told in str(raised.value)


@pytest.mark.parametrize("text, told", [("{'stage': 1}", "is not JSON"), ('{"zero_optimization": {"stage": 1}} # no', "comments are none"),
                                        ('{"fp16": {}, "fp16": {}}', "stands twice"), ("\udcff", "is not JSON")])
def test_files_that_are_no_json(tmp_path, text, told):
    path = tmp_path / "ds.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=told):
        DeepSpeedPlugin(hf_ds_config=str(path))


def test_precisions_that_contradict():
    plugin = DeepSpeedPlugin(hf_ds_config=zero() | {"bf16": {"enabled": False}})
    with pytest.raises(ConfigError, match="bf16 disabled"):
        plugin.json.precision("bf16")
    assert plugin.json.precision("fp16") == "fp16"
    with pytest.raises(ConfigError, match="mixed_precision='bf16'"):
        DeepSpeedPlugin(hf_ds_config=zero() | {"fp16": {"enabled": True}}).json.precision("bf16")


def test_batch_sizes():
    plugin = lambda **sizes: DeepSpeedPlugin(hf_ds_config=zero() | sizes).json  # noqa: E731
    config = plugin(train_batch_size=48, gradient_accumulation_steps=2)
    config.check_batch_sizes(4, 2)
    assert config.get("train_micro_batch_size_per_gpu") == 6
    with pytest.raises(ConfigError, match="train_batch_size is 48, and train_micro_batch_size_per_gpu 3 x .* are 24"):
        plugin(train_batch_size=48, train_micro_batch_size_per_gpu=3).check_batch_sizes(4, 2)
    with pytest.raises(ConfigError, match="1 cannot be divided"):  # 1 / 49 * 49 is not 1 in floating point
        plugin(train_batch_size=1).check_batch_sizes(49, 1)
    with pytest.raises(ConfigError, match="50 cannot be divided"):
        plugin(train_batch_size=50).check_batch_sizes(4, 2)


# What DeepSpeed 0.19.8's own classes give over a torch optimizer of lr 0.01.
RATES = [
    ("WarmupLR", {"warmup_min_lr": 1e-05, "warmup_max_lr": 0.001, "warmup_num_steps": 4},
     [1e-05, 1e-05, 0.000505, 0.0007945564379, 0.001, 0.001, 0.001]),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"}, [0.0, 0.0, 0.005, 0.01, 0.01]),
    ("WarmupDecayLR", {"total_num_steps": 8, "warmup_max_lr": 0.02, "warmup_num_steps": 3, "warmup_type": "linear"},
     [0.0, 0.0, 0.006666666667, 0.01333333333, 0.02, 0.016, 0.012, 0.008, 0.004, 0.0, 0.0]),
    ("WarmupDecayLR", {"total_num_steps": 6, "warmup_num_steps": 3},
     [0.0, 0.0, 0.0006309297536, 0.001, 0.001, 0.0006666666667, 0.0003333333333, 0.0, 0.0]),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01},
     [0.0, 0.001, 0.006678367782, 0.01, 0.009336825749, 0.007525, 0.00505, 0.002575, 0.0007631742513, 0.0001, 0.0001, 0.0001]),
    ("WarmupCosineLR", {"total_num_steps": 2, "warmup_num_steps": 4, "warmup_type": "linear"},
     [0.0, 0.0, 0.0025, 0.005, 0.0075, 1e-06, 1e-06, 1e-06]),
]


@pytest.mark.parametrize("kind, values, rates", RATES)
def test_schedules_are_deepspeeds(kind, values, rates):
    torch = pytest.importorskip("torch")
    from tessera.utils import DeepSpeedScheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    scheduler, found = DeepSpeedScheduler(optimizer, kind, values), []
    for step in range(len(rates)):
        found.append(optimizer.param_groups[0]["lr"])
        if step == 2:  # saved and loaded in between
            state = scheduler.state_dict()
            optimizer.param_groups[0]["lr"] = 0.01
            scheduler = DeepSpeedScheduler(optimizer, kind, values)
            scheduler.load_state_dict(state)
        scheduler.step()
    assert found == pytest.approx(rates, rel=1e-8)


@pytest.mark.parametrize("section, told", [
    ({"optimizer": {"type": "Lion", "params": {}}}, "Adam, AdamW and SGD"),
    ({"optimizer": {"type": "Adam", "params": {"betas": "auto"}}}, 'cannot be "auto"'),
    ({"optimizer": {"type": "AdamW", "params": {"momentum": 0.5}}}, "momentum"),
    ({"optimizer": {"type": "AdamW", "params": {"bias_correction": False}}}, "bias_correction"),
    ({}, "there is none"),
])
def test_optimizers_that_are_refused(section, told):
    torch = pytest.importorskip("torch")
    from tessera.utils import DummyOptim
    from tessera.utils.deepspeed import make_optimizer

    with pytest.raises(ConfigError, match=told):
        make_optimizer(DeepSpeedPlugin(hf_ds_config=zero() | section).json, DummyOptim([torch.nn.Parameter(torch.zeros(1))]))


@pytest.mark.parametrize("params, decoupled", [({"lr": "auto", "weight_decay": "auto"}, True), ({"adam_w_mode": False}, False)])
def test_adam_is_deepspeeds(params, decoupled):
    torch = pytest.importorskip("torch")
    from tessera.utils import DummyOptim
    from tessera.utils.deepspeed import make_optimizer

    config = DeepSpeedPlugin(hf_ds_config=zero() | {"optimizer": {"type": "Adam", "params": params}}).json
    made = make_optimizer(config, DummyOptim([torch.nn.Parameter(torch.zeros(1))], lr=0.5, weight_decay=0.25))
    assert type(made) is (torch.optim.AdamW if decoupled else torch.optim.Adam)
    group = made.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == ((0.5, 0.25) if decoupled else (1e-3, 0.0))  # FusedAdam's defaults
    assert (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-8)


def test_keywords_that_nobody_reads_are_named(caplog):
    from tessera.utils import DummyOptim, DummyScheduler, MegatronLMDummyScheduler

    assert DummyOptim([], betas=(0.9, 0.95)).kwargs == {"betas": (0.9, 0.95)}
    DummyScheduler(None, num_cycles=2)
    MegatronLMDummyScheduler(None, min_lr=0.1)
    told = "\n".join(caplog.messages)
    for kind, name in (("DummyOptim", "betas"), ("DummyScheduler", "num_cycles"), ("MegatronLMDummyScheduler", "min_lr")):
        assert f"{kind}: nobody reads {name}; it belongs into" in told


def test_training(python_build, tmp_path):
    """A JSON with optimizer and schedule on two processes against PyTorch alone over both processes' batches."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    output = tmp_path / "result.json"
    python_build.run(SCRIPT, output, launcher=python_build.launcher("--num_processes", 2))
    found = json.loads(output.read_text())
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-5)
    assert found["rates"] == pytest.approx(found["expected_rates"])
    assert found["weights"] == pytest.approx(found["expected_weights"], rel=1e-5)
    assert found["config"]["train_micro_batch_size_per_gpu"] == 2 and found["config"]["train_batch_size"] == 8
    assert "take the optimizer out of the JSON" in found["optimizer beside the JSON's"]
    assert "there is none" in found["no JSON"]
