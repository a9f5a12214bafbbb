"""examples/python/merge_megatron_checkpoint.py: one file of weights from what several processes saved."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_support import run, text_documents, write_config, write_corpus

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples/python/merge_megatron_checkpoint.py"
LAYOUT = ("parallel.tensor=2", "parallel.pipeline=2")


@pytest.fixture(scope="module")
def runs(tessera_program, tmp_path_factory) -> Path:
    """The same training by one process and by 2 x 2: the folders one and four."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = write_corpus(folder / "corpus", text_documents())
    config = write_config(folder, corpus, model__num_heads=4, training__steps=3, optimizer__eps=1e-5)
    run(tessera_program, "train", config, f"logging.dir={folder}/one")
    run(tessera_program, "train", config, f"logging.dir={folder}/four", *LAYOUT)
    return folder


def merge(python_build, checkpoint: Path, output: Path, code: int = 0, **variables) -> str:
    done = python_build.run(SCRIPT, "--checkpoint-dir", checkpoint, "--output", output, code=code, **variables)
    return done.stdout + done.stderr


def weights(file: Path) -> dict:
    if file.suffix == ".bin":
        return {name: value.numpy() for name, value in torch.load(file, weights_only=True).items()}
    from safetensors.numpy import load_file
    return load_file(file)


def test_a_merged_file_is_the_model_of_one_process(python_build, tessera_program, runs, tmp_path):
    run(tessera_program, "convert", "--from", "tessera", runs / "one", "--to", "hf", tmp_path / "serial")
    serial = weights(tmp_path / "serial/model.safetensors")
    for number, (source, name) in enumerate([(runs / "four", "pytorch_model.bin"), (runs / "four/checkpoints/step-00000003", "model.safetensors")]):
        output = tmp_path / str(number) / name
        said = merge(python_build, source, output)
        assert f"wrote {output}; {output.parent / 'config.json'} describes the model" in said
        assert sorted(path.name for path in output.parent.iterdir()) == ["config.json", name]
        merged = weights(output)
        assert merged.keys() == serial.keys() | ({"lm_head.weight"} if output.suffix == ".bin" else set())
        for key, value in serial.items():
            assert merged[key].dtype == np.float32 and np.allclose(merged[key], value, rtol=1e-4, atol=1e-6), key
        model = transformers.AutoModelForCausalLM.from_pretrained(output.parent)
        assert torch.equal(model.transformer.wte.weight, torch.from_numpy(merged["transformer.wte.weight"]))
        assert torch.equal(model.lm_head.weight, model.transformer.wte.weight)
        if output.suffix == ".bin":
            again = transformers.AutoModelForCausalLM.from_config(model.config)
            again.load_state_dict(torch.load(output, weights_only=True), strict=True)
            assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_what_save_state_wrote_is_merged(python_build, tessera_program, tmp_path):
    script = Path(__file__).parent / "scripts/save_and_resume.py"
    python_build.run(script, tmp_path / "run", 2, 1, "first", launcher=python_build.launcher("--num_processes", 2))
    state = tmp_path / "run/checkpoints/checkpoint_2"
    names = {path.name for path in state.rglob("*.safetensors")}
    assert {f"{kind}_tp_{rank}_pp_0{data}.safetensors" for rank in (0, 1) for kind, data in (("model", ""), ("optimizer", "_dp_0"))} <= names
    merge(python_build, state, tmp_path / "a/model.safetensors")
    run(tessera_program, "convert", "--from", "tessera", state, "--to", "hf", tmp_path / "b")
    merged, converted = weights(tmp_path / "a/model.safetensors"), weights(tmp_path / "b/model.safetensors")
    assert merged.keys() == converted.keys() and all(np.array_equal(merged[key], converted[key]) for key in merged)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a").config.n_layer == 4


def test_a_large_model_in_several_files_is_joined(tmp_path):
    from safetensors.numpy import save_file

    spec = importlib.util.spec_from_file_location("merge", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tensors = {f"layer.{i}": np.arange(i * i, dtype=np.float32).reshape(i, i) + i for i in range(1, 8)}
    for i, names in enumerate([("layer.1", "layer.7"), ("layer.2",), ("layer.3", "layer.4", "layer.5", "layer.6")]):
        save_file({name: tensors[name] for name in names}, tmp_path / f"model-{i}.safetensors", {"format": "pt"})
    module.join(sorted(tmp_path.glob("model-*")), tmp_path / "whole.safetensors")
    whole = weights(tmp_path / "whole.safetensors")
    assert whole.keys() == tensors.keys() and all(np.array_equal(whole[name], tensors[name]) for name in tensors)


def test_refusals_leave_nothing(python_build, runs, tmp_path):
    (tmp_path / "taken.bin").write_text("mine")
    assert "taken.bin exists already" in merge(python_build, runs / "four", tmp_path / "taken.bin", code=2)
    assert "ends in .bin or .safetensors" in merge(python_build, runs / "four", tmp_path / "model.pt", code=2)
    assert "nowhere" in merge(python_build, tmp_path / "nowhere", tmp_path / "model.safetensors", code=4)
    assert [path.name for path in tmp_path.iterdir()] == ["taken.bin"] and (tmp_path / "taken.bin").read_text() == "mine"


def test_bin_files_need_pytorch(runs, tmp_path, python_build):
    # A PyTorch that cannot be imported stands before the real one.
    (tmp_path / "blocked/torch").mkdir(parents=True)
    (tmp_path / "blocked/torch/__init__.py").write_text("raise ImportError('not here')")
    path = f"{tmp_path}/blocked:{ROOT / 'python'}"

    def plain(output: Path, code: int) -> str:
        done = subprocess.run([sys.executable, SCRIPT, "--checkpoint-dir", runs / "four", "--output", output], text=True,
                              capture_output=True, env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"})
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "only PyTorch writes .bin files, and it is not installed here" in plain(tmp_path / "out/model.bin", 2)
    assert not (tmp_path / "out").exists()
    plain(tmp_path / "out/model.safetensors", 0)
    merge(python_build, runs / "four", tmp_path / "with/model.safetensors")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "with/model.safetensors").read_bytes()
