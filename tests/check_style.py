#!/usr/bin/env python3
"""House rules a machine can see. `check_style.py [ROOT]` checks the rules below, `--format` the layout of the C++ files
by clang-format, `--self-test` shows that each rule can fail. Prints file:line and the rule; exit code 77 = cannot be
checked here."""

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Callable, Iterator, List, Optional, Tuple

MAX_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_PUBLIC_MEMBERS = 25  # an overload set is one
CLANG_FORMAT_MAJOR = 14  # layouts differ between versions; this one is in Debian 12 and in Ubuntu 24.04
CPP = {".hpp", ".cpp", ".h", ".cu", ".cuh", ".inc"}
TEXT = CPP | {".py", ".sh", ".cmake", ".md", ".toml", ".yaml", ".yml", ".txt"}
NOT_OURS = {".git", ".venv", "build", "__pycache__", ".cache"}
NOT_OURS_AT_ROOT = {"data", "runs"}
LIBRARY = ("include/", "src/", "kernels/")
CLI = ("src/cli/", "src/launch/", "src/main.cpp", "include/tessera/cli/", "kernels/bench/")

Finding = Tuple[int, str]  # line, rule
Scope = Tuple[str, int, int]  # what stands before the braces, and where both end

LATER = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
# (__CUDACC__ may be asked: __host__ __device__ is a mark for the compiler, not a backend.)
BACKEND_SWITCH = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b.*(TESSERA_\w+|__CUDA_\w+|_OPENMP|DNNL_\w+|__AVX\w+|__SSE\w+)")
ENVIRONMENT = re.compile(r"\b(secure_getenv|getenv|setenv|unsetenv|putenv)\s*\(|\bextern\s+char\s*\*\*\s*environ\b")
# The reader, and what hands it on to a child unread.
ENVIRONMENT_MAY = ("src/base/env.cpp", "src/data/text_source.cpp", "src/data/worker_process.cpp")
PRINTS = re.compile(r"\bstd::(cout|cerr|clog)\b|(?<![\w.>])(std::)?(printf|puts|putchar)\s*\(|\bfprintf\s*\(\s*std(out|err)")
# abort and terminate of the C library take no arguments; Communicator::abort does.
ENDS = re.compile(r"(?<![\w.>:])(std::)?((exit|_exit|quick_exit)\s*\(|(abort|terminate)\s*\(\s*\))")
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


def text_files(root: Path) -> List[str]:
    found = []
    for path in root.rglob("*"):
        parts = path.relative_to(root).parts
        ours = not any(part in NOT_OURS or part.startswith("build") for part in parts[:-1])
        ours = ours and (len(parts) == 1 or parts[0] not in NOT_OURS_AT_ROOT)
        if ours and path.is_file() and (path.suffix in TEXT or path.name in {"CMakeLists.txt", "run"}):
            found.append(path.relative_to(root).as_posix())
    return sorted(found)


def code_lines(text: str) -> Iterator[Tuple[int, str]]:
    """C++ lines without comments and without what stands in string literals."""
    text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match.group().count("\n"), text, flags=re.S)
    for number, line in enumerate(text.splitlines(), start=1):
        line = re.sub(r'"(\\.|[^"\\])*"', '""', line)
        yield number, line.split("//")[0]


NOT_CODE = re.compile(r"""//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'"""
                      r"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.S | re.M)
NAMED_SCOPE = re.compile(r"(template\s*<.*?>\s*)?(class|struct|union|enum|namespace|extern)\b", re.S)
ACCESS = re.compile(r"\b(public|private|protected):")


def scopes(text: str) -> Tuple[str, List[Scope]]:
    """C++ laid out by clang-format with all that is no code blanked, and its functions, classes and namespaces. Of braces at
    namespace or class scope, a body's follows a space, an initialiser's does not."""
    text = NOT_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    found: List[Scope] = []
    open_braces: List[Tuple[bool, str, int]] = []  # whether it is a scope for declarations; what stands before; where that begins
    start = inner = 0
    for place, char in enumerate(text):
        if char == "{":
            header = ACCESS.sub("", text[start:place]).strip()
            named = NAMED_SCOPE.match(header) is not None and not header.endswith("=")
            body = named or ("(" in header and text[place - 1] in " \n" and not header.endswith("="))
            if inner or not body:
                inner += 1
            else:
                begin = start + len(text[start:place]) - len(text[start:place].lstrip())
                open_braces.append((named, header, begin))
                start = place + 1
                inner = 0 if named else 1
        elif char == "}":
            if inner > 1 or (inner == 1 and (not open_braces or open_braces[-1][0])):
                inner -= 1
            elif open_braces:
                _, header, begin = open_braces.pop()
                found.append((header, begin, place))
                start, inner = place + 1, 0
        elif char == ";" and not inner:
            start = place + 1
    return text, found


def public_members(kind: str, body: str) -> set:
    """Names of the public functions and data of a class; constructors, operators and types are none."""
    depth, flat = 0, ""
    for char in body:
        depth -= char == "}"
        if depth == 0:
            flat += char
        depth += char == "{"
    public, names = kind == "struct", set()
    for item in re.split(r"((?:public|private|protected):)|;|(?<=\})(?=\s*\n)", flat):
        item = (item or "").strip()
        if item in {"public:", "private:", "protected:"}:
            public = item == "public:"
        elif public and not re.match(r"(template\s*<[^{]*>\s*)?(using|friend|class|struct|enum|typedef)\b", item):
            name = re.search(r"(?<![~\w])(\w+)\s*\(", item) if "(" in item else re.search(r"(\w+)\s*(\{\}|=.*|\[.*\])?$", item, re.S)
            if name and "operator" not in item:
                names.add(name.group(1))
    return names


def check_sizes(file: str, text: str) -> List[Finding]:
    if not file.startswith(LIBRARY) or Path(file).suffix not in {".hpp", ".cpp"}:
        return []
    findings = []
    text, found = scopes(text)
    for header, begin, end in found:
        line, lines = text.count("\n", 0, begin) + 1, text.count("\n", begin, end) + 1
        kind = re.match(r"(?:template\s*<.*?>\s*)?(class|struct)\s+(\w+)", header, re.S)
        if not NAMED_SCOPE.match(header) and lines > MAX_FUNCTION_LINES:
            findings.append((line, f"a function of {lines} lines; none is longer than {MAX_FUNCTION_LINES}"))
        if kind and kind.group(1) == "class":
            count = len(public_members("class", text[text.index("{", begin) + 1:end]) - {kind.group(2)})
            if count > MAX_PUBLIC_MEMBERS:
                findings.append((line, f"class {kind.group(2)} has {count} public members; {MAX_PUBLIC_MEMBERS} at most"))
    return findings


def matching(pattern: re.Pattern, lines: Iterator[Tuple[int, str]], rule: str) -> List[Finding]:
    return [(number, rule) for number, line in lines if pattern.search(line)]


def check_length(file: str, text: str) -> List[Finding]:
    count = text.count("\n")
    return [(MAX_LINES, f"{count} lines; no file is longer than {MAX_LINES}")] if count > MAX_LINES else []


def check_later(file: str, text: str) -> List[Finding]:
    return matching(LATER, enumerate(text.splitlines(), start=1), "unfinished work is finished or filed, not marked in the code")


def check_switches(file: str, text: str) -> List[Finding]:
    if not file.startswith(("include/", "src/", "tests/", "examples/", "python/")) or Path(file).suffix not in CPP:
        return []
    return matching(BACKEND_SWITCH, code_lines(text), "a backend is chosen by file (CMake), not by #if, outside kernels/")


def check_environment(file: str, text: str) -> List[Finding]:
    if not file.startswith(LIBRARY) or Path(file).suffix not in CPP or file in ENVIRONMENT_MAY:
        return []
    return matching(ENVIRONMENT, code_lines(text), "the environment is read in src/base/env.cpp only")


def check_manners(file: str, text: str) -> List[Finding]:
    if not file.startswith(LIBRARY) or Path(file).suffix not in CPP or file.startswith(CLI):
        return []
    return (matching(PRINTS, code_lines(text), "the library does not print; it logs or reports to its caller") +
            matching(ENDS, code_lines(text), "the library throws; it never ends the process"))


def check_python(file: str, text: str) -> List[Finding]:
    if not file.startswith("python/") or not file.endswith(".py"):
        return []
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [(error.lineno or 1, f"not Python: {error.msg}")]
    findings = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            findings.append((node.lineno, f"{node.func.id}() runs code from data"))
        if any(name.split(".")[0] in UNSAFE_MODULES for name in names):
            findings.append((node.lineno, f"{', '.join(names)} can run code from a file"))
    return findings


RULES: List[Callable[[str, str], List[Finding]]] = [
    check_length, check_sizes, check_later, check_switches, check_environment, check_manners, check_python]


def check_rules(root: Path) -> Tuple[List[str], int]:
    findings = []
    files = text_files(root)
    for file in files:
        text = (root / file).read_text(encoding="utf-8", errors="replace")
        for rule in RULES:
            findings += [f"{file}:{line}: {message}" for line, message in rule(file, text)]
    return findings, len(files)


def clang_format() -> Optional[str]:
    for name in (f"clang-format-{CLANG_FORMAT_MAJOR}", "clang-format"):
        program = shutil.which(name)
        if program:
            version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
            if re.search(rf"version {CLANG_FORMAT_MAJOR}\.", version):
                return program
    return None


def check_format(root: Path, program: str) -> Tuple[List[str], int]:
    files = [file for file in text_files(root) if Path(file).suffix in CPP - {".inc"}]
    findings = []
    for start in range(0, len(files), 50):
        result = subprocess.run([program, "--dry-run", "--style=file", *files[start:start + 50]], cwd=root,
                                capture_output=True, text=True)
        if result.returncode:
            findings.append(f"clang-format failed: {result.stderr.strip()}")
        places = re.findall(r"^(.+?:\d+):\d+: (?:warning|error): ", result.stderr, flags=re.M)
        findings += [f"{place}: layout; run {Path(program).name} -i" for place in dict.fromkeys(places)]
    return findings, len(files)


def self_test() -> List[str]:
    """Each case is one file and words of the finding it must cause; '' means none."""
    cases = [
        ("src/a.hpp", "// getenv(x) in a comment, \"std::cout\" too\nint run(int exit_code);\n", ""),
        ("src/long.cpp", "\n" * 601, "601 lines"),
        ("src/a.cpp", "namespace a {\nint f(int x) {\n" + "  ++x;\n" * 59 + "}\n}\n", "a function of 61 lines"),
        ("src/b.cpp", "namespace a {\nint f(int x) {\n" + "  ++x;\n" * 58 + "}\n}\n", ""),
        ("src/c.cpp", "struct A {\n  A(int x) : x_{x}, y_({}) {\n" + "    if (x) { ++x; }\n" * 59 + "  }\n};\n", "61 lines"),
        ("src/d.cpp", "constexpr std::array kTable{\n" + "  Row{f(1), \"{\"},\n" * 70 + "};\n", ""),
        ("include/e.hpp", "class E {\n public:\n" + "".join(f"  int f{i}() {{ return 1; }}\n" for i in range(26)) + "};\n",
         "class E has 26 public members"),
        ("include/f.hpp", "class F {\n public:\n  F(int);\n  using T = int;\n  void f();\n  void f(int);\n private:\n" +
         "".join(f"  int f{i}_ = 0;\n" for i in range(30)) + "};\n", ""),
        ("docs/a.md", "TO" "DO: write\n", "unfinished"),
        ("src/ops/a.cpp", "#ifdef TESSERA_CUDA\n#endif\n", "chosen by file"),
        ("kernels/cuda/a.cpp", "#ifdef __CUDA_ARCH__\n#endif\n", ""),
        ("src/nn/a.cpp", 'auto x = std::getenv("HOME");\n', "env.cpp only"),
        ("src/base/env.cpp", 'auto x = std::getenv("HOME");\n', ""),
        ("src/nn/b.cpp", "std::cout << 1;\n", "does not print"),
        ("src/cli/b.cpp", "std::cout << 1;\n", ""),
        ("src/nn/c.cpp", "if (bad) abort();\n", "never ends"),
        ("python/tessera/a.py", "import pickle\n", "run code"),
        ("python/tessera/b.py", "from cloudpickle.x import y\n", "run code"),
        ("python/tessera/c.py", "eval('1')\n", "runs code"),
        ("python/tessera/d.py", "model.eval()\n", ""),
    ]
    failures = []

    def expect(name: str, findings: List[str], expected: str) -> None:
        caught = len(findings) == 1 and expected in findings[0] if expected else not findings
        if not caught:
            failures.append(f"self-test '{name}': expected '{expected}', found {findings}")

    with tempfile.TemporaryDirectory() as folder:
        for number, (file, text, expected) in enumerate(cases):
            root = Path(folder, str(number))
            (root / file).parent.mkdir(parents=True)
            (root / file).write_text(text)
            expect(file, check_rules(root)[0], expected)
        program = clang_format()
        if program:
            for name, text, expected in (("bad", "int  f( ){return 1;}\n", "layout"), ("good", "int f() { return 1; }\n", "")):
                root = Path(folder, name)
                (root / "src").mkdir(parents=True)
                (root / ".clang-format").write_text("BasedOnStyle: Google\n")
                (root / "src/f.cpp").write_text(text)
                expect(f"{name} layout", check_format(root, program)[0], expected)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--format", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()
    if options.self_test:
        findings, passed = self_test(), "every rule fails when it should"
    elif options.format:
        program = clang_format()
        if program is None:
            print(f"check_style: clang-format {CLANG_FORMAT_MAJOR} is not installed; layout not checked")
            return 77
        findings, count = check_format(options.root, program)
        passed = f"{count} C++ files laid out as .clang-format says"
    else:
        findings, count = check_rules(options.root)
        passed = f"{count} files keep the rules"
    print("\n".join(findings) or f"check_style: {passed}")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
