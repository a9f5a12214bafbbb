#!/usr/bin/env python3
"""Holds the house together: every #include points down, to the same floor, or outside; so does every import of the Python
package, among its rooms; no file includes or imports itself round a corner. `check_floors.py [ROOT]` checks a tree;
`--self-test` shows that each rule can fail. Prints one line a finding."""

import ast
import re
import sys
import tempfile
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

# Bottom to top; floors in one tuple are siblings and never include each other.
ORDER = [("base",), ("device", "kernels"), ("tensor",), ("ops", "comm"), ("autograd",), ("parallel",), ("nn",),
         ("pipeline", "optim", "data"), ("checkpoint",), ("engine",), ("launch",), ("cli",), ("python",)]
LEVEL = {floor: level for level, floors in enumerate(ORDER) for floor in floors}
# Kernels stand on plain types only: what they may include besides themselves.
KERNELS_MAY_INCLUDE = {"base", "kernels"}
# Written for those who link the library; nothing of ours includes it.
UMBRELLA = "include/tessera/tessera.hpp"
PUBLIC_ALLOWED = re.compile(r"tessera/|[a-z_0-9]+$")  # our headers, the standard library's
FOLDERS = ("include", "src", "kernels", "python/bindings")
# The rooms of the Python package, bottom to top: folders, and the modules that stand for themselves. A room imports only rooms
# below it, also inside of functions; those in one tuple never import each other.
PACKAGE, COMPILED = "python/tessera", "tessera._C"
ROOMS = [("errors",), ("utils/objects",), ("comm",), ("launch", "compat", "utils/constants"),
         ("utils/environment",), ("utils/imports", "plugin"), ("utils/dataclasses", "utils/versions", "data"), ("state",),
         ("logging", "utils/memory", "utils/operations", "utils/tqdm"),
         ("utils/random", "checkpoint", "commands", "tracking", "memory_utils"), ("data_loader", "utils/other"), ("engine",),
         ("causal_lm", "optimizer", "scheduler", "utils/modeling"), ("utils/deepspeed", "utils/megatron_lm", "utils/weights"), ("accelerator",),
         ("big_modeling", "inference", "integrations", "launchers", "local_sgd", "parallelism_config", "tokenize_worker"),
         ("__init__", "utils/__init__"), ("cli", "commands/sanity", "parquet_worker", "plot", "sentence_worker"), ("__main__",)]
ROOM_LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


class Include(NamedTuple):
    file: str  # relative to the root
    line: int
    written: str
    target: Optional[str]  # the file of ours it means, relative to the root; None when it is not ours


def floor_of(path: str) -> Optional[str]:
    parts = Path(path).parts
    if parts[:2] == ("include", "tessera") and len(parts) > 3:
        return parts[2]
    if parts[0] == "src" and len(parts) > 2:
        return parts[1]
    return {"kernels": "kernels", "python": "python"}.get(parts[0])


def cpp_files(root: Path) -> List[str]:
    found = []
    for folder in FOLDERS:
        found += [path.relative_to(root).as_posix() for path in (root / folder).rglob("*")
                  if path.suffix in {".hpp", ".cpp", ".h", ".cuh", ".cu", ".inc"} and path.is_file()]
    return sorted(found)


def resolve(root: Path, file: str, written: str) -> Optional[str]:
    for base in (Path(file).parent, Path("include"), Path("."), Path("src")):
        candidate = root / base / written
        if candidate.is_file():
            return candidate.resolve().relative_to(root.resolve()).as_posix()
    return None


def includes_of(root: Path, file: str) -> Iterator[Include]:
    text = (root / file).read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        match = INCLUDE.match(line)
        if match:
            yield Include(file, number, match.group(2), resolve(root, file, match.group(2)))


def check_include(include: Include) -> Optional[str]:
    """What is wrong with one include, or None."""
    own = floor_of(include.file)
    if include.target is None:
        if include.written.startswith(("tessera/", "kernels/")):
            return "no such header"
        if include.file.startswith("include/") and not PUBLIC_ALLOWED.match(include.written):
            return "a public header may include only tessera/... and the standard library, so that users need nothing else"
        return None
    if include.target == UMBRELLA and own is not None:
        return "the umbrella header is for users of the library; include what is needed"
    if include.file.startswith("include/") and not include.target.startswith("include/"):
        return "a public header includes a private one, which is not installed"
    target = floor_of(include.target)
    if own is None or target is None or own == target:
        return None
    for floor in (own, target):
        if floor not in LEVEL:
            return f"unknown floor '{floor}'; the floors are listed at the top of tests/check_floors.py"
    if own == "kernels" and target not in KERNELS_MAY_INCLUDE:
        return f"kernels may include only base, not {target}"
    if LEVEL[target] > LEVEL[own]:
        return f"{own} includes {target}, which is a higher floor"
    if LEVEL[target] == LEVEL[own]:
        return f"{own} includes {target}, its sibling"
    return None


def find_cycles(graph: Dict[str, List[str]]) -> List[List[str]]:
    """One cycle for each back edge of a depth-first walk."""
    cycles, state = [], {}
    for start in graph:
        if start in state:
            continue
        trail, pending = [start], [iter(graph[start])]
        state[start] = "open"
        while pending:
            following = next(pending[-1], None)
            if following is None:
                state[trail.pop()] = "done"
                pending.pop()
            elif state.get(following) == "open":
                cycles.append(trail[trail.index(following):] + [following])
            elif following not in state:
                state[following] = "open"
                trail.append(following)
                pending.append(iter(graph.get(following, [])))
    return cycles


def room_of(file: str) -> Optional[str]:
    """The room of a file of the package, its path without suffix."""
    parts = file.split("/")
    return next((room for room in ("/".join(parts[:n]) for n in range(len(parts), 0, -1)) if room in ROOM_LEVEL), None)


def imports_of(root: Path, file: str, files: Set[str]) -> Iterator[Include]:
    """What a file of the package imports of it, anywhere in its text but for types alone. The C++ module is not its."""
    def module(name: str) -> str:
        path = "/".join(name.split(".")[1:])
        return path if path in files else f"{path}/__init__".lstrip("/")

    tree = ast.parse((root / PACKAGE / f"{file}.py").read_text(encoding="utf-8"))
    typed = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
             for inner in ast.walk(node)}
    for node in ast.walk(tree):
        names: List[str] = []
        if id(node) in typed:
            continue
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{each.name}" for each in node.names]
            names = [name if module(name) in files or name == COMPILED else str(node.module) for name in inner]
        for name in dict.fromkeys(names):
            if name.split(".")[0] == "tessera" and name != COMPILED:
                yield Include(file, node.lineno, name, module(name) if module(name) in files else None)


def check_import(each: Include) -> Optional[str]:
    """What is wrong with one import of the package, or None."""
    if each.target is None:
        return "no such module"
    own, target = room_of(each.file), room_of(each.target)
    if own is None or target is None or own == target or ROOM_LEVEL[target] < ROOM_LEVEL[own]:
        return None
    return f"{own} imports {target}, which is {'its sibling' if ROOM_LEVEL[target] == ROOM_LEVEL[own] else 'a higher room'}"


def check_package(root: Path) -> Tuple[List[str], int]:
    """(findings, number of files read)."""
    findings, graph = [], {}
    files = sorted(path.relative_to(root / PACKAGE).with_suffix("").as_posix() for path in (root / PACKAGE).rglob("*.py"))
    for file in files:
        if room_of(file) is None:
            findings.append(f"{PACKAGE}/{file}.py: stands in no room; the rooms are listed at the top of tests/check_floors.py")
        imports = list(imports_of(root, file, set(files)))
        graph[file] = [each.target for each in imports if each.target]
        for each in imports:
            problem = check_import(each)
            if problem:
                findings.append(f"{PACKAGE}/{file}.py:{each.line}: import {each.written}: {problem}")
    return findings + ["import cycle: " + " -> ".join(cycle) for cycle in find_cycles(graph)], len(files)


def check(root: Path) -> Tuple[List[str], int]:
    """(findings, number of files read)."""
    findings, read = check_package(root)
    graph = {}
    files = cpp_files(root)
    for file in files:
        includes = list(includes_of(root, file))
        graph[file] = [include.target for include in includes if include.target]
        for include in includes:
            problem = check_include(include)
            if problem:
                findings.append(f'{file}:{include.line}: #include "{include.written}": {problem}')
    findings += ["include cycle: " + " -> ".join(cycle) for cycle in find_cycles(graph)]
    return findings, read + len(files)


def self_test() -> List[str]:
    """Each case is a small tree with one fault and words of the finding it must cause; '' means none."""
    base = {"include/tessera/base/a.hpp": "#include <vector>\n"}
    rooms = {f"{PACKAGE}/{file}.py": "" for file in ("__init__", "comm/a", "state/c")}
    cases = [
        ("a clean tree", {"src/ops/x.cpp": '#include "tessera/base/a.hpp"\n#include <dnnl.hpp>\n'}, ""),
        ("upward", {"src/base/x.cpp": '#include "tessera/nn/n.hpp"\n', "include/tessera/nn/n.hpp": ""}, "higher floor"),
        ("sibling", {"src/ops/x.cpp": '#include "comm/c.hpp"\n', "src/comm/c.hpp": ""}, "sibling"),
        ("sibling of three", {"src/optim/x.cpp": '#include "pipeline/c.hpp"\n', "src/pipeline/c.hpp": ""}, "sibling"),
        ("optim beside data", {"src/optim/x.cpp": '#include "data/c.hpp"\n', "src/data/c.hpp": ""}, "sibling"),
        ("kernels above base", {"kernels/cpu/x.cpp": '#include "tessera/device/d.hpp"\n',
                                "include/tessera/device/d.hpp": ""}, "kernels may include only base"),
        ("missing header", {"src/base/x.cpp": '#include "tessera/base/gone.hpp"\n'}, "no such header"),
        ("private in public", {"include/tessera/base/x.hpp": '#include "base/p.hpp"\n', "src/base/p.hpp": ""}, "not installed"),
        ("third party in public", {"include/tessera/base/x.hpp": "#include <yaml-cpp/yaml.h>\n"}, "users need nothing else"),
        ("umbrella", {"src/nn/x.cpp": '#include "tessera/tessera.hpp"\n', UMBRELLA: ""}, "umbrella"),
        ("unknown floor", {"src/attic/x.cpp": '#include "tessera/base/a.hpp"\n'}, "unknown floor"),
        ("an import downward", {**rooms, f"{PACKAGE}/state/b.py": "from tessera.comm import a\nfrom tessera import _C\n"}, ""),
        ("an import upward", {**rooms, f"{PACKAGE}/comm/b.py": "def f():\n    from tessera.state.c import x\n"}, "a higher room"),
        ("an import of a sibling", {f"{PACKAGE}/plot.py": "import tessera.cli\n", f"{PACKAGE}/cli.py": ""}, "its sibling"),
        ("a name of the package's", {**rooms, f"{PACKAGE}/comm/b.py": "from tessera import Accelerator\n"}, "a higher room"),
        ("a module that is gone", {**rooms, f"{PACKAGE}/comm/b.py": "import tessera.comm.gone\n"}, "no such module"),
        ("no room", {f"{PACKAGE}/attic/a.py": ""}, "stands in no room"),
        ("an import cycle", {f"{PACKAGE}/comm/a.py": "from tessera.comm.b import x\n",
                             f"{PACKAGE}/comm/b.py": "def f():\n    import tessera.comm.a\n"}, "import cycle"),
        ("cycle", {"src/base/x.hpp": '#include "y.hpp"\n', "src/base/y.hpp": '#include "base/x.hpp"\n'}, "include cycle"),
    ]
    failures = []
    for name, files, expected in cases:
        with tempfile.TemporaryDirectory() as folder:
            for file, text in {**base, **files}.items():
                path = Path(folder, file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            findings, _ = check(Path(folder))
        caught = len(findings) == 1 and expected in findings[0] if expected else not findings
        if not caught:
            failures.append(f"self-test '{name}': expected '{expected}', found {findings}")
    return failures


def main() -> int:
    if "--self-test" in sys.argv:
        failures = self_test()
        print("\n".join(failures) or "check_floors: every rule fails when it should")
        return bool(failures)
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    findings, count = check(root)
    if count == 0:
        findings.append(f"{root}: no files found")
    print("\n".join(findings) or f"check_floors: {count} files, every include and import points down, no cycle")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
