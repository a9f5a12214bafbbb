"""What scripts of several layouts share: new states for the next one, and results for the test that started them."""

import json
from typing import Any

from tessera.state import AcceleratorState, GradientState, PartialState


def fresh_states() -> None:
    """For the next layout in the same processes, which stay connected."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def write_results(output: Any, results: Any) -> None:
    """As JSON, on the main process."""
    if PartialState().is_main_process:
        with open(output, "w") as file:
            json.dump(results, file)
