"""What a call of the model leaves behind until its backward: a gradient that waits for its factor, tapes that wait for theirs."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from tessera._session import Session


class OpenCall:
    """A gradient that was computed and waits for its factor. Whoever drops it drops the gradient."""

    def __init__(self, session: Session, number: int):
        self._session = weakref.ref(session)
        self.number = number
        self.used = False
        self._trained = session.freezing.applied

    @property
    def session(self) -> Optional[Session]:
        return self._session()

    def add(self, factor: float) -> None:
        """Errors: RuntimeError the second time; InvalidArgument after an optimizer step."""
        if self.used:
            raise RuntimeError("this loss was backwarded before: its gradient is a part of the accumulated one already. "
                               "Call the model again for another one")
        self.used = True
        session = self._session()
        session.check_factor(factor, session.freezing.changed_since(self._trained))
        session.engine.add_call(self.number, factor)

    def __del__(self):
        session = self._session()
        if not self.used and session is not None:
            session.unwanted_calls.append(self.number)


class OpenForward:
    """Tapes of a forward pass that wait for the gradient of what it returned."""

    def __init__(self, session: Session, number: int):
        self._session = weakref.ref(session)
        self.number = number
        self.used = False
        self._trained = session.freezing.applied

    @property
    def session(self) -> Optional[Session]:
        return self._session()

    def backward(self, upstream: Any) -> None:
        if self.used:
            raise RuntimeError("backward ran through these logits before, and their activations are gone; call the model again")
        self.used = True
        session = self._session()
        session.meet_unchanged("backward() of a loss of logits", session.freezing.changed_since(self._trained))
        session.engine.backward(self.number, upstream)

    def __del__(self):
        session = self._session()
        if not self.used and session is not None:
            session.unwanted_forwards.append(self.number)
