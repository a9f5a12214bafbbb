"""Which seed decides: PyTorch's or tessera.utils.set_seed's, for weights of a model that has none and for dropout."""

import json
import sys

import torch
import transformers

from tessera import Accelerator, init_empty_weights
from tessera.utils import set_seed

IDS = torch.arange(24).reshape(2, 12)
SIZES = dict(n_layer=1, n_embd=32, n_head=2, vocab_size=50, n_positions=12)
DROPS = dict(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
weights = {name: torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) * 0.1
           for name, value in transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)).state_dict().items()}
accelerator = Accelerator()


def drawn() -> float:
    """A number of the weights that are drawn for a model without any."""
    with init_empty_weights():
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))
    model = accelerator.prepare(model)
    model(input_ids=IDS)
    total = accelerator.get_state_dict(model)["transformer.wte.weight"].double().square().sum().item()
    accelerator.free_memory()
    return total


def dropped() -> float:
    """The loss of given weights in training mode."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **DROPS))
    model.load_state_dict(weights)
    model = accelerator.prepare(model.train())
    loss = model(input_ids=IDS, labels=IDS).loss.item()
    accelerator.free_memory()
    return loss


def after(seeded, *seed) -> list:
    seeded(*seed)
    return [drawn(), dropped()]


torch_5 = after(torch.manual_seed, 5)
result = {"torch 5": torch_5, "torch 6": after(torch.manual_seed, 6), "torch 5 again": after(torch.manual_seed, 5),
          "transformers 6": after(transformers.set_seed, 6), "tessera 5": after(set_seed, 5)}
set_seed(7)
result["tessera 7, then torch 5"] = after(torch.manual_seed, 5)
result["tessera 7"] = after(set_seed, 7)
with open(sys.argv[1], "w") as file:
    json.dump(result, file)
