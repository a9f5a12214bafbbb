"""The documents' Python blocks, as they are typed here, train what plain PyTorch trains from rank 0's weights, on every kind of layout.

The blocks are in tests/documents, and changes.yaml says what is written otherwise. Starting Python costs more than training, so all
scripts of one number of processes share a job."""

import json
import math
import re
import runpy
from pathlib import Path
from typing import Dict

import pytest
from cli_support import write_corpus
from documents_support import ROOT, SCRIPTS, changed, check_losses, commands, filled, printed, shell_environment, write_reader

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("yaml")

LAYOUTS = {2: {"dp2": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}, 4: {"tp2pp2": (2, 2)}}
CLM = ["--config_name", "gpt2-large", "--tokenizer_name", "gpt2-large", "--dataset_name", "wikitext", "--dataset_config_name",
       "wikitext-2-raw-v1", "--block_size", "16", "--per_device_train_batch_size", "1", "--per_device_eval_batch_size", "1",
       "--num_train_epochs", "2", "--learning_rate", "5e-3", "--output_dir", "clm"]
PLUGIN_LINE, LOOP_LINE = "megatron_plugin = MegatronLMPlugin(\n", "# Initialize accelerator\n"


def around(fragment: str) -> str:
    """A printed plugin in the place of the one in 003/basic_setup.py."""
    whole = changed("003/basic_setup.py")
    begin, end = whole.index(PLUGIN_LINE), whole.index(LOOP_LINE)
    return f"{whole[:begin]}{fragment}\nmegatron_plugin = vars().get('megatron_lm_plugin', vars().get('megatron_plugin'))\n{whole[end:]}"


class Cases:
    """Scripts of one job."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.cases = []
        write_reader(folder)
        write_corpus(folder / "data", [[(d * 31 + i * i) % 65 if i % 4 else i // 4 for i in range(15)] + [65] for d in range(30)])

    def add(self, name: str, text: str, *arguments: str, **environment: str) -> None:
        script = self.folder / f"{name}.py"
        script.write_text(text)
        self.cases.append({"name": name, "script": str(script), "folder": str(self.folder), "arguments": list(arguments), "environment": environment})

    def add_all(self, layout: str, tp: int, pp: int) -> None:
        """What is run on every layout."""
        launched = {"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_TP_DEGREE": str(tp), "MEGATRON_LM_PP_DEGREE": str(pp),
                    "MEGATRON_LM_NUM_MICRO_BATCHES": "2"}
        self.add(f"basic_setup {layout}", changed("003/basic_setup.py", tp_degree=tp, pp_degree=pp))
        self.add(f"train {layout}", changed("003/train.py", tp_degree=tp, pp_degree=pp))
        self.add(f"run_clm {layout}", filled(SCRIPTS / "documents/run_clm.py"), *CLM, **launched)
        self.add(f"custom step {layout}", filled(SCRIPTS / "documents/run_clm.py"), *CLM, "--custom_train_step", **launched)
        self.add(f"checkpoint {layout}", filled(SCRIPTS / "documents/checkpoint.py"), **launched)
        self.add(f"indexed {layout}", filled(SCRIPTS / "documents/indexed.py"), str(self.folder / "data"), "gpt2-large", **launched)

    def run(self, python_build, processes: int) -> Dict[str, dict]:
        (self.folder / "cases.json").write_text(json.dumps(self.cases))
        output = self.folder / "results.json"
        python_build.run(SCRIPTS / "documents/run.py", output, self.folder / "cases.json",
                         launcher=python_build.launcher("--cpu", "--num_processes", processes))
        return {**json.loads(output.read_text()), "folder": str(self.folder)}


@pytest.fixture(scope="module")
def two(python_build, tmp_path_factory) -> Dict[str, dict]:
    """What the scripts found on two processes."""
    cases = Cases(tmp_path_factory.mktemp("two"))
    for name, (tp, pp) in LAYOUTS[2].items():
        cases.add_all(name, tp, pp)
    return cases.run(python_build, 2)


@pytest.fixture(scope="module")
def four(python_build, tmp_path_factory) -> Dict[str, dict]:
    """And on four."""
    cases = Cases(tmp_path_factory.mktemp("four"))
    cases.add_all("tp2pp2", 2, 2)
    cases.add("basic_setup as printed", changed("003/basic_setup.py", "precision"))
    for fragment in ("activation_checkpointing", "distributed_optimizer", "micro_batches", "sequence_length", "oom"):
        cases.add(fragment, around(changed(f"003/{fragment}.py")))
    cases.add("sequence_length, one tensor rank", around(changed("003/sequence_length.py", tp_degree=1)))
    settings = changed("003/slow_pipeline.py") + changed("003/slow_micro_batches.py")
    names = ", ".join(f"{name}={name}" for name in ("tp_degree", "pp_degree", "num_micro_batches"))
    cases.add("slow training", around(f"{settings}megatron_plugin = MegatronLMPlugin({names})\n"))
    for fragment in ("return_logits", "alibi", "multiquery"):
        cases.add(fragment, around(changed(f"004/{fragment}.py")))
    return cases.run(python_build, 4)


@pytest.fixture
def results(request, layout) -> Dict[str, dict]:
    return request.getfixturevalue("four" if layout in LAYOUTS[4] else "two")


EVERYWHERE = [layout for layouts in LAYOUTS.values() for layout in layouts]
DATA_RANKS = {"dp2": 2, "tp2": 1, "pp2": 1, "tp2pp2": 1}


@pytest.mark.parametrize("layout", EVERYWHERE)
def test_basic_setup(results, layout):
    check_losses(results[f"basic_setup {layout}"], math.ceil(11 / (4 * DATA_RANKS[layout])))


@pytest.mark.parametrize("layout", EVERYWHERE)
def test_the_full_training_script(results, layout):
    check_losses(results[f"train {layout}"], 2 * math.ceil(11 / (4 * DATA_RANKS[layout])))


@pytest.mark.parametrize("layout", EVERYWHERE)
def test_the_changed_run_clm(results, layout):
    result, whole = results[f"run_clm {layout}"], 2 * DATA_RANKS[layout]
    steps = 2 * math.ceil(9 / whole)
    check_losses(result, steps)
    assert (result["told"]["steps"], result["told"]["total_batch_size"]) == (steps, whole)
    assert result["told"]["lr"] == pytest.approx([0, 0], abs=1e-9), "the schedule ends with the run"


@pytest.mark.parametrize("layout", EVERYWHERE)
def test_the_custom_train_step(results, layout):
    check_losses(results[f"custom step {layout}"], 2 * math.ceil(9 / (2 * DATA_RANKS[layout])))
    assert results[f"custom step {layout}"]["expected"][0] > 1.05 * results[f"run_clm {layout}"]["expected"][0]


@pytest.mark.parametrize("layout", EVERYWHERE)
def test_indexed_data(results, layout):
    check_losses(results[f"indexed {layout}"], 4)
    told = results[f"indexed {layout}"]["told"]
    assert len(told["evaluated"]) == 2 and "give the plugin train_iters" in told["refused"]


@pytest.mark.parametrize("layout", EVERYWHERE)
def test_saving_and_loading(results, layout):
    """003/save_checkpoint.py, 003/load_checkpoint.py"""
    told = results[f"checkpoint {layout}"]["told"]
    assert told["again"] == told["first"] and len(told["first"]) == math.ceil(11 / (2 * DATA_RANKS[layout]))


def test_names_of_checkpoint_files(four):
    """003/save_checkpoint.py prints names for tensor 2, pipeline 2; here they end in .safetensors, and the optimizer's tell the data
    rank too."""
    names = re.findall(r"^#   (\w+)\.bin", printed("003/save_checkpoint.py"), flags=re.M)
    ours = [f"{name.replace('pytorch_', '')}{'_dp_0' if 'optimizer' in name else ''}.safetensors" for name in names]
    written = {path.name for path in (Path(four["folder"]) / "checkpoint-1000").rglob("*.safetensors")}
    assert len(ours) == 5 and set(ours) <= written


def test_merging(four, python_build):
    """003/merge.sh: Transformers computes the loss that training went on with."""
    folder = Path(four["folder"])
    python_build.run(launcher=["bash", "-ec", commands("003/merge.sh")[0]], cwd=folder, EXAMPLES=str(ROOT / "examples/python"),
                     **shell_environment(python_build, folder))
    merged = transformers.GPT2LMHeadModel.from_pretrained(folder)  # pytorch_model.bin, and the config.json that was written with it
    samples = runpy.run_path(str(SCRIPTS / "documents/what_readers_have.py"))["train_loader"].dataset
    first = torch.stack([samples[row]["input_ids"] for row in range(2)])
    with torch.no_grad():
        loss = merged(input_ids=first, labels=first).loss.item()
    assert loss == pytest.approx(four["checkpoint tp2pp2"]["told"]["first"][0], rel=1e-5)


@pytest.mark.parametrize("fragment", ["alibi", "multiquery"])
def test_other_models(four, fragment):
    """004/alibi.py, 004/multiquery.py make another model of the one that is there, and one line says so. (Its numbers:
    test_changed_models.py.)"""
    result = four[fragment]
    assert len(result["losses"]) == 3 and all(0 < loss < 10 for loss in result["losses"])
    assert abs(result["losses"][0] - result["expected"][0]) > 1e-4, "the model is still the one with learned positions and all heads"
    assert len([line for line in result["said"] if "makes another model" in line]) == 1


def test_the_printed_precision(four):
    check_losses(four["basic_setup as printed"], 3, 2e-2)


def test_activation_checkpointing(four):
    """With one tensor rank there is nobody to share activations with: a warning, and the same losses."""
    check_losses(four["activation_checkpointing"], 3)
    assert len([text for text in four["activation_checkpointing"]["said"] if "partition_activations" in text]) == 1


@pytest.mark.parametrize("fragment, steps", [
    ("distributed_optimizer", 3), ("micro_batches", 1), ("sequence_length", 11), ("oom", 1),
    ("sequence_length, one tensor rank", 3), ("slow training", 2), ("return_logits", 3)])
def test_printed_plugins(four, fragment, steps):
    check_losses(four[fragment], steps)
