"""Keeps the documents honest: links, commands, flags, configuration keys, files; and the guides' blocks are run."""

import os
import re
import shlex
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Set, Tuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages about the code: every identifier in backticks must be one of the sources'.
CODE_PAGES = [ROOT / "docs/architecture.md", *sorted((ROOT / "docs/floors").glob("*.md"))]
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
MUST_RUN = {"train_your_own_text", "hugging_face", "resume_and_checkpoints", "choose_a_layout", "several_processes",
            "profile_a_run", "train_bert", "train_t5", "megatron_checkpoints"}
RUN_MARK = "<!-- run -->"
# What a guide's commands may refer to, as in the root of a clone.
SHOWN_TO_GUIDES = ["README.md", "docs", "configs", "examples"]

FENCE = re.compile(r"^(```+)(\w*)\s*$")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FOLDERS = "include|src|kernels|tests|configs|examples|scripts|cmake|python|docs"
PATH = re.compile(rf"(?<![\w/.~$-])(?:tessera/[a-z_]+/[\w/]+\.hpp|(?:{FOLDERS})/[\w./*-]*)")
CODE = re.compile(r"`([^`]+)`")
NAME = re.compile(r"[A-Za-z_]\w*(?:::\w+)*")
OVERRIDE = re.compile(r"([a-z_]+(?:\.[a-z_]+)+)=")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")


class Block(NamedTuple):
    line: int  # of the opening fence
    language: str
    text: str
    run: bool


class Command(NamedTuple):
    where: str
    words: List[str]  # after the program's name


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


@lru_cache(maxsize=None)
def split_document(path: Path) -> Tuple[str, List[Block]]:
    """The text outside of fenced blocks (as many lines as the file has), and the blocks."""
    prose: List[str] = []
    blocks: List[Block] = []
    opened, inside = None, []
    before = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if opened is None and fence:
            opened, inside = (number, fence, before.strip() == RUN_MARK), []
        elif opened is not None and fence and fence.group(1) == opened[1].group(1) and not fence.group(2):
            blocks.append(Block(opened[0], opened[1].group(2), "\n".join(inside) + "\n", opened[2]))
            opened = None
        elif opened is not None:
            inside.append(line)
        prose.append("" if opened is not None or fence else line)
        before = line
    assert opened is None, f"{name(path)}:{opened[0]}: this block is never closed"
    return "\n".join(prose), blocks


@lru_cache(maxsize=None)
def anchors(path: Path) -> Set[str]:
    """The anchors GitHub gives a document's headings."""
    prose, _ = split_document(path)
    titles = re.findall(r"^#+ +(.*)$", prose, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path) -> Iterator[str]:
    prose, _ = split_document(path)
    for target in LINK.findall(prose):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        goal = (path.parent / file).resolve() if file else path
        if not goal.exists():
            yield f"{name(path)}: {target} does not exist"
        elif anchor and anchor not in anchors(goal):
            yield f"{name(path)}: {target}: there is no such heading"


def commands(path: Path) -> Iterator[Command]:
    """Every `tessera ...` of a document's shell blocks."""
    for block in split_document(path)[1]:
        if block.language not in {"bash", "sh"}:
            continue
        text = re.sub(r"<<'(\w+)'\n.*?\n\1\n", "\n", block.text, flags=re.S)
        for line in text.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
            lexer.whitespace_split, lexer.commenters = True, "#"
            words: List[str] = []
            for word in [*lexer, ";"]:
                if set(word) <= set(";&|<>"):
                    while words and ASSIGNMENT.fullmatch(words[0]):
                        words.pop(0)
                    if words and Path(words[0]).name == "tessera":
                        yield Command(f"{name(path)}:{block.line}: {line.strip()}", words[1:])
                    words = []
                else:
                    words.append(word)


def config_keys() -> Set[str]:
    """section.key of every table in docs/configuration.md, which test_base compares with the program."""
    keys, section = set(), ""
    for line in (ROOT / "docs/configuration.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            section = line[4:].strip()
        row = re.match(r"\| `([a-z_.]+)` \|", line)
        if row and section:
            keys.add(f"{section}.{row.group(1)}")
    return keys


class Program:
    """What the program says about itself in --help."""

    def __init__(self, program: Path):
        self.program = program
        self.texts: Dict[Tuple[str, ...], str] = {}

    def help(self, *words: str) -> str:
        if words not in self.texts:
            # Commands of the Python package describe themselves.
            python = {"TESSERA_PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "python")}
            done = subprocess.run([str(self.program), *words, "--help"], capture_output=True, text=True, timeout=60,
                                  env={**os.environ, **python})
            assert done.returncode == 0, f"tessera {' '.join(words)} --help: {done.stderr}"
            self.texts[words] = done.stdout
        return self.texts[words]

    def subcommands(self, *words: str) -> Set[str]:
        listed = self.help(*words).partition("Subcommands:")[2]
        return set(re.findall(r"^  (\w+)", listed, flags=re.M))

    def flags(self, *words: str) -> Set[str]:
        options = re.split("^[Oo]ptions:", self.help(*words), maxsplit=1, flags=re.M)[1:]
        return set(re.findall(r"--?[a-z][\w-]*", "".join(options)))

    def faults(self, words: List[str], keys: Set[str]) -> Iterator[str]:
        path: List[str] = []
        while len(path) < len(words) and words[len(path)] in self.subcommands(*path):
            path.append(words[len(path)])
        rest = words[len(path):]
        if self.subcommands(*path) and not (rest and rest[0].startswith("-")):
            yield f"`tessera {' '.join(path)}` has no subcommand {rest[0] if rest else '(none given)'}"
        for word in rest:
            if re.match(r"--?[a-zA-Z]", word) and word.partition("=")[0] not in self.flags(*path):
                yield f"`tessera {' '.join(path)}` has no flag {word}"
        for override in filter(None, map(OVERRIDE.match, rest if path in (["train"], ["plan"]) else [])):
            if override.group(1) not in keys:
                yield f"there is no configuration key {override.group(1)}"


@lru_cache(maxsize=None)
def source_words() -> Set[str]:
    """Every identifier of the sources."""
    words: Set[str] = set()
    for folder in ("include", "src", "kernels", "examples", "python"):
        for path in (*(ROOT / folder).rglob("*.?pp"), *(ROOT / folder).rglob("*.py")):
            words.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return words


def missing_files(path: Path) -> Iterator[str]:
    for found in PATH.findall(path.read_text(encoding="utf-8")):
        file = found.rstrip(".,")
        if file.startswith("tessera/"):
            file = f"include/{file}"
        if not (any(ROOT.glob(file)) if "*" in file else (ROOT / file).exists()):
            yield f"{name(path)}: {found} does not exist"


def unknown_names(path: Path) -> Iterator[str]:
    """Names in backticks that no source has: members (A::b) anywhere, single identifiers on the pages about the code."""
    for code in CODE.findall(split_document(path)[0]):
        if not NAME.fullmatch(code) or code.startswith("std::"):
            continue
        unknown = [part for part in code.split("::") if part not in source_words()]
        if unknown and ("::" in code or path in CODE_PAGES):
            yield f"{name(path)}: `{code}`: nothing is called {unknown[0]}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_resolve(path: Path):
    assert not list(broken_links(path))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_named_files_and_identifiers_exist(path: Path):
    assert not [*missing_files(path), *unknown_names(path)]


def test_commands_exist_with_their_flags_and_keys(tessera_program: Path):
    program, keys = Program(tessera_program), config_keys()
    assert len(keys) > 50, "docs/configuration.md no longer has its tables"
    found = [command for path in DOCUMENTS for command in commands(path)]
    assert len(found) > 30, "the documents' commands are no longer recognised"
    assert not [f"{c.where}: {fault}" for c in found for fault in program.faults(c.words, keys)]


def test_checks_can_fail(tessera_program: Path, tmp_path: Path):
    program, keys = Program(tessera_program), config_keys()

    def faults(line: str) -> int:
        return len(list(program.faults(shlex.split(line), keys)))

    assert faults("train a.yaml training.steps=3") == faults("checkpoint verify runs/a") == faults("--version") == 0
    assert faults("trane a.yaml") == faults("generate runs/a --promt x") == faults("checkpoint repair a") == 1
    assert faults("train a.yaml training.stepz=3") == 1
    page = tmp_path / "page.md"
    page.write_text("# One heading\n[a](#one-heading) [b](#another) [c](gone.md) [d](https://example.org)\n"
                    "src/base/env.cpp src/base/gone.cpp tessera/base/gone.hpp kernels/gone*.hpp\n`Engine::walks_away` `Engine::step`\n")
    assert [len(list(check(page))) for check in (broken_links, missing_files, unknown_names)] == [2, 3, 1]


def test_the_guides_that_must_run_do():
    assert MUST_RUN <= {guide.stem for guide in GUIDES if any(block.run for block in split_document(guide)[1])}


@pytest.mark.parametrize("guide", [guide for guide in GUIDES if RUN_MARK in guide.read_text(encoding="utf-8").splitlines()],
                         ids=lambda path: path.stem)
def test_guides_run(guide: Path, tessera_program: Path, tmp_path: Path):
    """The marked blocks of a guide, one after the other in one folder, as a reader would type them."""
    blocks = [block for block in split_document(guide)[1] if block.run]
    marks = guide.read_text(encoding="utf-8").splitlines().count(RUN_MARK)
    assert len(blocks) == marks and all(block.language == "bash" for block in blocks), "marks stand just above bash blocks"
    folder, programs = tmp_path / "clone", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    (programs / "tessera").symlink_to(tessera_program)
    for shown in SHOWN_TO_GUIDES:
        (folder / shown).symlink_to(ROOT / shown)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TESSERA_", "OMP_"))}
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(variable, None)
    # The Python that has the package, as after an installation.
    (programs / "python3").write_text(f"#!/bin/sh\nPYTHONPATH={ROOT / 'python'} exec {sys.executable} \"$@\"\n")
    (programs / "python3").chmod(0o755)
    environment |= {"PATH": f"{programs}:{environment['PATH']}", "TESSERA_THREADS": "1"}
    script = "set -euo pipefail\n" + "".join(f"# line {block.line}\n{block.text}" for block in blocks)
    done = subprocess.run(["bash", "-x", "-c", script], cwd=folder, env=environment, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, errors="replace", timeout=300)
    assert done.returncode == 0, f"{name(guide)}\n{done.stdout}\n{done.stderr}"
