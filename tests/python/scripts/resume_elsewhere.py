"""One accumulation of two calls with a step: "save" stops between the calls and saves, "load" makes the second call, on whatever
layout, and compares with plain PyTorch. Arguments: output, save or load, tp, pp, folder."""

import json
import sys

import torch
import transformers

from tessera import Accelerator
from tessera.utils import MegatronLMPlugin


def make() -> tuple:
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_embd=24, n_head=4, vocab_size=101, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def main() -> None:
    output, action, tp, pp, folder = sys.argv[1:]
    (reference, plain), (model, optimizer) = make(), make()
    batches = torch.randint(0, 101, (2, 4, 12), generator=torch.Generator().manual_seed(5))
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=int(tp), pp_degree=int(pp), num_micro_batches=1,
                                                                  gradient_clipping=0.0, use_distributed_optimizer=True),
                              gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, optimizer)
    dp, rank = accelerator.state.mesh.dp, accelerator.state.mesh.coordinates["dp"]
    if action == "load":
        accelerator.load_state(folder)
    ids = batches[int(action == "load")]
    own = ids[rank * 4 // dp: (rank + 1) * 4 // dp]
    with accelerator.accumulate(model):
        accelerator.backward(model(input_ids=own, labels=own).loss)
        optimizer.step()
        optimizer.zero_grad()
    if action == "save":
        accelerator.save_state(folder)
        return
    for batch in batches:
        (reference(input_ids=batch, labels=batch).loss / 2).backward()
    plain.step()
    weights = model.state_dict()
    if accelerator.is_main_process:
        worst = max((weights[name] - weight).abs().max().item() for name, weight in reference.named_parameters())
        with open(output, "w") as file:
            json.dump(worst, file)


if __name__ == "__main__":
    main()
