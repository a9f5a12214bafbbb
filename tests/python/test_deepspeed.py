"""Runs that DeepSpeed itself saved go on here, where it is installed (PyPI; 0.19.8 was tried, on the CPU)."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import metrics, run

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)
from megatron_runs import lr_at  # noqa: E402
from test_megatron_runs import close, corpus, go_on, gpt2, llama  # noqa: E402, F401
from test_torch_runs import settings  # noqa: E402

HERE = Path(__file__).parent


def theirs(*command) -> None:
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
                                "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-m", *map(str, command)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("kind, stage, ranks, universal, parallel", [
    ("gpt2", 1, 3, False, []), ("llama", 2, 2, False, ["parallel.data=2"]), ("gpt2", 3, 2, False, ["parallel.tensor=2"]),
    ("llama", 3, 2, False, []), ("gpt2", 2, 2, True, ["parallel.pipeline=2"])])
def test_it_goes_on_as_with_torch(tessera_program, tmp_path, request, corpus, kind, stage, ranks, universal, parallel):  # noqa: F811
    started, folder = request.getfixturevalue(kind), tmp_path / "theirs"
    started.before.save_pretrained(tmp_path / "model")
    theirs("torch.distributed.run", "--nproc-per-node", ranks, "--standalone", HERE / "scripts/deepspeed_run.py", stage, tmp_path / "model",
           started.updates, folder)
    if universal:
        target = folder / f"global_step{started.updates}_universal"
        theirs("deepspeed.checkpoint.ds_to_universal", "--input_folder", folder / f"global_step{started.updates}", "--output_folder", target,
               "--inject_missing_state")
        folder = target
    convert = ("convert", "--from", "deepspeed", folder, "--hf_config", tmp_path / "model", "--to", "tessera", tmp_path / "run")
    run(tessera_program, *convert, "--with_optimizer", "--settings", settings(tmp_path))
    go_on(tessera_program, tmp_path / "run", corpus, started.updates + started.more, *parallel)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [4, 5, 6, 7]
    assert [line["lr"] for line in lines] == pytest.approx([lr_at(update) for update in range(3, 7)])
    close(tessera_program, tmp_path / "run", started, tmp_path)
