"""Trains, saves in the middle of an epoch, and goes on. Arguments: folder, tp, pp, what (whole | first | second), and the
folder of the state to load. Prints the losses of the steps after the save as JSON."""

import json
import random
import sys

import numpy as np
import torch

from tessera import Accelerator
from tessera.utils import MegatronLMPlugin, ProjectConfiguration, set_seed
from train_like_torch import make_dataset, make_model

folder, tp, pp, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


class Counter:
    """Something of the script's own to save."""

    def __init__(self):
        self.values = {"seen": 0, "history": [], "mean": np.zeros(3)}

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = state


set_seed(11)
model = make_model("gpt2")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=tp, pp_degree=pp, use_distributed_optimizer=True),
                          project_config=project)
dp = accelerator.state.mesh.dp
loader = torch.utils.data.DataLoader(make_dataset()[:48], batch_size=8 // dp, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
counter = Counter()
accelerator.register_for_checkpointing(counter)

losses, step, first_epoch = [], 0, 0
if what == "second":
    accelerator.load_state()
    step = counter.values["seen"]
    first_epoch = step // len(loader)
    assert accelerator.save_iteration == 3
for epoch in range(first_epoch, 2):
    loader.set_epoch(epoch)
    batches = loader
    if what == "second" and epoch == first_epoch:
        batches = accelerator.skip_first_batches(loader, step % len(loader))
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        counter.values["seen"] = step
        counter.values["history"].append(loss.item())
        losses.append([step, loss.item(), scheduler.get_last_lr()[0], random.random(), float(torch.rand(()))])
        if step in (2, 4, 8) and what == "first":
            accelerator.save_state()
        if step == 8 and what == "first":
            break
if accelerator.is_main_process:
    print("LOSSES " + json.dumps({"losses": losses, "history": counter.values["history"]}), flush=True)
accelerator.end_training()
