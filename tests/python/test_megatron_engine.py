"""The members of Accelerate's MegatronEngine and MegatronLMDummyDataLoader, and what the loader may be given."""

import inspect
import json
import logging

import plugin_support
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from plugin_support import IDS, indexed, prepared, step  # noqa: E402

from tessera.errors import ConfigError  # noqa: E402
from tessera.utils import (GPTTrainStep, MegatronEngine, MegatronLMDummyDataLoader, MegatronLMDummyScheduler,  # noqa: E402
                           avg_losses_across_data_parallel_group)
from tessera.accelerator.prepare import is_prepared  # noqa: E402

BATCH = {"input_ids": IDS, "labels": IDS}
RUN = dict(megatron_dataset_flag=True, train_iters=4, eval_iters=1, eval_interval=2)
fresh_states = plugin_support.fresh_states


def test_every_member_of_accelerates_is_there():
    theirs = pytest.importorskip("accelerate.utils.megatron_lm")
    for other, ours in ((theirs.MegatronEngine, MegatronEngine), (theirs.MegatronLMDummyDataLoader, MegatronLMDummyDataLoader)):
        for name, member in vars(other).items():
            if name.startswith("_"):
                continue
            wanted = [p.name for p in inspect.signature(member).parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
            mine = inspect.signature(getattr(ours, name)).parameters
            assert set(wanted) <= set(mine), (name, wanted)
    accelerator, model, optimizer = prepared()
    for name in ("module", "base_model", "optimizer", "scheduler", "train_step_handler", "total_loss_dict", "eval_total_loss_dict",
                 "iteration", "module_config"):
        getattr(model, name)


def test_train_step_is_a_loop_of_ones_own():
    accelerator, model, optimizer, scheduler = prepared(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    expected = []
    for _ in range(3):
        expected.append(step(accelerator, model, optimizer))
        scheduler.step()
    norm, rate = optimizer.last_step["grad_norm"], scheduler.get_last_lr()
    accelerator, model, optimizer, scheduler = prepared(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    found = [model.train_step(**BATCH) for _ in range(3)]
    assert [losses["lm loss"].item() for losses, *_ in found] == expected
    assert found[-1][1:] == (0, norm, None) and scheduler.get_last_lr() == rate
    assert (model.iteration, model.optimizer, model.scheduler) == (3, optimizer, scheduler)
    assert model.total_loss_dict == {"lm loss": pytest.approx(sum(expected))}
    assert isinstance(model.train_step_handler, GPTTrainStep) and model.base_model is model.module is model
    assert model.get_module_config().hidden_size == model.module_config.hidden_size == 16
    model.eval()
    with pytest.raises(ConfigError, match="train_step.. is for training mode"):
        model.train_step(**BATCH)


def test_train_step_accumulates_and_names_losses():
    def own_loss(loss_mask, losses):
        loss = (losses * loss_mask).sum() / loss_mask.sum()
        return loss, {"own": avg_losses_across_data_parallel_group([loss])[0]}

    accelerator, model, optimizer = prepared(custom_loss_function=own_loss, num_micro_batches=2)
    accelerator.gradient_accumulation_steps = 2
    seen = []
    for _ in range(2):
        with accelerator.accumulate(model):
            losses, skipped, norm, _ = model.train_step(**BATCH)
            seen.append((set(losses), skipped, norm > 0, model.iteration))
    assert seen == [({"own"}, 0, False, 0), ({"own"}, 0, True, 1)]


def test_eval_step_leaves_the_model_as_it_is():
    accelerator, model, optimizer = prepared()
    before = model.state_dict()
    loss = model.eval_step(**BATCH)["lm loss"]
    assert model.training and not loss.requires_grad and loss.item() == pytest.approx(step(accelerator, model, optimizer), rel=1e-6)
    accelerator, model, optimizer = prepared()
    model.eval_step(**BATCH)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ConfigError, match="a step needs labels"):
        model.eval_step(input_ids=IDS)


def test_batches_are_cut_as_the_engine_cuts_them():
    accelerator, model, optimizer = prepared(num_micro_batches=3)
    parts = list(model.get_batch_data_iterator(BATCH))
    assert [part["input_ids"].tolist() for part in parts] == [IDS[:2].tolist(), IDS[2:3].tolist(), IDS[3:].tolist()]
    assert model.get_batch_data_iterator({}) is None
    assert [len(part["labels"]) for part in model.get_batch_data_iterator({"labels": IDS[:2]})] == [1, 1]


def test_what_is_evaluated_is_reported(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def reported(folder, **arguments) -> dict:
        accelerator, model, optimizer = prepared(tensorboard_dir=str(folder), other_megatron_args=arguments)
        step(accelerator, model, optimizer)
        model.eval()
        with torch.no_grad():
            losses = [model(input_ids=IDS[:rows], labels=IDS[:rows]).loss.item() for rows in (4, 2)]
        with caplog.at_level(logging.INFO, "tessera"):
            model.train()
            model.train()  # nothing was evaluated since
        accelerator.free_memory()
        events = EventAccumulator(str(folder))
        events.Reload()
        found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"] if "valid" in name}
        assert found.pop("lm loss validation") == [(1, pytest.approx(sum(losses) / 2))]
        return found

    assert set(reported(tmp_path / "whole")) == {"lm loss validation ppl"}
    assert caplog.text.count("validation loss at iteration 1 | lm loss value: ") == 1 and "lm loss PPL" in caplog.text
    assert reported(tmp_path / "without", pretraining_flag=False) == {}


def test_checkpoints_of_the_model(tmp_path):
    accelerator, model, optimizer = prepared()
    model.train_step(**BATCH)
    model.save_checkpoint(str(tmp_path / "there"))
    expected = [model.train_step(**BATCH)[0]["lm loss"].item() for _ in range(2)]
    accelerator, model, optimizer = prepared()
    model.load_checkpoint(str(tmp_path / "there"))
    assert model.iteration == 1
    assert [model.train_step(**BATCH)[0]["lm loss"].item() for _ in range(2)] == expected
    with pytest.raises(ConfigError, match="train_step.. needs an optimizer"):
        plugin_support.forget_states()
        accelerator = plugin_support.Accelerator(megatron_lm_plugin=plugin_support.MegatronLMPlugin())
        accelerator.prepare(plugin_support.make_model()).train_step(**BATCH)


def test_a_call_returns_the_loss_itself():
    usual = prepared()[1](**BATCH).loss
    for fields in ({}, {"custom_train_step_class": GPTTrainStep}):
        model = prepared(other_megatron_args={"model_return_dict": False}, **fields)[1]
        loss = model(**BATCH)
        assert isinstance(loss, torch.Tensor) and loss.item() == pytest.approx(usual.item(), rel=1e-6)
        assert model.eval_step(**BATCH)["lm loss"].item() == pytest.approx(usual.item(), rel=1e-6)


# Loaders over .idx/.bin


def loaders(given: dict, **fields):
    dummy = MegatronLMDummyDataLoader(**{"seq_length": 8, "micro_batch_size": 2, **given})
    made = prepared(lambda optimizer: MegatronLMDummyScheduler(optimizer), dummy, dummy, dummy, **{**RUN, **fields})
    return made[1], made[4:]


def test_a_loaders_own_arguments_and_the_plugins(tmp_path, caplog):
    prefix = indexed(tmp_path)
    split = {"data_path": prefix, "splits_string": "900,50,50"}
    _, (train, valid, test) = loaders(split)
    counts = [len(each.dataset) for each in (train, valid, test)]
    first = next(train)["text"]
    _, by_plugin = loaders({}, other_megatron_args={"data_path": prefix, "split": "900,50,50", "data_cache_path": str(tmp_path / "kept")})
    assert torch.equal(next(by_plugin[0])["text"], first) and list((tmp_path / "kept").iterdir())
    _, more = loaders({**split, "eval_iters": 100, "train_iters": 6, "eval_interval": 3, "seed": 5}, other_megatron_args={"seed": 1234})
    assert [len(each.dataset) for each in more] != counts and not torch.equal(next(more[0])["text"], first)
    assert "seed is 5, which counts over the plugin's 1234" in caplog.text
    end = int(first[0, 2])
    model, (train, _, _) = loaders({**split, "eod_mask_loss": True, "eos_token_id": end, "reset_position_ids": True})
    batch = next(train)
    assert torch.equal(batch["labels"] == -100, batch["text"][:, :-1] == end) and (batch["position_ids"].diff() < 0).any()
    assert model._session.rules.eod == end
    _, (train, valid, test) = loaders({"train_data_path": prefix, "valid_data_path": [prefix], "seq_length": 4})
    shown, evaluated = next(train)["text"], next(valid)["text"]
    assert shown.shape == evaluated.shape == (2, 5) and test is None
    # The same from files that hold the lists.
    (tmp_path / "splits.json").write_text(json.dumps({"train": str(prefix), "valid": [str(prefix)], "test": None}))
    _, (train, valid, test) = loaders({"per_split_data_args_path": tmp_path / "splits.json", "seq_length": 4})
    assert torch.equal(next(train)["text"], shown) and torch.equal(next(valid)["text"], evaluated) and test is None
    (tmp_path / "words.txt").write_text(f"1.0 {prefix}\n")
    named = loaders({**split, "data_path": ["1.0", prefix]})[1][0], loaders({**split, "data_path": None, "data_args_path":
                                                                               str(tmp_path / "words.txt")})[1][0]
    assert torch.equal(*(next(each)["text"] for each in named))


def test_rules_of_loaders_take_the_models_end(tmp_path):
    split = {"data_path": indexed(tmp_path), "split": "900,50,50"}
    end = int(next(loaders(split)[1][0])["text"][0, 2])

    def change(model):
        model.config.eos_token_id = end
        return model

    dummy = MegatronLMDummyDataLoader(seq_length=8, micro_batch_size=2, **split)
    made = prepared(lambda optimizer: MegatronLMDummyScheduler(optimizer), dummy, dummy, dummy, change=change, eod_mask_loss=True, **RUN)
    batch = next(made[4])
    assert torch.equal(batch["labels"] == -100, batch["text"][:, :-1] == end) and (batch["labels"] == -100).any()
    assert made[1](**batch).loss.item() == pytest.approx(made[1](text=batch["text"]).loss.item(), rel=1e-6)


def test_what_a_loader_does_not_take(caplog):
    def loader(**given):
        return MegatronLMDummyDataLoader(**{"seq_length": 8, "micro_batch_size": 2, **given})

    for given, message in (({"data_pth": "x"}, "knows no data_pth; did you mean 'data_path'"), ({"seq_length": None}, "needs seq_length"),
                           ({"mock_data": True}, "'mock_data' is refused"), ({"retriever_seq_length": 8}, "not in this build"),
                           ({"tp_degree": 2}, "knows no tp_degree"),
                           ({"data_path": "a", "train_data_path": "b"}, "data_path is cut by `split`"),
                           ({"data_path": "a", "data_args_path": "b"}, "give one of them"),
                           ({"data_args_path": "/nowhere/list"}, "data_args_path: /nowhere/list cannot be read"),
                           ({"per_split_data_args_path": __file__}, "cannot be read")):
        with pytest.raises(ConfigError, match=message):
            loader(**given)
    assert loader(mock_data=False, mask_prob=None, megatron_dataset_flag=True).dataset_args == {"seq_length": 8, "micro_batch_size": 2}
    assert not caplog.messages
    for _ in range(2):
        loader(num_workers=2, tokenizer_type="GPT2BPETokenizer", mmap_bin_files=True)
    assert len(caplog.messages) == 3 and all("MegatronLMDummyDataLoader: '" in text for text in caplog.messages)


def test_the_loaders_members_alone(tmp_path, caplog):
    accelerator, model, optimizer = prepared(train_iters=4, eval_iters=1, eval_interval=2, other_megatron_args={"split": "1,1,1"})
    dummy = MegatronLMDummyDataLoader(data_path=indexed(tmp_path), seq_length=8, micro_batch_size=2, split="900,50,50")
    dummy.set_megatron_data_args()
    arguments = accelerator.state.megatron_lm_plugin.megatron_lm_default_args
    assert (arguments["split"], arguments["seq_length"], arguments["megatron_dataset_flag"]) == ("900,50,50", 8, True)
    assert "split is '900,50,50', which counts over the plugin's '1,1,1'" in caplog.text
    train, valid, test = dummy.get_train_valid_test_datasets_provider(accelerator)((8, 4, 2))
    assert (len(train) >= 8, len(valid) >= 4, len(test) >= 2) == (True, True, True)
    iterators = dummy.build_train_valid_test_data_iterators(accelerator)
    assert next(iterators[0])["text"].shape == (2, 9) and len(iterators) == 3 and is_prepared(model)
