"""How settings are refused: one sentence each."""

import difflib
from typing import Iterable


def not_ours(name: str, what: str, instead: str) -> NotImplementedError:
    """The refusal of a name that belongs to another engine, to be raised by the caller."""
    return NotImplementedError(f"{name} is for {what}, which Tessera does not run; {instead}")


def nearest(name: str, known: Iterable[str]) -> str:
    """"; did you mean 'x'?" or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
