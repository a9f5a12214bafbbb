"""Scripts without PyTorch: importing costs nothing, and a loop over numpy batches trains as the torch one does."""

import json

import pytest

HIDE_TORCH = """
import sys
sys.modules["torch"] = None  # as if it were not installed
sys.modules["transformers"] = None
"""

SCRIPT = HIDE_TORCH + """
import json
import numpy as np
from tessera import Accelerator, AdamW, CausalLM
from tessera.utils import MegatronLMPlugin, set_seed

set_seed(7)
folder, tp, pp, cp = sys.argv[1], *map(int, sys.argv[2:])
config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 83, "n_positions": 24,
          "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
plugin = MegatronLMPlugin(tp_degree=tp, pp_degree=pp, context_parallel_size=cp, num_micro_batches=2)
accelerator = Accelerator(megatron_lm_plugin=plugin, log_with="jsonl", project_dir=folder)
model, optimizer = accelerator.prepare(CausalLM(config), AdamW(lr=1e-2, eps=1e-5))
accelerator.init_trackers("plain", {"steps": 6})
rng = np.random.default_rng(0)
dp, rank = accelerator.state.mesh.dp, accelerator.state.mesh.coordinates["dp"]
losses = []
whole = rng.integers(0, 83, (8, 16))
for step in range(6):
    ids = whole[8 * rank // dp: 8 * (rank + 1) // dp]
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss * 0.5)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    accelerator.log({"loss": loss.item()}, step=step)
model.eval()
logits = model(input_ids=ids[:1]).logits
assert logits.shape == (1, 16, 83) and logits.dtype == np.float32
model.save_pretrained(folder + "/hf")
again = CausalLM.from_pretrained(folder + "/hf") if accelerator.is_main_process else None
accelerator.save_state(folder + "/state")
if accelerator.is_main_process:
    print("LOSSES " + json.dumps(losses + [float(logits.sum())]), flush=True)
accelerator.end_training()
"""


def losses_of(output: str) -> list:
    return json.loads(next(line for line in output.splitlines() if "LOSSES " in line).split("LOSSES ", 1)[1])


def test_training_without_torch(python_build, tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(SCRIPT)
    alone = losses_of(python_build.run(script, tmp_path / "1", 1, 1, 1, plain=True).stdout)
    assert alone[5] < alone[0]
    launcher = python_build.launcher("--num_processes", 4)
    for tp, pp, cp in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2)):
        folder = tmp_path / f"{tp}{pp}{cp}"
        printed = python_build.run(script, folder, tp, pp, cp, launcher=launcher, plain=True).stdout
        assert losses_of(printed) == pytest.approx(alone, rel=1e-5)
        lines = [json.loads(line) for line in next(folder.rglob("*.jsonl")).read_text().splitlines()]
        assert [line["loss"] for line in lines if "loss" in line] == pytest.approx(alone[:6], rel=1e-5)


def test_import_is_cheap(python_build):
    code = """
import sys, time
begin = time.process_time()
import tessera
import tessera.utils
elapsed = time.process_time() - begin
assert not {"torch", "transformers", "datasets"} & set(sys.modules), "imported what is optional"
print(elapsed)
"""
    best = min(float(python_build.run("-c", code, plain=True).stdout) for _ in range(3))
    assert best <= 0.3


def test_torch_objects_need_torch(python_build):
    code = HIDE_TORCH + """
from tessera import Accelerator
accelerator = Accelerator()
assert accelerator.prepare({"a": 1}, [1, 2]) == ({"a": 1}, [1, 2])  # what is none of ours passes through
from tessera.utils import GPTTrainStep
try:
    from tessera.optimizer import AcceleratedOptimizer
except ImportError as error:
    print(error)
"""
    assert "torch" in python_build.run("-c", code, plain=True).stdout
