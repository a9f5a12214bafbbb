"""BERT's samples against numpy, and from text to a trained model by the commands."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from bert_reference import Rules, sample, write_sentences
from cli_support import environment, metrics, run, shards, start, wait_for_lines

ROOT = Path(__file__).resolve().parents[2]
IDS = ["data.cls_id=1", "data.sep_id=2", "data.mask_id=3", "data.pad_id=0"]
LENGTH = 40


def documents(seed):
    """Sentences of ids 4 to 39, of many lengths; documents of one sentence, none, and one that is too long."""
    draw = random.Random(seed)
    made = [[[draw.randrange(4, 40) for _ in range(draw.randrange(1, 14))] for _ in range(draw.randrange(0, 12))] for _ in range(40)]
    return made + [[[5] * 600, [6, 7]]]


def samples_of(build_dir, folder, count, *overrides):
    (folder / "c.yaml").write_text(f"""
model: {{family: bert, num_layers: 1, hidden_size: 8, num_heads: 2, vocab_size: 40, max_positions: {LENGTH}}}
training: {{steps: 10, global_batch_size: 40, seq_length: {LENGTH}, eval_interval: 0}}
data: {{path: {folder / "d"}, split: "1,0,0", cache_dir: {folder / "cache"}}}
""")
    done = subprocess.run([build_dir / "tests/bert_samples", folder / "c.yaml", str(count), *overrides], capture_output=True, text=True,
                          timeout=120, env=environment())
    assert done.returncode == 0, done.stderr
    rows, *samples = map(json.loads, done.stdout.splitlines())
    return [rows[i:i + 3] for i in range(0, len(rows), 3)], samples


def record_pieces(folder, pieces):
    """The dataset's record: ids of pieces of words go with the tokenizer's others."""
    sizes = {f"{kind}_bytes": (folder / f"d.{kind}").stat().st_size for kind in ("idx", "bin")}
    special = {"cls": 1, "sep": 2, "mask": 3, "pad": 0, "continuations": [[piece, 1] for piece in sorted(pieces)]}
    tokenizer = {"type": "BertWordPieceCase", "file": "/gone/vocab.txt", "hash": "0", "vocab_size": 40, "end_of_document": 2}
    (folder / "d.tessera.json").write_text(json.dumps({"format": "tessera-dataset", "version": 1, "files": sizes, "append_eod": False,
                                                       "split_sentences": True, "tokenizer": tokenizer, "special_tokens": special}))


@pytest.mark.parametrize("rules, overrides", [
    (Rules(pieces=set(range(28, 36))), []),
    (Rules(seed=77, pieces=set(range(4, 40, 3)), geometric=True, longest=5),
     ["data.masking_use_geometric_distribution=true", "data.masking_max_ngram=5"]),
    (Rules(seed=4294967290, pieces={9, 30}, longer=True, longest=9, mask_prob=0.4),
     ["data.masking_use_longer_ngrams=true", "data.masking_max_ngram=9", "data.mask_prob=0.4"]),
    (Rules(seed=3, whole_words=False, head=False), ["data.masking_do_full_word=false", "model.binary_head=false", *IDS]),
], ids=["pretrain_bert", "geometric", "longer", "no head"])
def test_samples_are_those_of_numpy(build_dir, tmp_path, rules, overrides):
    made = documents(rules.seed)
    write_sentences(tmp_path / "d", made)
    if rules.pieces:
        record_pieces(tmp_path, rules.pieces)
    rows, samples = samples_of(build_dir, tmp_path, 200, f"training.seed={rules.seed}", "data.short_seq_prob=0.3", *overrides)
    sentences = [sentence for document in made for sentence in document]
    assert len({tuple(row) for row in rows}) > 40 and any(row[2] < LENGTH - 3 for row in rows)
    for index, (found, (first, end, target)) in enumerate(zip(samples, rows)):
        expected = sample(sentences[first:end], target, index, rules)
        length = len(expected["tokens"])
        assert found["end"] == [length]
        assert found["tokens"] == expected["tokens"] + [0] * (LENGTH - length)
        assert found["labels"] == expected["labels"] + [-100] * (LENGTH - length)
        assert not rules.head or found["types"] == expected["types"] + [0] * (LENGTH - length)
        assert not rules.head or found["label"] == [expected["label"]]
        assert rules.head or found["types"] == found["label"] == []


VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog", "sat", "ran", "on", "a", "mat", ".", "##s", "##ing", "walk"]
TEXT = "The cat sat.\nThe dogs ran on a mat.\n\n  A dog walking.  \n"


def preprocess(program, folder, *args, code=0, **env):
    own = {"TESSERA_PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "python")}
    return run(program, "preprocess", "--input", folder / "text.jsonl", "--split-sentences", "--overwrite", "--output-prefix",
               folder / "d", *args, code=code, env=own | env)


@pytest.fixture
def word_pieces(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": TEXT}) + "\n" for _ in range(12)))
    return tmp_path


def test_from_text_to_a_trained_model(tessera_program, word_pieces):
    folder, program = word_pieces, tessera_program
    said = preprocess(program, folder, "--vocab-file", folder / "vocab.txt").stdout
    assert "12 documents, 36 sentences, 204 tokens" in said, said
    record = json.loads((folder / "d_text_sentence.tessera.json").read_text())
    assert record["special_tokens"] == {"cls": 2, "sep": 3, "mask": 4, "pad": 0, "continuations": [[14, 2]]}
    assert record["split_sentences"] and record["tokenizer"]["type"] == "BertWordPieceLowerCase"
    (folder / "vocab.txt").rename(folder / "vocab.old")  # training needs no tokenizer
    config = folder / "c.yaml"
    config.write_text(f"""
model: {{family: megatron-bert, num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 17, max_positions: 24}}
optimizer: {{lr: 0.01}}
training: {{steps: 20, seq_length: 24, micro_batch_size: 4, global_batch_size: 8, eval_interval: 20, eval_iters: 1}}
data: {{path: {folder / "d_text_sentence"}, split: "9,3,0"}}
logging: {{dir: {folder / "run"}}}
device: {{threads: 1}}
""")
    done = run(program, "train", config)
    assert "token" in done.stderr and "nsp" in done.stderr
    lines = metrics(folder / "run")
    assert lines[-1]["token_loss"] < lines[0]["token_loss"] and {"eval_token_loss", "eval_nsp_loss", "nsp_loss"} <= lines[-1].keys()
    assert "bert" in run(program, "plan", config).stdout
    # As data of Megatron's tool are: without a record, by their tokenizer's files.
    (folder / "vocab.old").rename(folder / "vocab.txt")
    (folder / "d_text_sentence.tessera.json").unlink()
    run(program, "train", config, f"data.tokenizer={folder / 'vocab.txt'}", f"logging.dir={folder / 'run2'}")
    assert [line["loss"] for line in metrics(folder / "run2")] == [line["loss"] for line in lines]


@pytest.mark.parametrize("overrides", [(), ("parallel.pipeline=2", "training.precision=bf16")], ids=["alone", "pp2 bf16"])
def test_killed_and_resumed_is_the_uninterrupted_run(tessera_program, tmp_path, overrides, long_run):
    """Bit for bit, with dropout, over several epochs of samples."""
    if overrides and not long_run:
        pytest.skip("with tests/run.sh --all")
    write_sentences(tmp_path / "d", documents(4))
    config = tmp_path / "c.yaml"
    config.write_text(f"""
model: {{family: bert, num_layers: 2, hidden_size: 32, num_heads: 4, vocab_size: 40, max_positions: {LENGTH}, dropout: 0.1, attention_dropout: 0.1}}
training: {{steps: 30, seq_length: {LENGTH}, micro_batch_size: 4, global_batch_size: 8, eval_interval: 0}}
data: {{path: {tmp_path / "d"}, split: "1,0,0", masking_do_full_word: false, cls_id: 1, sep_id: 2, mask_id: 3, pad_id: 0}}
checkpoint: {{every: 8}}
logging: {{every: 1}}
device: {{threads: 1}}
""")
    straight, killed = (f"logging.dir={tmp_path / name}" for name in ("straight", "killed"))
    run(tessera_program, "train", config, straight, *overrides)
    process = start(tessera_program, config, killed, *overrides)
    wait_for_lines(process, tmp_path / "killed", 13)
    process.kill()
    process.communicate()
    assert "resuming from" in run(tessera_program, "train", config, killed, *overrides).stderr
    names = ("step", "loss", "token_loss", "nsp_loss", "grad_norm", "lr")
    lines, again = ([[line[name] for name in names] for line in metrics(tmp_path / name)] for name in ("straight", "killed"))
    assert again == lines and [line[0] for line in lines] == list(range(1, 31))
    assert shards(tmp_path / "killed") == shards(tmp_path / "straight")


def test_configs_are_the_usual_models(tessera_program, source_dir):
    for name, parameters in (("base", 110_106_428), ("large", 336_226_108)):
        planned = run(tessera_program, "plan", source_dir / f"configs/bert_{name}.yaml", "--json").stdout
        assert json.loads(planned)["parameters"] == parameters


def test_what_preprocess_refuses_and_tells(tessera_program, word_pieces):
    folder, program = word_pieces, tessera_program
    assert "not known; use lines or punkt" in preprocess(program, folder, "--sentence-splitter", "dots", code=2).stderr
    (folder / "text.jsonl").write_text('{"text": "one line only"}\n')
    assert "no document has more than one sentence" in preprocess(program, folder).stderr  # bytes
    needs = preprocess(program, folder, "--sentence-splitter", "punkt", code=2)
    if "nltk" in needs.stderr:
        assert "-m pip install nltk" in needs.stderr and "--sentence-splitter lines" in needs.stderr


PUNKT = """
class tokenize:
    @staticmethod
    def sent_tokenize(text, language):
        if language == "klingon":
            raise LookupError("no such language")
        return [part + "." for part in text.split(".") if part.strip()]
"""


def test_sentences_by_punkt(tessera_program, word_pieces):
    """With a stand-in for nltk, which is not among the tests' packages."""
    folder, program = word_pieces, tessera_program
    (folder / "nltk.py").write_text(PUNKT)
    (folder / "text.jsonl").write_text(json.dumps({"text": "The cat sat. The dog\nran. "}) + "\n")
    env = {"PYTHONPATH": f"{ROOT / 'python'}:{folder}"}
    vocabulary = ["--vocab-file", folder / "vocab.txt", "--sentence-splitter", "punkt"]
    assert "1 documents, 2 sentences, 8 tokens" in preprocess(program, folder, *vocabulary, **env).stdout
    missing = preprocess(program, folder, *vocabulary, "--lang", "klingon", code=2, **env).stderr
    assert "'klingon'" in missing and "nltk.downloader punkt_tab" in missing
