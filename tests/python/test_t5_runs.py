"""T5 by the commands: from text to a trained model, killed and resumed, the usual sizes."""

import json
import sys

import pytest
from bert_reference import write_sentences
from cli_support import metrics, run, shards, start, wait_for_lines
from test_bert_data import documents, preprocess, word_pieces  # noqa: F401


def test_from_text_to_a_trained_model(tessera_program, word_pieces, source_dir):  # noqa: F811
    folder, program = word_pieces, tessera_program
    preprocess(program, folder, "--vocab-file", folder / "vocab.txt")
    config = folder / "c.yaml"
    config.write_text(f"""
model: {{family: t5, num_layers: 2, hidden_size: 16, num_heads: 2, vocab_size: 30, max_positions: 24}}
optimizer: {{lr: 0.01}}
training: {{steps: 20, seq_length: 24, decoder_seq_length: 12, micro_batch_size: 4, global_batch_size: 8, eval_interval: 20, eval_iters: 1}}
data: {{path: {folder / "d_text_sentence"}, split: "9,3,0", vocab_extra_ids: 8}}
logging: {{dir: {folder / "run"}}}
device: {{threads: 1}}
""")
    run(program, "train", config)
    lines = metrics(folder / "run")
    assert lines[-1]["loss"] < lines[0]["loss"] and lines[-1]["eval_loss"] > 0
    assert "t5" in run(program, "plan", config).stdout
    # The text that the decoder writes stands alone, and is the same on two stages.
    (folder / "prompts.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": "a dog ran"}\n')
    texts = []
    for layout in ("parallel.pipeline=1", "parallel.pipeline=2"):
        run(program, "generate", folder / "run", layout, "--input", folder / "prompts.jsonl", "--output", folder / "texts.jsonl",
            "--max-new-tokens", 6, "--beams", 2, env={"TESSERA_PYTHON": sys.executable, "PYTHONPATH": str(source_dir / "python")})
        texts.append([json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()])
    assert texts[0] == texts[1] and [line["prompt"] for line in texts[0]] == ["the cat", "a dog ran"]
    assert any(line["text"] for line in texts[0])
    refused = run(program, "train", config, "data.vocab_extra_ids=0", f"logging.dir={folder / 'run2'}", code=2)
    assert "<extra_id_0>" in refused.stderr and "data.vocab_extra_ids" in refused.stderr
    assert all(line["mfu_of_measured"] > 0 for line in lines)  # of both stacks


def test_megatrons_own_t5(tessera_program, tmp_path):
    """Trained on a stage for each stack, resumed on tensor ranks, kept as Tessera's own folder alone."""
    write_sentences(tmp_path / "d", documents(4))
    config, program = tmp_path / "c.yaml", tessera_program
    config.write_text(f"""
model: {{family: megatron_t5, num_layers: 3, encoder_layers: 2, hidden_size: 16, num_heads: 2, vocab_size: 60, max_positions: 40, dropout: 0.1}}
optimizer: {{lr: 0.01}}
training: {{steps: 12, seq_length: 40, decoder_seq_length: 12, micro_batch_size: 4, global_batch_size: 8, eval_interval: 0}}
data: {{path: {tmp_path / "d"}, split: "1,0,0", masking_do_full_word: false, pad_id: 0, bos_id: 1, eos_id: 2, sentinel_ids: [59, 45]}}
checkpoint: {{every: 6}}
logging: {{dir: {tmp_path / "run"}, every: 1}}
device: {{threads: 1}}
""")
    said = run(program, "train", config, "parallel.pipeline=2", "parallel.pipeline_split_rank=1")
    assert "8 samples of 40 tokens and 12 in the decoder a step" in said.stdout + said.stderr
    straight = run(program, "train", config, f"logging.dir={tmp_path / 'straight'}")
    assert "megatron_t5" in run(program, "plan", config).stdout and straight.returncode == 0
    ours, alone = (metrics(tmp_path / name) for name in ("run", "straight"))
    assert [line["step"] for line in ours] == list(range(1, 13)) and alone[-1]["loss"] < alone[0]["loss"]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in alone], rel=1e-5)
    assert all(line["mfu_of_measured"] > 0 for line in ours)
    run(program, "train", config, "parallel.tensor=2", "training.steps=14")
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 15))
    run(program, "convert", "--from", "tessera", tmp_path / "run", "--to", "tessera", tmp_path / "whole")
    again = run(program, "train", config, f"model.init_from={tmp_path / 'whole'}", f"logging.dir={tmp_path / 'again'}", "training.steps=1")
    assert again.returncode == 0 and metrics(tmp_path / "again")[0]["loss"] < alone[0]["loss"]
    for words, more in (("no Hugging Face form", ("convert", "--from", "tessera", tmp_path / "run", "--to", "hf", tmp_path / "hf")),
                        ("pipeline_split_rank (2)", ("train", config, "parallel.pipeline=2", "parallel.pipeline_split_rank=2"))):
        assert words in run(program, *more, code=2).stderr


@pytest.mark.parametrize("overrides", [(), ("parallel.pipeline=2", "training.precision=bf16")], ids=["alone", "pp2 bf16"])
def test_killed_and_resumed_is_the_uninterrupted_run(tessera_program, tmp_path, overrides, long_run):
    """Bit for bit, with dropout, over several epochs of samples."""
    if overrides and not long_run:
        pytest.skip("with tests/run.sh --all")
    write_sentences(tmp_path / "d", documents(4))
    config = tmp_path / "c.yaml"
    config.write_text(f"""
model: {{family: t5, num_layers: 4, hidden_size: 32, num_heads: 4, vocab_size: 60, max_positions: 40, dropout: 0.1, attention_dropout: 0.1}}
training: {{steps: 30, seq_length: 40, decoder_seq_length: 12, micro_batch_size: 4, global_batch_size: 8, eval_interval: 0}}
data: {{path: {tmp_path / "d"}, split: "1,0,0", masking_do_full_word: false, pad_id: 0, bos_id: 1, eos_id: 2, sentinel_ids: [59, 45]}}
checkpoint: {{every: 8}}
logging: {{every: 1}}
device: {{threads: 1}}
""")
    straight, killed = (f"logging.dir={tmp_path / name}" for name in ("straight", "killed"))
    done = run(tessera_program, "train", config, straight, *overrides)
    assert "a sample may need up to 11 tokens" not in done.stderr
    process = start(tessera_program, config, killed, *overrides)
    wait_for_lines(process, tmp_path / "killed", 13)
    process.kill()
    process.communicate()
    assert "resuming from" in run(tessera_program, "train", config, killed, *overrides).stderr
    names = ("step", "loss", "grad_norm", "lr")
    lines, again = ([[line[name] for name in names] for line in metrics(tmp_path / name)] for name in ("straight", "killed"))
    assert again == lines and [line[0] for line in lines] == list(range(1, 31))
    assert shards(tmp_path / "killed") == shards(tmp_path / "straight")


def test_a_narrow_decoder_is_told_of(tessera_program, tmp_path):
    write_sentences(tmp_path / "d", documents(4))
    config = tmp_path / "c.yaml"
    config.write_text(f"""
model: {{family: t5, num_layers: 2, hidden_size: 8, num_heads: 2, vocab_size: 60, max_positions: 40}}
training: {{steps: 40, seq_length: 40, decoder_seq_length: 7, micro_batch_size: 8, global_batch_size: 8, eval_interval: 0}}
data: {{path: {tmp_path / "d"}, split: "1,0,0", masking_do_full_word: false, masking_max_ngram: 1, pad_id: 0, bos_id: 1, eos_id: 2, sentinel_ids: [59, 45]}}
logging: {{dir: {tmp_path / "run"}}}
device: {{threads: 1}}
""")
    done = run(tessera_program, "train", config, code=4)
    assert "a sample may need up to 11 tokens in the decoder" in done.stderr
    assert "training.decoder_seq_length is 7: raise it to 11" in done.stderr


def test_configs_are_the_usual_models(tessera_program, source_dir):
    for name, parameters in (("base", 222_903_552), ("large", 737_668_096)):
        planned = run(tessera_program, "plan", source_dir / f"configs/t5_{name}.yaml", "--json").stdout
        assert json.loads(planned)["parameters"] == parameters
