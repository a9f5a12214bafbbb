"""How OpenMP's threads wait. Runs before the compiled module, and libgomp with it, is loaded."""

import os

# Rounds of libgomp's waiting loop, each of one pause instruction: some 50 microseconds. As in src/base/env.cpp.
SPIN_COUNT = "2000"


def set_thread_waits() -> None:
    """Threads spin for some 50 microseconds and then sleep, where nobody has said how they shall wait: by default libgomp's
    spin for whole time slices, which another job on the same cores needs. What was loaded before is left as it is."""
    if "GOMP_SPINCOUNT" not in os.environ and "OMP_WAIT_POLICY" not in os.environ:
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
