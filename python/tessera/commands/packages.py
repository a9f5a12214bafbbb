"""The Python half of `tessera env`: versions, one a line."""

import platform
import sys
from importlib import metadata
from typing import List, Optional

PACKAGES = ("numpy", "torch", "transformers", "datasets", "safetensors", "tensorboard", "wandb")


def main(argv: Optional[List[str]] = None) -> int:
    """Prints the interpreter and the packages that Tessera can use; returns the exit code."""
    print(f"{'python':<12} {platform.python_version()} ({sys.executable})")
    for name in PACKAGES:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "not installed"
        print(f"{name:<12} {found}")
    return 0
