"""The exceptions of Tessera. They are made in C++ (tessera._C); every one is an `Error`."""

from __future__ import annotations

try:
    from tessera._C import (
        CheckpointError,
        CommunicationError,
        CommunicationTimeout,
        ConfigError,
        DataError,
        DeviceError,
        Error,
        InternalError,
        InvalidArgument,
        IoError,
        TrainingError,
    )
except ModuleNotFoundError as missing:
    if missing.name not in ("tessera._C", "tessera"):
        raise

    # A source tree without the compiled module: the helpers that need none of it (plot, config, trackers) still run.
    class Error(RuntimeError):
        """What all errors of Tessera are."""

    class InvalidArgument(Error, ValueError):
        """A call that its caller could have known to be wrong."""

    class ConfigError(Error, ValueError):
        """A setting, or a combination of settings, that cannot work."""

    class DataError(Error):
        """Bytes that are not what they should be."""

    class CheckpointError(Error):
        """A checkpoint that is not whole or belongs to another model."""

    class IoError(Error, OSError):
        """The system refused memory, a file or a connection."""

    class DeviceError(Error):
        """A device failed."""

    class CommunicationError(Error):
        """Other processes did not answer, or one of them failed."""

    class CommunicationTimeout(CommunicationError):
        """Another process is not known to be gone, but did not come in time."""

    class TrainingError(Error):
        """The training itself went wrong."""

    class InternalError(Error):
        """A mistake in Tessera."""


class DistributedOperationException(Exception):
    """The processes called one operation with data that does not fit together."""


class ProcessFailed(RuntimeError):
    """A process started by `notebook_launcher` or `debug_launcher` failed. `rank` is its number, `traceback` its text
    (empty when it ended without one)."""

    def __init__(self, message: str, rank: int, traceback: str = ""):
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


__all__ = [
    "CheckpointError",
    "CommunicationError",
    "CommunicationTimeout",
    "ConfigError",
    "DataError",
    "DeviceError",
    "DistributedOperationException",
    "Error",
    "InternalError",
    "InvalidArgument",
    "IoError",
    "ProcessFailed",
    "TrainingError",
]
