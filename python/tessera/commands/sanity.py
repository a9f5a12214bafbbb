"""What `tessera test` launches on every configured process: communication, then a short training of a tiny random model.

The main process prints one line for each thing that works; what does not work ends the job with its error.
"""

import importlib.util
import math
import sys
from typing import Any, Dict, List

SEQUENCE, VOCABULARY, STEPS = 16, 257, 6


def _say(state: Any, text: str) -> None:
    if state.is_main_process:
        print(f"ok  {text}", flush=True)


def check_communication(state: Any) -> None:
    """Sums, gathers and broadcasts over all processes. Errors: RuntimeError that says what came out instead."""
    import numpy as np

    from tessera.utils.operations import broadcast_object_list

    world = state._shared_state["world"]
    ranks = list(range(state.num_processes))
    total = np.array([float(state.process_index), 1.0])
    world.all_reduce(total)
    if total.tolist() != [float(sum(ranks)), float(len(ranks))]:
        raise RuntimeError(f"a sum over {len(ranks)} processes came out as {total.tolist()}")
    gathered = world.all_gather(np.array([state.process_index])).ravel().tolist()
    if gathered != ranks:
        raise RuntimeError(f"the ranks of all processes were gathered as {gathered}")
    told: List[Any] = [{"from": state.process_index}]
    broadcast_object_list(told)
    if told != [{"from": 0}]:
        raise RuntimeError(f"process 0 sent its rank to all, and {told} came here")
    state.wait_for_everyone()
    _say(state, "communication: sum, gather, broadcast, barrier")


def _samples(count: int, length: int) -> List[Dict[str, Any]]:
    """Token sequences that a model can learn: each token is the one before plus a step of its own."""
    import torch

    made = []
    for i in range(count):
        tokens = (torch.arange(length) * (1 + i % 3) + 7 * i) % VOCABULARY
        made.append({"input_ids": tokens, "labels": tokens.clone()})
    return made


def check_training(accelerator: Any) -> None:
    """A few steps of a tiny GPT-2 over the configured layout. Errors: RuntimeError if the loss is not finite, does not
    fall, or differs between processes."""
    import numpy as np
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from tessera.plugin.fields import degrees
    from tessera.state import PartialState
    from tessera.utils import set_seed

    plugin = getattr(accelerator.state, "megatron_lm_plugin", None)
    set_seed(1)
    # Sizes that every small layout divides.
    parts = degrees(plugin)
    heads = 4 * parts['tp']
    layers = 2 * parts['pp'] * (getattr(plugin, "num_layers_per_virtual_pipeline_stage", None) or 1)
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=8 * heads, n_head=heads, n_positions=SEQUENCE * parts['tp'] * parts['cp'],
                                       vocab_size=VOCABULARY, bos_token_id=256, eos_token_id=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # One global batch, taken again and again: its loss must fall.
    data = accelerator.num_processes // math.prod(parts.values())
    loader = torch.utils.data.DataLoader(_samples(2 * data * getattr(plugin, "num_micro_batches", 1), SEQUENCE * parts['cp']), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    _say(accelerator, f"layout: tensor {parts['tp']}, context {parts['cp']}, pipeline {parts['pp']}, data {data}; "
                      "weights divided among the processes")
    model.train()
    losses = []
    while len(losses) < STEPS:
        for batch in loader:
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(outputs.loss.item())
    if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        raise RuntimeError(f"the loss did not fall: {losses}")
    # Over all processes: the gather functions of scripts are over data ranks alone.
    everywhere = PartialState._shared_state["world"].all_gather(np.array([losses[-1]])).ravel().tolist()
    if len(set(everywhere)) != 1:
        raise RuntimeError(f"the processes have different losses: {everywhere}")
    _say(accelerator, f"training: {len(losses)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}, the same on every process")
    model.eval()
    with torch.no_grad():
        loss = model(**batch).loss.item()
    if not math.isfinite(loss):
        raise RuntimeError(f"the evaluation's loss is {loss}")
    _say(accelerator, "evaluation")


def main() -> int:
    """Runs the checks on this process; returns the exit code."""
    from tessera.state import PartialState

    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        state = PartialState()
        _say(state, f"processes: {state.num_processes}, on {state.device}")
        check_communication(state)
        if state.is_main_process:
            print(f"--  training was not tried: it needs {' and '.join(missing)} (pip install {' '.join(missing)})", flush=True)
        return 0
    from tessera import Accelerator

    accelerator = Accelerator()
    _say(accelerator, f"processes: {accelerator.num_processes}, on {accelerator.device}, {accelerator.distributed_type.value}, "
                      f"mixed precision {accelerator.mixed_precision}")
    check_communication(PartialState())
    check_training(accelerator)
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
