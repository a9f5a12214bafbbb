"""What a call of the model leaves behind until its backward: a gradient that waits for its factor, tapes that wait for theirs."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from tessera.engine.session import Session


class _Open:
    """What a call left open in the engine: used once, or dropped with this object."""

    used_before: str  # the error's text

    def __init__(self, session: Session, handle: Any):
        self._session = weakref.ref(session)
        self._handle = handle
        self.used = False
        self._trained = session.freezing.applied
        self._generation = session.generation

    @property
    def session(self) -> Optional[Session]:
        return self._session()

    def _use(self) -> Session:
        """Errors: RuntimeError the second time."""
        if self.used:
            raise RuntimeError(self.used_before)
        self.used = True
        session = self._session()
        if session.generation != self._generation:
            raise RuntimeError("the model was called before its optimizer was prepared, which made its engine anew: call the model "
                               "again for a loss to backward")
        return session

    def __del__(self):
        # Objects end anywhere, in other threads too; what they held ends between two calls of the engine.
        session = self._session()
        if session is not None:
            session.unwanted.append(self._handle)


class OpenCall(_Open):
    """A gradient that was computed and waits for its factor. Whoever drops it drops the gradient."""

    used_before = ("this loss was backwarded before: its gradient is a part of the accumulated one already. "
                   "Call the model again for another one")

    def add(self, factor: float) -> None:
        """Errors: RuntimeError the second time; InvalidArgument after an optimizer step."""
        session = self._use()
        session.check_factor(factor, session.freezing.changed_since(self._trained))
        self._handle.add(factor)


class OpenForward(_Open):
    """Tapes of a forward pass that wait for the gradient of what it returned."""

    used_before = "backward ran through these logits before, and their activations are gone; call the model again"

    def backward(self, upstream: Any) -> None:
        """Errors: RuntimeError the second time."""
        session = self._use()
        session.meet_unchanged("backward() of a loss of logits", session.freezing.changed_since(self._trained))
        session.engine.backward(self._handle, upstream)
