"""Trains a tiny T5 with dropout on two tensor ranks and two stages, saves after every step and goes on from there; rank 1 is killed
after its update of the step given. Rank 0 writes all losses. Arguments: folder, step (-1: nobody is killed)."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from plugin_support import make_t5

from tessera import Accelerator
from tessera.utils import MegatronLMPlugin, set_seed

STEPS = 6


class Losses(list):
    def state_dict(self) -> dict:
        return {"losses": list(self)}

    def load_state_dict(self, state: dict) -> None:
        self[:] = state["losses"]


def main() -> None:
    folder, killed = Path(sys.argv[1]), int(sys.argv[2])
    set_seed(3)
    model = make_t5(dropout_rate=0.1)
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, pp_degree=2, num_micro_batches=2))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = Losses()
    accelerator.register_for_checkpointing(losses)
    if (folder / "state").exists():
        accelerator.load_state(str(folder / "state"))
    data = torch.randint(1, 40, (STEPS, 4, 12), generator=torch.Generator().manual_seed(8))
    for number in range(len(losses), STEPS):
        loss = model(input_ids=data[number], labels=data[number, :, :7]).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if number == killed and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.save_state(str(folder / "state"))
    if accelerator.is_main_process:
        (folder / "losses.json").write_text(json.dumps(losses))


main()
