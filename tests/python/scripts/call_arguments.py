"""Arguments of a call, on this layout: num_items_in_batch and logits_to_keep beside PyTorch's numbers. Rank 0 writes the largest
differences as JSON. Arguments: output, tp, pp."""

import copy
import json
import sys

import numpy as np
import torch
import transformers

from tessera import Accelerator
from tessera.errors import InvalidArgument
from tessera.utils import MegatronLMPlugin, full_gradients


def main(output: str, tp: int, pp: int) -> None:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(num_hidden_layers=2, hidden_size=24, num_attention_heads=4, num_key_value_heads=2,
                                      intermediate_size=40, vocab_size=101, max_position_embeddings=16, bos_token_id=0, eos_token_id=0)
    model = transformers.LlamaForCausalLM(config)
    plain = copy.deepcopy(model)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=tp, pp_degree=pp) if tp * pp > 1 else None)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    mesh = accelerator.state.mesh
    ids = torch.randint(0, 101, (4, 9), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[0, :5] = -100
    rows = slice(mesh.coordinates["dp"] * 4 // mesh.dp, (mesh.coordinates["dp"] + 1) * 4 // mesh.dp)

    loss = model(input_ids=ids[rows], labels=labels[rows], num_items_in_batch=torch.tensor(240)).loss
    accelerator.backward(loss)
    gradients = full_gradients(model)
    expected = plain(input_ids=ids, labels=labels, num_items_in_batch=240).loss / mesh.dp  # the mean over data ranks, as under DDP
    expected.backward()
    errors = {"loss": abs(loss.item() - expected.item()) / expected.item(), "gradients": 0.0}
    if accelerator.is_main_process:
        errors["gradients"] = max(((gradients[name] - each.grad).abs().max() / each.grad.abs().max()).item()
                                  for name, each in plain.named_parameters())

    model.eval()
    with torch.no_grad():
        for which in (1, 3, torch.tensor([0, 4])):
            mine, theirs = model(ids[rows], logits_to_keep=which).logits, plain(ids[rows], logits_to_keep=which).logits
            errors["logits"] = max(errors.get("logits", 0.0), (mine - theirs).abs().max().item() if mine.shape == theirs.shape else 9.0)
    if mesh.dp > 1:
        try:
            model(input_ids=ids[rows], labels=labels[rows], num_items_in_batch=10 + mesh.coordinates["dp"])
            errors["disagreement"] = 1.0
        except InvalidArgument as error:
            errors["disagreement"] = 0.0 if "data rank 0: 10, data rank 1: 11" in str(error) else 1.0
    worst = accelerator.state.world.all_gather(np.array([max(errors.values())], dtype=np.float64))
    if accelerator.is_main_process:
        with open(output, "w") as file:
            json.dump({**errors, "worst of all ranks": float(worst.max())}, file)


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
