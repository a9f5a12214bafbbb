"""T5 in Python: batches, outputs, train steps, indexed data, what is refused. That it trains as in PyTorch on every layout:
test_train_like_torch.py."""

import copy
import json
import logging
import os
from pathlib import Path

import numpy
import plugin_support
import pytest
import torch
import transformers
from bert_reference import write_sentences
from plugin_support import forget_states, make_t5, step
from test_bert_data import documents, record_pieces

from tessera import Accelerator
from tessera.causal_lm import CausalLM
from tessera.data.key_masks import keys_of
from tessera.engine.t5_train_step import two_sequences
from tessera.errors import CheckpointError, ConfigError, DataError, InvalidArgument
from tessera.utils import MegatronLMDummyDataLoader, MegatronLMDummyScheduler, MegatronLMPlugin, T5TrainStep, full_gradients

fresh_states = plugin_support.fresh_states
GATED = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
# Version 1.0; 1.1 as Transformers 5 makes it of a config alone (tied, not scaled), and as it reads weights with another head; mT5.
MODELS = {"1.0": ("T5", False, {}), "1.1 tied": ("T5", False, GATED), "1.1": ("T5", True, GATED), "mT5": ("MT5", True, {})}


def batch_of(decoder: bool = False) -> dict:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 40, (4, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 8:], mask[2, :3] = 0, 0
    labels = torch.randint(1, 40, (4, 7), generator=generator)
    labels[0, 5:], labels[3, :2] = -100, -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if decoder:
        own = torch.ones(4, 7, dtype=torch.long)
        own[0, 5:], own[3, :2] = 0, 0
        batch |= {"decoder_input_ids": torch.randint(1, 40, (4, 7), generator=generator), "decoder_attention_mask": own}
    return batch


def without_labels(batch: dict) -> dict:
    return {name: value for name, value in batch.items() if name != "labels"}


def prepared(model=None, **fields):
    """What prepare() makes of a tiny model and its optimizer, and a copy in PyTorch."""
    forget_states()
    model = model or make_t5()
    reference = copy.deepcopy(model)
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**fields) if fields else None)
    return (accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)), reference)


def close(ours, theirs, limit: float = 1e-5) -> None:
    assert ours.shape == theirs.shape and (ours - theirs).abs().max() <= limit


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_transformers(name, tmp_path):
    kind, own_head, config = MODELS[name]
    accelerator, model, _, reference = prepared(make_t5(kind, own_head, **config))
    for batch in (batch_of(), batch_of(decoder=True)):
        ours, theirs = model(**batch), reference.train()(**batch)
        assert type(ours) is type(theirs)
        close(ours.loss, theirs.loss)
        asked = without_labels({"decoder_input_ids": batch["labels"].clamp(min=0), **batch})
        there = asked.get("decoder_attention_mask", torch.ones(4, 7)) > 0  # what padding says counts nowhere
        close(model(**asked).logits[there], reference(**asked).logits[there])
    in_order = [batch[key] for key in ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")]
    close(model(*in_order, return_dict=False)[0][there], reference(*in_order).logits[there])
    model.eval()
    with torch.no_grad():
        close(model(**batch).loss, reference.eval()(**batch).loss)
    accelerator.unwrap_model(model).save_pretrained(tmp_path / "saved")
    saved = type(reference).from_pretrained(tmp_path / "saved")
    assert (saved.lm_head.weight is saved.shared.weight) != own_head and saved.config.architectures == [type(reference).__name__]
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in saved.state_dict().items())
    assert set(model.state_dict()) == {name for name, _ in reference.named_parameters()}


@pytest.mark.parametrize("name", ["1.0", "1.1"])
def test_a_loss_of_logits_trains_as_in_pytorch(name):
    kind, own_head, config = MODELS[name]
    accelerator, model, _, reference = prepared(make_t5(kind, own_head, **config), return_logits=True, num_micro_batches=2)
    batch = batch_of(decoder=True)
    own = model(**batch)
    close(own.loss, reference.train()(**batch).loss)
    accelerator.backward(own.loss)
    reference(**batch).loss.backward()
    found = full_gradients(model)
    assert set(found) == {name for name, _ in reference.named_parameters()}
    for name, parameter in reference.named_parameters():
        close(found[name], parameter.grad)


def test_from_auto_classes_and_folders(tmp_path):
    """The class of a config; weights of a folder, which each rank reads for itself."""
    model = transformers.AutoModelForSeq2SeqLM.from_config(make_t5().config)
    assert Accelerator().prepare(model).eval()(**batch_of()).loss > 0
    original = make_t5("T5", True, **GATED)
    original.save_pretrained(tmp_path)
    forget_states()
    with torch.device("meta"):
        empty = transformers.AutoModelForSeq2SeqLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    with pytest.raises(CheckpointError, match="the folder's head is its own: read it by from_pretrained"):
        Accelerator().prepare(empty).eval().state_dict()
    forget_states()
    with torch.device("meta"):
        empty = transformers.AutoModelForSeq2SeqLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    empty.lm_head.weight = torch.nn.Parameter(torch.empty_like(empty.shared.weight))
    values = Accelerator().prepare(empty).eval().state_dict()
    assert all(torch.equal(values[name], value) for name, value in original.named_parameters())


def test_dropout_of_the_modules_counts():
    model = make_t5(dropout_rate=0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif "dropout" in vars(module):
            module.dropout = 0.0
    _, ours, _, reference = prepared(model)
    close(ours(**batch_of()).loss, reference.eval()(**batch_of()).loss)
    uneven = make_t5()
    uneven.encoder.block[1].layer[0].SelfAttention.dropout = 0.3
    with pytest.raises(ConfigError, match="dropout within attention differs"):
        prepared(uneven)


def test_what_a_call_is_refused_for():
    accelerator, model, optimizer, _ = prepared()
    holes = torch.ones(4, 11, dtype=torch.long)
    holes[2, 4] = 0
    cases = [(InvalidArgument, "neither labels nor decoder_input_ids", {"labels": None}),
             (InvalidArgument, "labels has the shape", {"decoder_input_ids": torch.zeros(4, 6).long()}),
             (InvalidArgument, r"input_ids have the shape \(3, 11\)", {"input_ids": torch.zeros(3, 11).long(), "attention_mask": None}),
             (InvalidArgument, "attention_mask has the shape", {"attention_mask": torch.ones(4, 10)}),
             (InvalidArgument, "decoder_attention_mask has the shape", {"decoder_attention_mask": torch.ones(4, 11)}),
             (InvalidArgument, "attention_mask of sample 2 has zeros between", {"attention_mask": holes}),
             (InvalidArgument, "decoder_attention_mask of sample 2 has zeros between", {"decoder_attention_mask": holes[:, :7]}),
             (InvalidArgument, "what an encoder returned", {"encoder_outputs": (torch.zeros(4, 11, 16),)}),
             (InvalidArgument, "embeddings as input", {"decoder_inputs_embeds": torch.zeros(4, 7, 16)}),
             (InvalidArgument, "position_ids: T5 knows distances alone", {"position_ids": torch.arange(11)[None]}),
             (InvalidArgument, "num_items_in_batch", {"num_items_in_batch": 3}),
             (InvalidArgument, "decoder_input_ids, decoder_attention_mask and labels; remove", {"index": torch.zeros(4)}),
             (DataError, "token of the encoder 40", {"input_ids": torch.full((4, 11), 40)}),
             (DataError, "label", {"labels": torch.full((4, 7), 40), "decoder_input_ids": torch.zeros(4, 7).long()})]
    for error, words, change in cases:
        with pytest.raises(error, match=words):
            model(**{**batch_of(), **change})
    step(accelerator, model, optimizer, batch_of())  # nothing is left behind
    start = make_t5()
    start.config.decoder_start_token_id = None
    with pytest.raises(InvalidArgument, match="decoder_start_token_id is not set"):
        prepared(start)[1](**batch_of())


def test_models_that_are_refused():
    def failure(words, model, **fields):
        with pytest.raises(ConfigError, match=words):
            prepared(model, **fields)

    failure("AutoModelForSeq2SeqLM", transformers.T5EncoderModel(make_t5().config))
    short = make_t5()
    del short.decoder.block[2]
    failure("no module 'decoder.block.2'", short)
    fewer = make_t5()
    fewer.decoder.config.num_heads = 1
    failure("the config of 'decoder' says num_heads = 1, the model's 2", fewer)
    apart = make_t5()
    apart.decoder.embed_tokens.weight = torch.nn.Parameter(torch.zeros(40, 16))
    failure("decoder.embed_tokens.weight", apart)
    failure("looks to both sides", make_t5(), eod_mask_loss=True, other_megatron_args={"eos_token_id": 3})
    failure("feed_forward_proj", make_t5(feed_forward_proj="gated-relu"))


def megatron_batch() -> dict:
    """The same as batch_of(decoder=True), but that its padding is at the end only, in Megatron's columns."""
    given = batch_of(decoder=True)
    read, said = torch.ones(4, 11, dtype=torch.long), torch.ones(4, 7, dtype=torch.long)
    read[1, 8:], said[0, 5:] = 0, 0
    counted = said > 0
    return {"text_enc": given["input_ids"], "text_dec": given["decoder_input_ids"], "loss_mask": counted.long(),
            "labels": torch.where(counted, given["labels"].clamp(min=0), -1), "truncated": torch.zeros(4).long(),
            "enc_mask": read[:, :, None] * read[:, None, :], "dec_mask": torch.tril(said[:, :, None] * said[:, None, :]),
            "enc_dec_mask": said[:, :, None] * read[:, None, :]}


def as_transformers(batch: dict) -> dict:
    return {"input_ids": batch["text_enc"], "decoder_input_ids": batch["text_dec"], "attention_mask": batch["enc_mask"][:, 0],
            "decoder_attention_mask": batch["dec_mask"][:, -1] if batch["dec_mask"][:, -1].any() else None,
            "labels": torch.where(batch["loss_mask"] > 0, batch["labels"], -100)}


@pytest.mark.parametrize("config, remedy", [({"model_type": "t5"}, "Transformers builds"), ({"family": "t5"}, "Transformers builds"),
                                            ({"family": "bert"}, "Transformers builds"), ({"family": "megatron_t5"}, "tessera train")], ids=str)
def test_a_decoder_alone_is_asked_for(config, remedy):
    """Also of a Tessera folder, whose section `model` names the family."""
    with pytest.raises(ConfigError, match=f"CausalLM is a decoder alone.*{remedy}"):
        CausalLM(config).describe()


def test_megatrons_samples():
    _, model, _, reference = prepared()
    batch = megatron_batch()
    expected = reference(input_ids=batch["text_enc"], attention_mask=batch["enc_mask"][:, 0], decoder_input_ids=batch["text_dec"],
                         labels=torch.where(batch["loss_mask"] > 0, batch["labels"], -100)).loss
    close(model(**batch).loss, expected)
    later = {**batch, "enc_mask": batch["enc_mask"][:, 0], "dec_mask": batch["loss_mask"]}  # as later versions have them
    del later["enc_dec_mask"]
    close(model(**later).loss, expected)
    for words, change in (("loss_mask counts position", {"loss_mask": torch.ones(4, 7)}), ("without it", {"text_dec": None}),
                          ("enc_mask has the shape", {"enc_mask": torch.ones(4, 9, 11)}),
                          ("dec_mask: what position 0 of sample 0 sees", {"dec_mask": torch.ones(4, 7, 7)}),
                          ("enc_mask and enc_dec_mask leave other tokens of the encoder to sample 1", {"enc_dec_mask": torch.ones(4, 7, 11)})):
        with pytest.raises(InvalidArgument, match=words):
            model(**{**batch, **change})


def test_masks_of_two_dimensions():
    seen = numpy.zeros((2, 5, 5), dtype=int)
    seen[0, :3, :3], seen[1, :, 1:] = 1, 1
    encoder, decoder = keys_of((2, 5), (2, 4), seen[:, None], numpy.tril(numpy.ones((1, 4, 4))), None)
    assert encoder.tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]] and decoder.tolist() == [[1] * 4] * 2
    seen[1, 3, 4] = 0
    with pytest.raises(InvalidArgument, match="position 3 of sample 1"):
        keys_of((2, 5), (2, 4), seen, None, None)


class Doubled(T5TrainStep):
    """A user's: Accelerate's signatures."""

    def get_batch_func(self, accelerator, megatron_dataset_flag):
        inner = super().get_batch_func(accelerator, megatron_dataset_flag)
        return lambda iterator: inner(iterator)

    def get_loss_func(self, accelerator):
        inner = super().get_loss_func(accelerator)

        def loss_func(loss_mask, output_tensor):
            loss, logged = inner(loss_mask, output_tensor)
            return 2 * loss, {name: 2 * value for name, value in logged.items()}

        return loss_func


def test_train_steps():
    for batch in (batch_of(), batch_of(decoder=True), megatron_batch()):
        own = prepared(num_micro_batches=1)
        expected = [step(*own[:3], batch) for _ in range(3)]
        assert type(own[1].train_step_handler) is T5TrainStep
        assert set(own[1].train_step(**batch)[0]) == {"lm loss"}
        accelerator, model, optimizer, _ = prepared(custom_train_step_class=T5TrainStep)
        assert [step(accelerator, model, optimizer, batch) for _ in range(3)] == pytest.approx(expected, rel=1e-5)
        assert set(model.eval_step(**batch)) == {"lm loss"}
    batches = {"custom_get_batch_function": lambda iterator: two_sequences(next(iterator), {"decoder_start_token_id": 0, "pad_token_id": 0})}
    accelerator, model, optimizer, _ = prepared(**batches)
    assert step(accelerator, model, optimizer, batch) == pytest.approx(expected[0], rel=1e-5)
    accelerator, model, optimizer, _ = prepared(custom_train_step_class=Doubled, num_micro_batches=2)
    losses, skipped, norm, _ = model.train_step(**batch)
    assert set(losses) == {"lm loss"} and skipped == 0 and norm > 0
    assert isinstance(model(**batch), transformers.modeling_outputs.Seq2SeqLMOutput)


def test_masks_of_the_train_step():
    mask = torch.tensor([[1, 1, 0]])
    assert T5TrainStep.attn_mask_postprocess(mask).tolist() == [[[False, False, True], [False, False, True], [True] * 3]]
    assert T5TrainStep.get_decoder_mask(2, "cpu").tolist() == [[[False, True], [False, False]]]
    assert T5TrainStep.get_enc_dec_mask(mask, 2, "cpu").tolist() == [[[False, False, True]] * 2]
    ours = two_sequences(batch_of(), {"decoder_start_token_id": 5, "pad_token_id": 6})
    assert ours[1][0].tolist() == [5, *batch_of()["labels"][0, :5].tolist(), 6] and ours[2].sum() == 24
    with pytest.raises(ConfigError, match="it must be bool"):
        prepared(custom_get_batch_function=lambda iterator: (*ours[:4], batch_of()["attention_mask"] < 0.5, None, None))[1](**batch_of())


def test_a_custom_loss_function():
    """Twice the weight on a sample's first token, against PyTorch."""
    def loss_func(loss_mask, losses):
        weights = loss_mask.clone()
        weights[:, 0] *= 2
        return (losses * weights).sum() / loss_mask.sum(), {"weighted": losses.detach().mean()}

    accelerator, model, optimizer, reference = prepared(custom_loss_function=loss_func)
    logits = reference(**batch_of()).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch_of()["labels"], reduction="none")
    loss_func((batch_of()["labels"] != -100).float(), losses)[0].backward()
    accelerator.backward(model(**batch_of()).loss)
    for name, parameter in reference.named_parameters():
        close(full_gradients(model)[name], parameter.grad)


def test_arguments_say_what_the_model_is():
    found = prepared(encoder_seq_length=11, decoder_seq_length=7)[1].get_module_config()
    assert (found.model_type_name, found.encoder_seq_length, found.decoder_seq_length) == ("t5", 11, 7)
    assert (found.num_layers, found.encoder_num_layers, found.decoder_num_layers, found.kv_channels) == (2, 2, 3, 5)
    found = prepared(seq_length=12, other_megatron_args={"model_type_name": "t5", "num_layers": 2})[1].get_module_config()
    assert (found.encoder_seq_length, found.decoder_seq_length) == (12, 512)
    for words, fields in (("'model_type_name' is 'gpt'", {"other_megatron_args": {"model_type_name": "gpt"}}),
                          ("asks for num_layers 5, and the model given to prepare\\(\\) has 2", {"other_megatron_args": {"num_layers": 5}}),
                          ("same thing", {"seq_length": 12, "encoder_seq_length": 11})):
        with pytest.raises(ConfigError, match=words):
            prepared(**fields)


@pytest.fixture
def sentences(tmp_path):
    write_sentences(tmp_path / "d", documents(5))
    record_pieces(tmp_path, {30})
    return tmp_path / "d"


def loaders(prefix, loader=None, **fields):
    forget_states()
    model = make_t5(vocab_size=120)
    optimizer = plugin_support.adamw(model.parameters())
    dummy = MegatronLMDummyDataLoader(**{"data_path": str(prefix), "split": "8,1,1", "encoder_seq_length": 40, "micro_batch_size": 2,
                                         **(loader or {})})
    plugin = MegatronLMPlugin(**{"train_iters": 4, "eval_iters": 1, "eval_interval": 2, "decoder_seq_length": 20,
                                 "other_megatron_args": {"vocab_extra_ids": 9}, **fields})
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    return (accelerator, *accelerator.prepare(model, optimizer, MegatronLMDummyScheduler(optimizer), dummy, dummy, dummy))


def test_indexed_data(sentences, tmp_path, caplog):
    """Megatron's pre-training script: its columns, with the model's own loss and by a train step, saved and resumed."""
    caplog.set_level(logging.WARNING)
    accelerator, model, optimizer, scheduler, train, valid, test = loaders(sentences, custom_train_step_class=T5TrainStep)
    assert "no effect" not in caplog.text
    losses = []
    for batch in train:
        assert batch["text_enc"].shape == (2, 40) and batch["enc_dec_mask"].shape == (2, 20, 40)
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == 2:
            accelerator.save_state(str(tmp_path / "state"))
        if len(losses) == 3:
            break
    accelerator, model, optimizer, scheduler, train, *_ = loaders(sentences, custom_train_step_class=T5TrainStep)
    accelerator.load_state(str(tmp_path / "state"))
    assert train.consumed_samples == 4 and model(**next(train)).loss.item() == losses[2]
    usual = loaders(sentences, loader={"decoder_seq_length": 20, "vocab_extra_ids": 9}, decoder_seq_length=None, other_megatron_args=None)
    assert usual[1](**next(usual[4])).loss.item() == pytest.approx(losses[0], rel=1e-6)
    with pytest.raises(ConfigError, match="need decoder_seq_length"):
        loaders(sentences, decoder_seq_length=None)


def test_saved_and_resumed(tmp_path):
    model = make_t5(dropout_rate=0.1)
    accelerator, model, optimizer, _ = prepared(model)
    step(accelerator, model, optimizer, batch_of())
    accelerator.save_state(tmp_path)
    expected = [step(accelerator, model, optimizer, batch_of()) for _ in range(2)]
    accelerator, model, optimizer, _ = prepared(make_t5(dropout_rate=0.1))
    accelerator.load_state(tmp_path)
    assert [step(accelerator, model, optimizer, batch_of()) for _ in range(2)] == expected


def test_killed_and_resumed(python_build, tmp_path, long_run):
    """One of two tensor ranks is killed between its step and the next save; the next job goes on bit for bit."""
    if not long_run:
        pytest.skip("the long run has it (--long)")
    script, launcher = Path(__file__).parent / "scripts/seq2seq_killed.py", python_build.launcher("--num_processes", 4)
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2] / "python"), str(Path(__file__).parent)])}
    python_build.run(script, tmp_path / "straight", -1, launcher=launcher, **paths)
    python_build.run(script, tmp_path / "run", 3, launcher=launcher, code=137, **paths)
    python_build.run(script, tmp_path / "run", -1, launcher=launcher, **paths)
    results = [json.loads((tmp_path / name / "losses.json").read_text()) for name in ("run", "straight")]
    assert len(results[1]) == 6 and results[0] == results[1]
