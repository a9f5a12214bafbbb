"""Tessera trains large transformers on any layout. Today: the command line; the Python API follows."""

from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("tessera")
except _metadata.PackageNotFoundError:  # read from a source tree that is not installed
    __version__ = "0+source"
