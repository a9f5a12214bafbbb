"""Jobs that are killed, or whose disk fails, at chosen operations on files: test_kill_matrix.py runs this with
tests/support/fault_shim preloaded. Ranks are forked from this process, which has imported all they need.

Arguments: folder, what (states | models | errors), and for the first two the number of kills and a seed."""

import ctypes
import errno
import hashlib
import json
import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np

import tessera._C
from tessera import Accelerator, AdamW, CausalLM
from tessera.errors import CheckpointError, ConfigError, ProcessFailed
from tessera.launchers import debug_launcher
from tessera.utils import MegatronLMPlugin, ProjectConfiguration, set_seed

SHIM = ctypes.CDLL(None)
KILL = 0


def arm(folder, at: int, error: int = KILL, exchange: bool = True) -> None:
    SHIM.faults_arm(str(folder).encode(), ctypes.c_long(at), error, 0 if exchange else 1)


def config(layers: int) -> dict:
    return {"model_type": "gpt2", "n_layer": layers, "n_embd": 16, "n_head": 2, "vocab_size": 61, "n_positions": 8,
            "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def number_in(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


class Steps:
    """What a script registers: the losses so far."""

    def __init__(self):
        self.losses = []

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]


# States of 4 ranks


def train(folder: Path, limit, until: int, rank: int, at: int, exchange: bool, saves: bool) -> None:
    """Goes on from the newest state up to step `until`, and saves after each; `rank` is killed at its operation `at` from then on.
    `limit`: of a project's states; None: one folder, saved into again and again."""
    set_seed(7)
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=limit is not None, total_limit=limit)
    accelerator = Accelerator(project_config=project, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, use_distributed_optimizer=True))
    model, optimizer = accelerator.prepare(CausalLM(config(1)), AdamW(lr=1e-2, eps=1e-5))
    steps, state = Steps(), folder / "state"
    accelerator.register_for_checkpointing(steps)
    saved = folder.with_suffix(".saved")  # what save_state() has returned from
    if saves:
        try:
            accelerator.load_state(None if limit is not None else str(state))
        except (ConfigError, CheckpointError) as error:
            assert "there is no checkpoint" in str(error) or "holds no whole state" in str(error), error
        assert len(steps.losses) >= number_in(saved), "a state that was saved is lost"
    if accelerator.process_index == rank:
        arm(folder, at, exchange=exchange)
    elif not exchange:
        arm(folder, 0, exchange=False)
    tokens = np.random.default_rng(0).integers(0, 61, (until, 4, 8))
    half = accelerator.state.mesh.coordinates["dp"] * 2
    for step in range(len(steps.losses), until):
        ids = tokens[step, half: half + 2]
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps.losses.append(loss.item())
        if saves:
            accelerator.save_state(None if limit is not None else str(state))
            if accelerator.is_main_process:
                saved.write_text(str(step + 1))
    folder.with_suffix(f".count{accelerator.process_index}").write_text(str(SHIM.faults_count()))
    arm(folder, 0)
    if accelerator.is_main_process:
        folder.with_suffix(".done").write_text(json.dumps(steps.losses))
    accelerator.end_training()


def job(where: Path, limit, until: int, rank: int = -1, at: int = 0, exchange: bool = True, saves: bool = True) -> list:
    """Its losses."""
    debug_launcher(train, (where, limit, until, rank, at, exchange, saves), num_processes=4)
    return json.loads(where.with_suffix(".done").read_text())


def run_states(folder: Path, limit, kills: int, chance: random.Random, exchange: bool, counted: list) -> list:
    """Kills, each in a job that goes on where the last one was killed, and then the rest; returns its losses. `counted`: about how
    many operations three saves are, on each rank."""
    run, done = folder / "run", 0
    while done < kills:
        rank = chance.choice((0, 0, 0, 1, 2, 3))
        saved = number_in(run.with_suffix(".saved"))
        at = chance.randint(1, max(1, counted[rank] - 1))
        try:
            job(run, limit, saved + 5, rank, at, exchange)
        except ProcessFailed as failure:
            assert "SIGKILL" in str(failure) and failure.rank == rank, failure
            done += 1
        if limit is not None:
            whole = [path for path in run.glob("checkpoints/checkpoint_*/tessera_state")]
            assert len(whole) <= limit + 1, whole
    until = number_in(run.with_suffix(".saved")) + 2
    losses = job(run, limit, until, exchange=exchange)
    assert len(losses) == until, losses
    left = [path.name for path in run.rglob("*") if "incomplete" in path.name]
    assert not left, left
    return losses


# Models in folders of Hugging Face's kind


def save_model(folder: Path, layers: int, at: int, exchange: bool) -> None:
    set_seed(layers)
    accelerator = Accelerator()
    model = accelerator.prepare(CausalLM(config(layers)))
    model.build()
    if accelerator.is_main_process:
        arm(folder.parent, at, exchange=exchange)
    model.save_pretrained(folder, max_shard_size="12KB")
    if accelerator.is_main_process:
        folder.with_suffix(".count").write_text(str(SHIM.faults_count()))
    arm(folder, 0)
    accelerator.end_training()


def what_is_in(folder: Path):
    """As Transformers looks at a folder: config.json, then one file or an index and its files. None: no model."""
    if not (folder / "config.json").exists():
        return None
    names = ["model.safetensors"]
    if not (folder / names[0]).exists():
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        names = sorted(set(index["weight_map"].values()))
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ["config.json", *names]}


FOREIGN = {"README.md": "mine", "tokenizer.json": "{}"}


def run_models(folder: Path, kills: int, chance: random.Random, exchange: bool, subfolder: bool) -> int:
    """save_pretrained over a folder that holds another model and things of the user's."""
    def job(where, layers, at=0):
        debug_launcher(save_model, (where, layers, at, exchange), num_processes=chance.choice((1, 1, 2)))

    folder.mkdir(parents=True)
    old, new, target = folder / "old", folder / "new", folder / "work" / "target"
    target.parent.mkdir()
    job(old, 3)
    job(new, 2)
    models = [what_is_in(old), what_is_in(new)]
    assert len(models[0]) > 3 < len(models[1]) and models[0] != models[1]
    foreign = {**FOREIGN, **({"logs/events": "1"} if subfolder else {})}

    def prepare():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(old, target)
        for name, text in foreign.items():
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_text(text)

    prepare()
    job(target, 2)
    count = int(target.with_suffix(".count").read_text())
    for done in range(kills):
        prepare()
        try:
            job(target, 2, chance.randint(1, count))
        except ProcessFailed as failure:
            assert "SIGKILL" in str(failure), failure
        seen = what_is_in(target)
        assert seen in models or (seen is None and (subfolder or not exchange)), seen
        CausalLM.from_pretrained(target)  # puts the moves to an end that were decided
        assert what_is_in(target) in models
        assert all((target / name).read_text() == text for name, text in foreign.items())
    job(target, 2)
    assert what_is_in(target) == models[1]
    names = {path.name for path in target.iterdir()}
    assert names == {*models[1], "model.safetensors.index.json", *(name.partition("/")[0] for name in foreign)}, names
    assert {path.name for path in target.parent.iterdir()} == {"target", "target.count"}
    return kills


# Disks that are full or broken


def fail_each(folder: Path, save, check, exchange: bool = True) -> int:
    """save() with each of its operations failing once, until it succeeds; check() after each failure."""
    for error in (errno.ENOSPC, errno.EIO):
        at = 1
        while True:
            arm(folder, at, error, exchange)
            try:
                save()
            except OSError as problem:
                assert os.strerror(error) in str(problem), problem
                assert str(folder) in str(problem), problem
            else:
                if SHIM.faults_count() < at:
                    break
                raise AssertionError(f"operation {at} failed by {os.strerror(error)}, and nobody said so")
            finally:
                arm(folder, 0)
            check()
            at += 1
            assert at < 1000
    return at - 1


def run_errors(folder: Path) -> dict:
    set_seed(1)
    project = ProjectConfiguration(str(folder / "project"), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(project_config=project)
    model, optimizer = accelerator.prepare(CausalLM(config(1)), AdamW(lr=1e-2))
    steps, counts = Steps(), {}
    accelerator.register_for_checkpointing(steps)
    steps.losses = [0.5]
    accelerator.save_state()

    def same_state():
        steps.losses = None
        accelerator.load_state()
        assert steps.losses == [0.5]

    counts["save_state, numbered"] = fail_each(folder, accelerator.save_state, same_state)
    project.automatic_checkpoint_naming = False
    state = folder / "state"
    accelerator.save_state(state)
    for exchange in (True, False):
        def same_folder():
            steps.losses = None
            accelerator.load_state(state)
            assert steps.losses == [0.5]

        name = "save_state into one folder" + ("" if exchange else ", no exchange")
        counts[name] = fail_each(folder, lambda: accelerator.save_state(state), same_folder, exchange)
    for exchange, subfolder in ((True, False), (False, False), (True, True)):
        target = folder / "model"
        shutil.rmtree(target, ignore_errors=True)
        model.save_pretrained(target, torch_dtype="float32", max_shard_size="12KB")
        if subfolder:
            (target / "logs").mkdir()
        wanted = what_is_in(target)

        def whole_model():
            CausalLM.from_pretrained(target)
            assert what_is_in(target) == wanted

        name = "save_pretrained" + ("" if exchange else ", no exchange") + (" in place" if subfolder else "")
        counts[name] = fail_each(folder, lambda: model.save_pretrained(target, max_shard_size="12KB"), whole_model, exchange)
    file = folder / "values.safetensors"
    accelerator.save({"x": np.arange(3)}, file)
    before = file.read_bytes()

    def same_file():
        assert file.read_bytes() == before

    counts["save"] = fail_each(folder, lambda: accelerator.save({"x": np.arange(3)}, file), same_file)
    assert not [path for path in folder.rglob("*") if "incomplete" in path.name]
    accelerator.end_training()
    return counts


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    folder.mkdir(parents=True)
    if what == "errors":
        print("RESULT " + json.dumps(run_errors(folder)))
        return
    kills, chance, done = int(sys.argv[3]), random.Random(int(sys.argv[4])), {}
    if what == "states":
        kinds = {"total_limit 1": (1, True), "one folder, no exchange": (None, False), "total_limit 2": (2, True), "one folder": (None, True)}
        job(folder / "counted", 2, 3)
        counted, losses = [number_in(folder / f"counted.count{rank}") for rank in range(4)], {}
        for number, (name, (limit, exchange)) in enumerate(kinds.items()):
            share = kills // len(kinds) + (number < kills % len(kinds))
            if share:
                losses[name] = run_states(folder / str(number), limit, share, chance, exchange, counted)
                done[name] = share
        # Bit for bit those of a job that nobody has killed.
        straight = job(folder / "straight", None, max(map(len, losses.values())), saves=False)
        assert all(straight[:len(each)] == each for each in losses.values()), (straight, losses)
    else:
        kinds = {"exchange": (True, False), "no exchange": (False, False), "in place": (True, True)}
        for number, (name, (exchange, subfolder)) in enumerate(kinds.items()):
            share = kills // len(kinds) + (number < kills % len(kinds))
            if share:
                done[name] = run_models(folder / str(number), share, chance, exchange, subfolder)
    print("RESULT " + json.dumps(done))


if __name__ == "__main__":
    main()
