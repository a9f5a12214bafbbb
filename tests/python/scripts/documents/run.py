"""Runs the documents' scripts one after the other in these processes, each beside plain PyTorch. Arguments: output, and a JSON file
[{"name", "script", "folder", "arguments", "environment"}]. Rank 0 writes {name: {"losses", "expected"}}."""

import gc
import json
import logging
import os
import runpy
import sys

import torch

from beside import Beside
from tessera.state import AcceleratorState, GradientState, PartialState


class Said(logging.Handler):
    """What is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(case: dict) -> dict:
    sys.modules.pop("what_readers_have", None)
    sys.argv = [case["script"], *case.get("arguments", [])]
    os.environ.update(case.get("environment", {}))
    os.chdir(case["folder"])
    torch.manual_seed(11 + PartialState().process_index)  # another one on each rank, as without a seed
    beside, said = Beside(), Said()
    beside.begin()
    logging.getLogger("tessera").addHandler(said)
    try:
        found = runpy.run_path(case["script"], run_name="__main__")
    finally:
        beside.end()
        logging.getLogger("tessera").removeHandler(said)
        for name in case.get("environment", {}):
            del os.environ[name]
    result = {"losses": beside.losses, "expected": beside.expected, "said": said.lines, "told": found.get("told", {})}
    # The processes stay connected: the next script needs new states alone.
    beside.accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return result


def main() -> None:
    output, cases = sys.argv[1:]
    gc.freeze()  # what is imported stays: free_memory() need not look through it each time
    with open(cases) as file:
        results = {case["name"]: run(case) for case in json.load(file)}
    if PartialState().is_main_process:
        with open(output, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
