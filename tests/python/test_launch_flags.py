"""tessera launch: Accelerate's flags and files, the default file, and tracebacks; `tessera test`, `config` and `env`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch_support import launch, lines_of, python

PYTHON = Path(__file__).resolve().parents[2] / "python"
TELL = ("import json, os; print(json.dumps({name: value for name, value in os.environ.items() if name.startswith(('MEGATRON_LM_', "
        "'ACCELERATE_')) or name == 'CUDA_VISIBLE_DEVICES'})); print(sorted(os.sched_getaffinity(0)))")
LAYOUT = ["--use_megatron_lm", "--megatron_lm_tp_degree", 2, "--megatron-lm-pp-degree=1"]


def told(job, rank: int = 0) -> dict:
    return json.loads(lines_of(job.out, rank)[0])


def test_flags_reach_the_workers(tessera_program):
    job = launch(tessera_program, "--num_processes", 2, *LAYOUT, "--mixed-precision", "bf16", "--cpu", "--debug",
                 "--gradient_accumulation_steps", 4, "--megatron_lm_sequence_parallelism", "true",
                 "--megatron_lm_gradient_clipping=0.5", "--same_network", "--rdzv_backend", "static", *python(TELL))
    expected = {"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_TP_DEGREE": "2", "MEGATRON_LM_PP_DEGREE": "1",
                "MEGATRON_LM_SEQUENCE_PARALLELISM": "true", "MEGATRON_LM_GRADIENT_CLIPPING": "0.5",
                "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DEBUG_MODE": "true", "ACCELERATE_USE_CPU": "true",
                "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "CUDA_VISIBLE_DEVICES": ""}
    assert told(job, 0) == told(job, 1) == expected
    assert job.err == ""


def test_a_layout_expects_gpus_and_says_once_that_there_are_none(tessera_program):
    job = launch(tessera_program, "--num_processes", 2, *LAYOUT, *python(TELL))
    if "expects GPUs" in job.err:
        assert job.err.count("the job runs on the CPU") == 1
        assert told(job)["ACCELERATE_USE_CPU"] == "true"
    else:
        assert "ACCELERATE_USE_CPU" not in told(job)
    assert "expects GPUs" not in launch(tessera_program, "--num_processes", 2, *python(TELL)).err


def test_cores_are_shared_out(tessera_program):
    job = launch(tessera_program, "--num_processes", 2, "--enable_cpu_affinity", *python(TELL))
    shares = [json.loads(lines_of(job.out, rank)[1]) for rank in range(2)]
    assert sorted(set(shares[0] + shares[1])) == sorted(os.sched_getaffinity(0))
    assert len(os.sched_getaffinity(0)) == 1 or not set(shares[0]) & set(shares[1])
    assert told(job)["ACCELERATE_CPU_AFFINITY"] == "1"


def test_warned_flags(tessera_program):
    job = launch(tessera_program, "--num_processes", 2, "-t", 3, "--role", "x", "--monitor_interval", 1, "--dynamo-backend", "inductor",
                 "--rdzv_conf", "timeout=9,a=b", *python(TELL))
    assert [len(re.findall(part, job.err)) for part in ("--tee has no effect", "--role has", "--monitor_interval has", "inductor is left out",
                                                        "a has no effect")] == [1] * 5
    assert told(job)["ACCELERATE_DYNAMO_BACKEND"] == "NO"


@pytest.mark.parametrize("flags, message", [
    (["--deepspeed_moe_layer_cls_names", "Block"], "is for DeepSpeed itself, which Tessera does not use"),
    (["--fsdp-offload-params", "true"], "--fsdp_offload_params is for PyTorch's FSDP"),
    (["--tpu"], "is for TPUs"),
    (["--mixed_precision", "fp8"], "fp8 is not in this build yet"),
    (["--megatron_lm_tp_degree", "2"], "needs --use_megatron_lm"),
    ([*LAYOUT, "--num_processes", "3"], "num_processes 3 must be a multiple of 2"),
    ([*LAYOUT, "--num_processes", "4", "--megatron_lm_context_parallel_size", "3"], "x megatron_lm_context_parallel_size 3"),
    (["--multi_gpu", "--num_processes", "1"], "--multi_gpu needs --num_processes of at least 2"),
    (["--megatron_lm_tp_degre", "2"], "did you mean '--megatron_lm_tp_degree'?"),
    (["-m", "--no_python"], "--module and --no_python contradict"),
    (["--config_file", "no/such.yaml"], "no/such.yaml: cannot be read"),
])
def test_refused_flags(tessera_program, flags, message):
    assert message in launch(tessera_program, *flags, *python(TELL), code=2).err


def test_flags_come_before_the_file_in_yaml_and_json(tessera_program, tmp_path):
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MEGATRON_LM", "num_processes": 2, "mixed_precision": "fp16",
              "use_cpu": True, "megatron_lm_config": {"megatron_lm_tp_degree": 2, "megatron_lm_recompute_activations": True,
                                                      "megatron_lm_gradient_clipping": 1.0}}
    (tmp_path / "a.json").write_text(json.dumps(config, indent=2))
    (tmp_path / "a.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in config.items()))
    for name in ("a.json", "a.yaml"):
        got = told(launch(tessera_program, "--config_file", tmp_path / name, "--mixed_precision", "no", "--megatron_lm_tp_degree", 1,
                          *python(TELL)))
        assert (got["ACCELERATE_MIXED_PRECISION"], got["MEGATRON_LM_TP_DEGREE"]) == ("no", "1")
        assert got["MEGATRON_LM_RECOMPUTE_ACTIVATIONS"] == "true" and got["ACCELERATE_USE_MEGATRON_LM"] == "true"
        plain = told(launch(tessera_program, "--config_file", tmp_path / name, "--multi_gpu", *python(TELL)))
        assert plain["ACCELERATE_USE_MEGATRON_LM"] == "false" and "MEGATRON_LM_TP_DEGREE" not in plain


def test_the_default_file(tessera_program, tmp_path):
    home = {"XDG_CONFIG_HOME": str(tmp_path / "home/.config"), "HF_HOME": str(tmp_path / "home/.cache/huggingface")}

    def write(path: str, precision: str):
        file = tmp_path / "home" / path
        file.parent.mkdir(parents=True)
        file.write_text(f"distributed_type: 'NO'\nnum_processes: 1\nmixed_precision: {precision}\n")
        return str(file)

    theirs = write(".cache/huggingface/accelerate/default_config.yaml", "bf16")
    job = launch(tessera_program, *python(TELL), env=home)
    assert f"settings from {theirs}" in job.err and told(job)["ACCELERATE_MIXED_PRECISION"] == "bf16"
    ours = write(".config/tessera/default_config.yaml", "fp16")
    job = launch(tessera_program, *python(TELL), env=home)
    assert f"settings from {ours}" in job.err and told(job)["ACCELERATE_MIXED_PRECISION"] == "fp16"
    for flags in (["--cpu"], ["--config_file", "none"]):
        job = launch(tessera_program, *flags, *python(TELL), env=home)
        assert "settings from" not in job.err and "ACCELERATE_MIXED_PRECISION" not in told(job)
    Path(ours).write_text("distributed_type: FSDP\n")
    job = launch(tessera_program, *python(TELL), env=home, code=2)
    assert "'FSDP' is not what Tessera does" in job.err and "give --config_file none" in job.err


DEEPSPEED_FILE = """compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
use_cpu: true
"""
TELL_STAGE = """from tessera import Accelerator
a = Accelerator()
p = a.state.deepspeed_plugin
a.print(a.num_processes, p.zero_stage, p.clip_grad, a.gradient_accumulation_steps, sorted(p.offload.items()), a.mixed_precision)
"""


def test_deepspeeds_file_and_flags_make_the_plugin(tessera_program, tmp_path):
    (tmp_path / "ds.yaml").write_text(DEEPSPEED_FILE)
    (tmp_path / "tell.py").write_text(TELL_STAGE)
    env = {"PYTHONPATH": str(PYTHON), "TESSERA_PYTHON": sys.executable}
    job = launch(tessera_program, "--config_file", tmp_path / "ds.yaml", tmp_path / "tell.py", env=env)
    assert "2 2 0.5 4 [('gradients', 'cpu'), ('optimizer', 'cpu')] bf16" in job.out, job.out + job.err
    flags = ["--use_deepspeed", "--zero_stage", 3, "--cpu", "--num_processes", 2, "--offload-param-device", "cpu"]
    job = launch(tessera_program, *flags, tmp_path / "tell.py", env=env)
    assert "2 3 1.0 1 [('optimizer', 'none'), ('parameters', 'cpu')] no" in job.out, job.out + job.err
    refused = launch(tessera_program, "--zero_stage", 3, tmp_path / "tell.py", env=env, code=2)
    assert "--zero_stage needs --use_deepspeed" in refused.err


def test_a_traceback_is_shown_whole_and_first(tessera_program, tmp_path):
    functions = "\n".join(f"def f{i}():\n    f{i + 1}()" for i in range(60))
    (tmp_path / "fail.py").write_text(
        f"import os, time\n{functions}\ndef f60():\n    raise ValueError('the reason')\n"
        "if os.environ['RANK'] == '1':\n    f0()\ntime.sleep(20)\n")
    job = launch(tessera_program, "--num_processes", 3, tmp_path / "fail.py", code=1)
    report = job.err[job.err.index("error: rank 1"):].splitlines()
    assert report[1] == "[rank 1] Traceback (most recent call last):"
    assert sum(", in f" in line for line in report) == 61
    assert report.index("[rank 1] ValueError: the reason") == max(n for n, line in enumerate(report) if line.startswith("[rank 1]"))
    assert report[-1] == "afterwards ranks 0, 2 were ended by the launcher"


def run(program, *args, **env):
    return subprocess.run([program, *map(str, args)], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "TESSERA_PYTHON": sys.executable, "PYTHONPATH": str(PYTHON), **env})


def test_config_is_run_through_the_program(tessera_program, tmp_path):
    done = run(tessera_program, "config", "--tp_degree", "2", "--num_processes", 2, "--cpu", "--config_file", tmp_path / "a.yaml")
    assert done.returncode == 0, done.stderr
    assert told(launch(tessera_program, "--config_file", tmp_path / "a.yaml", *python(TELL)))["MEGATRON_LM_TP_DEGREE"] == "2"
    failed = run(tessera_program, "config", "--tp_degree", "x")
    assert failed.returncode == 2 and "--tp_degree is 'x'" in failed.stderr and "pip install" not in failed.stderr
    assert "usage: tessera config" in run(tessera_program, "config", "--help").stdout
    missing = run(tessera_program, "config", "--default", PYTHONPATH="/nowhere", TESSERA_PYTHON="/usr/bin/env")
    assert missing.returncode != 0


def test_env_names_python_packages(tessera_program):
    text = run(tessera_program, "env").stdout
    assert re.search(rf"^python +{re.escape(sys.version.split()[0])}", text, re.M), text
    assert re.search(r"^torch +\S+", text, re.M) and re.search(r"^transformers +\S+", text, re.M)


def test_the_sanity_run(tessera_program, python_build, tmp_path):
    pytest.importorskip("transformers")
    run(tessera_program, "config", "--tp_degree", 2, "--num_processes", 2, "--cpu", "--config_file", tmp_path / "a.yaml")
    done = run(tessera_program, "test", "--config_file", tmp_path / "a.yaml")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("ok  processes: 2, on cpu, MEGATRON_LM") and said[-1] == "Everything works."
    for part in ("communication: sum", "layout: tensor 2, context 1, pipeline 1, data 1", "the same on every process", "ok  evaluation"):
        assert sum(part in line for line in said) == 1, done.stdout


def test_the_sanity_run_without_torch(tessera_program, python_build, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'torch' else find(name, package)\n")
    done = run(tessera_program, "test", "--num_processes", 2, PYTHONPATH=f"{tmp_path}:{PYTHON}")
    assert done.returncode == 0, done.stderr
    assert "ok  communication" in done.stdout and "--  training was not tried: it needs torch (pip install torch)" in done.stdout
