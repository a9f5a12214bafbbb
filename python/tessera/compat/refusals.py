"""What settings may say, and how they are refused: one sentence each."""

import difflib
from typing import Any, Iterable, Optional

from tessera.errors import ConfigError

LAYOUT = "give the layout in a MegatronLMPlugin (tp_degree, pp_degree, use_distributed_optimizer)"


YES, NO = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")


def boolean(text: Any) -> Optional[bool]:
    """Of a bool or a word for one, as Accelerate reads them; None for anything else."""
    word = str(text).strip().lower()
    return True if word in YES else False if word in NO else None


def check_precision(precision: str) -> None:
    """Errors: ConfigError for fp8, which is not in this build yet, and unknown words."""
    if precision == "fp8":
        raise ConfigError("mixed_precision 'fp8' is not in this build yet; use bf16")
    if precision not in ("no", "fp16", "bf16"):
        raise ConfigError(f"mixed_precision '{precision}' is unknown; it is no, fp16 or bf16")


def not_ours(name: str, what: str, instead: str) -> NotImplementedError:
    """The refusal of a name that belongs to another engine, to be raised by the caller."""
    return NotImplementedError(f"{name} is for {what}, which Tessera does not run; {instead}")


def nearest(name: str, known: Iterable[str]) -> str:
    """"; did you mean 'x'?" or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
