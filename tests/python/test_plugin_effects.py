"""Fields of MegatronLMPlugin whose effect is seen only in training: a changed number, file or column."""

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import plugin_support  # noqa: E402
from plugin_support import IDS, indexed, prepared, step  # noqa: E402

from tessera.engine import session  # noqa: E402
from tessera.errors import ConfigError  # noqa: E402
from tessera.utils import (MegatronLMDummyDataLoader, MegatronLMDummyScheduler,  # noqa: E402
                           avg_losses_across_data_parallel_group, full_gradients)
from tessera.plugin.config_map import native_config  # noqa: E402

fresh_states = plugin_support.fresh_states


@pytest.mark.parametrize("given", ["field", "environment"])
def test_a_schedule_without_its_scheduler_is_said(given, monkeypatch, caplog):
    fields = {"lr_decay_iters": 10, "lr_warmup_iters": 2}
    if given == "environment":
        monkeypatch.setenv("MEGATRON_LM_LR_DECAY_ITERS", str(fields.pop("lr_decay_iters")))
    prepared(MegatronLMDummyScheduler, **fields)
    assert not any("without effect" in text for text in caplog.messages)
    prepared(**fields)
    assert sum("without effect: lr_decay_iters=10, lr_warmup_iters=2" in text for text in caplog.messages) == 1


@pytest.mark.parametrize("field", ["return_logits", "require_logits"])
def test_logits(field):
    accelerator, model, optimizer = prepared()
    plain = model(input_ids=IDS, labels=IDS)
    assert plain.logits is None
    accelerator.backward(plain.loss)
    expected = full_gradients(model)
    accelerator, model, optimizer = prepared(**{field: True})
    outputs = model(input_ids=IDS, labels=IDS)
    assert outputs.logits.shape == (4, 8, 40) and outputs.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    accelerator.backward(outputs.loss)
    for name, gradient in full_gradients(model).items():
        assert torch.allclose(gradient, expected[name], atol=1e-6), name


@pytest.mark.parametrize("plugin, expected", [(None, "full"), ({}, "full"), ({"recompute_activations": True}, "selective")])
def test_checkpointed_models(monkeypatch, plugin, expected):
    """gradient_checkpointing_enable() counts unless the plugin says what is recomputed; numbers stay."""
    def gradients(model) -> dict:
        loss = model(input_ids=IDS, labels=IDS).loss
        accelerator.backward(loss)
        return {"loss": loss.detach(), **full_gradients(model)}

    def checkpointed(model):
        model.gradient_checkpointing_enable()
        return model

    accelerator, model, _ = prepared()
    usual = gradients(model)
    configs = []
    monkeypatch.setattr(session, "native_config", lambda **given: configs.append(native_config(**given)) or configs[-1])
    accelerator, model, _ = prepared(change=checkpointed, plugin=plugin is not None, **(plugin or {}))
    assert configs[0]["training"]["recompute"] == expected
    for name, value in gradients(model).items():
        assert torch.equal(value, usual[name]), name
    with pytest.raises(ConfigError, match="before prepare"):
        model.gradient_checkpointing_enable()


def test_gradients_are_not_where_torch_looks_for_them(caplog):
    accelerator, model, optimizer = prepared()
    accelerator.backward(model(input_ids=IDS, labels=IDS).loss)
    assert "full_gradients" not in caplog.text
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert caplog.text.count("Clip with accelerator.clip_grad_norm_()") == 1 and "full_gradients" in caplog.text
    parameter = next(model.parameters())
    parameter.grad = None
    with pytest.raises(ConfigError, match="cannot be set"):
        parameter.grad = torch.zeros_like(parameter)
    assert isinstance(parameter, torch.nn.Parameter) and parameter.is_leaf


def test_compiled_models(caplog, monkeypatch):
    monkeypatch.setattr("tessera.comm.warnings._told", set())  # other tests may have heard it
    accelerator, model, optimizer = prepared()
    loss = step(accelerator, model, optimizer)
    accelerator, model, optimizer = prepared(change=torch.compile)
    assert "torch.compile is not used" in caplog.text
    assert step(accelerator, model, optimizer) == loss
    assert "transformer.wte.weight" in dict(model.named_parameters())


def test_no_save_optim_and_no_load_optim(tmp_path):
    accelerator, model, optimizer = prepared()
    step(accelerator, model, optimizer)
    accelerator.save_state(str(tmp_path / "whole"))
    accelerator, model, optimizer = prepared(no_save_optim=True)
    step(accelerator, model, optimizer)
    accelerator.save_state(str(tmp_path / "weights"))

    def tensors(folder: Path) -> set:
        manifest = json.loads(next(folder.rglob("manifest.json")).read_text())
        return {name.split(".")[0] for name in manifest["tensors"]} if isinstance(manifest["tensors"], dict) else {
            tensor["name"].split(".")[0] for tensor in manifest["tensors"]}

    assert tensors(tmp_path / "whole") == {"param", "adam_m", "adam_v"}
    assert tensors(tmp_path / "weights") == {"param"}

    losses = {}
    for fields in ({}, {"no_load_optim": True}):
        accelerator, model, optimizer = prepared(**fields)
        accelerator.load_state(str(tmp_path / "whole"))
        losses[bool(fields)] = [step(accelerator, model, optimizer) for _ in range(3)]
    assert losses[True][0] == losses[False][0]  # the same weights
    assert losses[True][2] != losses[False][2]  # other moments
    accelerator, model, optimizer = prepared(no_load_optim=True)
    accelerator.load_state(str(tmp_path / "weights"))
    assert step(accelerator, model, optimizer) == losses[True][0]


def test_custom_loss_and_get_batch():
    def own_loss(loss_mask, output_tensor):
        loss = (output_tensor.float() * loss_mask).sum() / loss_mask.sum() * 3.0
        return loss, {"tripled": avg_losses_across_data_parallel_group([loss])[0]}

    def own_batch(data_iterator):
        ids = next(data_iterator)["input_ids"]
        labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
        return ids, labels, (labels != -100).float(), None, None

    usual = step(*prepared())
    assert step(*prepared(custom_loss_function=own_loss, custom_get_batch_function=own_batch)) == pytest.approx(3 * usual, rel=1e-6)
    assert step(*prepared(custom_get_batch_function=own_batch, num_micro_batches=2)) == pytest.approx(usual, rel=1e-6)


def test_indexed_data(tmp_path):
    prefix = indexed(tmp_path)
    dummy = MegatronLMDummyDataLoader(data_path=prefix, seq_length=8, micro_batch_size=2, splits_string="900,50,50")
    common = dict(megatron_dataset_flag=True, num_micro_batches=2, train_iters=4, eval_iters=1, eval_interval=2)
    accelerator, model, optimizer, scheduler, train, valid, test = prepared(
        lambda optimizer: MegatronLMDummyScheduler(optimizer), dummy, dummy, dummy, **common)
    batches = [next(train) for _ in range(2)]
    assert batches[0]["text"].shape == (4, 9) and next(valid)["text"].shape == (4, 9) and next(test)["text"].shape == (4, 9)
    native = step(accelerator, model, optimizer, batches[0])
    accelerator, model, optimizer, _, train, _, _ = prepared(lambda optimizer: MegatronLMDummyScheduler(optimizer), dummy, dummy, dummy,
                                                            consumed_samples=[4, 0, 0], **common)
    assert torch.equal(next(train)["text"], batches[1]["text"])

    def provider(counts):
        return tuple([{"text": np.full(9, i % 40)} for i in range(count)] for count in counts)

    accelerator, model, optimizer, _, train, _, _ = prepared(
        lambda optimizer: MegatronLMDummyScheduler(optimizer), dummy, dummy, dummy,
        custom_megatron_datasets_provider_function=provider, **common)
    assert next(train)["text"][:, 0].tolist() == [0, 1, 2, 3]

    def usual_loss(loss_mask, losses):
        loss = (losses * loss_mask).sum() / loss_mask.sum()
        return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}

    accelerator, model, optimizer, _, train, _, _ = prepared(lambda optimizer: MegatronLMDummyScheduler(optimizer), dummy, dummy, dummy,
                                                            custom_loss_function=usual_loss, **common)
    assert step(accelerator, model, optimizer, next(train)) == pytest.approx(native, rel=1e-6)  # a train step reads `text` too


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def scalars(folder, **fields) -> EventAccumulator:
        accelerator, model, optimizer = prepared(tensorboard_dir=str(folder), **fields)
        losses = [step(accelerator, model, optimizer) for _ in range(3)]
        accelerator.free_memory()
        events = EventAccumulator(str(folder))
        events.Reload()
        assert [event.value for event in events.Scalars("lm loss")] == pytest.approx(losses)
        assert [event.step for event in events.Scalars("lm loss")] == [1, 2, 3]
        return events

    few = set(scalars(tmp_path / "few").Tags()["scalars"])
    many = set(scalars(tmp_path / "many", set_all_logging_options=True).Tags()["scalars"])
    assert few == {"lm loss", "learning-rate", "grad-norm", "loss-scale"} and few < many


def test_conditions_of_the_optimizer():
    def weights(**fields) -> dict:
        accelerator, model, optimizer = prepared(**fields)
        optimizer.param_groups[0]["weight_decay"] = 0.5
        step(accelerator, model, optimizer)
        return model.state_dict()

    usual = weights()
    undecayed = weights(no_wd_decay_cond=lambda name, parameter: "c_fc" in name)
    frozen_rate = weights(scale_lr_cond=lambda name, parameter: "wpe" in name, lr_mult=0.0)
    start = prepared()[1].state_dict()
    for name, value in usual.items():
        assert torch.equal(undecayed[name], value) != ("c_fc.weight" in name), name
        assert torch.equal(frozen_rate[name], value) != ("wpe" in name), name
    assert torch.equal(frozen_rate["transformer.wpe.weight"], start["transformer.wpe.weight"])
