"""What is said, once in a run, of a loss or a gradient that is not finite."""

from __future__ import annotations

import math
from typing import Any

from tessera.logging import get_logger

logger = get_logger(__name__)


class NotFinite:
    """Warns on the main process the first time."""

    def __init__(self) -> None:
        self._told_of_loss = self._told_of_step = False

    def check_loss(self, session: Any, loss: float, batch: Any) -> None:
        """`loss`: of `batch`, equal on all ranks. Collective when it is the first that is not finite: then the batch's
        losses are computed once more, to see where."""
        if self._told_of_loss or math.isfinite(loss):
            return
        self._told_of_loss = True
        logger.warning(f"the loss of step {session.engine.steps_done + 1} is {loss:g}: {_where(session, batch)}")

    def check_step(self, session: Any, result: dict) -> None:
        """After an update."""
        if self._told_of_step or not result["skipped"]:
            return
        self._told_of_step = True
        text = (f"step {session.engine.steps_done} was skipped, and the weights stay: its gradient has the norm "
                f"{result['grad_norm']:g}")
        if session.state.mixed_precision == "fp16":
            text += f". With fp16 that is normal until the loss scale has settled; it is {result['loss_scale']:g} now"
        else:
            text += ". Later steps like it are not reported; after too many in a row optimizer.step() raises TrainingError"
        logger.warning(text)


def _where(session: Any, batch: Any) -> str:
    import numpy as np

    losses, _ = session.forward(batch, "token_losses", record=False)
    bad = np.zeros(batch.batch, dtype=bool)
    if batch.batch:
        bad = ~np.isfinite(_on_host(losses)).all(axis=1)
    mesh = session.mesh
    own = np.array([bad.sum(), bad.argmax() if bad.any() else 0, batch.batch], dtype=np.int64)
    ranks = own[None] if mesh.dp == 1 else mesh.data.all_gather(own)
    if ranks[:, 0].sum() == 0:
        return "computed again without dropout it is finite, so single activations overflow"
    if (ranks[:, 0] == ranks[:, 2]).all():
        return ("so it is in every sample of the batch, and it comes from the weights. Lower the learning rate, lengthen the "
                "warm-up, or clip the gradient")
    places = [f"in {count} of the {samples} samples of data rank {rank} (the first is number {first})"
              for rank, (count, first, samples) in enumerate(ranks.tolist()) if count]
    return f"so it is {', '.join(places)}. Look at these samples"


def _on_host(losses: Any) -> Any:
    import numpy as np

    if isinstance(losses, np.ndarray):
        return losses
    import torch

    return torch.from_dlpack(losses).cpu().numpy()
