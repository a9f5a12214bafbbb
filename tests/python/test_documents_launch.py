"""The documents' commands and files, typed as tests/documents/changes.yaml says, in a folder like the reader's."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Dict, List

import pytest
from documents_support import ROOT, SCRIPTS, changed, check_losses, commands, filled, printed, shell_environment, write_reader

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("yaml")


class Reader:
    """Whoever types the commands: a folder, a shell in which `tessera` and `python` are found."""

    def __init__(self, python_build, folder: Path):
        self.build, self.folder = python_build, folder
        self.environment = shell_environment(python_build, folder) | {
            "PYTHONPATH": f"{ROOT / 'python'}:{SCRIPTS / 'documents'}", "HF_HOME": str(folder / "huggingface"),
            "XDG_CONFIG_HOME": str(folder / "config"), "EXAMPLES": str(ROOT / "examples/python")}

    def type(self, command: str, **environment: str) -> subprocess.CompletedProcess:
        return self.build.run(launcher=["bash", "-ec", command], cwd=self.folder, **{**self.environment, **environment})

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def read(self, name: str) -> dict:
        return json.loads((self.folder / name).read_text())


@pytest.fixture
def reader(python_build, tmp_path) -> Reader:
    return Reader(python_build, tmp_path)


def beside_pytorch(script: str) -> str:
    """The script, which writes losses.json at its end: its losses and PyTorch's."""
    return (f"from beside import Beside\n\nbeside = Beside()\nbeside.begin()\n{script}\nbeside.end()\n"
            "if accelerator.is_main_process:\n    import json\n\n    with open('losses.json', 'w') as file:\n"
            "        json.dump({'losses': beside.losses, 'expected': beside.expected}, file)\n")


def test_installing():
    """Of the documents' installations `pip install .` is left, which tests/python/test_packaging.py tries."""
    for block in ("000/install.sh", "003/install.sh", "001/requirements.sh", "001/pip.sh", "004/megatron.sh"):
        assert commands(block) == ["pip install ."], block
    for block in ("001/clone.sh", "004/apex.sh"):
        assert commands(block) == [], block
    for block in ("004/conda.sh", "004/pytorch.sh"):  # of the reader's choice
        assert changed(block) == printed(block)
    assert "`pip install .`" in (ROOT / "README.md").read_text()


def test_the_guides_launch_command(reader):
    """The full training script in the printed precision, by the first command of 003/launch.sh."""
    reader.write("train.py", changed("003/train.py", "precision"))
    first, *machines = commands("003/launch.sh")
    assert first == "tessera launch --multi_gpu --num_processes 4 train.py" and len(machines) == 2
    reader.type(first)
    assert sorted(path.name for path in reader.folder.glob("checkpoint-epoch-*")) == ["checkpoint-epoch-0", "checkpoint-epoch-1"]


def test_accelerates_launch_command(reader):
    write_reader(reader.folder)
    reader.write("megatron_gpt_config.yaml", changed("004/megatron_gpt_config.yaml"))
    reader.write("examples/by_feature/megatron_lm_gpt_pretraining.py", beside_pytorch(filled(SCRIPTS / "documents/run_clm.py")))
    reader.type(commands("004/launch.sh")[0])
    steps = 5 * math.ceil(9 / 4)
    check_losses(reader.read("losses.json"), steps)
    assert list((reader.folder / "awesome_model").glob("**/*.safetensors"))
    lines = [json.loads(line) for path in (reader.folder / "awesome_model").rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    assert [line["epoch"] for line in lines if "eval_loss" in line] == [0, 1, 2, 3, 4]


def plan(reader, layers: int, **parallel) -> str:
    """What `tessera plan` says of a model of 8192 positions."""
    layout = ", ".join(f"{name}: {value}" for name, value in parallel.items())
    reader.write("plan.yaml", f"model: {{family: gpt2, num_layers: {layers}, hidden_size: 64, num_heads: 4, vocab_size: 128, "
                 f"max_positions: 8192}}\nparallel: {{{layout}}}\ntraining: {{seq_length: 8192, micro_batch_size: 1, global_batch_size: 8}}\n"
                 "data: {path: x}\n")
    return reader.type("tessera plan plan.yaml").stdout


def groups(text: str) -> Dict[str, List[set]]:
    found = re.findall(r"^  (tp|pp|dp) +(\[.*\])$", text, flags=re.M)
    return {axis: [set(map(int, group.split())) for group in re.findall(r"\[([\d ]+)\]", line)] for axis, line in found}


def replicas(axes: Dict[str, List[set]]) -> List[List[int]]:
    """Ranks that tensor or pipeline groups connect."""
    found: List[set] = []
    for group in axes["tp"] + axes["pp"]:
        touching = [each for each in found if each & group]
        found = [each for each in found if not each & group] + [set().union(group, *touching)]
    return sorted(map(sorted, found))


def test_what_the_pictures_say(reader):
    """000/tensor_parallel.py, 003/tensor_parallel.py, pipeline_parallel.py, data_parallel.py, sequence_parallel.py"""
    drawn = re.findall(r"GPU \d: Layers (\d+-\d+)", printed("003/pipeline_parallel.py"))
    text = plan(reader, 12, pipeline=4)
    assert re.findall(r"^  \d +(?:embedding \+ )?(\d+-\d+)", text, flags=re.M) == drawn and len(drawn) == 4
    # Not the neighbours that the picture shows: stages are the outermost axis, as in Megatron-LM.
    assert "(GPUs 0-3)" in printed("003/data_parallel.py")
    assert replicas(groups(plan(reader, 4, tensor=2, pipeline=2, data=2))) == [[0, 1, 4, 5], [2, 3, 6, 7]]

    def middle(text: str) -> Dict[str, float]:
        """Numbers of a stage that holds blocks alone."""
        row = re.search(r"^  1 +\S+ +([\d,]+) +[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+)", text, flags=re.M)
        return {"parameters": int(row.group(1).replace(",", "")), "activations": float(row.group(2))}

    one, two, sequence = (middle(plan(reader, 3, pipeline=3, **more)) for more in ({}, {"tensor": 2}, {"tensor": 2, "sequence": "true"}))
    assert printed("000/tensor_parallel.py").count("\n") == printed("003/tensor_parallel.py").count("\n") == 5
    assert two["parameters"] == pytest.approx(one["parameters"] / 2, rel=0.02)  # norms and some biases are whole on both
    assert "Tokens 0-4095" in printed("003/sequence_parallel.py")
    assert sequence["activations"] == pytest.approx(one["activations"] / 2, rel=0.02) and two["activations"] > 1.2 * sequence["activations"]
