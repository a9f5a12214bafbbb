"""How gradients are accumulated and where the current dataloader stands: `tessera.state.GradientState`."""

from __future__ import annotations

import weakref
from typing import Any, List


class GradientState:
    """How gradients are accumulated, and where the current dataloader stands.

    Attributes: `sync_gradients` (whether this step updates), `num_steps`, `adjust_scheduler`, `sync_with_dataloader`
    (of the GradientAccumulationPlugin), `end_of_dataloader`, `remainder` (samples of an uneven last batch, -1 outside
    of a dataloader), `active_dataloader`, `dataloader_references` (held weakly), `in_dataloader`."""

    _shared_state: dict = {}

    def __init__(self, gradient_accumulation_plugin: Any = None):
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.sync_gradients = True
            self._dataloader_references_ref: List[Any] = [None]
            self.plugin_kwargs: dict = {}
            self.is_xla_gradients_synced = False
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    @property
    def num_steps(self) -> int:
        return self.plugin_kwargs.get("num_steps", 1)

    @property
    def adjust_scheduler(self) -> bool:
        return self.plugin_kwargs.get("adjust_scheduler", False)

    @property
    def sync_with_dataloader(self) -> bool:
        return self.plugin_kwargs.get("sync_with_dataloader", True)

    @property
    def initialized(self) -> bool:
        return GradientState._shared_state != {}

    @property
    def end_of_dataloader(self) -> bool:
        return self.in_dataloader and self.active_dataloader.end_of_dataloader

    @property
    def remainder(self) -> int:
        return self.active_dataloader.remainder if self.in_dataloader else -1

    @property
    def active_dataloader(self) -> Any:
        return self.dataloader_references[-1]

    @property
    def dataloader_references(self) -> List[Any]:
        return [None if reference is None else reference() for reference in self._dataloader_references_ref]

    @dataloader_references.setter
    def dataloader_references(self, references: List[Any]) -> None:
        self._dataloader_references_ref = [None if loader is None else weakref.ref(loader) for loader in references]

    @property
    def in_dataloader(self) -> bool:
        return self.active_dataloader is not None

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, dataloader: Any) -> None:
        self.dataloader_references += [dataloader]

    def _remove_dataloader(self, dataloader: Any) -> None:
        self.dataloader_references = [loader for loader in self.dataloader_references if loader is not dataloader]

    @staticmethod
    def _reset_state() -> None:
        """Forgets the state, for tests."""
        GradientState._shared_state.clear()
