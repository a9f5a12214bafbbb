"""Enumerations, configuration classes, foreign plugins and the horizon of the learning rate."""

import dataclasses
import logging
from datetime import timedelta

import pytest

from tessera.errors import ConfigError
from tessera.plugin.config_map import resolve_horizon
from tessera.plugin.lr_horizon import Horizon
from tessera.utils import dataclasses as ours

ENUMS = ("DistributedType", "SageMakerDistributedType", "ComputeEnvironment", "FP8BackendType", "DynamoBackend", "LoggerType",
         "PrecisionType", "RNGType", "DDPCommunicationHookType", "CustomDtype")
CLASSES = ("AutocastKwargs", "DistributedDataParallelKwargs", "GradScalerKwargs", "InitProcessGroupKwargs", "ProfileKwargs",
           "DataLoaderConfiguration", "ProjectConfiguration", "GradientAccumulationPlugin", "TorchDynamoPlugin")
FOREIGN = ("TorchTensorParallelPlugin", "ParallelismConfig",
           "BnbQuantizationConfig", "TERecipeKwargs", "MSAMPRecipeKwargs", "AORecipeKwargs", "FP8RecipeKwargs",
           "TorchContextParallelConfig", "DeepSpeedSequenceParallelConfig", "TorchTensorParallelConfig")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr("tessera.comm.warnings._told", set())
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND", raising=False)


def test_enumerations():
    assert ours.DistributedType("MEGATRON_LM") == "MEGATRON_LM" == ours.DistributedType.MEGATRON_LM
    assert ours.DistributedType.TPU is ours.DistributedType.XLA
    assert str(ours.PrecisionType.BF16) == "bf16" and "fp16" in ours.PrecisionType and "int8" not in ours.PrecisionType
    assert ours.LoggerType.list()[:3] == ["all", "aim", "tensorboard"] and "jsonl" in ours.LoggerType


@pytest.mark.parametrize("name", ENUMS)
def test_enumerations_are_accelerates(name):
    theirs = getattr(pytest.importorskip("accelerate.utils.dataclasses"), name)
    values = {member.name: member.value for member in getattr(ours, name)}
    assert values == {**{member.name: member.value for member in theirs}, **({"JSONL": "jsonl"} if name == "LoggerType" else {})}


@pytest.mark.parametrize("name", CLASSES)
def test_classes_are_accelerates(name):
    theirs = getattr(pytest.importorskip("accelerate.utils.dataclasses"), name)
    mine = getattr(ours, name)
    assert [field.name for field in dataclasses.fields(mine)] == [field.name for field in dataclasses.fields(theirs)]
    a, b = vars(mine()), vars(theirs())
    assert {key: str(value) for key, value in a.items()} == {key: str(value) for key, value in b.items()
                                                            } | ({key: str(a[key]) for key in ("mode", "fullgraph",
                                                                 "use_regional_compilation")} if "Dynamo" in name else {})


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_plugins_say_what_to_use(name):
    with pytest.raises(NotImplementedError, match=f"{name} is for .*, which Tessera does not run; "):
        getattr(ours, name)()
    with pytest.raises(NotImplementedError):
        getattr(ours, name)(1, a=2)


def test_dynamo(monkeypatch):
    assert ours.TorchDynamoPlugin().backend is ours.DynamoBackend.NO
    assert ours.TorchDynamoPlugin(backend="no").to_dict()["backend"] == "no"
    with pytest.raises(NotImplementedError, match="torch.compile"):
        ours.TorchDynamoPlugin(backend="inductor")
    with pytest.raises(ConfigError, match="'fast' is unknown"):
        ours.TorchDynamoPlugin(backend="fast")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    with pytest.raises(NotImplementedError, match="EAGER"):
        ours.TorchDynamoPlugin()


@pytest.mark.parametrize("name, fields, message", [
    ("AutocastKwargs", {"enabled": False}, "mixed_precision='no'"),
    ("GradScalerKwargs", {"growth_factor": 3.0}, "doubles and halves"),
    ("GradScalerKwargs", {"backoff_factor": 0.25}, "must be 0.5"),
    ("GradScalerKwargs", {"init_scale": 0.0}, "from 1 to 1e18"),
    ("GradScalerKwargs", {"growth_interval": 0}, "at least 1"),
    ("InitProcessGroupKwargs", {"timeout": timedelta(0)}, "timedelta above 0"),
    ("InitProcessGroupKwargs", {"timeout": 5}, "timedelta"),
    ("DistributedDataParallelKwargs", {"comm_hook": ours.DDPCommunicationHookType.FP16}, "does not compress"),
    ("DistributedDataParallelKwargs", {"comm_wrapper": ours.DDPCommunicationHookType.BF16}, "does not compress"),
    ("DistributedDataParallelKwargs", {"comm_state_option": {"a": 1}}, "comm_hook"),
    ("ProfileKwargs", {"activities": ["xpu"]}, "not one of cpu, cuda"),
    ("ProfileKwargs", {"schedule_option": {"waits": 1}}, "the keys are"),
    ("DataLoaderConfiguration", {"split_batches": "yes"}, "must be True or False"),
    ("DataLoaderConfiguration", {"data_seed": -1}, "at least 0"),
    ("ProjectConfiguration", {"total_limit": 0}, "at least 1"),
    ("ProjectConfiguration", {"iteration": 1.5}, "must be an integer"),
    ("GradientAccumulationPlugin", {"num_steps": 0}, "at least 1"),
])
def test_refused_values(name, fields, message):
    with pytest.raises(ConfigError) as error:
        getattr(ours, name)(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize("name, fields", [
    ("AutocastKwargs", {"cache_enabled": True}), ("InitProcessGroupKwargs", {"backend": "mpi"}),
    ("InitProcessGroupKwargs", {"init_method": "env://"}), ("DataLoaderConfiguration", {"non_blocking": True}),
    ("DataLoaderConfiguration", {"use_stateful_dataloader": True}), ("GradientAccumulationPlugin", {"sync_each_batch": True}),
    *(("DistributedDataParallelKwargs", {key: value}) for key, value in {
        "dim": 1, "broadcast_buffers": False, "bucket_cap_mb": 1, "find_unused_parameters": True, "check_reduction": True,
        "gradient_as_bucket_view": True, "static_graph": True}.items()),
    *(("ProfileKwargs", {key: True}) for key in ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")),
])
def test_one_warning(name, fields, caplog):
    with caplog.at_level(logging.WARNING, "tessera"):
        for _ in range(2):
            getattr(ours, name)(**fields)
    assert len(caplog.messages) == 1 and f"{name}.{list(fields)[0]}" in caplog.text and "no effect" in caplog.text


def test_no_warning_without_reason(caplog):
    with caplog.at_level(logging.WARNING, "tessera"):
        for name in CLASSES:
            getattr(ours, name)()
        ours.InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=5))
        ours.MegatronLMPlugin()
    assert caplog.messages == []


def test_folders_of_a_project():
    project = ours.ProjectConfiguration(project_dir="a")
    assert (project.project_dir, project.logging_dir) == ("a", "a")
    project.set_directories("b")
    assert (project.project_dir, project.logging_dir) == ("b", "a")
    project = ours.ProjectConfiguration(logging_dir="logs")
    project.set_directories("c")
    assert (project.project_dir, project.logging_dir) == ("c", "logs")


def test_kwargs():
    assert ours.GradScalerKwargs(init_scale=8.0).to_kwargs() == {"init_scale": 8.0}
    assert ours.InitProcessGroupKwargs().timeout == timedelta(seconds=600)
    assert ours.InitProcessGroupKwargs(backend="gloo").timeout == timedelta(seconds=1800)
    assert "comm_hook" not in ours.DistributedDataParallelKwargs().to_dict()
    plugin = ours.GradientAccumulationPlugin(num_steps=2)
    assert plugin.to_kwargs() == {"num_steps": 2} and plugin.adjust_scheduler


# The horizon


def megatron(style: str, **more) -> Horizon:
    """Of the literal tables in tests/optim/schedule_test.cpp: init .01, max .1, min .001, warm-up 100, decay 1000."""
    return Horizon(train_iters=1000, decay=1000, warmup=100, style=style, min_lr=0.001, init_lr=0.01, **more)


@pytest.mark.parametrize("style, more, table", [
    ("linear", {}, {50: 0.055, 500: 0.1 - 0.099 * 400 / 900, 101: 0.09989, 750: 0.0285, 1000: 0.001, 1001: 0.001, 5000: 0.001}),
    ("constant", {}, {0: 0.01, 50: 0.055, 100: 0.1, 101: 0.1, 5000: 0.1}),
    ("cosine", {}, {101: 0.0999996984291, 500: 0.0590955847945, 999: 0.00100030157094, 1000: 0.001, 1001: 0.001}),
    ("inverse-square-root", {}, {101: 0.099503719021, 500: 0.04472135955, 1000: 0.0316227766017, 1001: 0.001}),
    ("WSD", {"wsd_decay": 200, "wsd_style": "linear"}, {800: 0.1, 801: 0.099505, 900: 0.0505, 999: 0.001495}),
    ("WSD", {"wsd_decay": 200, "wsd_style": "cosine"}, {801: 0.0999938933078, 850: 0.0855017856687}),
    ("WSD", {"wsd_decay": 200, "wsd_style": "exponential"}, {801: 0.0993149720399, 900: 0.0420071426749}),
    ("WSD", {"wsd_decay": 200, "wsd_style": "minus_sqrt"}, {801: 0.0929996428663, 999: 0.00124781015086, 1001: 0.001}),
])
def test_rates_are_megatrons(style, more, table):
    horizon = megatron(style, **more)
    assert {step: horizon.lr_at(step, 0.1) for step in table} == pytest.approx(table, abs=1e-12)


def test_a_group_has_its_own_rate():
    horizon = megatron("linear")
    assert horizon.lr_at(100, 0.05) == pytest.approx(0.05) and horizon.lr_at(2000, 0.0005) == 0.0005
    assert horizon.lr_at(0, 0.005) == 0.005  # init_lr is never above the group's rate


def test_samples_and_steps_give_the_same_rates():
    steps = resolve_horizon(ours.MegatronLMPlugin(train_iters=100, lr_warmup_iters=10, lr_decay_iters=80), dp=2, num_micro_batches=2)
    samples = resolve_horizon(ours.MegatronLMPlugin(train_samples=1600, lr_warmup_samples=160, lr_decay_samples=1280,
                                                    num_micro_batches=2), dp=2, num_micro_batches=2, micro_batch_size=4)
    assert (samples.train_iters, samples.decay_iters, samples.warmup_iters) == (100, 80, 10)
    assert [samples.lr_at(n, 0.3) for n in range(110)] == pytest.approx([steps.lr_at(n, 0.3) for n in range(110)], abs=1e-15)


def test_weight_decay():
    for style, half in (("linear", 0.3), ("cosine", 0.3)):
        horizon = resolve_horizon(ours.MegatronLMPlugin(train_iters=100, weight_decay_incr_style=style, start_weight_decay=0.1,
                                                        end_weight_decay=0.5))
        assert [horizon.weight_decay_at(n, 0.01) for n in (0, 50, 100, 200)] == pytest.approx([0.1, half, 0.5, 0.5])
        assert horizon.weight_decay_at(50, 0) == 0
    assert resolve_horizon(ours.MegatronLMPlugin(train_iters=5)).weight_decay_at(3, 0.01) == 0.01


@pytest.mark.parametrize("total, warmup, batches, accumulation, expected, reason", [
    (400, 40, 100, 1, (52, 6), "4 epochs of 100 undivided batches"),  # an epoch takes 13 steps of at most 8 batches
    (400, 40, 80, 1, (50, 5), "an epoch takes 10 steps of 8"),
    (401, 40, 100, 1, (401, 40), "401 is no whole number of epochs"),
    (400, 40, None, 1, (400, 40), "no length"),
    (96, 8, 96, 1, (12, 1), "1 epochs of 96"),
    (75, 25, 100, 4, (12, 4), "3 epochs of 25"),
])
def test_the_dummy_schedulers_steps(total, warmup, batches, accumulation, expected, reason):
    horizon = resolve_horizon(ours.MegatronLMPlugin(num_micro_batches=4), total_num_steps=total, warmup_num_steps=warmup,
                              loader_batches=batches, dp=2, num_micro_batches=4, gradient_accumulation_steps=accumulation)
    assert (horizon.train_iters, horizon.warmup) == expected and reason in horizon.reason


def test_the_plugin_wins_and_one_process_changes_nothing():
    plugin = ours.MegatronLMPlugin(train_iters=30, lr_warmup_iters=3)
    horizon = resolve_horizon(plugin, total_num_steps=800, warmup_num_steps=80, loader_batches=100, dp=4)
    assert (horizon.train_iters, horizon.decay, horizon.warmup) == (30, 30, 3) and "train_iters" in horizon.reason
    horizon = resolve_horizon(None, total_num_steps=800, warmup_num_steps=80, loader_batches=100)
    assert (horizon.train_iters, horizon.warmup) == (800, 80)
    # split_batches: the loader's batch is the whole step.
    horizon = resolve_horizon(None, total_num_steps=800, warmup_num_steps=80, loader_batches=100, loader_steps=100, dp=4)
    assert (horizon.train_iters, horizon.warmup) == (800, 80)
    constant = resolve_horizon(ours.MegatronLMPlugin(lr_decay_style="constant"))
    assert constant.train_iters is None and constant.lr_at(10 ** 6, 0.1) == 0.1


@pytest.mark.parametrize("fields, more, message", [
    ({}, {}, "nothing says over how many steps"),
    ({"train_iters": 5, "train_samples": 5}, {}, "two lengths"),
    ({"train_iters": 5, "lr_warmup_samples": 5}, {}, "needs train_samples"),
    ({"train_iters": 5, "lr_decay_samples": 5}, {}, "or lr_decay_iters"),
    ({"train_samples": 64, "lr_warmup_iters": 5}, {}, "counts steps"),
    ({"train_samples": 3}, {"dp": 4}, "less than one step of 4"),
    ({"train_iters": 50, "lr_warmup_iters": 5, "lr_warmup_fraction": 0.1}, {}, "two warm-ups"),
    ({"train_iters": 5, "lr_warmup_iters": 6}, {}, "longer than the decay"),
    ({"train_iters": 5, "start_weight_decay": 0.1}, {}, "weight_decay_incr_style 'linear' or 'cosine'"),
    ({"train_iters": 5, "weight_decay_incr_style": "linear"}, {}, "not None and None"),
    ({"train_iters": 5, "weight_decay_incr_style": "linear", "start_weight_decay": 0.2, "end_weight_decay": 0.1}, {}, "not below"),
    ({"train_iters": 5, "lr_decay_style": "WSD"}, {}, "lr_wsd_decay_iters"),
    ({"train_iters": 5, "other_megatron_args": {"lr_wsd_decay_style": "x"}}, {}, "must be one of exponential"),
    ({}, {"total_num_steps": 0}, "at least 1"),
    ({}, {"total_num_steps": 5, "warmup_num_steps": 6}, "from 0 to it"),
])
def test_horizons_that_cannot_be(fields, more, message):
    with pytest.raises(ConfigError) as error:
        resolve_horizon(ours.MegatronLMPlugin(**fields), **more)
    assert message in str(error.value)


def test_arguments_of_the_horizon():
    plugin = ours.MegatronLMPlugin(train_iters=100, lr_warmup_iters=10, lr_decay_style="WSD",
                                   other_megatron_args={"lr_warmup_init": 0.01, "lr_wsd_decay_iters": 20, "lr_wsd_decay_style": "linear"})
    horizon = resolve_horizon(plugin)
    assert [horizon.lr_at(n, 0.1) for n in (0, 10, 80, 90, 100)] == pytest.approx([0.01, 0.1, 0.1, 0.05, 0.0])
