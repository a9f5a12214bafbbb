"""Gives way when a scheduler asks for it: saves, ends with exit code 75, and goes on when it is started again.

    tessera launch --num_processes 2 examples/python/6_save_when_preempted.py --steps 1000 --state runs/state
    kill -TERM PID      # the launcher's, or -USR1 to it or to any of its processes

Needs NumPy alone."""

import argparse
from pathlib import Path

import numpy as np

from tessera import Accelerator, AdamW, CausalLM
from tessera.utils import set_seed

SAMPLES, LENGTH, VOCAB_SIZE = 8, 32, 97
MODEL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": VOCAB_SIZE, "n_positions": LENGTH}


class Position:
    """How many steps were made; goes into the state."""

    step = 0

    def state_dict(self) -> dict:
        return {"step": self.step}

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]


def batch_of(step: int, part: slice) -> np.ndarray:
    return np.random.default_rng(step).integers(0, VOCAB_SIZE, (SAMPLES, LENGTH))[part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--state", type=Path, default=Path("runs/state"), help="folder of save_state()")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(7)
    model, optimizer = accelerator.prepare(CausalLM(MODEL), AdamW(lr=1e-3))
    position = Position()
    accelerator.register_for_checkpointing(position)
    if args.state.exists():
        accelerator.load_state(args.state)
    share = SAMPLES // accelerator.num_processes
    own = slice(accelerator.process_index * share, (accelerator.process_index + 1) * share)
    while position.step < args.steps:
        ids = batch_of(position.step, own)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        position.step += 1
        accelerator.print(f"step {position.step}  loss {loss.item():.6f}", flush=True)
        accelerator.exit_if_preempted(args.state)
    accelerator.save_state(args.state)
    accelerator.end_training()


if __name__ == "__main__":
    main()
