"""The Accelerator's members about saving and resuming. Nothing here reads or writes a pickle."""

from __future__ import annotations

import json
import random
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from tessera.checkpoint import lease, saved_states as states
from tessera.checkpoint.background import PendingSave
from tessera.checkpoint.saving import DamagedState, StagedFolder, on_every_rank, on_main_rank
from tessera.comm.process_group import meet, native
from tessera.data.indexed import SampleIterator
from tessera.errors import CheckpointError, ConfigError, DataError
from tessera.launch.progress import progress
from tessera.logging import get_logger
from tessera.utils.objects import load_objects, save_objects, write_whole
from tessera.utils.other import save

logger = get_logger(__name__)


@dataclass
class _SavedState:
    """A state read and checked, of which nothing was used yet."""

    folder: Path
    facts: dict
    models: List[Path]
    objects: Dict[str, list]
    random_states: Optional[dict]


class RemovableHandle:
    """remove() takes a hook out again."""

    _next = 0

    def __init__(self, hooks: dict, hook: Callable):
        RemovableHandle._next += 1
        self._hooks, self.id = hooks, RemovableHandle._next
        hooks[self.id] = hook

    def remove(self) -> None:
        self._hooks.pop(self.id, None)


class Checkpoints:
    _models: list
    _optimizers: list
    _schedulers: list
    _dataloaders: list
    _custom_objects: list
    _save_hooks: dict
    _load_hooks: dict
    _pending_save: Optional[PendingSave]
    state: Any
    project_configuration: Any

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Objects with state_dict and load_state_dict that save_state and load_state take along. What they hold must be
        numbers, text, tensors, arrays, lists, dicts: nothing is pickled."""
        bad = [obj for obj in objects if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict"))]
        if bad:
            raise ValueError("register_for_checkpointing needs objects with state_dict and load_state_dict; these have not both: "
                             + ", ".join(f"{type(obj).__name__} (number {objects.index(obj)})" for obj in bad))
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """hook(models, weights, output_dir) before each save_state; `weights` is an empty list: they are sharded."""
        return RemovableHandle(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """hook(models, input_dir) before each load_state."""
        return RemovableHandle(self._load_hooks, hook)

    def save_state(self, output_dir: Optional[str] = None, safe_serialization: bool = True, blocking: bool = True,
                   **kwargs: Any) -> str:
        """Saves weights, optimizer, schedulers, loaders' places, random states and registered objects; returns the folder.
        Collective. The folder loads under any other layout. An earlier state in it is replaced when the new one is whole. With
        automatic naming the project's folder is this job's until it ends. blocking=False returns when there is a copy in host
        memory, which threads then write: the folder holds the state after wait_for_saves(), the next save_state() or load_state(),
        end_training() or the end of the script. Errors: ConfigError naming the job whose it is; those of a save in the background
        come with the call that waits for it."""
        if not safe_serialization:
            raise ConfigError("safe_serialization=False would write pickles, which Tessera never does; leave it out")
        meet(self.state.world, f"accelerator.save_state({'' if blocking else 'blocking=False'})")
        self.wait_for_saves()
        begin = time.monotonic()
        naming = self.project_configuration.automatic_checkpoint_naming
        target = self._naming_target() if naming else output_dir
        if target is None:
            raise ConfigError("save_state needs output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)")
        target, world = Path(target), self.state.world
        on_main_rank(world, lambda: target.mkdir(parents=True, exist_ok=True))
        for hook in list(self._save_hooks.values()):
            hook(list(self._models), [], str(target))
        self._save_to(target, naming, in_background=not blocking and self._has_room())
        if naming:
            self.project_configuration.iteration += 1
        steps = [model.session.engine.steps_done for model in self._models if model.session.engine is not None]
        progress().saved(max(steps, default=0), time.monotonic() - begin)
        return str(target)

    def wait_for_saves(self) -> None:
        """Until what save_state(blocking=False) saves is in place. Collective. Errors: what went wrong with it, on every rank; the
        state before is then still there."""
        pending, self._pending_save = self._pending_save, None
        if pending is not None:
            on_every_rank(self.state.world, pending.wait_here)

    def _save_to(self, target: Path, naming: bool, in_background: bool) -> None:
        world, limit = self.state.world, self.project_configuration.total_limit

        def prune() -> None:
            if naming and limit is not None:
                states.prune(target, limit)

        check = self._hold_project if naming else lambda: None
        staged = StagedFolder(world, target / states.FOLDER)
        if not in_background:
            with staged:
                self._write_state(staged.path, [])
                staged.publish(check)
            return on_main_rank(world, prune)

        def publish() -> None:
            if self.process_index == 0:
                staged.publish_here(check)
                prune()

        staged.__enter__()
        saves: List[Any] = []
        try:
            self._write_state(staged.path, saves, in_background=True)
        except BaseException:
            del saves[:]
            staged.__exit__()
            raise
        self._pending_save = PendingSave(saves, publish, staged.__exit__)

    def _has_room(self) -> bool:
        """Whether the hosts' memory holds copies of what is saved. Collective."""
        obstacles = [model.session.engine.background_obstacle(optimizer=self._with_optimizer()) for model in self._models]
        for obstacle in filter(None, obstacles):
            logger.warning(f"save_state(blocking=False) waits all the same: {obstacle}")
        return not any(obstacles)

    def _with_optimizer(self) -> bool:
        return not getattr(self.state.megatron_lm_plugin, "no_save_optim", False)

    def _write_state(self, folder: Path, saves: List[Any], in_background: bool = False) -> None:
        """What this rank has, and on rank 0 what all have in common; `saves` gets those of the engines that have begun. Collective."""
        with_optimizer = self._with_optimizer()
        for number, model in enumerate(self._models):
            if not with_optimizer and model.session.has_gradient():
                logger.warning(f"save_state() without the optimizer (no_save_optim) leaves out the gradient accumulated in "
                               f"{model.session.engine.finished_calls} calls since the last step")
            engine, place = model.session.engine, folder / f"model_{number}"
            if in_background:
                saves.append(engine.begin_save(place, optimizer=with_optimizer, tokenizer=self._tokenizer()))
            else:
                engine.save(place, optimizer=with_optimizer, tokenizer=self._tokenizer())
        on_every_rank(self.state.world, lambda: save_objects(folder / f"random_states_{self.process_index}", _random_states()))
        on_main_rank(self.state.world, lambda: self._save_small(folder))

    def _tokenizer(self) -> Optional[str]:
        """The record of what made the ids of .idx/.bin data, for whoever generates text with the weights."""
        records = [loader.tokenizer for loader in self._dataloaders if isinstance(loader, SampleIterator)]
        return next((record for record in records if record is not None), None)

    def _save_small(self, folder: Path) -> None:
        for kind, objects in self._small_objects():
            for number, obj in enumerate(objects):
                save_objects(folder / f"{kind}_{number}", obj.state_dict())
        missing = [rank for rank in range(self.num_processes) if not (folder / f"random_states_{rank}").exists()]
        if missing:
            raise CheckpointError(f"{folder} does not have what ranks {missing} have written: all processes of a job need one "
                                  "folder, on several machines on a file system that they share")
        facts = {"format": states.FORMAT, "id": secrets.token_hex(8), "processes": self.num_processes, "step": self.step,
                 **{kind: len(objects) for kind, objects in self._small_objects()}, "model": len(self._models),
                 "frozen": [model._session.freezing.state() for model in self._models],
                 "texts": [model._session.text_numbers.state() for model in self._models],
                 "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}}
        write_whole(folder / "state.json", (json.dumps(facts, indent=1) + "\n").encode())
        states.read_facts(folder)

    def _small_objects(self) -> list:
        loaders = [loader for loader in self._dataloaders if hasattr(loader, "state_dict")]
        return [("optimizer", self._optimizers), ("scheduler", self._schedulers), ("dataloader", loaders),
                ("custom", self._custom_objects)]

    def _naming_target(self) -> Path:
        target = self._checkpoints_root() / f"checkpoint_{self.save_iteration}"

        def check() -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._hold_project()
            states.clear_leftovers(target.parent, target)
            if states.problem_of(target) is None:
                raise ConfigError(f"{target} exists already: set ProjectConfiguration(iteration=...) to the next free number, or "
                                  "load_state() first, which does")

        on_main_rank(self.state.world, check)
        return target

    def _hold_project(self) -> None:
        lease.hold(self.project_dir, self.state.world)

    def _checkpoints_root(self) -> Path:
        return Path(self.project_dir) / "checkpoints"

    def load_state(self, input_dir: Optional[str] = None, load_kwargs: Optional[dict] = None, **kwargs: Any) -> None:
        """Puts a saved state into what was prepared, whatever layout saved it; without `input_dir` the newest whole one of those
        automatically named. Collective. Errors: CheckpointError for a damaged state, or listing what does not fit; then nothing
        was changed."""
        meet(self.state.world, "accelerator.load_state()")
        self.wait_for_saves()
        if input_dir is None:
            input_dir, saved = self._newest_state()
        else:
            saved = self._read_state(Path(input_dir))
        for hook in list(self._load_hooks.values()):
            hook(list(self._models), input_dir)
        self._take_state(saved)
        self.wait_for_everyone()

    def _newest_state(self) -> tuple:
        """The newest numbered folder with a whole state, and that. Collective."""
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ConfigError("load_state needs input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)")
        root, problems = self._checkpoints_root(), []
        holder = on_main_rank(self.state.world, lambda: lease.holder(self.project_dir))
        if holder:
            logger.warning(f"save_state() will not save here: {holder}")
        for name in on_main_rank(self.state.world, lambda: [path.name for path in reversed(states.numbered(root))]):
            try:
                saved = self._read_state(root / name)
            except DamagedState as error:
                problems.append(str(error))
                logger.warning(f"load_state() passes over {root / name}: {error}")
                continue
            self.project_configuration.iteration = states.number_of(root / name) + 1
            return str(root / name), saved
        raise ConfigError(f"there is no checkpoint in {root}" + (f" that is whole: {'; '.join(problems)}" if problems else ""))

    def _read_state(self, target: Path) -> _SavedState:
        """Reads and checks everything; changes nothing. Collective. Errors: DamagedState; CheckpointError, ConfigError or DataError
        where it does not fit."""
        folder, world = target / states.FOLDER, self.state.world
        on_main_rank(world, lambda: native().settle_directory(folder))
        saved = on_every_rank(world, lambda: self._read_small(folder))
        with_optimizer = not getattr(self.state.megatron_lm_plugin, "no_load_optim", False)
        for model, checkpoint in zip(self._models, saved.models):
            damage = model.session.engine.check(checkpoint, optimizer=with_optimizer)
            if damage:
                raise DamagedState(damage)
        for kind, objects in self._small_objects():
            for obj, state in zip(objects, saved.objects[kind]):
                if hasattr(obj, "check_state_dict"):
                    obj.check_state_dict(state)
        on_every_rank(world, lambda: states.check_unchanged(folder, saved.facts))
        return saved

    def _read_small(self, folder: Path) -> _SavedState:
        facts = states.read_facts(folder)
        self._check_facts(folder, facts)
        try:
            objects = {kind: [load_objects(folder / f"{kind}_{number}") for number in range(len(prepared))]
                       for kind, prepared in self._small_objects()}
            own = folder / f"random_states_{self.process_index}"
            random_states = load_objects(own) if own.exists() else None
        except (DataError, OSError) as error:
            raise DamagedState(str(error)) from error
        if random_states is not None:
            _check_random_states(own, random_states)
        return _SavedState(folder, facts, [states.model_checkpoint(folder, number) for number in range(len(self._models))], objects,
                           random_states)

    def _take_state(self, saved: _SavedState) -> None:
        with_optimizer = not getattr(self.state.megatron_lm_plugin, "no_load_optim", False)
        for model, checkpoint in zip(self._models, saved.models):
            model.session.engine.load(checkpoint, optimizer=with_optimizer)
        on_every_rank(self.state.world, lambda: states.check_unchanged(saved.folder, saved.facts))
        for model, frozen in zip(self._models, saved.facts.get("frozen", [])):
            model._session.freezing.restore(frozen)
        for model, texts in zip(self._models, saved.facts.get("texts", [])):
            model._session.text_numbers.restore(texts)
        self._resume_accumulation(saved.facts)
        for kind, objects in self._small_objects():
            for obj, state in zip(objects, saved.objects[kind]):
                if hasattr(obj, "use_stateful_dataloader"):  # without it, scripts skip what they have seen by themselves
                    obj.load_state_dict(state, position=obj.use_stateful_dataloader)
                else:
                    obj.load_state_dict(state)
        if saved.random_states is not None:
            _set_random_states(saved.random_states)
        else:
            logger.warning(f"the state was saved by {saved.facts['processes']} processes: this one keeps its own random states",
                           main_process_only=False)

    def _resume_accumulation(self, facts: dict) -> None:
        """Goes on where the state was saved; without its gradient, at the beginning of that accumulation."""
        self.step = facts["step"]
        begun = self.step % self.gradient_state.num_steps
        if begun and not any(model._session.has_gradient() for model in self._models):
            self.step -= begun
            logger.warning(f"the state was saved after {begun} of {self.gradient_state.num_steps} calls of an accumulation, without "
                           "their gradient: it begins anew, and these batches count for nothing")

    def _check_facts(self, folder: Path, facts: dict) -> None:
        problems = [f"{facts.get(kind, 0)} {kind}s there, {count} here"
                    for kind, count in [*((kind, len(objects)) for kind, objects in self._small_objects()),
                                        ("model", len(self._models))] if facts.get(kind, 0) != count]
        if problems:
            raise CheckpointError(f"{folder.parent} does not fit what was prepared: {'; '.join(problems)}. Prepare and register "
                                  "the same objects before load_state()")

    def save(self, obj: Any, f: Any, safe_serialization: bool = True) -> None:
        """Writes a dict of tensors as safetensors, on the main process."""
        save(obj, f, save_on_each_node=self.project_configuration.save_on_each_node, safe_serialization=safe_serialization)

    def save_model(self, model: Any, save_directory: Any, max_shard_size: Any = "10GB", safe_serialization: bool = True) -> None:
        """The model's weights and config as a Hugging Face folder. Collective."""
        model.save_pretrained(save_directory, max_shard_size=max_shard_size, safe_serialization=safe_serialization)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict:
        """All weights under Hugging Face's names in the model's dtype on rank 0, {} elsewhere. Collective."""
        return model.state_dict()


def _random_states() -> dict:
    import numpy as np

    states = {"python": random.getstate(), "numpy": np.random.get_state()}
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _check_random_states(path: Path, saved: Any) -> None:
    """Whether the generators would take them. Errors: DamagedState."""
    import numpy as np

    try:
        random.Random().setstate(saved["python"])
        np.random.RandomState().set_state(saved["numpy"])
    except (TypeError, ValueError, KeyError) as error:
        raise DamagedState(f"{path} holds no random states: {error!r}") from error


def _set_random_states(states: dict) -> None:
    import numpy as np

    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in states:
        torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(states["cuda"])
