"""T5's samples over .idx/.bin of sentences: as numpy draws them, and what vocabularies and lengths they need."""

import json

import numpy
import pytest
from bert_reference import write_sentences
from t5_reference import T5Rules, t5_sample
from test_bert_data import documents, record_pieces
from thread_ranks import needs_module

needs_module()
from tessera.data.sentence_samples import open_t5_samples  # noqa: E402
from tessera.errors import ConfigError, DataError, InvalidArgument  # noqa: E402

SENTENCES = [[4, 5, 6, 7, 8, 9], [10, 30, 11, 12, 31, 32, 13], [14, 15, 16, 17, 18], [19, 33, 20, 21, 22, 23, 24]]
GOLDEN = T5Rules(pieces=set(range(30, 36)), sentinels=range(100, 110))
PADS = {"text_enc": 0, "text_dec": 0, "labels": -1}
IDS = dict(bos_id=36, eos_id=37, pad_id=0, sentinel_ids=[100, 109])


def opened(prefix, count, encoder=40, decoder=24, **options):
    """The training samples, and the rows of their map."""
    cache = prefix.parent / "cache" / str(len(list(prefix.parent.glob("cache/*"))))
    train = open_t5_samples(prefix, (count, 0, 0), encoder, decoder, **{"split": "1,0,0", "cache_dir": cache, **options})[0]
    (rows,) = cache.glob("*T5MaskedWordPieceDataset-train-sample_index.npy")
    return train, numpy.load(rows)


def check(columns, at, expected):
    for name, padding in PADS.items():
        values = expected[name]
        assert columns[name][at].tolist() == values + [padding] * (columns[name].shape[1] - len(values)), (at, name)
    ends = {name: numpy.arange(columns[name].shape[1]) < len(expected[name]) for name in ("text_enc", "text_dec")}
    read, said = ends["text_enc"], ends["text_dec"]
    for name, mask in (("loss_mask", said), ("enc_mask", numpy.outer(read, read)), ("dec_mask", numpy.tril(numpy.outer(said, said))),
                       ("enc_dec_mask", numpy.outer(said, read))):
        assert numpy.array_equal(columns[name][at], mask), (at, name)


def test_samples_are_megatrons(tmp_path):
    """What Megatron's dataset gives: decoder input and the end of the encoder's."""
    write_sentences(tmp_path / "d", [SENTENCES])
    record_pieces(tmp_path, set(range(30, 36)))
    samples, rows = opened(tmp_path / "d", 4, 26, 12, short_seq_prob=0.0, **IDS)
    assert rows.tolist() == [[0, 4, 24]] * 4
    columns = samples.fetch(range(4))
    for i, said in enumerate(([36, 100, 7, 8, 9], [36, 100, 9, 10, 30], [36, 100, 9, 10, 30], [36, 100, 20, 21, 101, 23])):
        expected = t5_sample(SENTENCES, 24, i, GOLDEN)
        assert expected["text_dec"] == said and expected["labels"] == [*said[1:], 37]
        check(columns, i, expected)
    assert expected["text_enc"][-5:] == [19, 33, 100, 22, 101]


@pytest.mark.parametrize("rules, options", [
    (GOLDEN, {}),
    (T5Rules(seed=4294967290, pieces={9, 30}, mask_prob=0.4, longest=3, geometric=False, sentinels=range(139, 99, -1)),
     dict(seed=4294967290, mask_prob=0.4, masking_max_ngram=3, masking_use_geometric_distribution=False, sentinel_ids=[139, 100])),
    (T5Rules(seed=7, whole_words=False), dict(seed=7, masking_do_full_word=False))], ids=["pretrain_t5", "not geometric", "single pieces"])
def test_samples_are_those_of_numpy(tmp_path, rules, options):
    made = documents(rules.seed)
    write_sentences(tmp_path / "d", made)
    record_pieces(tmp_path, rules.pieces)
    rules = rules._replace(sentinels=rules.sentinels if "sentinel_ids" in options else range(100, 110))
    samples, rows = opened(tmp_path / "d", 150, decoder=40, **{"short_seq_prob": 0.3, **IDS, **options})
    sentences = [sentence for document in made for sentence in document]
    assert len(samples) == len(rows) >= 150 and any(target < 38 for target in rows[:, 2]) and len({tuple(row) for row in rows}) > 40
    columns = samples.fetch(range(150))
    for i, (first, end, target) in enumerate(rows[:150]):
        check(columns, i, t5_sample(sentences[first:end], target, i, rules))
    assert (columns["enc_mask"][:, 0].sum(1) < 40).any()


def vocabulary(folder, tokens, **roles):
    """A tokenizer.json, and the names of its special tokens beside it."""
    vocab = {token: i for i, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}}))
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return folder / "tokenizer.json"


def test_sentinels_of_a_vocabulary_and_behind_one(tmp_path):
    write_sentences(tmp_path / "d", [[[5, 6, 14], [7, 8], [9, 10, 15]]] * 6)
    words = [f"w{i}" for i in range(16)]
    given = dict(mask_prob=0.4, short_seq_prob=0.0)
    # T5's own: sentinels fall, the decoder begins with padding.
    own = vocabulary(tmp_path, ["<pad>", "</s>", "<unk>", *words, *(f"<extra_id_{i}>" for i in reversed(range(5)))])
    columns = opened(tmp_path / "d", 6, 16, 12, vocab_file=own, vocab_size=24, **given)[0].fetch(range(6))
    assert set(columns["text_dec"][:, 0]) == {0} and set(columns["text_dec"][:, 1]) == {23}
    assert all(row[row >= 0][-1] == 1 for row in columns["labels"]) and 22 in columns["text_enc"]
    # Behind a vocabulary without: as Megatron's tokenizers, [BOS] and [EOS] first.
    behind = vocabulary(tmp_path, ["[PAD]", "[UNK]", *words])
    columns = opened(tmp_path / "d", 6, 16, 12, vocab_file=behind, vocab_size=40, vocab_extra_ids=8, **given)[0].fetch(range(6))
    assert set(columns["text_dec"][:, 0]) == {18} and set(columns["text_dec"][:, 1]) == {20}
    assert all(row[row >= 0][-1] == 19 for row in columns["labels"]) and 21 in columns["text_enc"]
    (tmp_path / "one").mkdir()
    for wrong, error, message in (
            (dict(vocab_extra_ids=0), ConfigError, "<extra_id_0>.*data.vocab_extra_ids"),
            (dict(vocab_size=27), ConfigError, "with its 8 sentinels the vocabulary of the data has 28 tokens, and the model's 27"),
            (dict(vocab_file=vocabulary(tmp_path / "one", ["[PAD]", *words, "<extra_id_0>"])), ConfigError, "has 1 sentinels"),
            (dict(vocab_file=None, masking_do_full_word=False, vocab_extra_ids=0), ConfigError, "<extra_id_0>"),
            (dict(vocab_file=None, masking_do_full_word=False, sentinel_ids=[20, 21], vocab_extra_ids=0), ConfigError, "</s>.*data.eos_id"),
            (dict(sentinel_ids=[20]), ConfigError, "two ids"), (dict(mask_prob=1.5), InvalidArgument, "mask_prob 1.5")):
        with pytest.raises(error, match=message):
            opened(tmp_path / "d", 6, 16, 12, **{**given, "vocab_file": behind, "vocab_size": 40, "vocab_extra_ids": 8, **wrong})


def test_what_does_not_fit(tmp_path):
    write_sentences(tmp_path / "d", documents(3))
    record_pieces(tmp_path, {30})
    with pytest.raises(ConfigError, match="9 are left out, and a decoder of 10 tokens has no room"):
        opened(tmp_path / "d", 4, 62, 10, **IDS)
    with pytest.raises(ConfigError, match="an encoder of 3 tokens is too short"):
        opened(tmp_path / "d", 4, 3, 10, **IDS)
    with pytest.raises(ConfigError, match="less than one token"):
        opened(tmp_path / "d", 4, 8, 10, **IDS)
    single = dict(masking_max_ngram=1, short_seq_prob=0.0, **IDS)
    with pytest.raises(DataError, match=r"tokens in the decoder, and training.decoder_seq_length is 12: raise it to 19"):
        opened(tmp_path / "d", 40, 62, 12, **single)[0].fetch(range(40))
    with pytest.raises(DataError, match="runs of words, and there are 2 sentinels: raise data.vocab_extra_ids"):
        opened(tmp_path / "d", 40, 62, 24, **{**single, "sentinel_ids": [100, 101]})[0].fetch(range(40))


def test_the_loader_over_indexed_data(tmp_path):
    """Which of its arguments, and of the plugin's, samples of T5 are made with."""
    from types import SimpleNamespace

    from tessera.data.indexed_loaders import admit, samples_provider
    from tessera.utils import MegatronLMPlugin

    write_sentences(tmp_path / "d", documents(3))
    record_pieces(tmp_path, {30})

    def provided(plugin, **given):
        session = SimpleNamespace(config={"model_type": "t5", "vocab_size": 200})
        accelerator = SimpleNamespace(state=SimpleNamespace(megatron_lm_plugin=plugin), _models=[SimpleNamespace(_session=session)])
        own = admit({"data_path": str(tmp_path / "d"), "split": "1,0,0", "encoder_seq_length": 40, "micro_batch_size": 2, **given})
        return samples_provider(accelerator, own)((8, 0, 0))[0].fetch(range(8))

    by_hand = open_t5_samples(tmp_path / "d", (8, 0, 0), 40, 20, split="1,0,0", vocab_extra_ids=9, mask_prob=0.25)[0].fetch(range(8))
    both = MegatronLMPlugin(other_megatron_args={"mask_prob": 0.25, "vocab_extra_ids": 9}, decoder_seq_length=20)
    for found in (provided(both), provided(MegatronLMPlugin(), mask_prob=0.25, vocab_extra_ids=9, decoder_seq_length=20)):
        assert all(numpy.array_equal(found[name], by_hand[name]) for name in by_hand) and found["text_dec"].shape == (8, 20)
    with pytest.raises(ConfigError, match="need decoder_seq_length"):
        provided(MegatronLMPlugin())
