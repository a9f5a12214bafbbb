"""What fields about layouts change in a step on two processes. Arguments: output, and a JSON list of the plugin's fields. Rank 0 writes
for each of them [elements of parameters on rank 0, most bytes it held in a step]."""

import json
import sys

import torch

from tessera import Accelerator
from tessera.state import AcceleratorState, GradientState, PartialState
from tessera.utils import MegatronLMPlugin
from train_like_torch import make_model


def held(fields: dict) -> list:
    model = make_model("gpt2")
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**fields))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    ids = torch.randint(0, 101, (8, 16), generator=torch.Generator().manual_seed(2))
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    engine = model.session.engine
    numbers = [engine.elements_held, engine.peak_bytes]
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return numbers


def main() -> None:
    output, cases = sys.argv[1], json.loads(sys.argv[2])
    numbers = [held(fields) for fields in cases]
    if PartialState().is_main_process:
        with open(output, "w") as file:
            json.dump(numbers, file)


if __name__ == "__main__":
    main()
