"""States and models in folders: damaged ones, folders that hold other things, links."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parent / "scripts"

SAVE = """
import json, sys
from pathlib import Path
from tessera import Accelerator, CausalLM
from tessera.errors import CheckpointError
from tessera.utils import set_seed
folder, real = Path(sys.argv[1]), Path(sys.argv[2])
set_seed(1)
accelerator = Accelerator()
config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 61, "n_positions": 8}
model = accelerator.prepare(CausalLM(config))
model.save_pretrained(folder, max_shard_size="8KB")
many = sorted(path.name for path in folder.iterdir())
assert len(many) > 3
(folder / "README.md").write_text("mine")
(folder / "step_1").mkdir()
model.save_pretrained(folder)
assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors", "step_1"]
import os
os.chdir(folder)  # the folder one works in stays where it is
model.save_pretrained(".")
assert Path("README.md").read_text() == "mine" and Path("model.safetensors").exists()
(folder / "config.json").rename(real / "config.json")
(folder / "config.json").symlink_to(real / "config.json")
try:
    CausalLM.from_pretrained(folder)
    raise AssertionError("the link was followed")
except CheckpointError as error:
    assert str(real / "config.json") in str(error) and "follow_symlinks=True" in str(error), error
CausalLM.from_pretrained(folder, follow_symlinks=True)
print("DONE")
"""


def test_damaged_states(python_build, tmp_path):
    done = python_build.run(SCRIPTS / "damaged_states.py", tmp_path, launcher=python_build.launcher("--num_processes", 2), plain=True)
    assert "DONE" in done.stdout and "passes over" in done.stderr + done.stdout


def test_folders_that_hold_other_things(python_build, tmp_path):
    (tmp_path / "real").mkdir()
    assert "DONE" in python_build.run("-c", SAVE, tmp_path / "model", tmp_path / "real", plain=True).stdout


def test_convert_follows_links_only_when_told(tessera_program, tmp_path):
    from tessera.checkpoint.safetensors import to_bytes

    config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 0, "num_attention_heads": 1,
              "vocab_size": 16, "max_position_embeddings": 8, "tie_word_embeddings": True}
    config["num_hidden_layers"] = 1
    names = {"embed_tokens": (16, 8), "layers.0.input_layernorm": (8,), "layers.0.post_attention_layernorm": (8,), "norm": (8,),
             **{f"layers.0.self_attn.{part}_proj": (8, 8) for part in "qkvo"},
             **{f"layers.0.mlp.{part}_proj": (8, 8) for part in ("gate", "up", "down")}}
    tensors = {f"model.{name}.weight": np.ones(shape, np.float32) for name, shape in names.items()}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "weights").write_bytes(to_bytes(tensors, {"format": "pt"}))
    os.symlink(tmp_path / "weights", tmp_path / "model/model.safetensors")
    convert = [tessera_program, "convert", "--from", "hf", tmp_path / "model", "--to", "tessera", tmp_path / "out"]
    refused = subprocess.run(convert, capture_output=True, text=True)
    assert refused.returncode == 4 and not (tmp_path / "out").exists(), refused
    for text in ("model.safetensors: is a symbolic link to", str(tmp_path / "weights"), "--follow_symlinks"):
        assert text in refused.stderr
    followed = subprocess.run([*convert, "--follow_symlinks"], capture_output=True, text=True)
    assert followed.returncode == 0 and (tmp_path / "out/model.safetensors").is_file(), followed


def test_safetensors_are_read_by_the_cpp_reader(tmp_path):
    from tessera.errors import DataError
    from tessera.utils import other
    from tessera.checkpoint.safetensors import to_bytes

    data = to_bytes({"w": np.arange(3, dtype=np.uint64), "deep": np.zeros((1,) * 9, np.float32)})
    (tmp_path / "f").write_bytes(data)
    assert other.load(tmp_path / "f")["w"].tolist() == [0, 1, 2] and other.load(tmp_path / "f")["deep"].ndim == 9
    for damaged, text in [(data[:-1], "the file holds"), (data + b"x", "the tensors end at byte"), (data[:5], "only 5 bytes"),
                          (data.replace(b"U64", b"U65"), 'unknown dtype "U65"')]:
        (tmp_path / "f").write_bytes(damaged)
        with pytest.raises(DataError, match=text) as error:
            other.load(tmp_path / "f")
        assert str(error.value).startswith(f"{tmp_path / 'f'}: ")
