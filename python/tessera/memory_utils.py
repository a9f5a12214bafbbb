"""The old place of `tessera.utils.memory`."""

import warnings

from tessera.utils.memory import find_executable_batch_size, release_memory

warnings.warn(
    "tessera.memory_utils is now tessera.utils.memory; `from tessera import find_executable_batch_size` finds both",
    FutureWarning,
    stacklevel=2,
)

__all__ = ["find_executable_batch_size", "release_memory"]
