#!/usr/bin/env python3
"""Whether the tests on the emulator ran every CUDA kernel there is.

    python3 tests/emulated_kernels.py RECORD [ROOT]

RECORD is the file that tests wrote with TESSERA_EMULATOR_RECORD set to it: the name of each kernel that ran. The kernels
there are: every __global__ function of ROOT/kernels/cuda. `--self-test` shows that a kernel is found however it is
written.
"""

import re
import sys
from pathlib import Path
from typing import Dict, Iterable, List, Set

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
ATTRIBUTE = r"(?:__launch_bounds__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)|static|inline|__cluster_dims__\s*\([^()]*\))\s*"
KERNEL = re.compile(rf"__global__\s+(?:{ATTRIBUTE})*void\s+(?:{ATTRIBUTE})*(\w+)\s*\(")
MENTION = re.compile(r"\b__global__\b")
LAUNCH = re.compile(r"\b(?:launch|launch_rows|each_pack)\s*(?:<[^;()]*>)?\(")


def kernels_in(text: str) -> Set[str]:
    """Errors: ValueError when a kernel is written in a way that this does not understand."""
    code = COMMENT.sub(" ", text)
    names = KERNEL.findall(code)
    if len(names) != len(MENTION.findall(code)):
        raise ValueError(f"of {len(MENTION.findall(code))} __global__ functions only {names} could be read")
    return set(names)


def kernels_of(root: Path) -> Dict[str, List[str]]:
    """The files that have a kernel of a name."""
    found = {}
    for path in sorted((root / "kernels" / "cuda").iterdir()):
        if path.suffix not in {".cu", ".cuh"}:
            continue
        # What load_kernels() does not know of is loaded at its first launch.
        if path.suffix == ".cu" and LAUNCH.search(path.read_text()) and "TESSERA_KERNEL_FILE(" not in path.read_text():
            sys.exit(f"{path} launches kernels and names none of them with TESSERA_KERNEL_FILE (kernels/cuda/loading.hpp)")
        try:
            names = kernels_in(path.read_text())
        except ValueError as error:
            sys.exit(f"{path}: {error}")
        for name in names:
            found.setdefault(name, []).append(path.name)
    return found


def executed(lines: Iterable[str]) -> Set[str]:
    """Function names, out of 'void tessera::(anonymous namespace)::name<float>(float const*)'."""
    names = set()
    for line in lines:
        match = re.search(r"(\w+)\s*[<(]", line.replace("(anonymous namespace)", "").replace("operator()", ""))
        if match:
            names.add(match.group(1))
    return names


def self_test() -> int:
    source = """// __global__ void not_this()
__global__ void plain(int x) {}
template <typename T>
__global__ void __launch_bounds__(kThreads, ceil_div(2, 1)) bounded(const T* x) {}
__global__ __launch_bounds__(128) void other(int a,
                                             int b);
static __global__ void inner() {}
"""
    assert kernels_in(source) == {"plain", "bounded", "other", "inner"}, kernels_in(source)
    try:
        kernels_in("__global__ auto strange() -> void {}")
        raise AssertionError("a kernel was overlooked")
    except ValueError:
        pass
    lines = ["void tessera::kernels::cuda::(anonymous namespace)::bounded<tessera::bfloat16>(tessera::bfloat16 const*)",
             "tessera::kernels::cuda::plain(int)"]
    assert executed(lines) == {"bounded", "plain"}, executed(lines)
    print("emulated_kernels: kernels are found and names are read")
    return 0


def main() -> int:
    if "--self-test" in sys.argv:
        return self_test()
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    root = Path(sys.argv[2]) if len(sys.argv) == 3 else Path(__file__).resolve().parent.parent
    record = Path(sys.argv[1])
    kernels = kernels_of(root)
    ran = executed(record.read_text().splitlines()) if record.is_file() else set()
    problems = [f"{', '.join(files)}: {name} was run by no test" for name, files in kernels.items() if name not in ran]
    problems += [f"{' and '.join(files)} have a kernel {name} each: one cannot see which ran; rename them"
                 for name, files in kernels.items() if len(files) > 1]
    print("\n".join(problems) or f"emulated_kernels: all {len(kernels)} kernels were run")
    return bool(problems) or not kernels


if __name__ == "__main__":
    sys.exit(main())
