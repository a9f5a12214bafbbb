"""ParallelismConfig under the module path that scripts import it from."""

from tessera.compat.foreign import ParallelismConfig

__all__ = ["ParallelismConfig"]
