"""tessera config: its questions through a pseudo-terminal, its flags, and what accelerate makes of the files."""

import builtins
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.commands import config_file
from tessera.commands.config import main
from tessera.commands.config_file import read_config, to_yaml, write_basic_config
from tessera.errors import ConfigError

PYTHON = Path(__file__).resolve().parents[2] / "python"

# The guide's run: 2 x 2 x 1 GPUs.
GUIDE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MEGATRON_LM
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
megatron_lm_config:
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_num_micro_batches: 2
  megatron_lm_pp_degree: 2
  megatron_lm_recompute_activations: true
  megatron_lm_sequence_parallelism: true
  megatron_lm_tp_degree: 2
  megatron_lm_use_distributed_optimizer: true
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
# As Accelerate's guide to Megatron-LM prints them, and Enter for what is asked after them.
GUIDE_ANSWERS = ["0", "2", "", "", "", "yes", "2", "", "2", "2", "", "", "", "4", "bf16"]
FURTHER = [""] * 4


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(config_file, "gpu_count", lambda: 0)


def on_terminal(answers: list, *flags, code: int = 0) -> str:
    """Runs the command on a terminal of its own and types the answers; returns what it showed."""
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "tessera", "config", *map(str, flags)], stdin=slave, stdout=slave, stderr=slave,
                               env={**os.environ, "PYTHONPATH": str(PYTHON)}, start_new_session=True)
    os.close(slave)
    shown = b""
    # A person reads the question before the answer is typed. By position; or to the question that has these words.
    by_question = dict(answers) if isinstance(answers, dict) else None
    answers = [answer.encode() + b"\n" for answer in answers] + [b"\x04"]
    try:
        while True:
            try:
                piece = os.read(master, 4096)
            except OSError:  # the other side is closed: it has ended
                break
            if not piece:
                break
            shown += piece
            if not shown.endswith((b"]: ", b"? ")):
                continue
            if by_question is not None:
                question = shown.rpartition(b"\0")[2].decode()
                os.write(master, next((by_question.pop(part) for part in list(by_question) if part in question), "").encode() + b"\n")
            elif answers:
                os.write(master, answers.pop(0))
            shown += b"\0"
        assert process.wait(30) == code, shown.decode()
    finally:
        process.kill()
        os.close(master)
    return shown.replace(b"\0", b"").decode()


def test_the_guides_file(tmp_path):
    shown = on_terminal(GUIDE_ANSWERS + FURTHER, "--config_file", tmp_path / "a.yaml")
    assert (tmp_path / "a.yaml").read_text() == GUIDE
    assert f"tessera launch --config_file {tmp_path}/a.yaml" in shown
    # What comes after the guide's questions need not be answered.
    shown = on_terminal(GUIDE_ANSWERS, "--config_file", tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == read_config(tmp_path / "a.yaml")
    assert "the rest is as usual" in shown


# A part of each question of another guide, whose order is not ours, with its answer.
OTHER_GUIDE = {
    "compute environment": "This machine", "type of machine": "Multi-GPU", "different machines": "1", "DeepSpeed": "No", "FSDP": "No",
    "use Megatron-LM": "Yes", "Tensor Parallelism degree": "2", "Sequence Parallelism": "No", "Pipeline Parallelism degree": "2",
    "Data Parallelism degree": "2", "activation checkpointing": "SELECTIVE", "activation partitioning": "SEQUENTIAL"}


def test_another_guides_dialogue(tmp_path):
    """Its answers to its questions, and Enter to the others."""
    shown = on_terminal(OTHER_GUIDE, "--config_file", tmp_path / "a.yaml")
    config = read_config(tmp_path / "a.yaml")
    assert "That makes 8 processes in all." in shown
    assert (config["distributed_type"], config["num_processes"], config["num_machines"]) == ("MEGATRON_LM", 8, 1)
    assert config["megatron_lm_config"] == {
        "megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 2, "megatron_lm_sequence_parallelism": False,
        "megatron_lm_num_micro_batches": 1, "megatron_lm_recompute_activations": True, "megatron_lm_gradient_clipping": 1.0,
        "megatron_lm_use_distributed_optimizer": True}
    in_numbers = {**OTHER_GUIDE, "compute environment": "0", "type of machine": "2", "activation checkpointing": "1",
                  "activation partitioning": "1"}
    on_terminal(in_numbers, "--config_file", tmp_path / "b.yaml")
    layout = read_config(tmp_path / "b.yaml")["megatron_lm_config"]
    assert (layout["megatron_lm_recompute_activations"], layout["megatron_lm_recompute_granularity"],
            layout["megatron_lm_partition_activations"]) == (False, "full", True)
    on_terminal({**OTHER_GUIDE, "activation checkpointing": "none"}, "--config_file", tmp_path / "c.yaml")
    assert read_config(tmp_path / "c.yaml")["megatron_lm_config"]["megatron_lm_recompute_activations"] is False


def test_other_engines_get_a_sentence(tmp_path):
    answers = ["1", "this machine", "TPU", "multi-gpu", "", "yes", "yes", "", "2", "fp16", "", "0,1", "yes"]
    shown = on_terminal(answers, "--config_file", tmp_path / "a.yaml")
    for sentence in ("Amazon SageMaker starts no jobs", "does not run on TPUs", "Tessera does not use DeepSpeed.",
                     "Tessera does not use FullyShardedDataParallel (FSDP)."):
        assert sentence in shown
    config = read_config(tmp_path / "a.yaml")
    assert (config["distributed_type"], config["gpu_ids"], config["enable_cpu_affinity"]) == ("MULTI_GPU", "0,1", True)


@pytest.mark.parametrize("answers, copies", [(GUIDE_ANSWERS, 1), (OTHER_GUIDE, 2)], ids=["by position", "by question"])
def test_what_the_dialogues_write_trains(python_build, tmp_path, answers, copies):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    on_terminal(answers, "--config_file", tmp_path / "a.yaml")
    done = python_build.run(launcher=[python_build.program, "test", "--config_file", tmp_path / "a.yaml"])
    assert f"layout: tensor 2, context 1, pipeline 2, data {copies}" in done.stdout and "Everything works." in done.stdout


def test_where_it_goes_by_default(tmp_path):
    on_terminal([""] * 6)
    config = read_config(tmp_path / "config/tessera/default_config.yaml")
    assert (config["distributed_type"], config["num_processes"], config["gpu_ids"]) == ("NO", 1, "all")


def test_wrong_answers_are_asked_again(tmp_path):
    answers = ["moon", "0", "7", "cluster", "2", "0", "two", "1", "perhaps", "no", "", "yes", "2", "no", "1", "maybe", "no", "", "-1", "0",
               "3", "4", "int8", "no", "half", "", "PARALLEL", "", "0", "many", "2", ""]
    shown = on_terminal(answers, "--config_file", tmp_path / "a.yaml")
    for hint in ("a number from 0 to 1, or one of the words", "a number from 0 to 3, or one of the words", "an integer of at least 1", "yes or no", "a number of at least 0",
                 "an integer of at least 1, a multiple of 2 (tensor x pipeline x context degree)"):
        assert f"Please enter {hint}." in shown
    config = read_config(tmp_path / "a.yaml")
    assert config["num_processes"] == 4 and config["mixed_precision"] == "no"
    assert config["megatron_lm_config"] == {
        "megatron_lm_tp_degree": 2, "megatron_lm_sequence_parallelism": False, "megatron_lm_pp_degree": 1,
        "megatron_lm_recompute_activations": False, "megatron_lm_use_distributed_optimizer": True, "megatron_lm_gradient_clipping": 0.0}


def test_an_end_of_input_writes_nothing(tmp_path):
    shown = on_terminal(["multi-GPU"], "--config_file", tmp_path / "a.yaml", code=1)
    assert "nothing was written" in shown and not (tmp_path / "a.yaml").exists()


# The same answers to accelerate: a part of its question, and what is answered
ANSWERS = {
    "guide": (GUIDE_ANSWERS + FURTHER, {
        "compute environment": 0, "type of machine": 4, "different machines": "1", "Megatron-LM": "yes", "Tensor Parallelism": "2",
        "Pipeline Parallelism": "2", "number of micro-batches": "2", "How many GPU": "4", "mixed precision": 2}),
    "machines": (["0", "multi-GPU", "2", "1", "10.0.0.1", "5000", "no", "c10d", "", "", "no", "8", "fp16", "yes", "0,1", "yes"], {
        "compute environment": 0, "type of machine": 4, "different machines": "2", "rank of this machine": 1, "IP address": "10.0.0.1",
        "port you will use": "5000", "same local network": "no", "rendezvous backend": "c10d", "checked while running": "yes",
        "How many GPU": "8", "by id": "0,1", "numa": "yes", "mixed precision": 1}),
    "cpu": (["", "1", "", "", "2", "", ""], {
        "compute environment": 0, "type of machine": 1, "different machines": "1", "How many processes": "2", "mixed precision": 0}),
    "one": (["", "0", "no", "bf16", "", ""], {"compute environment": 0, "type of machine": 0, "mixed precision": 2}),
    "one cpu": (["", "", "yes", ""], {"compute environment": 0, "type of machine": 0, "CPU only": "yes", "mixed precision": 0}),
}


def answered_by_accelerate(monkeypatch, answers: dict):
    utils = pytest.importorskip("accelerate.commands.config.config_utils")
    from accelerate.commands.config.config import get_user_input

    def answer(question, otherwise):
        return next((value for part, value in answers.items() if part in question), otherwise)

    class Menu:
        def __init__(self, question, options):
            self.question = question

        def run(self, default_choice=0):
            return answer(self.question, default_choice)

    monkeypatch.setattr(utils, "BulletMenu", Menu)
    monkeypatch.setattr(builtins, "input", lambda question="": answer(question, ""))
    return get_user_input()


@pytest.mark.parametrize("name", ANSWERS)
def test_accelerate_writes_the_same(name, tmp_path, monkeypatch):
    ours, theirs = ANSWERS[name]
    config = answered_by_accelerate(monkeypatch, theirs)
    config.to_yaml_file(tmp_path / "theirs.yaml")
    on_terminal(ours, "--config_file", tmp_path / "ours.yaml")
    from accelerate.commands.config.config_args import load_config_from_file

    mine, other = load_config_from_file(str(tmp_path / "ours.yaml")), load_config_from_file(str(tmp_path / "theirs.yaml"))
    assert vars(mine) == vars(other)
    # And the text: the same keys in the same order.
    written = [(tmp_path / name).read_text().replace("'", "") for name in ("ours.yaml", "theirs.yaml")]
    assert written[0] == written[1]


# Flags


def test_flags_ask_nothing(tmp_path):
    path = tmp_path / "a.yaml"
    assert main(["--config_file", str(path), "--tp_degree", "2", "--pp-degree=2", "--num_micro_batches", "2", "--num_processes", "4",
                 "--sequence_parallelism", "--megatron_lm_recompute_activations", "true", "--use-distributed-optimizer",
                 "--megatron-lm-gradient-clipping", "1.0", "--mixed_precision", "bf16"]) == 0
    assert path.read_text() == GUIDE
    assert main(["--config-file", str(path), "--cpu", "--num_processes=3"]) == 0
    config = read_config(path)
    assert (config["distributed_type"], config["use_cpu"], config["num_processes"]) == ("MULTI_CPU", True, 3)
    assert main(["--config-file", str(path), "--num_processes=2", "--gpu_ids", "0, 3"]) == 0
    assert (read_config(path)["distributed_type"], read_config(path)["gpu_ids"]) == ("MULTI_GPU", "0,3")


@pytest.mark.parametrize("flags, message", [
    (["--tp_degree", "2", "--num_processes", "3"], "must be a multiple of 2, the tensor x pipeline x context degree"),
    (["--tp_degree", "two"], "--tp_degree is 'two'; it must be an integer"),
    (["--context_parallel_size", "2", "--num_processes", "3"], "must be a multiple of 2, the tensor x pipeline x context"),
    (["--distributed_type", "NO", "--tp_degree", "2"], "a layout is for distributed_type MEGATRON_LM"),
    (["--distributed_type", "MULTI_GPU"], "needs at least 2 processes"),
    (["--num_machines", "2", "--num_processes", "4"], "needs a main_process_ip"),
    (["--num_machines", "2", "--num_processes", "3"], "must be a multiple of num_machines 2"),
    (["--gpu_ids", "a"], "must be all, or numbers"),
    (["default", "--tp_degree", "2"], "takes --mixed_precision and --config_file only"),
    (["--default", "--config_file", "/proc/none/a.yaml"], "cannot be written"),
    (["update", "--config_file", "no/such.yaml"], "cannot be read"),
])
def test_refused_flags(flags, message, capsys, tmp_path):
    assert main(flags if "--config_file" in flags else [*flags, "--config_file", str(tmp_path / "a.yaml")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "a.yaml").exists()


def test_unknown_flags_end_the_command(capsys):
    for flags in (["--tp"], ["--fsdp_config", "x"], ["--mixed_precision", "fp8"], ["other"]):
        with pytest.raises(SystemExit) as end:
            main(flags)
        assert end.value.code == 2 and "usage: tessera config" in capsys.readouterr().err


def test_default_and_basic(tmp_path, capsys, monkeypatch):
    default = tmp_path / "config/tessera/default_config.yaml"
    assert main(["default", "--mixed_precision", "bf16"]) == 0
    config = read_config(default)
    assert (config["distributed_type"], config["use_cpu"], config["mixed_precision"]) == ("NO", True, "bf16")
    assert write_basic_config() is False and "exists already" in capsys.readouterr().out
    monkeypatch.setattr(config_file, "gpu_count", lambda: 4)
    path = write_basic_config("BF16", tmp_path / "b.json")
    config = json.loads(path.read_text())
    assert (config["distributed_type"], config["num_processes"], config["use_cpu"]) == ("MULTI_GPU", 4, False)
    for precision, message in (("fp8", "not in this build"), ("int8", "unknown")):
        with pytest.raises(ConfigError, match=message):
            write_basic_config(precision, tmp_path / "c.yaml")


def test_update(tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text("distributed_type: MULTI_GPU\nfp16: true\nnum_processes: 2\nmain_process_ip: null\ndynamo_backend: 'NO'\n")
    assert main(["update", "--config_file", str(path)]) == 0
    config = read_config(path)
    assert (config["mixed_precision"], config["num_processes"], config["num_machines"]) == ("fp16", 2, 1)
    assert not {"fp16", "dynamo_backend", "main_process_ip"} & set(config)
    path.write_text("num_processes: 2\n")
    assert main(["update", "--config_file", str(path)]) == 2
    for text in ("a: [", "- a"):
        path.write_text(text)
        assert main(["update", "--config_file", str(path)]) == 2


def test_update_of_a_file_that_lost_its_indentation(tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text("distributed_type: MEGATRON_LM\nmegatron_lm_config:\nmegatron_lm_tp_degree: 2\n"
                    "megatron_lm_learning_rate_decay_iters: 9\nnum_processes: 2\n")
    assert main(["update", "--config_file", str(path)]) == 0
    config = read_config(path)
    assert config["megatron_lm_config"] == {"megatron_lm_tp_degree": 2, "megatron_lm_lr_decay_iters": 9}
    assert "megatron_lm_tp_degree" not in config


def test_yaml_is_read_as_it_was_meant():
    yaml = pytest.importorskip("yaml")
    config = {"a": "no", "b": "NO", "c": None, "d": 1.0, "e": "0,1", "f": "it's: #1", "g": [], "h": ["x", "1"], "i": {"j": "y", "k": 3},
              "l": "10.0.0.1", "m": "", "n": "1e5", "o": "runs/a-b.yaml", "p": True}
    assert yaml.safe_load(to_yaml(config)) == config
