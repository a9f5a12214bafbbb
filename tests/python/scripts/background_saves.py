"""save_state(blocking=False) beside training. Arguments: output folder, tensor ranks. Rank 0 writes what became of it."""

import json
import sys
from pathlib import Path

import torch
import transformers

from tessera import Accelerator
from tessera.utils import MegatronLMPlugin, ProjectConfiguration

out, tp = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(1)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=97, n_positions=32))
plugin = MegatronLMPlugin(tp_degree=tp, num_micro_batches=1) if tp > 1 else None
accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin, project_config=ProjectConfiguration(
    project_dir=str(out / "project"), automatic_checkpoint_naming=True, total_limit=2))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
ids = torch.randint(0, 97, (4, 16), generator=torch.Generator().manual_seed(2))


def train(steps: int) -> list:
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


facts = {}
train(2)
waited = accelerator.save_state()
folder = accelerator.save_state(blocking=False)
facts["after"] = train(3)
accelerator.wait_for_saves()
facts["published"] = (Path(folder) / "tessera_state" / "state.json").exists()
accelerator.load_state(folder)
facts["again"] = train(3)
accelerator.load_state(waited)
facts["waited"] = train(3)
for _ in range(3):  # each waits for the one before; two stay
    accelerator.save_state(blocking=False)
    train(1)
accelerator.wait_for_saves()
facts["kept"] = sorted(path.name for path in (out / "project/checkpoints").iterdir())
try:  # a folder that cannot be: it is a file
    accelerator.project_configuration.automatic_checkpoint_naming = False
    (out / "taken").write_text("") if accelerator.is_main_process else None
    accelerator.wait_for_everyone()
    accelerator.save_state(str(out / "taken" / "state"), blocking=False)
    accelerator.wait_for_saves()
    facts["refused"] = ""
except Exception as error:
    facts["refused"] = f"{type(error).__name__}: {error}"
if accelerator.is_main_process:
    (out / "facts.json").write_text(json.dumps(facts))
accelerator.save_state(str(out / "last"), blocking=False)  # nobody waits: the end of the script does
