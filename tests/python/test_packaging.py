"""The two ways to install Tessera, each tried from nothing: `cmake --install` and `pip install .`."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CONSUMER_CMAKE = """
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES CXX)
find_package(tessera {version} REQUIRED)
add_executable(consumer main.cpp)
target_link_libraries(consumer PRIVATE tessera::tessera)
"""
CONSUMER_MAIN = """
#include <iostream>
#include "tessera/tessera.hpp"
int main() { std::cout << tessera::version() << std::endl; }
"""


def run(*command, cwd=None, env=None):
    """Standard output; a failing command's whole output is in the assertion."""
    result = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True,
                            stdin=subprocess.DEVNULL)
    assert result.returncode == 0, f"{command} ended with {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def clean_environment():
    """Without what would let an installation lean on the source tree."""
    return {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}


@pytest.fixture(scope="module")
def version(source_dir) -> str:
    return re.search(r"project\(tessera VERSION ([0-9.]+)", (source_dir / "CMakeLists.txt").read_text()).group(1)


@pytest.fixture(scope="module")
def prefix(build_dir, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", build_dir, "--prefix", folder)
    return folder


def build_consumer(source: Path, build: Path, prefix: Path) -> None:
    run("cmake", "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Release")
    run("cmake", "--build", build)


def test_find_package(prefix, version, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(CONSUMER_CMAKE.format(version=version))
    (source / "main.cpp").write_text(CONSUMER_MAIN)
    build_consumer(source, tmp_path / "build", prefix)
    assert run(tmp_path / "build/consumer").strip() == version


# What brings the names of the standard library that installed headers use; a header has them from itself or from ours it includes.
STANDARD = {
    "vector": "vector", "map": "map", "set": "set", "array": "array", "span": "span", "deque": "deque", "list": "list",
    "unordered_map": "unordered_map", "unordered_set": "unordered_set", "optional": "optional", "variant": "variant",
    "string": "string", "to_string": "string", "string_view": "string_view", "function": "functional", "filesystem": "filesystem",
    "unique_ptr": "memory", "shared_ptr": "memory", "weak_ptr": "memory", "make_unique": "memory", "make_shared": "memory",
    "mutex": "mutex", "lock_guard": "mutex", "unique_lock": "mutex", "condition_variable": "condition_variable", "atomic": "atomic",
    "thread": "thread", "jthread": "thread", "chrono": "chrono", "future": "future", "exception_ptr": "exception",
    "runtime_error": "stdexcept", "logic_error": "stdexcept", "initializer_list": "initializer_list", "complex": "complex",
    "int64_t": "cstdint", "uint64_t": "cstdint", "int32_t": "cstdint", "uint32_t": "cstdint", "uint16_t": "cstdint",
    "uint8_t": "cstdint", "byte": "cstddef", "ostream": "iosfwd|ostream|iostream|sstream", "istream": "iosfwd|istream|iostream|sstream",
    "numeric_limits": "limits", "type_index": "typeindex", "sqrt": "cmath",
}


def missing_standard_headers(include: Path) -> list:
    """"HEADER uses std::NAME without <HEADER>", of all headers below a folder."""
    texts = {path: path.read_text() for path in sorted(include.rglob("*.hpp"))}

    def brought(path: Path, seen: set) -> set:
        seen.add(path)
        found = set(re.findall(r"^#include <(\w+)>", texts[path], re.MULTILINE))
        for name in re.findall(r'^#include "([^"]+)"', texts[path], re.MULTILINE):
            if include / name not in seen:
                found |= brought(include / name, seen)
        return found

    def used(text: str) -> set:
        code = re.sub(r"//.*", "", text)
        return {name for name in re.findall(r"\bstd::(\w+)", code) if name in STANDARD}

    return [f"{path.relative_to(include)} uses std::{name} without <{STANDARD[name]}>" for path, text in texts.items()
            for name in sorted(used(text)) if not brought(path, set()) & set(STANDARD[name].split("|"))]


def test_every_installed_header_compiles_alone(prefix, tmp_path, long_run):
    """As it is with --long. Else behind the precompiled headers of the standard library, half of the time, with what of these
    it must include itself told by the names it uses; and one that another includes before any other of ours, in that one."""
    include, options = prefix / "include", ("-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", prefix / "include")
    headers = sorted((include / "tessera").rglob("*.hpp"))
    assert headers
    ahead = []
    if not long_run:
        standard = sorted({name for header in headers for name in re.findall(r"^#include <(\w+)>", header.read_text(), re.MULTILINE)})
        (tmp_path / "standard.hpp").write_text("".join(f"#include <{name}>\n" for name in standard))
        run("c++", *options, "-x", "c++-header", tmp_path / "standard.hpp", "-o", tmp_path / "standard.hpp.gch")
        ahead = ["-Winvalid-pch", "-include", tmp_path / "standard.hpp"]
        assert missing_standard_headers(include) == []
        first = {match[1] for header in headers if (match := re.search(r'^#include "([^"]+)"', header.read_text(), re.MULTILINE))}
        headers = [header for header in headers if str(header.relative_to(include)) not in first]

    def compile_alone(header: Path) -> None:
        source = tmp_path / f"{'_'.join(header.relative_to(include).parts)}.cpp"
        source.write_text(f'#include "{header.relative_to(include)}"\n')
        run("c++", *options, *ahead, "-fsyntax-only", source)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_alone, headers))


def test_missing_standard_headers_are_named(tmp_path):
    (tmp_path / "a.hpp").write_text("#include <vector>\n")
    (tmp_path / "b.hpp").write_text('#include "a.hpp"\nstd::vector<std::string> names;  // std::map\n')
    assert missing_standard_headers(tmp_path) == ["b.hpp uses std::string without <string>"]


def test_another_version_is_refused(prefix, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(CONSUMER_CMAKE.format(version="99.0"))
    (tmp_path / "main.cpp").write_text(CONSUMER_MAIN)
    result = subprocess.run(["cmake", "-S", tmp_path, "-B", tmp_path / "build", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}"],
                            capture_output=True, text=True)
    assert result.returncode != 0 and "99.0" in result.stderr


@pytest.mark.parametrize("example", ["01_own_model", "02_parallel_gpt"])
def test_example_against_the_installed_package(prefix, source_dir, tmp_path, example):
    build_consumer(source_dir / "examples" / example, tmp_path / "build", prefix)


def test_installed_program(prefix, version):
    assert version in run(prefix / "bin/tessera", "env")


def configure(source: Path, build: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(["cmake", "-S", source, "-B", build, "-G", "Ninja", "-DTESSERA_TESTS=OFF", *options],
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_cuda_by_itself(source_dir, tmp_path):
    """TESSERA_CUDA=auto, the wheel's: with CUDA where all of it is there, else without, and either way it says so."""
    result = configure(source_dir, tmp_path, "-DTESSERA_CUDA=auto")
    assert result.returncode == 0, result.stderr
    said = re.search(r"TESSERA_CUDA: auto, (ON with \S+|OFF for want of .+)", result.stdout)
    assert said, result.stdout
    commands = (tmp_path / "compile_commands.json").read_text()
    assert ("kernels/cuda/" in commands) == said.group(1).startswith("ON")
    assert ("kernels/stub/" in commands) == said.group(1).startswith("OFF")


def test_no_cuda_by_itself_without_its_compiler(source_dir, tmp_path):
    result = configure(source_dir, tmp_path, "-DTESSERA_CUDA=auto", "-DCMAKE_CUDA_COMPILER=NOTFOUND")
    assert result.returncode == 0, result.stderr
    assert "TESSERA_CUDA: auto, OFF for want of nvcc" in result.stdout


def test_unknown_cuda_mode_is_refused(source_dir, tmp_path):
    result = configure(source_dir, tmp_path, "-DTESSERA_CUDA=maybe")
    assert result.returncode != 0 and "it can be OFF, ON, auto or emulated" in result.stderr


@pytest.fixture(scope="module")
def wheel_bin(build_dir, source_dir, tmp_path_factory) -> Path:
    """bin/ of an empty virtual environment after `pip install .`."""
    folder = tmp_path_factory.mktemp("venv")
    # The compiler by the name CMake knows it by and the headers of one pybind11, so that ccache finds what the build of
    # the tests left. And for the CPU: whether the automatic choice would be CUDA, test_cuda_by_itself asks without
    # compiling it.
    environment = {**clean_environment(), "CC": "cc", "CXX": "c++", "TESSERA_CUDA": "OFF"}
    pybind11 = run(sys.executable, "-m", "pybind11", "--cmakedir").strip()
    run(sys.executable, "-m", "venv", folder, env=environment)
    run(folder / "bin/python", "-m", "pip", "install", "--disable-pip-version-check", "-C", f"cmake.define.pybind11_DIR={pybind11}",
        ".", cwd=source_dir, env=environment)
    return folder / "bin"


def test_console_script(wheel_bin, version, tmp_path):
    assert version in run(wheel_bin / "tessera", "env", cwd=tmp_path, env=clean_environment())


def test_it_compiles_what_the_tests_do(wheel_bin, build_dir, source_dir):
    """In a unity build the same files together; otherwise the compiler cache has none of them, and testing takes minutes longer."""
    def units(build: Path) -> dict:
        files = [Path(entry["file"]) for entry in json.loads((build / "compile_commands.json").read_text())]
        ours = [path for path in files if path.parent.name == "Unity" and path.parent.parent.name.startswith("tessera_")]
        return {str(path.relative_to(build)): path.read_text() for path in ours}

    expected = units(build_dir.resolve())
    if not expected:
        pytest.skip("the tests were not built as units")
    newest = max((source_dir / "build").glob("wheel-*"), key=lambda folder: (folder / "build.ninja").stat().st_mtime)
    assert units(newest.resolve()) == expected


def test_module(wheel_bin, version, tmp_path):
    assert version in run(wheel_bin / "python", "-m", "tessera", "env", cwd=tmp_path, env=clean_environment())
    printed = run(wheel_bin / "python", "-c", "import tessera; print(tessera.__version__)", cwd=tmp_path, env=clean_environment())
    assert printed.strip() == version


def test_it_trains_and_serves(wheel_bin, tmp_path):
    """The server, whose HTTP library is the system's, is in the wheel."""
    (tmp_path / "text.txt").write_text("some words\n" * 20)
    tessera, environment = wheel_bin / "tessera", clean_environment()
    run(tessera, "preprocess", "--input", "text.txt", "--output-prefix", "data", cwd=tmp_path, env=environment)
    (tmp_path / "run.yaml").write_text(
        "model: {family: gpt2, num_layers: 1, hidden_size: 8, num_heads: 1, vocab_size: 257, max_positions: 16}\n"
        "training: {steps: 1, seq_length: 8, micro_batch_size: 1, global_batch_size: 1, eval_interval: 0}\n"
        'data: {path: data_text_document, split: "100,0,0"}\nlogging: {dir: run}\n')
    run(tessera, "train", "run.yaml", cwd=tmp_path, env=environment)
    server = subprocess.Popen([tessera, "serve", "run", "--port", "0"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        said = ""
        while not (found := re.search(r"http://\S+", said)):
            line = server.stderr.readline()
            assert line, said
            said += line
        body = json.dumps({"prompt": "some ", "max_tokens": 3, "temperature": 0}).encode()
        request = urllib.request.Request(f"{found[0]}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
    finally:
        server.terminate()
        server.communicate()
    assert server.returncode == 0


def test_plot_says_what_to_install(wheel_bin, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    result = subprocess.run([wheel_bin / "tessera", "plot", tmp_path], capture_output=True, text=True, env=clean_environment())
    assert result.returncode == 1 and "pip install matplotlib" in result.stderr


def test_an_unknown_command_fails(wheel_bin, tmp_path):
    result = subprocess.run([wheel_bin / "tessera", "no-such-command"], capture_output=True, text=True, env=clean_environment())
    assert result.returncode != 0 and result.stderr


def test_the_wheel_holds_only_the_package(wheel_bin):
    listing = run(wheel_bin / "python", "-m", "pip", "show", "-f", "tessera", env=clean_environment()).split("Files:")[1].split()
    outside = [name for name in listing if not name.startswith(("tessera/", "tessera-", "../../../bin/tessera"))]
    assert not outside
    assert any(name.startswith("tessera/_C.") for name in listing)
