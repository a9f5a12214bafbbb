#!/usr/bin/env python3
"""Compiles the CUDA kernels and writes docs/kernels_cuda.md: registers, shared memory and spills of each.

    python3 tests/kernel_table.py [OUTPUT]     writes the table
    python3 tests/kernel_table.py --check      compares it with docs/kernels_cuda.md; no kernel may spill
    python3 tests/kernel_table.py --check LOG  the same by what ninja printed of a build with -Xptxas=-v (CUDAFLAGS), if it
                                               compiled every kernel; compiles nothing then

Exit code 77 (skipped) where there is no nvcc. Another release of nvcc than the one that the table names gives other
figures: then --check compares only which kernels there are, and looks for spills.
"""

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Dict, List, NamedTuple, Optional

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "kernels_cuda.md"
OPTIONS = ["-O3", "-std=c++20", "--expt-relaxed-constexpr", "-lineinfo",
           "--generate-code=arch=compute_90,code=[sm_90]", "-Xptxas=-v"]

INTRODUCTION = """# CUDA kernels

What the compiler makes of each kernel in `kernels/cuda` for compute capability 9.0 (H100, H200), in its instances:
registers per thread, shared memory per block that is known when compiling, and bytes of registers spilled to memory.
Made by `tests/kernel_table.py` with nvcc {release}. CI checks that it is current and that nothing spills.

{count} instances, {spilling} with spills.

| File | Kernel | Registers | Shared bytes | Spilled bytes |
|---|---|---:|---:|---:|
"""

ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_90'")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
ROW = re.compile(r"^\| `(?P<file>[^`]+)` \| `(?P<name>[^`]+)` \| \d+ \| \d+ \| \d+ \|$", re.MULTILINE)
STEP = re.compile(r"\[\d+/\d+\] (?:Building CUDA object \S*/kernels/cuda/(?P<file>\w+\.cu)\.o)?")
RELEASE = re.compile(r"with nvcc (\d+\.\d+)")


class Kernel(NamedTuple):
    file: str
    name: str
    registers: int
    shared: int
    spilled: int


def find_nvcc() -> Optional[str]:
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def release_of(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return re.search(r"release (\d+\.\d+)", text).group(1)


def compiler_output(nvcc: str, source: pathlib.Path) -> str:
    """What ptxas says about one file. Through ccache where there is one: it keeps that too."""
    with tempfile.TemporaryDirectory() as folder:
        include = [f"-I{ROOT / 'include'}", f"-I{ROOT}", f"-I{ROOT / 'src'}"]
        command = [nvcc, *include, *OPTIONS, "-x", "cu", "-c", str(source), "-o", str(pathlib.Path(folder) / "kernel.o")]
        ccache = shutil.which("ccache")
        done = subprocess.run(([ccache] if ccache else []) + command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}")
    return done.stdout


def demangle(names: List[str]) -> Dict[str, str]:
    """Short names: without return type, parameters and our namespaces."""
    if not names:
        return {}
    done = subprocess.run(["c++filt"], input="\n".join(names), stdout=subprocess.PIPE, text=True, check=True)
    return {mangled: shorten(name) for mangled, name in zip(names, done.stdout.splitlines())}


def shorten(name: str) -> str:
    name = name.replace("(anonymous namespace)::", "")
    name = re.sub(r"\b_GLOBAL__N_\w+::", "", name)
    name = re.sub(r"\btessera::(\w+::)*", "", name)
    depth, end = 0, len(name)
    for position, character in enumerate(name):  # the parameters begin at the first bracket outside <>
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0:
            end = position
            break
    name = re.sub(r"\((?:int|bool|long|unsigned int|unsigned long)\)", "", name[:end])
    return re.sub(r"^void ", "", name).strip()


def kernels_of(file: str, text: str) -> List[Kernel]:
    found, mangled, spilled = [], None, 0
    for line in text.splitlines():
        if ENTRY.search(line):
            mangled, spilled = ENTRY.search(line).group(1), 0
        elif mangled and SPILLS.search(line):
            spilled = sum(map(int, SPILLS.search(line).groups()))
        elif mangled and USED.search(line):
            shared = SHARED.search(line)
            registers = int(USED.search(line).group(1))
            found.append(Kernel(file, mangled, registers, int(shared.group(1)) if shared else 0, spilled))
            mangled = None
    names = demangle([kernel.name for kernel in found])
    return sorted(kernel._replace(name=names[kernel.name]) for kernel in found)


def outputs_in(log: str) -> Dict[str, str]:
    """What a build's log has after the line of each CUDA file that was compiled."""
    found, current = {}, None
    for line in log.splitlines():
        step = STEP.match(line)
        if step:
            current = step["file"]
        if current:
            found[current] = f"{found.get(current, '')}{line}\n"
    return found


def all_kernels(nvcc: str, log: str) -> List[Kernel]:
    sources = sorted((ROOT / "kernels" / "cuda").glob("*.cu"))
    if not sources:
        sys.exit("kernels/cuda holds no kernel")
    logged = outputs_in(log)
    # A file of launches alone has no entry; that its code went through ptxas is told all the same.
    missing = [source for source in sources if "ptxas info" not in logged.get(source.name, "")]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        logged.update(zip((source.name for source in missing), pool.map(lambda source: compiler_output(nvcc, source), missing)))
    outputs = [logged[source.name] for source in sources]
    kernels = [kernel for source, text in zip(sources, outputs) for kernel in kernels_of(source.name, text)]
    if not kernels:
        sys.exit(f"{nvcc} said nothing about any kernel")
    return kernels


def to_markdown(kernels: List[Kernel], release: str) -> str:
    spilling = sum(kernel.spilled > 0 for kernel in kernels)
    rows = [f"| `{k.file}` | `{k.name}` | {k.registers} | {k.shared} | {k.spilled} |\n" for k in kernels]
    return INTRODUCTION.format(release=release, count=len(kernels), spilling=spilling) + "".join(rows)


def findings(kernels: List[Kernel], release: str) -> List[str]:
    found = [f"{k.file}: {k.name} spills {k.spilled} bytes" for k in kernels if k.spilled]
    table = TABLE.read_text() if TABLE.is_file() else ""
    listed = {(row["file"], row["name"]) for row in ROW.finditer(table)}
    present = {(k.file, k.name) for k in kernels}
    found += [f"{file}: {name} is not in {TABLE.name}" for file, name in sorted(present - listed)]
    found += [f"{TABLE.name} lists {name} of {file}, which is gone" for file, name in sorted(listed - present)]
    named = RELEASE.search(table)
    if not found and named and named.group(1) == release and table != to_markdown(kernels, release):
        found.append(f"{TABLE.name} has other figures than this compiler gives")
    if found:
        found.append("run python3 tests/kernel_table.py to write the table anew")
    return found


def main() -> int:
    nvcc = find_nvcc()
    if nvcc is None:
        print("skipped: no nvcc")
        return 77
    arguments = sys.argv[1:]
    log = pathlib.Path(arguments[1]).read_text(errors="replace") if arguments[:1] == ["--check"] and arguments[1:] else ""
    kernels, release = all_kernels(nvcc, log), release_of(nvcc)
    if "--check" in arguments:
        problems = findings(kernels, release)
        print("\n".join(problems) or f"kernel_table: {len(kernels)} instances, none spills, nvcc {release}")
        return bool(problems)
    output = pathlib.Path(arguments[0]) if arguments else TABLE
    output.write_text(to_markdown(kernels, release))
    print(f"kernel_table: {len(kernels)} instances written to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
