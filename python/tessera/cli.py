"""The command line: `tessera COMMAND ...` and `python3 -m tessera COMMAND ...`.

Commands that need Python packages are Python modules with a `main(argv)`; every other one is C++ (`tessera._C`).
"""

import importlib
import os
import signal
import sys
from typing import List, Optional

PYTHON_COMMANDS = {"plot": "tessera.plot", "config": "tessera.commands.config",
                   "packages": "tessera.commands.packages"}


# As `python -m tessera`, but nothing is imported from the current folder (src/base/python_module.cpp).
_RUN = """import sys; sys.path[:] = [p for p in sys.path if p not in ('', '.')]
import runpy
runpy.run_module('tessera', run_name='__main__', alter_sys=True)"""


def own_command(python: str = sys.executable) -> List[str]:
    """The words that run this program by a Python interpreter, whatever lies in the current folder; its arguments follow."""
    return [python, "-c", _RUN]


def console() -> int:
    """The program that pip installs. As the C++ program it runs Python commands by the interpreter in TESSERA_PYTHON."""
    python, args = os.environ.get("TESSERA_PYTHON"), sys.argv[1:]
    if not python or not args or args[0] not in PYTHON_COMMANDS:
        return main(args)
    try:
        os.execvp(python, own_command(python) + args)
    except OSError as error:
        print(f"error: TESSERA_PYTHON is {python}, which cannot be run ({error.strerror}). Name a Python interpreter there, "
              "or unset it", file=sys.stderr)
    return 2


def main(argv: Optional[List[str]] = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in PYTHON_COMMANDS:
        return importlib.import_module(PYTHON_COMMANDS[args[0]]).main(args[1:])
    return _cpp_main(args)


def _cpp_main(args: List[str]) -> int:
    try:
        from tessera._C import cli_main
    except ImportError as error:
        print(f"error: the C++ part of Tessera cannot be loaded ({error}).", file=sys.stderr)
        print("Install it with `pip install .` in Tessera's source folder.", file=sys.stderr)
        return 1
    # The C++ side runs Python helpers with this interpreter, where the package is known to be.
    os.environ.setdefault("TESSERA_PYTHON", sys.executable)
    # Python's own handler only sets a flag that nobody reads while C++ runs; C++ installs its own where it needs one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.flush()
    # Where several processes are needed, they are this interpreter's, whether or not `tessera` is in PATH.
    return cli_main(args, own_command(sys.executable))
