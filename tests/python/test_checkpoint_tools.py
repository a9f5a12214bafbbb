"""`tessera checkpoint diff`, `average` and `inspect --tree` over runs of several layouts, model folders and Megatron's."""

import json
import os
import shutil
import struct
import subprocess

import pytest
from cli_support import run, text_documents, write_config, write_corpus

np = pytest.importorskip("numpy")


def read_safetensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    return {name: np.frombuffer(data, "<f4", offset=8 + length + entry["data_offsets"][0],
                                count=(entry["data_offsets"][1] - entry["data_offsets"][0]) // 4).reshape(entry["shape"])
            for name, entry in header.items() if entry["dtype"] == "F32"}


@pytest.fixture(scope="module")
def folder(tessera_program, tmp_path_factory):
    """Runs `one` (one rank) and `two` (tensor 2, pipeline 2: the same training), and model folders of the first."""
    folder = tmp_path_factory.mktemp("tools")
    corpus = write_corpus(folder / "corpus", text_documents())
    model = {"model__dropout": 0.0, "model__attention_dropout": 0.0, "model__num_heads": 4}
    run(tessera_program, "train", write_config(folder, corpus, "one", **model))
    run(tessera_program, "train", write_config(folder, corpus, "two", parallel__tensor=2, parallel__pipeline=2, **model))
    for kind in ("hf", "tessera"):
        run(tessera_program, "convert", "--from", "tessera", folder / "one", "--to", kind, folder / kind)
    run(tessera_program, "convert", "--from", "hf", folder / "hf", "--to", "megatron", folder / "megatron", "--tensor", 2, "--pipeline", 2)
    return folder


def test_the_same_weights_are_equal_in_every_form(tessera_program, folder):
    for other in ("hf", "tessera", "megatron", "one/checkpoints/step-00000006"):
        done = run(tessera_program, "checkpoint", "diff", folder / "one", folder / other)
        assert done.stdout.endswith("all equal\n") and done.stdout.count("\n") == 1
    listed = run(tessera_program, "checkpoint", "diff", folder / "hf", folder / "megatron", "--all").stdout
    assert listed.count(": equal, ") == len(listed.splitlines()) - 1 > 20


def test_differences_are_counted_and_measured(tessera_program, folder, tmp_path):
    # Another layout rounds otherwise: far below one step of training.
    close = run(tessera_program, "checkpoint", "diff", folder / "one", folder / "two", "--atol", 1e-3, "--rtol", 1e-2, "--weights-only")
    assert close.stdout.endswith("all equal\n")
    steps = run(tessera_program, "checkpoint", "diff", folder / "one/checkpoints/step-00000003", folder / "one", code=1).stdout
    assert "adam_m." in steps and "adam_v." in steps
    assert "adam_m." not in run(tessera_program, "checkpoint", "diff", "--weights-only", folder / "one/checkpoints/step-00000003",
                                folder / "one", code=1).stdout
    # One value changed by hand.
    shutil.copytree(folder / "hf", tmp_path / "changed")
    path = tmp_path / "changed/model.safetensors"
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + length])
    name = next(name for name in header if name.endswith("h.0.ln_1.weight"))
    at = 8 + length + header[name]["data_offsets"][0]
    (value,) = struct.unpack_from("<f", data, at + 8)
    struct.pack_into("<f", data, at + 8, value + 0.5)
    path.write_bytes(data)
    lines = run(tessera_program, "checkpoint", "diff", folder / "hf", tmp_path / "changed", code=1).stdout.splitlines()
    assert len(lines) == 2 and lines[1].endswith(" tensors, 1 different")
    assert ": different, [48], float32, 1 of 48 values, largest difference 0.5 " in lines[0]
    struct.pack_into("<f", data, at + 8, float("nan"))
    path.write_bytes(data)
    assert "largest difference inf" in run(tessera_program, "checkpoint", "diff", folder / "hf", tmp_path / "changed", "--atol", 1e30,
                                           code=1).stdout
    corpus = folder / "corpus"
    run(tessera_program, "train", write_config(tmp_path, corpus, "other", training__steps=3, model__num_layers=1, model__hidden_size=24))
    other = run(tessera_program, "checkpoint", "diff", folder / "hf", tmp_path / "other", code=1)
    assert "only in A" in other.stdout and "] in A, [" in other.stdout and "optimizer's state" in other.stderr
    assert "there is no" in run(tessera_program, "checkpoint", "diff", folder / "hf", folder / "absent", code=4).stderr


def test_the_mean_of_several(tessera_program, folder, tmp_path):
    steps = [folder / "one/checkpoints" / name for name in ("step-00000003", "step-00000006")]
    for weights in ([1, 1], [1, 3]):
        out = tmp_path / f"mean{weights[1]}"
        run(tessera_program, "checkpoint", "average", *steps, "--weights", *weights, "--drop-optimizer", "--output", out)
        parts = []
        for step in steps:
            target = tmp_path / f"{step.name}-{weights[1]}"
            run(tessera_program, "convert", "--from", "tessera", step, "--to", "tessera", target)
            parts.append(read_safetensors(target / "model.safetensors"))
        mean = read_safetensors(out / "model.safetensors")
        assert mean.keys() == parts[0].keys()
        for name, values in mean.items():
            wanted = sum(w / sum(weights) * part[name].astype("f8") for w, part in zip(weights, parts))
            assert np.array_equal(values, wanted.astype("f4")), name
    same = run(tessera_program, "checkpoint", "average", folder / "hf", folder / "megatron", "--output", tmp_path / "same").stdout
    assert "the mean of 2 checkpoints" in same
    run(tessera_program, "checkpoint", "diff", tmp_path / "same", folder / "one")
    run(tessera_program, "convert", "--from", "tessera", tmp_path / "same", "--to", "hf", tmp_path / "same_hf")
    run(tessera_program, "checkpoint", "diff", tmp_path / "same_hf", folder / "one")

    def refused(*words, code=2):
        error = run(tessera_program, "checkpoint", "average", *words, "--output", tmp_path / "none", code=code).stderr
        assert not (tmp_path / "none").exists()
        return error

    assert "--drop-optimizer" in refused(*steps)
    assert "at least two" in refused(folder / "hf")
    assert "--weights has 3 numbers for 2" in refused(*steps, "--drop-optimizer", "--weights", 1, 2, 3)
    run(tessera_program, "train", write_config(tmp_path, folder / "corpus", "wide", training__steps=3, model__num_layers=3))
    assert "another model" in refused(folder / "hf", tmp_path / "wide", "--drop-optimizer")
    before = (tmp_path / "same/model.safetensors").read_bytes()
    assert run(tessera_program, "checkpoint", "average", folder / "hf", folder / "tessera", "--output", tmp_path / "same",
               code=4).stderr.startswith("error: ")
    assert (tmp_path / "same/model.safetensors").read_bytes() == before


def write_wide_model(folder, layers, hidden):
    """A GPT-2 of zeros, as a sparse file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 257, "n_positions": 64, "n_embd": hidden,
        "n_layer": layers, "n_head": 8, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}))
    shapes = {"wte.weight": [257, hidden], "wpe.weight": [64, hidden], "ln_f.weight": [hidden], "ln_f.bias": [hidden]}
    for layer in range(layers):
        for name, shape in {"ln_1": [hidden], "ln_2": [hidden], "attn.c_attn": [hidden, 3 * hidden], "attn.c_proj": [hidden, hidden],
                            "mlp.c_fc": [hidden, 4 * hidden], "mlp.c_proj": [4 * hidden, hidden]}.items():
            shapes[f"h.{layer}.{name}.weight"] = shape
            shapes[f"h.{layer}.{name}.bias"] = shape[-1:]
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[f"transformer.{name}"] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return at


def most_memory(*command):
    """Bytes that a process had in memory at most; it must end with 0."""
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024


def test_memory_follows_the_largest_tensor(tessera_program, tmp_path):
    bare = most_memory(tessera_program, "checkpoint", "--help")
    largest = 4 * 4 * 512 * 512
    for name in ("a", "b"):
        size = write_wide_model(tmp_path / name, 12, 512)
    assert size > 140 << 20
    for command in (["diff", tmp_path / "a", tmp_path / "b"], ["average", tmp_path / "a", tmp_path / "b", "--output", tmp_path / "c"]):
        assert most_memory(tessera_program, "checkpoint", *command) - bare < 6 * largest + (24 << 20)


def test_trees(tessera_program, folder):
    def tree(path):
        return run(tessera_program, "checkpoint", "inspect", "--tree", path).stdout

    hf = tree(folder / "hf")
    assert "0-1\n" in hf and hf.count("c_attn") == 1 and "weight  float32 [48, 144]" in hf
    assert tree(folder / "hf/model.safetensors").splitlines()[1:] == hf.splitlines()[1:]
    assert "adam_m" in tree(folder / "two") and "param" in tree(folder / "two")
    megatron = tree(folder / "megatron")
    assert megatron.count("model_optim_rng.pt\n") == 4 and megatron.count("query_key_value") >= 4
    assert "checkpoint_version  3.0" in megatron
    assert "there is no such folder" in run(tessera_program, "checkpoint", "inspect", "--tree", folder / "absent", code=4).stderr
