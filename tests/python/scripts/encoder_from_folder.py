"""Fine-tunes a classifier that begins with a pre-trained folder's weights, which each rank reads in part, in bf16. Arguments: folder,
output. Rank 0 writes which tensors are the folder's before training, and the losses."""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from tessera import Accelerator, init_empty_weights
from tessera.utils import MegatronLMPlugin


def main() -> None:
    folder, output = map(Path, sys.argv[1:])
    accelerator = Accelerator(mixed_precision="bf16", megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, sequence_parallelism=True))
    with init_empty_weights():
        model = transformers.BertForSequenceClassification(transformers.AutoConfig.from_pretrained(folder, num_labels=3))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    begin, stored = model.state_dict(), load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    batch = {"input_ids": torch.randint(1, 40, (6, 12), generator=generator), "labels": torch.tensor([0, 1, 2, 0, 1, 2])}
    losses = []
    for _ in range(8):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if accelerator.is_main_process:
        same = {name: name in stored and torch.equal(value, stored[name]) for name, value in begin.items()}
        output.write_text(json.dumps({"losses": losses, "same": same}))


if __name__ == "__main__":
    main()
