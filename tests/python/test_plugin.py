"""MegatronLMPlugin field by field: each changes a number, a shape, a file, a line of the log or an exception of a run, given as a
field and under Megatron's names in other_megatron_args. A field without a row fails."""

import json
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, Callable, NamedTuple

import plugin_support
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import plugin_runs as see  # noqa: E402

from tessera.errors import ConfigError  # noqa: E402
from tessera.plugin import megatron_args, reference  # noqa: E402
from tessera.plugin.fields import FIELDS as TABLE  # noqa: E402
from tessera.utils import MegatronLMPlugin  # noqa: E402

SCRIPT = Path(__file__).parent / "scripts" / "plugin_layouts.py"
FIELDS = [field.name for field in fields_of(MegatronLMPlugin)]
END = int(plugin_support.IDS[0, 2])
fresh_states = plugin_support.fresh_states


class Row(NamedTuple):
    """A field with this value, beside those `around` it, and what is seen of a run without and with it."""

    see: Callable
    value: Any
    around: dict = {}
    right: Callable = lambda before, after: before != after


def less(before, after):
    return after < before


def _some(name, parameter):
    return "c_fc.weight" in name


FULL = {"recompute_granularity": "full"}
LENGTH = {"train_iters": 4}
ROWS = {
    "no_load_optim": Row(see.third_loss_after_loading, True, right=lambda a, b: a[0] == b[0] and a[2] != b[2]),
    "no_save_optim": Row(see.saved_bytes, True, right=less),
    "eod_mask_loss": Row(see.second_loss, True, {"other_megatron_args": {"eos_token_id": END}}),
    "use_precision_aware_optimizer": Row(see.peak_bytes, True, {"mixed_precision": "bf16"}),
    "optimizer_cpu_offload": Row(see.where_state_lies, True, right=lambda a, b: not a and "where the CPU is the device" in b[0]),
    "recompute_granularity": Row(see.peak_bytes, "full", right=less),
    "recompute_method": Row(see.peak_bytes, "block", FULL),
    "recompute_num_layers": Row(see.peak_bytes, 3, FULL),
    "checkpoint_num_layers": Row(see.peak_bytes, 3, FULL),
    "recompute_activations": Row(see.peak_bytes, True, right=less),
    "attention_dropout": Row(see.second_loss, 0.5),
    "hidden_dropout": Row(see.second_loss, 0.5),
    "use_rotary_position_embeddings": Row(see.new_model, True),
    "num_micro_batches": Row(see.loaded, 2, right=lambda a, b: (a, b) == ([(2, 8), 2], [(4, 8), 2])),
    "gradient_clipping": Row(see.second_loss, 1e-3),
    "is_train_batch_min": Row(see.loaded, False, {"sizes": (2, 4)}, right=lambda a, b: (a[-1], b[-1]) == (2, 4)),
    "train_iters": Row(see.rates, 8, {"lr_decay_style": "linear", "train_iters": 4}),
    "train_samples": Row(see.rates, 64, {"train_samples": 32}),
    "weight_decay_incr_style": Row(see.rates, "linear", {**LENGTH, "weight_decay_incr_style": "cosine", "start_weight_decay": 0.0,
                                                     "end_weight_decay": 1.0}),
    "start_weight_decay": Row(see.rates, 0.5, {**LENGTH, "weight_decay_incr_style": "linear", "end_weight_decay": 1.0,
                                               "start_weight_decay": 0.0}),
    "end_weight_decay": Row(see.rates, 2.0, {**LENGTH, "weight_decay_incr_style": "linear", "start_weight_decay": 0.0,
                                             "end_weight_decay": 1.0}),
    "lr_decay_style": Row(see.rates, "cosine", LENGTH),
    "lr_decay_iters": Row(see.rates, 3, LENGTH),
    "lr_decay_samples": Row(see.rates, 24, {"train_samples": 32}),
    "lr_warmup_iters": Row(see.rates, 2, LENGTH),
    "lr_warmup_samples": Row(see.rates, 16, {"train_samples": 32}),
    "lr_warmup_fraction": Row(see.rates, 0.5, LENGTH),
    "min_lr": Row(see.rates, 0.005, LENGTH),
    "consumed_samples": Row(see.first_text, [2]),
    "no_wd_decay_cond": Row(see.weights, _some),
    "scale_lr_cond": Row(see.weights, _some, {"lr_mult": 0.5, "scale_lr_cond": lambda name, parameter: False}),
    "lr_mult": Row(see.weights, 0.5, {"scale_lr_cond": _some}),
    "megatron_dataset_flag": Row(see.flags, True, right=lambda a, b: (a, b) == ([False], [True])),
    "seq_length": Row(see.too_long, 17, right=lambda a, b: not a and "sequences of 17 tokens are longer" in b),
    "encoder_seq_length": Row(see.encoder_too_long, 17, right=lambda a, b: not a and "sequences of 17 tokens are longer" in b),
    "decoder_seq_length": Row(see.too_long, 17, right=lambda a, b: not a and "sequences of 17 tokens are longer" in b),
    "tensorboard_dir": Row(see.scalars, "a new folder", right=lambda a, b: not a and "lm loss" in b),
    "set_all_logging_options": Row(see.scalars, True, {"tensorboard_dir": "a new folder"}, right=lambda a, b: a < b),
    "eval_iters": Row(see.sample_counts, 200, right=lambda a, b: a[1] < b[1] and a[2] < b[2]),
    "eval_interval": Row(see.sample_counts, 1, {"eval_iters": 50}, right=lambda a, b: a[1] < b[1] and a[2] == b[2]),
    "return_logits": Row(see.logits, True),
    "require_logits": Row(see.logits, True),
    "custom_train_step_class": Row(see.second_loss, see.Scaled),
    "custom_train_step_kwargs": Row(see.second_loss, {"factor": 5.0}, {"custom_train_step_class": see.Scaled}),
    "custom_megatron_datasets_provider_function": Row(see.first_text, see.own_provider),
    "custom_get_batch_function": Row(see.second_loss, see.first_tokens),
    "custom_loss_function": Row(see.second_loss, see.tripled),
    "other_megatron_args": Row(see.new_model, {"seed": 77}),
    "check_for_nan_in_loss_and_grad": Row(see.not_finite, True, right=lambda a, b: not a and b),
}

# Of a step on two processes: fields around one, its value, and which number [parameters on rank 0, most bytes] changes how.
PIPELINE = {"pp_degree": 2, "num_micro_batches": 4}
SPLIT_FULL = {"tp_degree": 2, "recompute_granularity": "full"}
LAYOUTS = {
    "tp_degree": ({}, 2, lambda a, b: b[0] < a[0]),
    "pp_degree": ({}, 2, lambda a, b: b[0] < a[0]),
    "context_parallel_size": ({}, 2, lambda a, b: b[1] < a[1]),
    "expert_model_parallel_size": ({"family": "Mixtral"}, 2, lambda a, b: b[0] < a[0]),
    "sequence_parallelism": ({"tp_degree": 2}, True, lambda a, b: b[1] != a[1]),
    "use_distributed_optimizer": ({}, True, lambda a, b: b[1] < a[1]),
    "use_custom_fsdp": ({"use_distributed_optimizer": True}, True, lambda a, b: b[1] < a[1]),
    "decoder_last_pipeline_num_layers": (PIPELINE, 3, lambda a, b: b[0] < a[0]),
    "pipeline_model_parallel_split_rank": ({**PIPELINE, "family": "MT5"}, 1, lambda a, b: b[0] < a[0]),
    "num_layers_per_virtual_pipeline_stage": (PIPELINE, 1, lambda a, b: b[1] != a[1]),
    "distribute_checkpointed_activations": (SPLIT_FULL, True, lambda a, b: b[1] < a[1]),
    "partition_activations": (SPLIT_FULL, True, lambda a, b: b[1] < a[1]),
}


def given(name, value, around) -> dict:
    return {**around, name: value}


def as_argument(name, value, around) -> dict:
    """The same in other_megatron_args."""
    return {**{key: kept for key, kept in around.items() if key != name},
            "other_megatron_args": {**around.get("other_megatron_args", {}), name: value}}


def having(effect) -> list:
    return [name for name, row in TABLE.items() if row.effect == effect]


def test_every_field_has_a_row():
    assert set(FIELDS) == set(ROWS) | set(LAYOUTS) | set(having("warns")) | set(having("refuses")) == set(TABLE)


@pytest.mark.parametrize("name", ROWS)
def test_what_a_field_changes(name):
    row = ROWS[name]
    if row.see is see.scalars:
        pytest.importorskip("tensorboard")
    before, after = row.see(**row.around), row.see(**given(name, row.value, row.around))
    assert row.right(before, after), (before, after)
    if name in megatron_args.ARGUMENTS and megatron_args.ARGUMENTS[name][:2] == ("field", name):
        assert row.see(**as_argument(name, row.value, row.around)) == after


def test_what_layouts_change(python_build, tmp_path):
    cases = [{}] + [fields for name, (around, value, _) in LAYOUTS.items() for fields in (around, given(name, value, around))]
    output = tmp_path / "numbers.json"
    python_build.run(SCRIPT, output, json.dumps(cases), launcher=python_build.launcher("--num_processes", 2))
    numbers = json.loads(output.read_text())[1:]
    wrong = {name: (before, after) for (name, (_, _, right)), before, after in zip(LAYOUTS.items(), numbers[::2], numbers[1::2])
             if not right(before, after)}
    assert not wrong


@pytest.mark.parametrize("name", having("warns"))
def test_fields_without_effect_are_said_once(name, caplog):
    value = name != "attention_softmax_in_fp32"
    usual = see.second_loss()

    def twice():
        assert see.second_loss(**{name: value}) == usual
        see.second_loss(other_megatron_args={name: value})

    found = [text for text in see.said(caplog, twice) if name in text]
    assert len(found) == 1 and TABLE[name].detail in found[0]


@pytest.mark.parametrize("name", having("refuses"))
def test_fields_that_are_refused(name):
    value = {"calculate_per_token_loss": False}.get(name, len if name.startswith("custom") else 2)
    for fields in (given(name, value, {}), as_argument(name, value, {})):
        with pytest.raises(ConfigError, match=f"MegatronLMPlugin.{name}="):
            MegatronLMPlugin(**fields)


def test_what_is_written_from_the_tables(source_dir):
    """The plugin's page, the table for those who come from Megatron-LM, the launcher's keys, names in a configuration's errors."""
    files = reference.written(source_dir)
    assert len(files) == 4
    assert not [path.name for path, text in files.items() if path.read_text() != text], "run: python3 -m tessera.plugin.reference ."
