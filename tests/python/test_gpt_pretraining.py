"""Accelerate's Megatron-LM example, call by call, under `tessera launch` with a file as `accelerate config` writes it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")

SCRIPT = Path(__file__).parent / "scripts" / "gpt_pretraining.py"
CONFIG = """\
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
mixed_precision: 'no'
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
use_cpu: true
"""


def run(python_build, *arguments) -> list:
    """What each rank found out."""
    done = subprocess.run([str(python_build.build / "tessera"), "launch", *map(str, arguments)], capture_output=True, text=True,
                          timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1", "TESSERA_PYTHON": sys.executable,
                                            "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", **python_build.environment})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    folder = Path(arguments[arguments.index(SCRIPT) + 1])
    return [json.loads(path.read_text()) for path in sorted(folder.glob("all_results_*.json"))]


def test_the_example(python_build, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    whole = run(python_build, "--config_file", config, SCRIPT, tmp_path / "whole")
    assert len(whole) == 4 and all(each == whole[0] for each in whole)
    result = whole[0]
    assert result["total_batch_size"] == 8 and result["completed"] == 2 * result["updates"]
    assert result["perplexity"][1] < result["perplexity"][0] < 257
    assert result["lr"] == pytest.approx([0.0, 0.0], abs=1e-9)  # the horizon is that of the run
    assert list((tmp_path / "whole").rglob("events.out.tfevents*"))
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole/hf")
    resumed = run(python_build, "--config_file", config, SCRIPT, tmp_path / "again", tmp_path / "whole/step_3")[0]
    assert resumed["losses"] == result["losses"][3:]
    assert resumed["perplexity"] == result["perplexity"]
