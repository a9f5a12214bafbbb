"""What a run says of itself when prepare() has made its engine: what `tessera train` says, as far as a script tells it."""

from __future__ import annotations

from typing import Any, List

from tessera.logging import get_logger

logger = get_logger(__name__)


def announce(accelerator: Any) -> None:
    """Logs it (level INFO) on the main process, once for each engine."""
    session = accelerator._models[0]._session
    if session.engine is None or session.announced:
        return
    session.announced = True
    if accelerator.is_main_process:
        for line in [*session.engine.model_lines(), *_batch_lines(accelerator, session), _optimizer_line(accelerator, session)]:
            logger.info(line)


def _batch_lines(accelerator: Any, session: Any) -> List[str]:
    micro_batches, data_ranks = session.num_micro_batches, session.mesh.dp
    places = f"on each of {data_ranks} data rank{'s' if data_ranks > 1 else ''}"
    if session.mesh.cp > 1:
        places += f", its positions shared by {session.mesh.cp} context ranks"
    if not accelerator._prepared.batch_sizes:
        return [f"number of micro-batches: {micro_batches} {places}; total batch: what the script gives each call"]
    size, calls = session.training.micro_batch_size, accelerator.gradient_accumulation_steps
    total = size * micro_batches * data_ranks * calls
    accumulated = f", {calls} calls accumulated" if calls > 1 else ""
    return [f"number of micro-batches: {micro_batches} of {size} sample{'s' if size > 1 else ''} {places}",
            f"total batch: {total} samples{accumulated}"]


def _optimizer_line(accelerator: Any, session: Any) -> str:
    own = accelerator._optimizers[0].optimizer
    text = f"optimizer: {type(own).__name__}"
    groups = getattr(own, "param_groups", None) or [vars(own)]
    rates = ", ".join(f"lr {group['lr']:g} and weight decay {group.get('weight_decay', 0):g}" for group in groups[:4])
    text += f", {len(groups)} parameter group{'s' if len(groups) > 1 else ''} ({rates}{', ...' if len(groups) > 4 else ''})"
    mesh = session.mesh
    if mesh.dp * mesh.cp > 1:
        ranks = f"{mesh.dp * mesh.cp} data {'and context ' if mesh.cp > 1 else ''}ranks"
        divided = session.plugin is not None and session.plugin.use_distributed_optimizer
        text += f", its state {'divided among' if divided else 'whole on each of'} {ranks}"
    return text
