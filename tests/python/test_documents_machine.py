"""What the documents show of checkpoints' files, of the machine and of the log, beside what is printed here."""

import json
import re
import shutil

import pytest
from cli_support import run, text_documents, write_config, write_corpus
from documents_support import ROOT, commands, printed, shell_environment

pytest.importorskip("yaml")


def test_asking_for_the_links(tessera_program, build_dir, tmp_path):
    """003/topology.sh and 003/nvlink.sh, with a stand-in for the driver's library."""
    assert commands("003/topology.sh") == commands("003/nvlink.sh") == ["tessera env"]
    lines = run(tessera_program, "env").stdout.splitlines()
    assert any(line.startswith("gpus ") for line in lines)
    nodes = [line.split() for line in lines if re.search(r"node \d+: CPUs [\d,-]*$", line)]
    assert nodes[0][0] == "numa" and len(nodes) == sum(1 for line in lines if ": CPUs" in line)
    shutil.copy(build_dir / "tests/libnvml_stand_in.so", tmp_path / "libnvidia-ml.so.1")
    lines = run(tessera_program, "env", env={"LD_LIBRARY_PATH": str(tmp_path)}).stdout.splitlines()
    (links,) = [number for number, line in enumerate(lines) if re.match(r"links +GPU0 is ", line)]
    assert any("NV" in line for line in lines[links:]), lines


def test_files_of_a_checkpoint_are_named_by_rank(tessera_program, python_build, tmp_path):
    """The names of 003/save_checkpoint.py, in safetensors, and 003/merge.sh."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shown = re.findall(r"# +(?:pytorch_)?(model|optimizer)_tp_(\d)_pp_(\d)\.bin", printed("003/save_checkpoint.py"))
    assert ("optimizer", "0", "0") in shown and len(shown) == 5
    config = write_config(tmp_path, write_corpus(tmp_path / "corpus", text_documents()), model__num_heads=4, training__steps=3)
    run(tessera_program, "train", config, "parallel.tensor=2", "parallel.pipeline=2")
    shutil.copytree(tmp_path / "run/checkpoints/step-00000003", tmp_path / "checkpoint-1000")
    names = {path.name for path in (tmp_path / "checkpoint-1000").iterdir()}
    assert names >= {f"{kind}_tp_{t}_pp_{p}{'_dp_0' if kind == 'optimizer' else ''}.safetensors" for kind, t, p in shown}
    environment = shell_environment(python_build, tmp_path) | {"EXAMPLES": str(ROOT / "examples/python")}
    (merge,) = commands("003/merge.sh")
    python_build.run(launcher=["bash", "-ec", merge], cwd=tmp_path, **environment)
    (tmp_path / "merged").mkdir()
    for name in ("pytorch_model.bin", "config.json"):
        shutil.move(tmp_path / name, tmp_path / "merged" / name)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.n_layer == 2


def test_parameters_of_the_printed_log(tessera_program, tmp_path):
    """004/output.txt is of GPT-2 large with its vocabulary padded to 50,432; here nothing is padded unless it is said."""
    shown = re.findall(r"^ > number of parameters on \(tensor, pipeline\) model parallel rank \((\d), (\d)\): (\d+)$",
                       printed("004/output.txt"), re.M)
    assert len(shown) == 4
    model = {"num_layers": 36, "hidden_size": 1280, "num_heads": 20, "vocab_size": 50432, "max_positions": 1024}
    config = write_config(tmp_path, tmp_path / "corpus", **{f"model__{key}": value for key, value in model.items()}, parallel__tensor=2,
                          parallel__pipeline=2, parallel__pipeline_layout="18,18")
    ranks = json.loads(run(tessera_program, "plan", config, "--json").stdout)["ranks"]
    assert {(str(each["tensor"]), str(each["stage"]), str(each["parameters"])) for each in ranks} == set(shown)
