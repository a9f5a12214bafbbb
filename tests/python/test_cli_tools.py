"""tessera generate, convert, checkpoint, env, plot."""

import importlib.util
import json
import re
import shutil
import sys

import numpy as np
import pytest
from cli_support import run, text_documents, write_config, write_corpus


@pytest.fixture(scope="module")
def trained(tessera_program, tmp_path_factory):
    """A run of a few steps."""
    folder = tmp_path_factory.mktemp("trained")
    corpus = write_corpus(folder / "corpus", text_documents())
    run(tessera_program, "train", write_config(folder, corpus))
    return folder / "run"


@pytest.fixture(scope="module")
def models(source_dir):
    """The module that writes Hugging Face folders for the parity tests."""
    spec = importlib.util.spec_from_file_location("parity_models", source_dir / "tests/parity/models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def newest(run_folder):
    return sorted((run_folder / "checkpoints").glob("step-*"))[-1]


def generate(program, model, *options, **more):
    # A model this young writes bytes that are no text.
    return run(program, "generate", model, "--prompt", "def f", *options, errors="replace", **more)


def test_generate(tessera_program, trained):
    greedy = generate(tessera_program, trained, "--temperature", 0).stdout
    assert greedy.startswith("def f") and len(greedy) > 8
    assert greedy == generate(tessera_program, trained, "--top-k", 1, "--seed", 9).stdout
    assert greedy == generate(tessera_program, newest(trained), "--temperature", 0).stdout
    first = generate(tessera_program, trained, "--seed", 1, "--top-p", 0.9).stdout
    assert first == generate(tessera_program, trained, "--seed", 1, "--top-p", 0.9).stdout
    assert first != generate(tessera_program, trained, "--seed", 2, "--top-p", 0.9).stdout
    two = generate(tessera_program, trained, "--seed", 1, "--num-samples", 2, "--top-p", 0.9).stdout
    assert two.startswith(first + "----\n")
    moved = trained.with_name("moved")
    shutil.copytree(trained, moved)
    assert greedy == generate(tessera_program, moved, "--temperature", 0).stdout


@pytest.mark.parametrize("options,part", [(["--beams", 0], "num_beams"), (["--top-p", 2], "top_p"),
                                          (["--temperature", -1], "temperature"), (["--top-k", "many"], "--top-k"),
                                          (["--max-new-tokens", -1], "max_new_tokens")])
def test_generate_refuses(tessera_program, trained, options, part):
    done = generate(tessera_program, trained, *options, code=2)
    assert part in done.stderr and done.stdout == ""


def test_generate_needs_a_model_and_a_prompt(tessera_program, trained, tmp_path):
    assert "nowhere" in generate(tessera_program, tmp_path / "nowhere", code=4).stderr
    (tmp_path / "empty").mkdir()
    assert "empty" in generate(tessera_program, tmp_path / "empty", code=4).stderr
    assert "--prompt" in run(tessera_program, "generate", trained, "--prompt", "", code=2).stderr
    long = run(tessera_program, "generate", trained, "--prompt", "x" * 49, code=2).stderr
    assert "49" in long and "48" in long


def test_generate_says_that_the_model_has_no_more_positions(tessera_program, trained):
    cut = generate(tessera_program, trained, "--max-new-tokens", 100, "--seed", 1)
    assert "note: stopped at the model's last position: it has 48, the prompt takes 5" in cut.stderr
    assert "note" not in generate(tessera_program, trained, "--max-new-tokens", 10, "--seed", 1).stderr


def test_generate_from_a_file_on_layouts(tessera_program, trained, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f", "id": 7}\n\n{"prompt": "a"}\n{"prompt": "class"}\n', encoding="utf-8")
    for options in (["--temperature", 0], ["--beams", 3], ["--seed", 4, "--top-k", 5, "--num-samples", 2]):
        texts = []
        for layout in ([], ["parallel.tensor=3"], ["parallel.pipeline=2"]):
            out = tmp_path / f"{len(texts)}.jsonl"
            done = run(tessera_program, "generate", trained, *layout, "--input", prompts, "--output", out, "--max-new-tokens", 6, *options)
            assert "3 prompts" in done.stderr and "tokens/s" in done.stderr
            texts.append([json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()])
        assert texts[0] == texts[1] == texts[2] and texts[0][0]["id"] == 7
    prompts.write_text('{"prompt": 3}\n', encoding="utf-8")
    assert "prompts.jsonl:1" in run(tessera_program, "generate", trained, "--input", prompts, code=4).stderr


def tensors(folder):
    from safetensors.numpy import load_file
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama3_tied"])
def test_convert_there_and_back(tessera_program, tmp_path, models, name):
    models.write_model(tmp_path / "hf", name)
    run(tessera_program, "convert", "--from", "hf", tmp_path / "hf", "--to", "tessera", tmp_path / "ours")
    run(tessera_program, "convert", "--from", "tessera", tmp_path / "ours", "--to", "hf", tmp_path / "back")
    before, after = tensors(tmp_path / "hf"), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype and np.array_equal(value, after[key]), key
    assert (tmp_path / "hf/config.json").read_bytes() == (tmp_path / "back/config.json").read_bytes()
    assert tensors(tmp_path / "ours").keys() == models.to_tessera_names(models.MODELS[name], before).keys()


def test_convert_a_run_and_train_on_from_a_model(tessera_program, tmp_path, models):
    models.write_model(tmp_path / "hf", "gpt2")
    corpus = write_corpus(tmp_path / "corpus", text_documents(end=False))
    config = write_config(tmp_path, corpus, model__init_from=str(tmp_path / "hf"), model__vocab_size=211, model__num_layers=3,
                          model__hidden_size=60, model__num_heads=5, model__max_positions=64, model__dropout=0.0,
                          model__attention_dropout=0.0, data__tokenizer="none.json", training__steps=2, optimizer__lr=1e-30,
                          optimizer__weight_decay=0.0, lr_schedule__warmup_steps=0)
    run(tessera_program, "train", config)
    run(tessera_program, "convert", "--from", "tessera", tmp_path / "run", "--to", "hf", tmp_path / "exported")
    before, after = tensors(tmp_path / "hf"), tensors(tmp_path / "exported")
    for key, value in before.items():  # a learning rate of nothing: the weights it started from
        assert np.array_equal(value, after[key]), key
    half = run(tessera_program, "convert", "--from", "tessera", tmp_path / "run", "--to", "hf", tmp_path / "half", "--dtype",
               "float16")
    assert "half" in half.stdout
    assert all(value.dtype == np.float16 for value in tensors(tmp_path / "half").values())
    run(tessera_program, "train", config, "model.num_layers=2", f"logging.dir={tmp_path}/other", code=4)
    changes = ("model.num_kv_heads=1", f"logging.dir={tmp_path}/changed")
    assert "num_kv_heads: 5 there, 1 here" in run(tessera_program, "train", config, *changes, code=4).stderr
    said = run(tessera_program, "train", config, *changes, "model.reinitialize=true")
    assert "drawn anew from the seed: transformer.h.*.attn.c_attn.weight, transformer.h.*.attn.c_attn.bias; " in said.stdout + said.stderr
    run(tessera_program, "convert", "--from", "tessera", tmp_path / "changed", "--to", "hf", tmp_path / "multiquery")
    kept = {key: value for key, value in tensors(tmp_path / "multiquery").items() if "c_attn" not in key and "mlp" in key}
    # GPTBigCode's layers are Linear, GPT-2's have their weights transposed.
    assert kept and all(np.array_equal(value, before[key].T) for key, value in kept.items())
    none = run(tessera_program, "train", config, *changes, "model.reinitialize=true", "model.hidden_size=50", "model.vocab_size=213",
               "model.max_positions=63", f"logging.dir={tmp_path}/none", code=4)
    assert "none has the name and shape" in none.stderr
    error = generate(tessera_program, tmp_path / "exported", code=4).stderr
    assert "tokenizer" in error and "211" in error


def test_convert_refuses(tessera_program, tmp_path, models):
    models.write_model(tmp_path / "hf", "llama")

    def convert(source, target, *more, code):
        return run(tessera_program, "convert", "--from", *source, "--to", *target, *more, code=code).stderr

    ours = ("tessera", tmp_path / "ours")
    assert '"keras"' in convert(("keras", tmp_path / "hf"), ours, code=2)
    assert "--dtype" in convert(("hf", tmp_path / "hf"), ours, "--dtype", "int3", code=2)
    assert "nowhere" in convert(("hf", tmp_path / "nowhere"), ours, code=4)
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").write_text("words")
    assert "used" in convert(("hf", tmp_path / "hf"), ("tessera", tmp_path / "used"), code=4)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    assert "layers.3" in convert(("hf", tmp_path / "hf"), ours, code=4)
    file = tmp_path / "hf/model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    assert "model.safetensors" in convert(("hf", tmp_path / "hf"), ours, code=4)
    assert not (tmp_path / "ours").exists()


def test_checkpoint_inspect_and_verify(tessera_program, trained, tmp_path):
    shown = run(tessera_program, "checkpoint", "inspect", trained).stdout
    for part in ("step 6", "param.embedding.word_embeddings.weight", "[257, 48]", "adam_m", "24 samples",
                 "model_tp_0_pp_0.safetensors", "optimizer_tp_0_pp_0_dp_0.safetensors"):
        assert part in shown, shown
    for path in (trained, trained / "checkpoints", newest(trained)):
        assert "every byte" in run(tessera_program, "checkpoint", "verify", path).stdout

    copy = tmp_path / "copy"
    shutil.copytree(newest(trained), copy)
    shard = next(copy.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 0x40
    shard.write_bytes(data)
    damaged = run(tessera_program, "checkpoint", "verify", copy, code=4).stdout
    assert shard.name in damaged and "damaged" in damaged
    (copy / "manifest.json").write_text("{")
    for command in ("inspect", "verify"):
        done = run(tessera_program, "checkpoint", command, copy, code=4)
        assert "copy" in done.stdout + done.stderr
    assert "nowhere" in run(tessera_program, "checkpoint", "inspect", tmp_path / "nowhere", code=4).stderr


def test_env(tessera_program):
    text = run(tessera_program, "env").stdout
    for word in ("tessera", "compiler", "threads"):
        assert word in text


def test_a_limit_on_instruction_sets(tessera_program):
    env = {"TESSERA_MAX_CPU_ISA": "baseline"}
    assert re.search(r"\bbaseline\b", run(tessera_program, "env", env=env).stdout)
    env = {"TESSERA_MAX_CPU_ISA": "sse9"}
    assert "baseline, avx2 or avx512" in run(tessera_program, "env", code=2, env=env).stderr


def test_usage(tessera_program):
    assert run(tessera_program, "--version").stdout.startswith("tessera 0.")
    assert "train" in run(tessera_program, "--help").stdout
    assert "overrides" in run(tessera_program, "train", "--help").stdout
    run(tessera_program, code=2)
    run(tessera_program, "tarin", code=2)
    run(tessera_program, "train", code=2)
    run(tessera_program, "generate", "x", "--colour", code=2)


def test_plot(tessera_program, trained, source_dir, tmp_path):
    pytest.importorskip("matplotlib")
    python = {"TESSERA_PYTHON": sys.executable, "PYTHONPATH": str(source_dir / "python")}
    run(tessera_program, "plot", trained, env=python)
    assert (trained / "loss.png").read_bytes().startswith(b"\x89PNG")
    failed = run(tessera_program, "plot", tmp_path / "nowhere", env=python, code=1)
    assert "nowhere" in failed.stderr
    absent = run(tessera_program, "plot", trained, env={"TESSERA_PYTHON": "/nowhere/python"}, code=2)
    assert "/nowhere/python" in absent.stderr


def test_a_runs_tokenizer_follows_from_its_data(tessera_program, tmp_path):
    pytest.importorskip("tokenizers")
    words = {"a": 0, "b": 1, "c": 2, "</s>": 3}
    (tmp_path / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "a"}}))
    (tmp_path / "text.txt").write_text("a b c " * 400)
    run(tessera_program, "preprocess", "--input", tmp_path / "text.txt", "--append-eod", "--output-prefix", tmp_path / "words",
        "--tokenizer-model", "tokenizer.json", cwd=tmp_path, env={"TESSERA_PYTHON": sys.executable})
    config = write_config(tmp_path, tmp_path / "words_text_document", model__vocab_size=4, data__split="100,0,0",
                          data__eod_mask_loss=True, training__eval_interval=0)
    (tmp_path / "elsewhere").mkdir()
    for given in ([], ["data.tokenizer=tokenizer.json", f"logging.dir={tmp_path / 'given'}"]):
        run(tessera_program, "train", config, *given, cwd=tmp_path)
        text = run(tessera_program, "generate", tmp_path / ("given" if given else "run"), "--prompt", "b c", "--max-new-tokens", 9,
                   cwd=tmp_path / "elsewhere", env={"TESSERA_PYTHON": sys.executable})
        assert set(text.stdout.split()) <= set(words) and text.stdout.startswith("b c")
    check_a_moved_tokenizer(tessera_program, tmp_path, text.stdout)


def test_tokens_without_a_text(tessera_program, tmp_path):
    """A model's vocabulary may be padded beyond the tokenizer's: such tokens are drawn by a model that knows nothing, and are no text."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a b"}\n{"prompt": "c"}\n')
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=3,
                                                         eos_token_id=3)).save_pretrained(tmp_path / "model")
    (tmp_path / "model/tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2, "</s>": 3}, "unk_token": "a"}}))
    run(tessera_program, "generate", tmp_path / "model", "--input", tmp_path / "prompts.jsonl", "--output", tmp_path / "texts.jsonl",
        "--max-new-tokens", 20, "--stop", "nothing", env={"TESSERA_PYTHON": sys.executable})
    texts = [json.loads(line)["text"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert len(texts) == 2 and all(set(text.split()) <= {"a", "b", "c"} for text in texts)


def check_a_moved_tokenizer(program, tmp_path, text):
    """With a run in tmp_path/given, and what it wrote with its tokenizer.json."""
    def write(model, *more, code=0):
        return run(program, "generate", model, "--prompt", "b c", "--max-new-tokens", 9, *more, code=code,
                   env={"TESSERA_PYTHON": sys.executable})

    run(program, "convert", "--from", "tessera", tmp_path / "given", "--to", "hf", tmp_path / "exported")
    assert write(tmp_path / "exported").stdout == text  # the tokenizer went with the weights
    old, new = tmp_path / "tokenizer.json", tmp_path / "elsewhere" / "renamed.json"
    old.rename(new)
    missing = write(tmp_path / "given", code=2).stderr
    assert str(old) in missing and "--tokenizer" in missing
    assert write(tmp_path / "given", "--tokenizer", new).stdout == text
    told = run(program, "convert", "--from", "tessera", tmp_path / "given", "--to", "hf", tmp_path / "without").stderr
    assert str(old) in told and "is not copied" in told and not (tmp_path / "without" / "tokenizer.json").exists()
    old.write_text(new.read_text().replace('"a": 0, "b": 1', '"b": 0, "a": 1'))
    other = write(tmp_path / "given", code=2).stderr
    assert "the model was trained on data of" in other and "--tokenizer" in other
    assert "bytes (257 tokens)" in write(tmp_path / "given", "--tokenizer", "bytes", code=2).stderr
