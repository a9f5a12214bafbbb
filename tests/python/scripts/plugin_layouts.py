"""What fields about layouts change in a step on two processes. Arguments: output, and a JSON list of the plugin's fields (and "family", of another model than a GPT-2). Rank 0 writes
for each of them [elements of parameters on rank 0, most bytes it held in a step]."""

import json
import sys

from results import fresh_states, write_results
import torch

from tessera import Accelerator
from tessera.utils import MegatronLMPlugin
from train_like_torch import make_model


def held(fields: dict) -> list:
    fields = dict(fields)
    model = make_model(fields.pop("family", "gpt2"))
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**fields))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    ids = torch.randint(0, 101, (8, 16), generator=torch.Generator().manual_seed(2))
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    engine = model.session.engine
    numbers = [engine.elements_held, engine.peak_bytes]
    accelerator.free_memory()
    fresh_states()
    return numbers


def main() -> None:
    output, cases = sys.argv[1], json.loads(sys.argv[2])
    numbers = [held(fields) for fields in cases]
    write_results(output, numbers)


if __name__ == "__main__":
    main()
