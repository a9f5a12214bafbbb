"""_C.Config: a configuration out of plain values, read by attributes."""

import pickle

import pytest
from thread_ranks import needs_module

from tessera.errors import ConfigError

needs_module()
from tessera._C import Config  # noqa: E402

SECTIONS = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "norm": "rmsnorm", "position_embedding": "rotary",
              "rope_scaling.type": "linear", "rope_scaling.factor": 2.0, "window_pattern": None},
    "parallel": {"tensor": 2, "sequence": True, "data": None},
    "optimizer": {"betas": [0.8, 0.9], "no_decay": ["*.weight"]},
    "training": {"seq_length": 16, "micro_batch_size": 1, "global_batch_size": 4, "precision": "bf16"},
    "data": {"path": [[0.5, "a"], [2, "b"]]},
    "offload": {},
}


def test_attributes_are_resolved_values():
    config = Config(SECTIONS)
    assert (config.model.hidden_size, config.model.head_dim, config.model.norm) == (64, 16, "rmsnorm")
    assert config.model.window_pattern is None and config.model.norm_bias is False and config.parallel.data is None
    assert config.model.rope_scaling.factor == 2.0 and config.model.rope_scaling.type == "linear"
    assert config.parallel.sequence is True and type(config.parallel.tensor) is int and type(config.model.dropout) is float
    assert config.optimizer.betas == [0.8, 0.9] and config.optimizer.no_decay == ["*.weight"]
    assert config.training.precision == "bf16" and config.data.path == [(0.5, "a"), (2.0, "b")]
    values = config.values()
    assert list(values)[:2] == ["model.family", "model.num_layers"] and values["model.rope_scaling.factor"] == 2.0
    assert values["training.precision"] == "bf16" and values["parallel.data"] is None


def test_it_is_compared_and_printed_and_never_changes():
    config = Config(SECTIONS)
    assert config == Config(SECTIONS) and config != Config({**SECTIONS, "parallel": {"tensor": 4}}) and config != SECTIONS
    assert "\nparallel:\n  tensor: 2\n  sequence: true\n" in repr(config)
    config.optimizer.betas.append(1.0)
    assert config.optimizer.betas == [0.8, 0.9]
    for change in (lambda: setattr(config, "model", 1), lambda: setattr(config.model, "hidden_size", 1)):
        with pytest.raises(AttributeError):
            change()
    for unknown in (lambda: config.nonsense, lambda: config.model.hidden, lambda: config.model.rope_scaling.fact):
        with pytest.raises(AttributeError, match="a configuration has no"):
            unknown()
    with pytest.raises(TypeError):
        pickle.dumps(config)


@pytest.mark.parametrize("sections, texts", [
    ({"model": {"num_heads": 5}}, ["override 'model.num_heads=5': model.hidden_size (768) is not a multiple of model.num_heads (5)"]),
    ({"model": {"dropout": 1.5}, "parallel": {"tensor": "2"}}, ["model.dropout must be below 1, not 1.5", "parallel.tensor must be an integer, not the quoted text '2'"]),
    ({"training": {"precision": "bf17"}}, ["did you mean 'bf16'?"]),
    ({"training": {"micro_batch": 1}, "model": {"norm_eps": float("nan")}}, ["unknown key", "must be a finite number"]),
    ({"modell": {"num_layers": 1}}, ["unknown section 'modell'"]),
    ({"modell": {}, "model": 3, 1: {"x": 2}}, ["unknown section 'modell'", "model must be", "unknown section '1'"]),
    ({"training": {"steps": None}}, ["training.steps must be an integer, not null"])])
def test_every_fault_is_told_at_once(sections, texts):
    with pytest.raises(ConfigError) as error:
        Config(sections)
    for text in texts:
        assert text in str(error.value), error.value
