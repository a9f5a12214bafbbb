"""Two jobs that save into one folder: the second is told whose it is, or both save whole states. Never a mixture."""

import os
import re
import subprocess
import sys
from pathlib import Path

from process_support import wait_for

BEGIN = """
import sys, time
from pathlib import Path
import numpy as np
from tessera import Accelerator, CausalLM
from tessera.errors import CheckpointError, ConfigError
from tessera.utils import ProjectConfiguration, set_seed
folder, who, config = Path(sys.argv[1]), sys.argv[2], {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 61,
                                                       "n_positions": 8}
def wait_for(name):
    end = time.monotonic() + 120
    while not (folder / name).exists():
        assert time.monotonic() < end, name
        time.sleep(0.01)
class Owner:
    values = {}
    def state_dict(self):
        return self.values
    def load_state_dict(self, values):
        self.values = values
"""

NUMBERED = BEGIN + """
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True))
model = accelerator.prepare(CausalLM(config))
if who == "first":
    accelerator.save_state()
    (folder / "saved").touch()
    wait_for("refused")
    accelerator.save_state()
else:
    accelerator.load_state()
    try:
        accelerator.save_state()
    except ConfigError as error:
        print("REFUSED", error)
"""


def start(folder: Path, script: str, who: str) -> subprocess.Popen:
    path = folder / f"{who}.py"
    path.write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "python")}
    return subprocess.Popen([sys.executable, path, folder, who], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def end(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, f"{out}\n{err}"
    return out + err


def test_a_project_is_one_jobs(tmp_path):
    first = start(tmp_path, NUMBERED, "first")
    try:
        wait_for((tmp_path / "saved").exists, "the first job's state", 120)
        said = end(start(tmp_path, NUMBERED, "second"))
        assert re.search(rf"save_state\(\) will not save here: .*process {first.pid} ", said), said
        assert re.search(rf"REFUSED {re.escape(str(tmp_path))} is in use: process {first.pid} on .*project_dir", said), said
        (tmp_path / "refused").touch()
        end(first)
        names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert names == ["checkpoint_0", "checkpoint_1"]
        # Its end, or its death, gives the folder back.
        said = end(start(tmp_path, NUMBERED, "third"))
        assert "REFUSED" not in said and "will not save here" not in said and (tmp_path / "checkpoints/checkpoint_2").is_dir()
    finally:
        first.kill()


SAVES = 12
ONE_FOLDER = BEGIN + f"""
accelerator = Accelerator(cpu=True)
set_seed(int(who))
model, owner = accelerator.prepare(CausalLM(config)), Owner()
accelerator.register_for_checkpointing(owner)
def mark():
    return float(sum(np.abs(tensor.astype(np.float64)).sum() for tensor in model.state_dict().values()))
model.build()
own = {{"who": who, "mark": mark()}}
(folder / f"ready{{who}}").touch()
wait_for("ready1")
wait_for("ready2")
seen = set()
for save in range({SAVES}):
    owner.values = own
    accelerator.save_state(folder / "state")
    while True:  # this job's or the other's
        try:
            accelerator.load_state(folder / "state")
            break
        except (CheckpointError, OSError):
            pass  # the other one has put its own in place meanwhile
    assert mark() == owner.values["mark"], owner.values
    seen.add(owner.values["who"])
    set_seed(int(who))
    accelerator.free_memory()
    model = accelerator.prepare(CausalLM(config))
    model.build()
    assert mark() == own["mark"]
"""


def test_two_jobs_may_save_into_one_folder(tmp_path):
    jobs = [start(tmp_path, ONE_FOLDER, who) for who in ("1", "2")]
    try:
        for job in jobs:
            end(job)
    finally:
        for job in jobs:
            job.kill()
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["tessera_state"]  # and nothing half written
