"""The documents' commands and files, typed as tests/documents/changes.yaml says, in a folder like the reader's."""

import json
import math
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List

import pytest
from documents_support import ROOT, SCRIPTS, changed, check_losses, commands, filled, printed, shell_environment, write_reader
from launch_support import free_port
from test_config_command import on_terminal

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("yaml")


class Reader:
    """Whoever types the commands: a folder, a shell in which `tessera` and `python` are found."""

    def __init__(self, python_build, folder: Path):
        self.build, self.folder = python_build, folder
        self.environment = shell_environment(python_build, folder) | {
            "PYTHONPATH": f"{ROOT / 'python'}:{SCRIPTS / 'documents'}", "HF_HOME": str(folder / "huggingface"),
            "XDG_CONFIG_HOME": str(folder / "config"), "CUDA_VISIBLE_DEVICES": ""}

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


def plain_script() -> str:
    """003/basic_setup.py without its plugin: everything comes from the launcher's file."""
    whole = changed("003/basic_setup.py")
    begin, end = whole.index("megatron_plugin = "), whole.index("# Prepare model and optimizer")
    return f"{whole[:begin]}accelerator = Accelerator()\n{whole[end:]}"


def test_installing():
    """Of the documents' installations `pip install .` is left, which tests/python/test_packaging.py tries."""
    for block in ("000/install.sh", "003/install.sh", "001/requirements.sh", "001/pip.sh", "004/megatron.sh"):
        assert commands(block) == ["pip install ."], block
    for block in ("001/clone.sh", "004/apex.sh"):
        assert commands(block) == [], block
    for block in ("004/conda.sh", "004/pytorch.sh"):  # of the reader's choice
        assert changed(block) == printed(block)
    assert "`pip install .`" in (ROOT / "README.md").read_text()


def printed_answers(block: str) -> Dict[str, str]:
    """A part of each question, with its answer: where the answer stands below, or behind the question's colon."""
    lines = [line for line in printed(block).splitlines() if line and "accelerate config" not in line]
    if "> " not in lines[1]:
        return {line.partition("?")[0].rpartition(" (")[0] or line.partition("?")[0]: line.rpartition(":")[2].strip() for line in lines}
    answers = {question.partition("?")[0]: answer.removeprefix("> ") for question, answer in zip(lines[::2], lines[1::2])}
    both = answers.pop("Do you want to use DeepSpeed/FSDP")  # they are asked one after the other
    return answers | {"use DeepSpeed": both, "FSDP": both}


@pytest.mark.parametrize("block", ["000/config_answers.txt", "003/config_answers.txt"])
def test_the_guides_dialogue(tmp_path, block):
    """000/config.sh, 003/config.sh: every question is asked, in words of the guide, and its answer is taken."""
    yaml = pytest.importorskip("yaml")
    answers = printed_answers(block)
    assert len(answers) == 12 and commands(block.replace("config_answers.txt", "config.sh")) == ["tessera config"]
    shown = on_terminal(answers, "--config_file", tmp_path / "a.yaml")
    assert not [question for question in answers if question not in shown]
    written, wanted = (yaml.safe_load(text) for text in ((tmp_path / "a.yaml").read_text(), printed("003/default_config.yaml")))
    layout = wanted.pop("megatron_lm_config")
    del wanted["mixed_precision"], layout["megatron_lm_learning_rate_decay_iters"]  # which the guide's dialogue does not ask for
    assert {key: written[key] for key in wanted} == wanted
    assert {key: written["megatron_lm_config"][key] for key in layout} == layout


def test_accelerates_dialogue(tmp_path):
    """The fifteen answers by their position write the printed file."""
    yaml = pytest.importorskip("yaml")
    answers = list(printed_answers("004/config_answers.txt").values())
    assert len(answers) == 15 and changed("004/config_answers.txt").startswith(":~$ tessera config --config_file")
    on_terminal(answers, "--config_file", tmp_path / "megatron_gpt_config.yaml")
    written, wanted = (yaml.safe_load(text) for text in (
        (tmp_path / "megatron_gpt_config.yaml").read_text(), printed("004/megatron_gpt_config.yaml")))
    wanted = {key: value for key, value in wanted.items() if value not in (None, {})}
    assert {key: written[key] for key in wanted} == wanted


@pytest.mark.parametrize("block", ["000/default_config.yaml", "003/default_config.yaml"])
def test_the_guides_files(reader, block):
    """Where the guide says that the file is; the horizon of the learning rate is told to the script."""
    reader.write("huggingface/accelerate/default_config.yaml", changed(block))
    script = "assert accelerator.state.megatron_lm_plugin.lr_decay_iters == 320000\n"
    reader.write("script.py", beside_pytorch(plain_script() + script))
    done = reader.type("tessera launch script.py")
    assert f"settings from {reader.folder}/huggingface/accelerate/default_config.yaml" in done.stderr
    assert done.stderr.count("indent") == (block == "000/default_config.yaml"), done.stderr
    check_losses(reader.read("losses.json"), 11)


def test_the_guides_launch_command(reader):
    """The full training script in the printed precision, by the first command of 003/launch.sh."""
    reader.write("train.py", changed("003/train.py", "precision"))
    first, *machines = commands("003/launch.sh")
    assert first == "tessera launch --multi_gpu --num_processes 4 train.py" and len(machines) == 2
    reader.type(first)
    assert sorted(path.name for path in reader.folder.glob("checkpoint-epoch-*")) == ["checkpoint-epoch-0", "checkpoint-epoch-1"]


def test_the_guides_two_machines(reader):
    """Both on this one: without a secret they find each other, and each says once what that means."""
    reader.write("train.py", changed("003/train.py"))
    environment = {"MASTER_ADDR": "127.0.0.1", "FREE_PORT": str(free_port())}
    first, second = commands("003/launch.sh")[1:]
    with ThreadPoolExecutor() as pool:
        jobs = [job.result() for job in [pool.submit(reader.type, command, **environment) for command in (first, second)]]
    assert [job.stderr.count("without a secret") for job in jobs] == [1, 1]
    assert (reader.folder / "checkpoint-epoch-1").is_dir()


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


def test_accelerates_generation_script(reader):
    """A script of the shape of megatron_gpt2_generation.py, with 004/generate.py in it, under the file of its own (two tensor ranks,
    two stages, two micro-batches) and under 004's: the texts of one process, drawn ones too, on every rank."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    text = " ".join(re.findall("[A-Za-z.,?]+", (ROOT / "CONTRIBUTING.md").read_text()))
    reader.write("text.txt", text)
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text.split(". "), vocab_size=500, special_tokens=["<|endoftext|>"], show_progress=False)
    (reader.folder / "gpt2").mkdir()
    tokenizer.save_model(str(reader.folder / "gpt2"))
    transformers.GPT2Config(n_layer=4, n_head=4, n_embd=32, vocab_size=500, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                            initializer_range=0.2).save_pretrained(reader.folder / "gpt2")  # texts do not end at its eos_token_id, 50256
    whole = changed("004/megatron_gpt_config.yaml")
    reader.write("megatron_gpt_config.yaml", whole)
    own = reader.write("generate.yaml", re.sub("(recompute_activations|sequence_parallelism): true", r"\1: false", whole)).read_text()
    reader.write("one.yaml", re.sub("(tp_degree|pp_degree|num_processes): [24]", r"\1: 1", own))
    reader.write("script.py", filled(SCRIPTS / "documents/gpt2_generation.py"))
    found = {}
    for name in ("one", "generate", "megatron_gpt_config"):
        reader.type(f"tessera launch --config_file {name}.yaml script.py --resume_from_checkpoint gpt2 --train_file text.txt "
                    f"--written {name}.json")
        found[name] = reader.read(f"{name}.json")
        assert found[name]["losses"] == pytest.approx(found["one"]["losses"], rel=1e-5), name
        assert found[name]["written"] == found["one"]["written"], name
    *drawn, likeliest = found["one"]["written"]
    assert [len(texts) for texts in drawn] == [4, 4, 4, 1] and len(likeliest) == 4
    assert drawn[2][1].startswith("<|endoftext|>The purpose of life is") and drawn[3][0].startswith("The purpose of life is")
    assert all(len(set(text[len("The purpose of life is"):].replace("<|endoftext|>", ""))) > 8 for text in likeliest[:2])


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
    even = plan(reader, 24, pipeline=4, pipeline_layout='"6,6,6,6"')  # as 004 counts; left out, the head weighs too
    assert re.findall(r"^  \d +(?:embedding \+ )?(\d+-\d+)", even, flags=re.M) == ["0-5", "6-11", "12-17", "18-23"]
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
