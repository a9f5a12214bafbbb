"""The Accelerator's members about saving and resuming. Nothing here reads or writes a pickle."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Callable, List, Optional

from tessera._process_group import meet
from tessera._progress import progress
from tessera.errors import CheckpointError, ConfigError
from tessera.logging import get_logger
from tessera.utils.objects import load_objects, save_objects

logger = get_logger(__name__)
_FOLDER = "tessera_state"
_FORMAT = 1


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

    def save_state(self, output_dir: Optional[str] = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Saves weights, optimizer, schedulers, loaders' places, random states and registered objects; returns the folder.
        Collective. The folder loads under any other layout. An earlier state in it is replaced when the new one is whole."""
        if not safe_serialization:
            raise ConfigError("safe_serialization=False would write pickles, which Tessera never does; leave it out")
        meet(self.state.world, "accelerator.save_state()")
        begin = time.monotonic()
        target = self._naming_target() if self.project_configuration.automatic_checkpoint_naming else output_dir
        if target is None:
            raise ConfigError("save_state needs output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)")
        target = Path(target)
        self.wait_for_everyone()
        for hook in list(self._save_hooks.values()):
            hook(self._models, [], str(target))
        staging = target / f".{_FOLDER}.incomplete"
        if self.is_main_process:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        self.wait_for_everyone()
        with_optimizer = not getattr(self.state.megatron_lm_plugin, "no_save_optim", False)
        for number, model in enumerate(self._models):
            if not with_optimizer and model.session.has_gradient():
                logger.warning(f"save_state() without the optimizer (no_save_optim) leaves out the gradient accumulated in "
                               f"{model.session.engine.finished_calls} calls since the last step")
            model.session.engine.save(staging / f"model_{number}", optimizer=with_optimizer, tokenizer=self._tokenizer())
        save_objects(staging / f"random_states_{self.process_index}", _random_states())
        if self.is_main_process:
            self._save_small(staging)
        self.wait_for_everyone()
        if self.is_main_process:
            old = target / f".{_FOLDER}.old"
            shutil.rmtree(old, ignore_errors=True)
            if (target / _FOLDER).exists():
                os.replace(target / _FOLDER, old)
            os.replace(staging, target / _FOLDER)
            shutil.rmtree(old, ignore_errors=True)
        self.wait_for_everyone()
        if self.project_configuration.automatic_checkpoint_naming:
            self.project_configuration.iteration += 1
        steps = [model.session.engine.steps_done for model in self._models if model.session.engine is not None]
        progress().saved(max(steps, default=0), time.monotonic() - begin)
        return str(target)

    def _tokenizer(self) -> Optional[str]:
        """The record of what made the ids of .idx/.bin data, for whoever generates text with the weights."""
        from tessera._indexed import SampleIterator

        records = [loader.tokenizer for loader in self._dataloaders if isinstance(loader, SampleIterator)]
        return next((record for record in records if record is not None), None)

    def _save_small(self, folder: Path) -> None:
        for kind, objects in self._small_objects():
            for number, obj in enumerate(objects):
                save_objects(folder / f"{kind}_{number}", obj.state_dict())
        facts = {"format": _FORMAT, "processes": self.num_processes, "step": self.step,
                 **{kind: len(objects) for kind, objects in self._small_objects()}, "model": len(self._models),
                 "frozen": [model._session.freezing.state() for model in self._models]}
        (folder / "state.json").write_text(json.dumps(facts, indent=1) + "\n")

    def _small_objects(self) -> list:
        loaders = [loader for loader in self._dataloaders if hasattr(loader, "state_dict")]
        return [("optimizer", self._optimizers), ("scheduler", self._schedulers), ("dataloader", loaders),
                ("custom", self._custom_objects)]

    def _naming_target(self) -> Path:
        root = Path(self.project_dir) / "checkpoints"
        number = self.save_iteration
        target = root / f"checkpoint_{number}"
        if (target / _FOLDER).exists():
            raise ValueError(f"{target} exists already: set ProjectConfiguration(iteration=...) to the next free number, or "
                             "load_state() first, which does")
        limit = self.project_configuration.total_limit
        self.wait_for_everyone()
        if limit is not None and self.is_main_process:
            for old in _numbered(root)[: max(0, len(_numbered(root)) + 1 - limit)]:
                logger.info(f"deletes {old}: total_limit is {limit}")
                shutil.rmtree(old)
        return target

    def load_state(self, input_dir: Optional[str] = None, load_kwargs: Optional[dict] = None, **kwargs: Any) -> None:
        """Puts a saved state into what was prepared, whatever layout saved it; without `input_dir` the last automatically
        named one. Collective. Errors: CheckpointError listing what does not fit; then nothing was changed."""
        meet(self.state.world, "accelerator.load_state()")
        if input_dir is None:
            if not self.project_configuration.automatic_checkpoint_naming:
                raise ConfigError("load_state needs input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)")
            found = _numbered(Path(self.project_dir) / "checkpoints")
            if not found:
                raise ConfigError(f"there is no checkpoint in {Path(self.project_dir) / 'checkpoints'}")
            input_dir = str(found[-1])
            self.project_configuration.iteration = int(found[-1].name.rpartition("_")[2]) + 1
        folder = Path(input_dir) / _FOLDER
        facts = self._read_facts(folder)
        for hook in list(self._load_hooks.values()):
            hook(self._models, input_dir)
        for number, model in enumerate(self._models):
            steps = sorted((folder / f"model_{number}").glob("step-*"))
            if not steps:
                raise CheckpointError(f"{folder} has no model_{number}: it was saved without one, or is damaged")
            model.session.engine.load(
                steps[-1], optimizer=not getattr(self.state.megatron_lm_plugin, "no_load_optim", False))
        for model, frozen in zip(self._models, facts.get("frozen", [])):
            model._session.freezing.restore(frozen)
        self._resume_accumulation(facts)
        for kind, objects in self._small_objects():
            for number, obj in enumerate(objects):
                state = load_objects(folder / f"{kind}_{number}")
                if hasattr(obj, "use_stateful_dataloader"):  # without it, scripts skip what they have seen by themselves
                    obj.load_state_dict(state, position=obj.use_stateful_dataloader)
                else:
                    obj.load_state_dict(state)
        own = folder / f"random_states_{self.process_index}"
        if own.exists():
            _set_random_states(load_objects(own))
        else:
            logger.warning(f"{folder} was saved by {facts['processes']} processes: this one keeps its own random states",
                           main_process_only=False)
        self.wait_for_everyone()

    def _resume_accumulation(self, facts: dict) -> None:
        """Goes on where the state was saved; without its gradient, at the beginning of that accumulation."""
        self.step = facts["step"]
        begun = self.step % self.gradient_state.num_steps
        if begun and not any(model._session.has_gradient() for model in self._models):
            self.step -= begun
            logger.warning(f"the state was saved after {begun} of {self.gradient_state.num_steps} calls of an accumulation, without "
                           "their gradient: it begins anew, and these batches count for nothing")

    def _read_facts(self, folder: Path) -> dict:
        try:
            facts = json.loads((folder / "state.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder.parent} holds no state that save_state() wrote: {error}") from error
        problems = [f"{facts.get(kind, 0)} {kind}s there, {count} here"
                    for kind, count in [*((kind, len(objects)) for kind, objects in self._small_objects()),
                                        ("model", len(self._models))] if facts.get(kind, 0) != count]
        if facts.get("format") != _FORMAT:
            problems.append(f"format {facts.get('format')} there, {_FORMAT} here")
        if problems:
            raise CheckpointError(f"{folder.parent} does not fit what was prepared: {'; '.join(problems)}. Prepare and register "
                                  "the same objects before load_state()")
        return facts

    def save(self, obj: Any, f: Any, safe_serialization: bool = True) -> None:
        """Writes a dict of tensors as safetensors, on the main process."""
        from tessera.utils.other import save

        save(obj, f, save_on_each_node=self.project_configuration.save_on_each_node, safe_serialization=safe_serialization)

    def save_model(self, model: Any, save_directory: Any, max_shard_size: Any = "10GB", safe_serialization: bool = True) -> None:
        """The model's weights and config as a Hugging Face folder. Collective."""
        model.save_pretrained(save_directory, max_shard_size=max_shard_size, safe_serialization=safe_serialization)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict:
        """All weights under Hugging Face's names in the model's dtype on rank 0, {} elsewhere. Collective."""
        return model.state_dict()


def _numbered(root: Path) -> List[Path]:
    folders = [path for path in root.glob("checkpoint_*") if path.name.rpartition("_")[2].isdigit()]
    return sorted(folders, key=lambda path: int(path.name.rpartition("_")[2]))


def _random_states() -> dict:
    import numpy as np

    states = {"python": random.getstate(), "numpy": np.random.get_state()}
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _set_random_states(states: dict) -> None:
    import numpy as np

    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in states:
        torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(states["cuda"])
