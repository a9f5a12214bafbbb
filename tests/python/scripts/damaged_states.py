"""load_state() with states that are damaged or do not fit: passed over or refused, and nothing is changed. Arguments: folder.
Run by 2 ranks; needs no PyTorch."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np

from tessera import Accelerator, AdamW, CausalLM
from tessera.errors import CheckpointError, ConfigError
from tessera.utils import ProjectConfiguration, set_seed
from tessera.utils.objects import save_objects

folder = Path(sys.argv[1])
set_seed(3)
accelerator = Accelerator(project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2))
model, optimizer = accelerator.prepare(
    CausalLM({"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 61, "n_positions": 8}), AdamW(lr=1e-2))


class Steps:
    values = {"step": 0}

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = state


steps = Steps()
accelerator.register_for_checkpointing(steps)
ids = np.arange(16).reshape(2, 8)
checkpoints = folder / "checkpoints"


def train_step():
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
    steps.values["step"] += 1


def on_main(work):
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        work()
    accelerator.wait_for_everyone()


def refused(error, text, **arguments):
    """load_state() fails so, and weights, optimizer and registered objects are as they were."""
    before, values, lr = model.state_dict(), dict(steps.values), optimizer.optimizer.lr
    try:
        accelerator.load_state(**arguments)
    except error as problem:
        assert text in str(problem), problem
    else:
        raise AssertionError(f"load_state({arguments}) took a state with: {text}")
    after = model.state_dict()
    assert all((before[name] == after[name]).all() for name in before) and steps.values == values and optimizer.optimizer.lr == lr


# The limit counts whole states, and is kept after the new one is there.
for _ in range(2):
    train_step()
    accelerator.save_state()
on_main(lambda: (checkpoints / "checkpoint_7").mkdir())  # of nobody's, or of a save that was killed
on_main(lambda: (checkpoints / "checkpoint_2").mkdir())
on_main(lambda: (checkpoints / "checkpoint_2" / ".incomplete-tessera_state").mkdir())
train_step()
accelerator.save_state()
names = sorted(path.name for path in checkpoints.iterdir())
assert names == ["checkpoint_1", "checkpoint_2"], names  # the empty folder went, the oldest state too

# Whatever is damaged in the newest state, the one before it is taken.
newest = checkpoints / "checkpoint_2" / "tessera_state"
whole = folder / "whole"
on_main(lambda: shutil.copytree(newest, whole))
model_files = [path.relative_to(newest) for path in newest.glob("model_0/step-*/*") if path.suffix == ".safetensors"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def change(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


damages = [(damage, name) for damage in (cut, change, Path.unlink)
           for name in ("custom_0", "optimizer_0", "random_states_1", *model_files)]
damages += [(cut, next(newest.glob("model_0/step-*/manifest.json")).relative_to(newest)), (Path.unlink, "state.json")]
for damage, name in damages:
    on_main(lambda: damage(newest / name))
    steps.values = {"step": -1}
    accelerator.load_state()
    assert steps.values == {"step": 2}, (damage, name, steps.values)
    assert accelerator.save_iteration == 2
    refused(CheckpointError, "checkpoint_2", input_dir=str(newest.parent))
    on_main(lambda: (shutil.rmtree(newest), shutil.copytree(whole, newest)))
accelerator.load_state()
assert steps.values == {"step": 3}

# A state that has stepped aside for one that never came, also of an earlier version.
for aside in (".incomplete-tessera_state-replaced", ".tessera_state.old"):
    on_main(lambda: newest.rename(newest.parent / aside))
    steps.values = {"step": -1}
    accelerator.load_state()
    assert steps.values == {"step": 3} and newest.is_dir()

# What does not fit is no damage: it is refused, not passed over.
on_main(lambda: save_objects(newest / "optimizer_0", {"momentum": 1.0}))
on_main(lambda: (newest / "state.json").write_text(json.dumps(
    {**json.loads((whole / "state.json").read_text()), "files": {}})))
refused(ConfigError, "momentum")
accelerator.register_for_checkpointing(Steps())
refused(CheckpointError, "1 customs there, 2 here")
accelerator._custom_objects.pop()

# Nothing whole at all.
on_main(lambda: [(path / "tessera_state" / "state.json").unlink() for path in checkpoints.iterdir()])
refused(ConfigError, "there is no checkpoint in")
accelerator.project_configuration.iteration = 2
train_step()
accelerator.save_state()  # and the damaged folder is no obstacle
accelerator.load_state()
if accelerator.is_main_process:
    print("DONE", flush=True)
accelerator.end_training()
