"""The folders that save_state() writes: what makes one whole, the numbered ones of a project, which of them may go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Optional

from tessera.checkpoint.saving import DamagedState
from tessera.comm.process_group import native
from tessera.errors import CheckpointError, ConfigError
from tessera.logging import get_logger

logger = get_logger(__name__)
FOLDER = "tessera_state"
FORMAT = 1


def numbered(root: Path) -> List[Path]:
    """root/checkpoint_N, the smallest number first."""
    folders = [path for path in root.glob("checkpoint_*") if path.name.rpartition("_")[2].isdigit()]
    return sorted(folders, key=number_of)


def number_of(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])


def read_facts(folder: Path) -> Dict[str, Any]:
    """state.json of a state folder. Errors: DamagedState where it or a file that it names is missing or of another size;
    CheckpointError where another program's checkpoint is."""
    try:
        facts = json.loads((folder / "state.json").read_text())
        sizes = {name: (folder / name).stat().st_size for name in facts.get("files", {})}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        if (folder.parent / "latest_checkpointed_iteration.txt").is_file():
            raise CheckpointError(f"{folder.parent} is a checkpoint of Megatron-LM: `tessera convert --from megatron {folder.parent} --to hf "
                                  "FOLDER` makes a folder of it, whose model prepare() takes on any layout") from error
        raise DamagedState(f"{folder.parent} holds no whole state that save_state() wrote: {error}") from error
    if facts.get("format") != FORMAT:
        raise ConfigError(f"{folder.parent} was saved in format {facts.get('format')}, which this version does not know (it knows "
                          f"{FORMAT}): load it with the version that saved it")
    for name, size in sizes.items():
        if size != facts["files"][name]:
            raise DamagedState(f"{folder / name} has {size} bytes, {facts['files'][name]} were written: it was cut or changed")
    return facts


def check_unchanged(folder: Path, facts: Dict[str, Any]) -> None:
    """After a state was read, file by file. Errors: DamagedState if another process has put its own in place meanwhile."""
    if read_facts(folder) != facts:
        raise DamagedState(f"the state in {folder.parent} was replaced by another process while it was read: load it again")


def model_checkpoint(folder: Path, number: int) -> Path:
    """The checkpoint of a model in a state folder. Errors: DamagedState."""
    found, problems = native().newest_checkpoint(folder / f"model_{number}")
    if found is None:
        raise DamagedState(f"{folder} has no whole model_{number}" + (f": {'; '.join(problems)}" if problems else ""))
    return Path(found)


def problem_of(checkpoint: Path) -> Optional[str]:
    """Why there is no whole state in checkpoint_N; None: there is one. Manifests, sizes and headers are looked at, not each byte."""
    try:
        native().settle_directory(checkpoint / FOLDER)
        facts = read_facts(checkpoint / FOLDER)
        for number in range(facts.get("model", 0)):
            model_checkpoint(checkpoint / FOLDER, number)
    except (DamagedState, ConfigError, OSError) as error:
        return str(error)
    return None


def clear_leftovers(root: Path, target: Path) -> None:
    """Undoes or finishes what killed processes have left in a project's numbered folders; those without anything in them go."""
    for path in root.glob(".incomplete-checkpoint_*"):
        native().recover_directory(root / path.name[len(".incomplete-"):])
    for folder in numbered(root):
        native().recover_directory(folder / FOLDER)
        if folder != target and not any(folder.iterdir()):
            folder.rmdir()


def prune(newest: Path, limit: int) -> None:
    """Removes whole states beyond `limit`, the oldest first, never `newest`. What holds none does not count and stays."""
    others = [folder for folder in reversed(numbered(newest.parent)) if folder != newest and problem_of(folder) is None]
    for old in others[max(0, limit - 1):]:
        logger.info(f"deletes {old}: total_limit is {limit}")
        native().remove_directory(old)
