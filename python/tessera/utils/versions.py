"""Comparing versions, under the module path that scripts import it from."""

from tessera.utils.imports import compare_versions, is_torch_version

__all__ = ["compare_versions", "is_torch_version"]
