"""BERT's samples in Python: MegatronLMDummyDataLoader over .idx/.bin of sentences."""

import json
import logging
import os
import subprocess
from pathlib import Path

import numpy
import plugin_support
import pytest
from bert_reference import Rules, sample, write_sentences
from cli_support import environment
from test_bert_data import VOCABULARY, documents, record_pieces

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tessera import Accelerator  # noqa: E402
from tessera.data.sentence_samples import open_bert_samples  # noqa: E402
from tessera.errors import ConfigError, InvalidArgument  # noqa: E402
from tessera.utils import BertTrainStep, MegatronLMDummyDataLoader, MegatronLMDummyScheduler, MegatronLMPlugin  # noqa: E402

fresh_states = plugin_support.fresh_states
SCRIPT = Path(__file__).parent / "scripts/indexed_sentences.py"
IDS = dict(cls_id=1, sep_id=2, mask_id=3, pad_id=0, vocab_size=40)
RUN = dict(train_iters=4, eval_iters=1, eval_interval=2)
SENTENCES = [[4, 5, 6, 7, 8, 9], [10, 30, 11, 12, 31, 32, 13], [14, 15, 16, 17, 18], [19, 33, 20, 21, 22, 23, 24]]
# What Megatron's dataset gives for them: tokens before masking, position: (label, written); B begins; swapped.
AS_FOUND = "1 5 6 7 8 9 10 30 11 12 31 32 13 14 15 2 19 33 20 21 22 23 24 2"
GOLDEN = [(AS_FOUND, {9: (12, 3), 10: (31, 3), 11: (32, 3)}, 16, 0),
          (AS_FOUND, {2: (6, 6), 3: (7, 7), 20: (22, 3)}, 16, 0),
          ("1 15 16 17 18 19 33 20 21 22 23 24 2 6 7 8 9 10 30 11 12 31 32 2", {2: (16, 3), 3: (17, 3), 4: (18, 3)}, 13, 1),
          ("1 5 6 7 8 9 10 30 11 12 31 32 2 16 17 18 19 33 20 21 22 23 24 2", {5: (9, 3), 19: (21, 3), 20: (22, 3)}, 13, 0)]


def test_samples_are_megatrons(tmp_path):
    write_sentences(tmp_path / "d", [SENTENCES])
    record_pieces(tmp_path, set(range(30, 36)))
    train, valid, _ = open_bert_samples(tmp_path / "d", (4, 0, 0), 24, split="1,0,0", short_seq_prob=0.0, vocab_size=40)
    found = {name: column.tolist() for name, column in train.fetch([0, 1, 2, 3]).items()}
    assert valid is None and set(found) == {"text", "types", "labels", "is_random", "loss_mask", "padding_mask"}
    for i, (before, masked, second, swapped) in enumerate(GOLDEN):
        before = [int(token) for token in before.split()]
        assert all(before[at] == label for at, (label, _) in masked.items())
        assert found["text"][i] == [masked[at][1] if at in masked else token for at, token in enumerate(before)]
        assert found["labels"][i] == [masked[at][0] if at in masked else -1 for at in range(24)]
        assert found["loss_mask"][i] == [int(at in masked) for at in range(24)]
        assert found["types"][i] == [0] * second + [1] * (24 - second) and found["is_random"][i] == swapped
        assert found["padding_mask"][i] == [1] * 24


@pytest.mark.parametrize("kind", ["BertForPreTraining", "MegatronBertForMaskedLM"])
def test_batches_are_those_of_tessera_train(build_dir, tmp_path, kind):
    """Of the same data, seed and keys, padding included."""
    head = kind.endswith("ForPreTraining")
    write_sentences(tmp_path / "d", documents(5))
    (tmp_path / "c.yaml").write_text(f"""
model: {{family: bert, num_layers: 1, hidden_size: 8, num_heads: 2, vocab_size: 40, max_positions: 40, binary_head: {str(head).lower()}}}
training: {{steps: 4, global_batch_size: 6, micro_batch_size: 2, seq_length: 40, eval_interval: 0, seed: 77}}
data: {{path: {tmp_path / "d"}, split: "8,1,1", cache_dir: {tmp_path / "cache"}, masking_do_full_word: false, mask_prob: 0.3,
       short_seq_prob: 0.25, cls_id: 1, sep_id: 2, mask_id: 3, pad_id: 0}}
""")
    done = subprocess.run([build_dir / "tests/bert_samples", tmp_path / "c.yaml", "24"], capture_output=True, text=True, timeout=120,
                          env=environment())
    assert done.returncode == 0, done.stderr
    samples = list(map(json.loads, done.stdout.splitlines()[1:]))
    ids = {name: value for name, value in IDS.items() if name != "vocab_size"}
    dummy = MegatronLMDummyDataLoader(data_path=str(tmp_path / "d"), split="8,1,1", seq_length=40, micro_batch_size=2, seed=77, mask_prob=0.3,
                                      short_seq_prob=0.25, masking_do_full_word=False, **ids)
    model = plugin_support.make_encoder(kind, max_position_embeddings=40)
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=3, **RUN))
    optimizer = plugin_support.adamw(model.parameters())
    made = accelerator.prepare(model, optimizer, MegatronLMDummyScheduler(optimizer), dummy, dummy, dummy)
    batches = [{name: column.tolist() for name, column in batch.items()} for _, batch in zip(range(4), made[3])]
    assert any(sample["end"][0] < 40 for sample in samples)
    for i, expected in enumerate(samples):
        found = {name: column[i % 6] for name, column in batches[i // 6].items()}
        end = expected["end"][0]
        assert found.pop("text") == expected["tokens"]
        assert found.pop("labels") == [-1 if label == -100 else label for label in expected["labels"]]
        assert found.pop("loss_mask") == [int(label != -100) for label in expected["labels"]]
        assert found.pop("padding_mask") == [1] * end + [0] * (40 - end)
        assert found == ({"types": expected["types"], "is_random": expected["label"][0]} if head else {})
    loss = made[0](**next(made[4])).loss
    accelerator.backward(loss)
    assert loss.item() > 0


def test_every_rule_of_masking(tmp_path):
    """The samples are numpy's under each of them."""
    made = documents(9)
    write_sentences(tmp_path / "d", made)
    record_pieces(tmp_path, {9, 30})
    rules = Rules(seed=3, pieces={9, 30}, longer=True, longest=9, mask_prob=0.4)
    options = dict(seed=3, mask_prob=0.4, masking_max_ngram=9, masking_use_longer_ngrams=True, short_seq_prob=0.3, split="1,0,0", vocab_size=40)
    columns = open_bert_samples(tmp_path / "d", (20, 0, 0), 64, cache_dir=tmp_path / "cache", **options)[0].fetch(list(range(20)))
    (rows,) = (tmp_path / "cache").glob("*-train-sample_index.npy")
    sentences = [sentence for document in made for sentence in document]
    for i, (first, end, target) in enumerate(numpy.load(rows)[:20]):
        expected = sample(sentences[first:end], target, i, rules)
        length = int(columns["padding_mask"][i].sum())
        assert columns["text"][i, :length].tolist() == expected["tokens"]
        assert columns["labels"][i, :length].tolist() == [max(label, -1) for label in expected["labels"]]
    usual = columns["text"].tolist()
    for name, value in (("masking_use_geometric_distribution", True), ("masking_do_full_word", False), ("short_seq_prob", 0.9), ("mask_id", 8)):
        assert open_bert_samples(tmp_path / "d", (20, 0, 0), 64, **{**options, name: value})[0].fetch(list(range(20)))["text"].tolist() != usual


def test_the_vocabulary_says_what_samples_are_made_of(tmp_path):
    write_sentences(tmp_path / "d", [[[5, 6, 14], [7, 8], [9, 10, 15]]] * 6)
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    given = dict(split="1,0,0", vocab_size=17, vocab_file=tmp_path / "vocab.txt", mask_prob=0.5, short_seq_prob=0.0)
    samples = open_bert_samples(tmp_path / "d", (6, 0, 0), 16, **given)[0]
    text = samples.fetch(range(6))["text"]
    assert set(text[:, 0]) == {2} and (text == 3).sum() == 12 and (text == 4).any() and set(text[:, 11:].ravel()) == {0}
    assert json.loads(samples.tokenizer)["vocab_size"] == 17
    with pytest.raises(ConfigError, match="vocab_file, or masking_do_full_word=False"):
        open_bert_samples(tmp_path / "d", (6, 0, 0), 16, **{**given, "vocab_file": None})
    with pytest.raises(ConfigError, match=r"\[CLS\].*cls_id"):
        open_bert_samples(tmp_path / "d", (6, 0, 0), 16, **{**given, "vocab_file": None, "masking_do_full_word": False})
    record_pieces(tmp_path, {14})
    with pytest.raises(ConfigError, match="vocab_file is BertWordPiece.*but the data were made with"):
        open_bert_samples(tmp_path / "d", (6, 0, 0), 16, **{**given, "vocab_size": 40})
    with pytest.raises(ConfigError, match="the model's vocabulary is 17"):
        open_bert_samples(tmp_path / "d", (6, 0, 0), 16, **{**given, "vocab_file": None})
    for wrong, words in ((dict(mask_prob="much"), "mask_prob is 'much'"), (dict(mask_prob=1.5), "mask_prob 1.5"),
                         (dict(masking_max_ngram=0), "max_ngram 0"), (dict(masking_do_full_word=1), "True or False"), (dict(cls_id=-1), "cls_id"),
                         (dict(short_seq_prob=2), "short_seq_prob"), (dict(cls_id=40), "cls_id is 40")):
        with pytest.raises((ConfigError, InvalidArgument), match=words):
            open_bert_samples(tmp_path / "d", (6, 0, 0), 16, **{**given, **IDS, "vocab_file": None, **wrong})


def loaders(prefix, model=None, loader=None, **fields):
    """What prepare() makes of the loaders and an encoder, or of another model."""
    plugin_support.forget_states()
    model = model or plugin_support.make_encoder("BertForPreTraining", max_position_embeddings=24)
    optimizer = plugin_support.adamw(model.parameters())
    dummy = MegatronLMDummyDataLoader(**{"data_path": str(prefix), "split": "8,1,1", "seq_length": 24, "micro_batch_size": 2, **(loader or {})})
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**{**RUN, **fields}))
    return (accelerator, *accelerator.prepare(model, optimizer, MegatronLMDummyScheduler(optimizer), dummy, dummy, dummy))


@pytest.fixture
def sentences(tmp_path):
    write_sentences(tmp_path / "d", documents(5))
    record_pieces(tmp_path, {30})
    return tmp_path / "d"


def test_what_the_plugin_says_of_masking(sentences, caplog):
    """It counts where the loader says nothing, and is said to have no effect for a decoder."""
    rules = {"mask_prob": 0.4, "short_seq_prob": 0.0}
    first = next(loaders(sentences)[4])["text"]
    by_plugin = next(loaders(sentences, other_megatron_args=rules)[4])["text"]
    assert not torch.equal(first, by_plugin) and torch.equal(next(loaders(sentences, loader=rules)[4])["text"], by_plugin)
    assert torch.equal(next(loaders(sentences, loader=rules, other_megatron_args={"mask_prob": 0.2})[4])["text"], by_plugin)
    caplog.set_level(logging.WARNING)
    caplog.clear()
    batch = next(loaders(sentences, plugin_support.make_model(n_positions=24), other_megatron_args={"mask_prob": 0.4})[4])
    assert batch["text"].shape == (2, 25) and "'mask_prob' has no effect: gpt2 learns the next token" in caplog.text


def test_train_steps_and_saved_states(sentences, tmp_path):
    fields = dict(custom_train_step_class=BertTrainStep)
    accelerator, model, optimizer, scheduler, train, *_ = loaders(sentences, **fields)
    usual = loaders(sentences)
    expected = usual[1](**next(usual[4])).loss.item()
    accelerator, model, optimizer, scheduler, train, *_ = loaders(sentences, **fields)
    losses = []
    for batch in train:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == 2:
            accelerator.save_state(str(tmp_path / "state"))
    assert losses[0] == pytest.approx(expected, rel=1e-6)
    accelerator, model, optimizer, scheduler, train, *_ = loaders(sentences, **fields)
    accelerator.load_state(str(tmp_path / "state"))
    assert train.consumed_samples == 4 and model(**next(train)).loss.item() == losses[2]


def test_what_is_refused(sentences):
    classifier = plugin_support.make_encoder("BertForSequenceClassification", max_position_embeddings=24)
    for given, words in ((dict(model=classifier), "this model is a classifier"), (dict(loader={"eod_mask_loss": True}), "eod_mask_loss: a bert looks to both sides"),
                         (dict(loader={"encoder_seq_length": 20}), "seq_length is 24 and encoder_seq_length 20"),
                         (dict(loader={"mask_prob": True}), "mask_prob is True"), (dict(loader={"decoder_seq_length": 8}), "'decoder_seq_length' is of samples of T5, and the model is a bert")):
        with pytest.raises(ConfigError, match=words):
            loaders(sentences, **given)


@pytest.mark.parametrize("kind", ["BertForPreTraining", "MegatronBertForMaskedLM"])
def test_training_is_the_same_on_two_processes(python_build, sentences, tmp_path, kind, long_run):
    if "Masked" in kind and not long_run:
        pytest.skip("with tests/run.sh --all")
    results = []
    for processes, micro_batches in ((1, 4), (2, 2)):
        output = tmp_path / f"{processes}.json"
        python_build.run(SCRIPT, kind, sentences, output, str(micro_batches), launcher=python_build.launcher("--num_processes", str(processes)),
                         PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[2] / "python"), str(Path(__file__).parent)]))
        results.append(json.loads(output.read_text()))
    one, two = results
    assert one["losses"] == pytest.approx(two["losses"], rel=1e-6) and one["losses"][4] < one["losses"][0]
    assert one["first"] == two["first"]
