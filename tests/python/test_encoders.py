"""BERT in Python: batches, outputs, train steps, what is refused. That it trains as in PyTorch on every layout: test_train_like_torch.py."""

import copy
import json
import logging
from pathlib import Path

import plugin_support
import pytest
import torch
import transformers
from plugin_support import forget_states, make_encoder, step

from tessera import Accelerator
from tessera.engine.bert_train_step import encoder_columns
from tessera.errors import CheckpointError, ConfigError, DataError, InvalidArgument
from tessera.utils import BertTrainStep, MegatronLMPlugin

fresh_states = plugin_support.fresh_states
KINDS = [prefix + kind for prefix in ("Bert", "MegatronBert") for kind in ("ForPreTraining", "ForMaskedLM", "ForSequenceClassification")]


def batch_of(kind: str, padded: bool = True) -> dict:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 40, (4, 11), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 8:], mask[2, :3] = 0, 0
    labels = torch.where((torch.rand(ids.shape, generator=generator) < 0.4) & (mask > 0), ids, -100)
    batch = {"input_ids": ids, "token_type_ids": (torch.arange(11) > 5).long().expand(4, 11), "attention_mask": mask, "labels": labels}
    if kind.endswith("ForSequenceClassification"):
        batch["labels"] = torch.tensor([0, 2, 1, -100])
    if kind.endswith("ForPreTraining"):
        batch["next_sentence_label"] = torch.tensor([[0], [1], [-100], [1]])
    return batch


def without_labels(batch: dict) -> dict:
    return {name: value for name, value in batch.items() if "label" not in name}


def prepared(kind: str, config=None, **fields):
    """What prepare() makes of a tiny model and its optimizer, and a copy in PyTorch."""
    forget_states()
    model = make_encoder(kind, **{"num_labels": 3, **(config or {})})
    reference = copy.deepcopy(model)
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**fields) if fields else None)
    return (accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)), reference)


def close(ours, theirs, limit: float = 1e-5) -> None:
    assert ours.shape == theirs.shape and (ours - theirs).abs().max() <= limit


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_transformers(kind, tmp_path):
    _, model, _, reference = prepared(kind)
    batch = batch_of(kind)
    ours, theirs = model(**batch), reference.train()(**batch)
    assert type(ours) is type(theirs)
    close(ours.loss, theirs.loss)
    ours, theirs = model(**without_labels(batch)), reference(**without_labels(batch))
    assert list(ours) == list(theirs)
    for name in theirs:
        close(ours[name], theirs[name])
    in_order = [batch["input_ids"], batch["attention_mask"], batch["token_type_ids"]]
    for mine, other in zip(model(*in_order, return_dict=False), theirs.values()):
        close(mine, other)
    model.eval()
    with torch.no_grad():
        evaluated = model(**batch)
        close(evaluated.loss, reference.eval()(**batch).loss)
        if "Sequence" in kind:  # metrics need them beside the loss
            close(evaluated.logits, theirs.logits)
    model.save_pretrained(tmp_path / "saved")
    saved = type(reference).from_pretrained(tmp_path / "saved")
    assert saved.config.architectures == [kind] and saved.config.num_labels == reference.config.num_labels
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in saved.state_dict().items())
    assert set(model.state_dict()) == {name for name, _ in reference.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_of_logits_trains_as_in_pytorch(kind):
    accelerator, model, _, reference = prepared(kind, return_logits=True, num_micro_batches=2)
    batch = batch_of(kind)
    from tessera.utils import full_gradients

    own = model(**batch)
    close(own.loss, reference.train()(**batch).loss)
    accelerator.backward(own.loss)
    reference(**batch).loss.backward()
    found = full_gradients(model)
    for name, parameter in reference.named_parameters():
        close(found[name], parameter.grad)


PROBLEMS = {
    "one number": ({"num_labels": 1}, torch.tensor([0.5, -1.0, 2.0, 0.1])),
    "numbers": ({"problem_type": "regression"}, torch.arange(12.0).reshape(4, 3) / 6),
    "classes": ({}, torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.25, 0.5, 1.0]]))}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_regression_and_several_classes_a_sample(problem, tmp_path):
    """Each loss, its gradients and a step, by the model and by a BertTrainStep, against Transformers."""
    from tessera.utils import full_gradients

    config, labels = PROBLEMS[problem]
    batch = {**batch_of("BertForSequenceClassification"), "labels": labels}
    steps = [{}, {"num_micro_batches": 2}] + [{"custom_train_step_class": BertTrainStep}] * (problem != "numbers")
    for fields in steps:
        accelerator, model, optimizer, reference = prepared("BertForSequenceClassification", config, **fields)
        expected = reference.train()(**batch)
        expected.loss.backward()
        loss = model(**batch).loss
        close(loss, expected.loss)
        accelerator.backward(loss)
        found = full_gradients(model)
        for name, parameter in reference.named_parameters():
            close(found[name], parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        assert step(accelerator, model, optimizer, batch) < expected.loss.item()
        if "custom_train_step_class" in fields:
            continue
        model.save_pretrained(tmp_path)
        saved = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
        assert (saved.config.problem_type, saved.config.num_labels) == (reference.config.problem_type, expected.logits.shape[1])
        with torch.no_grad():
            evaluated, again = model.eval()(**batch), saved(**batch)
        close(evaluated.loss, again.loss)
        close(evaluated.logits, again.logits)


def test_dropout_is_the_same_for_both_heads():
    """Of a pass for each head: the loss of both is that of one pass."""
    _, model, _, _ = prepared("BertForPreTraining", {"hidden_dropout_prob": 0.2}, return_logits=True)
    _, other, _, _ = prepared("BertForPreTraining", {"hidden_dropout_prob": 0.2}, return_logits=False, num_micro_batches=1)
    batch = batch_of("BertForPreTraining")
    close(model(**batch).loss, other(**batch).loss)


@pytest.mark.parametrize("fields", [{}, {"return_logits": True}])
def test_pairs_without_labels_count_nothing(fields):
    _, model, _, reference = prepared("BertForPreTraining", **fields)
    batch = {**batch_of("BertForPreTraining"), "next_sentence_label": torch.full((4,), -100)}
    logits = reference.train()(**without_labels(batch)).prediction_logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    close(model(**batch).loss, expected)
    with torch.no_grad():
        close(model.eval()(**batch).loss, expected)


def test_from_auto_classes():
    config = make_encoder().config
    for auto in (transformers.AutoModelForMaskedLM, transformers.AutoModelForPreTraining, transformers.AutoModelForSequenceClassification):
        forget_states()
        model = Accelerator().prepare(auto.from_config(config))
        assert model.eval()(**without_labels(batch_of(""))) is not None


def test_what_a_call_is_refused_for():
    calls = {
        "BertForPreTraining": [
            (InvalidArgument, "without next_sentence_label", {"next_sentence_label": None}),
            (InvalidArgument, "without labels", {"labels": None}),
            (InvalidArgument, r"one class for each of the 4 samples", {"next_sentence_label": torch.zeros(3)[None].long()}),
            (DataError, "sample 1", {"next_sentence_label": torch.tensor([0, 2, 1, 1])}),
            (DataError, "token type 2", {"token_type_ids": torch.full((4, 11), 2)}),
            (InvalidArgument, "token_type_ids have the shape", {"token_type_ids": torch.zeros(4, 10).long()}),
            (InvalidArgument, "zeros between ones", {"attention_mask": torch.tensor([1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]).expand(4, 11)}),
            (InvalidArgument, "num_items_in_batch", {"num_items_in_batch": 3}),
            (InvalidArgument, "attention weights", {"output_attentions": True})],
        "BertForMaskedLM": [
            (InvalidArgument, "no head for pairs", {"next_sentence_label": torch.zeros(4).long()}),
            (InvalidArgument, "labels has the shape", {"labels": torch.zeros(4, 10).long()}),
            (DataError, "label", {"labels": torch.full((4, 11), 40)})],
        "BertForSequenceClassification": [
            (InvalidArgument, r"they must be \[4, 3\]", {"labels": torch.rand(4, 2)}),
            (InvalidArgument, "sample 1 are not finite", {"labels": torch.tensor([0.0, float("nan"), 1.0, 1.0])[:, None].expand(4, 3)}),
            (DataError, "sample 2", {"labels": torch.tensor([0, 1, 3, 1])}),
            (InvalidArgument, "one class for each", {"labels": torch.zeros(4, 11).long()})]}
    for kind, cases in calls.items():
        accelerator, model, optimizer, _ = prepared(kind)
        for error, words, change in cases:
            with pytest.raises(error, match=words):
                model(**{**batch_of(kind), **change})
        step(accelerator, model, optimizer, batch_of(kind))  # nothing is left behind


def test_models_that_are_refused():
    def failure(error, kind, words, **config):
        forget_states()
        with pytest.raises(error, match=words):
            Accelerator().prepare(make_encoder(kind, **config))

    failure(ConfigError, "BertForSequenceClassification", "classifier_dropout", classifier_dropout=0.3)
    failure(ConfigError, "BertForMaskedLM", "is_decoder", is_decoder=True)
    failure(ConfigError, "BertForTokenClassification", "AutoModelForMaskedLM")
    forget_states()
    with pytest.raises(ConfigError, match="looks to both sides"):
        Accelerator(megatron_lm_plugin=MegatronLMPlugin(eod_mask_loss=True, other_megatron_args={"eos_token_id": 3})).prepare(make_encoder())
    model = make_encoder()
    model.bert.embeddings.position_ids += 1
    with pytest.raises(ConfigError, match="position_ids"):
        Accelerator().prepare(model)


MEGATRON = {"input_ids": "text", "token_type_ids": "types", "attention_mask": "padding_mask", "next_sentence_label": "is_random"}


def megatron_batch() -> dict:
    batch = {MEGATRON.get(name, name): value for name, value in batch_of("BertForPreTraining").items()}
    counted = batch["labels"] != -100
    return {**batch, "labels": torch.where(counted, batch["labels"], -1), "loss_mask": counted.long(), "truncated": torch.zeros(4).long()}


def test_megatrons_samples():
    _, model, _, _ = prepared("MegatronBertForPreTraining")
    model.eval()
    with torch.no_grad():
        expected = model(**batch_of("MegatronBertForPreTraining")).loss
        assert model(**megatron_batch()).loss == expected
        uncounted = {**megatron_batch(), "loss_mask": torch.ones(4, 11)}
        with pytest.raises(InvalidArgument, match="loss_mask counts position"):
            model(**uncounted)
        assert prepared("BertForMaskedLM")[1].eval()(**megatron_batch()).loss > 0  # without a head for is_random
    for mine, other in zip(encoder_columns(megatron_batch()), encoder_columns(batch_of("MegatronBertForPreTraining"))):
        assert torch.equal(mine, other)


class Doubled(BertTrainStep):
    """A user's: Accelerate's signatures."""

    def get_loss_func(self, accelerator, pretraining_flag, num_labels):
        inner = super().get_loss_func(accelerator, pretraining_flag, num_labels)

        def loss_func(*arguments):
            loss, logged = inner(*arguments)
            return 2 * loss, {name: 2 * value for name, value in logged.items()}

        return loss_func

    def get_forward_step_func(self, pretraining_flag, bert_binary_head):
        return super().get_forward_step_func(pretraining_flag, bert_binary_head)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_train_steps(kind):
    batch = batch_of(kind)
    own = prepared(kind, num_micro_batches=1)
    expected = [step(*own[:3], batch) for _ in range(3)]
    assert type(own[1].train_step_handler) is BertTrainStep
    names = {"ForPreTraining": {"lm loss", "sop loss"}, "ForMaskedLM": {"lm loss"}}.get(kind[4:], {"loss"})
    assert set(own[1].train_step(**batch)[0]) == names and set(own[1].eval_step(**batch)) == names
    for given in ({"custom_train_step_class": BertTrainStep}, {"custom_get_batch_function": lambda iterator: encoder_columns(next(iterator))}):
        accelerator, model, optimizer, _ = prepared(kind, **given)
        assert [step(accelerator, model, optimizer, batch) for _ in range(3)] == pytest.approx(expected, rel=1e-5)
        assert set(model.eval_step(**batch)) == names
    accelerator, model, optimizer, _ = prepared(kind, custom_train_step_class=Doubled, num_micro_batches=2)
    losses, skipped, norm, _ = model.train_step(**batch)
    assert set(losses) == names and skipped == 0
    assert type(model.train_step_handler) is Doubled


def test_a_custom_loss_function():
    """Smoothed labels of a classification, against PyTorch."""
    def loss_func(labels, logits):
        loss = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
        return loss, {"loss": loss.detach()}

    accelerator, model, optimizer, reference = prepared("BertForSequenceClassification", custom_loss_function=loss_func)
    batch = {**batch_of("BertForSequenceClassification"), "labels": torch.tensor([0, 2, 1, 1])}
    plain = torch.optim.AdamW(reference.train().parameters(), lr=1e-2, eps=1e-5)
    for _ in range(3):
        loss = loss_func(batch["labels"], reference(**without_labels(batch)).logits)[0]
        plain.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        plain.step()
        assert step(accelerator, model, optimizer, batch) == pytest.approx(loss.item(), rel=1e-5)


def test_arguments_say_what_the_model_is():
    def arguments(kind, **given):
        return prepared(kind, seq_length=11, other_megatron_args=given)[1].get_module_config()

    found = arguments("MegatronBertForPreTraining")
    assert (found.model_type_name, found.pretraining_flag, found.bert_binary_head, found.num_labels) == ("bert", True, True, 2)
    assert (found.seq_length, found.tokenizer_type, found.padded_vocab_size) == (11, "BertWordPieceLowerCase", 40)
    found = arguments("BertForSequenceClassification", num_labels=3, pretraining_flag=False, model_type_name="bert")
    assert (found.pretraining_flag, found.bert_binary_head, found.num_labels) == (False, False, 3)
    for kind, given in (("BertForSequenceClassification", {"num_labels": 2}), ("BertForMaskedLM", {"bert_binary_head": True}),
                        ("BertForMaskedLM", {"pretraining_flag": False}), ("BertForMaskedLM", {"model_type_name": "gpt"})):
        with pytest.raises(ConfigError, match=next(iter(given))):
            arguments(kind, **given)
    with pytest.raises(ConfigError, match="an encoder alone"):
        prepared("BertForMaskedLM", decoder_seq_length=8)
    with pytest.raises(ConfigError, match="a decoder alone"):
        plugin_support.prepared(encoder_seq_length=8)


def meta_of(kind: str, folder, **config):
    """An object of that class without weights, whose config names the folder."""
    settings = transformers.AutoConfig.from_pretrained(folder, **config)
    with torch.device("meta"):
        return getattr(transformers, kind)(settings)


@pytest.mark.parametrize("prefix", ["Bert", "MegatronBert"])
def test_a_classification_begins_with_another_heads_weights(prefix, tmp_path, caplog):
    trained = make_encoder(f"{prefix}ForPreTraining")
    trained.save_pretrained(tmp_path)
    forget_states()
    with caplog.at_level(logging.WARNING):
        model = Accelerator().prepare(meta_of(f"{prefix}ForSequenceClassification", tmp_path, num_labels=5))
        values = model.eval().state_dict()
    said = " ".join(caplog.messages)
    assert f"holds a {prefix}ForPreTraining" in said and "drawn anew from the seed: classifier.weight, classifier.bias" in said
    assert "left out: cls.predictions.transform.dense.weight" in said
    assert values["classifier.weight"].shape == (5, 16) and 0 < values["classifier.weight"].abs().max() < 1
    kept = {name: value for name, value in trained.state_dict().items() if name in values}
    assert len(kept) == len(values) - 2 and all(torch.equal(values[name], value) for name, value in kept.items())


def test_the_same_on_two_ranks(python_build, tmp_path, long_run):
    if not long_run:
        pytest.skip("the long run has it (--long)")
    make_encoder("BertForMaskedLM").save_pretrained(tmp_path / "masked")
    script = Path(__file__).parent / "scripts/encoder_from_folder.py"
    python_build.run(script, tmp_path / "masked", tmp_path / "out.json", launcher=python_build.launcher("--num_processes", 2))
    found = json.loads((tmp_path / "out.json").read_text())
    new = {name for name, same in found["same"].items() if not same}
    assert new == {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}
    assert found["losses"][-1] < 0.5 * found["losses"][0]


def test_num_labels_that_do_not_fit_the_file(tmp_path):
    make_encoder("BertForSequenceClassification", num_labels=3).save_pretrained(tmp_path)
    forget_states()
    with pytest.raises(CheckpointError, match="model.num_labels: 3 there, 4 here"):
        Accelerator().prepare(meta_of("BertForSequenceClassification", tmp_path, num_labels=4)).eval().state_dict()
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"], config["label2id"] = {str(i): str(i) for i in range(4)}, {str(i): i for i in range(4)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    forget_states()
    with pytest.raises(CheckpointError, match="classifier.weight"):
        Accelerator().prepare(meta_of("BertForSequenceClassification", tmp_path)).eval().state_dict()


@pytest.mark.parametrize("kind", KINDS[:3])
def test_saved_and_resumed(kind, tmp_path):
    accelerator, model, optimizer, _ = prepared(kind, {"hidden_dropout_prob": 0.1})
    step(accelerator, model, optimizer, batch_of(kind))
    accelerator.save_state(tmp_path)
    expected = [step(accelerator, model, optimizer, batch_of(kind)) for _ in range(2)]
    accelerator, model, optimizer, _ = prepared(kind, {"hidden_dropout_prob": 0.1})
    accelerator.load_state(tmp_path)
    assert [step(accelerator, model, optimizer, batch_of(kind)) for _ in range(2)] == expected
