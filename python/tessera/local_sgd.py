"""LocalSGD under the module path that scripts import it from."""

from tessera.compat.foreign_functions import find

LocalSGD = find("LocalSGD")

__all__ = ["LocalSGD"]
