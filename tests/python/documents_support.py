"""The blocks that the users' documents print, kept word for word in tests/documents, and what is written otherwise here."""

import os
import re
import textwrap
from functools import lru_cache
from pathlib import Path
from typing import Dict, List, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ROOT / "tests/documents"
SCRIPTS = Path(__file__).parent / "scripts"
VOCABULARY = ("plt", "pd", "sk", "fit", "predict", *(f"word{i}" for i in range(60)), "[end]", "[unknown]")


class Change(NamedTuple):
    line: str
    becomes: str
    why: str
    which: int  # of the lines that read so, from 1; 0: all


def blocks() -> List[str]:
    """"003/train.py", ...: every printed block."""
    return sorted(path.relative_to(DOCUMENTS).as_posix() for path in DOCUMENTS.glob("*/*"))


def printed(block: str) -> str:
    return (DOCUMENTS / block).read_text(encoding="utf-8")


@lru_cache(maxsize=None)
def changes_file() -> dict:
    return pytest.importorskip("yaml").safe_load((DOCUMENTS / "changes.yaml").read_text(encoding="utf-8"))


def changes(block: str) -> List[Change]:
    return [Change(row["line"], row.get("becomes", ""), row["why"], row.get("which", 0)) for row in changes_file()["blocks"][block]]


def places(block: str, change: Change) -> List[int]:
    """The numbers of the lines that a change is about."""
    found = [i for i, line in enumerate(printed(block).splitlines()) if line.strip() == change.line]
    return found[change.which - 1:change.which] if change.which else found


def changed(block: str, *without: str, **degrees: int) -> str:
    """The block as it is typed here. `without`: reasons whose changes are not made; `degrees`: another layout than the printed
    one, as tp_degree=1."""
    lines = printed(block).splitlines()
    for change in changes(block):
        if change.why in without:
            continue
        for place in places(block, change):
            indent = lines[place][:len(lines[place]) - len(lines[place].lstrip())]
            lines[place] = indent + change.becomes if change.becomes else ""
    text = "\n".join(lines) + "\n"
    for name, value in degrees.items():
        text, count = re.subn(rf"\b{name}(=|: )\d+", rf"{name}\g<1>{value}", text)
        assert count == 1, f"{block} has {count} lines of {name}"
    return text


def commands(block: str) -> List[str]:
    """The commands of a shell block as typed here, one after the other, without comments."""
    joined = changed(block).replace("\\\n", " ")
    return [" ".join(line.split()) for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def filled(script: Path) -> str:
    """A script whose lines "# block BLOCK [PARAGRAPH]" are replaced by those blocks, or by paragraphs of them, from 1."""
    def insert(match: re.Match) -> str:
        text = changed(match.group(2))
        part = text.split("\n\n")[int(match.group(3)) - 1] if match.group(3) else text
        return textwrap.indent(part, match.group(1)).rstrip("\n")

    return re.sub(r"^( *)# block (\S+?)(?: (\d+))?$", insert, script.read_text(encoding="utf-8"), flags=re.M)


def shell_environment(python_build, folder: Path) -> Dict[str, str]:
    """PATH of a shell that finds `tessera` and `python` in folder/bin."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "tessera").symlink_to(python_build.program)
    (programs / "python").symlink_to(python_build.preloaded)
    return {"PATH": f"{programs}:{os.environ['PATH']}"}


def check_losses(result: dict, steps: int, limit: float = 1e-5) -> None:
    """The losses that a script had are those of plain PyTorch."""
    losses, expected = result["losses"], result["expected"]
    assert len(losses) == len(expected) == steps
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected))
    assert worst <= limit, (worst, losses, expected)


def write_reader(folder: Path) -> None:
    """What the reader of 004 has: a model's configuration and tokenizer called gpt2-large, and texts called wikitext."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {word: number for number, word in enumerate(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[unknown]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[end]").save_pretrained(folder / "gpt2-large")
    transformers.GPT2Config(n_layer=4, n_head=4, n_embd=32, vocab_size=len(words), n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
                            attn_pdrop=0.0, bos_token_id=65, eos_token_id=65).save_pretrained(folder / "gpt2-large")
    texts = folder / "wikitext/wikitext-2-raw-v1"
    texts.mkdir(parents=True)
    for name, count in (("train", 9), ("validation", 3)):  # samples of 16 words; the last step is short
        numbers = [(i * i * 7 + i // 3) % 65 if i % 4 else i // 4 % 5 for i in range(count * 16)]  # each 4th is a keyword
        (texts / f"{name}.txt").write_text(" ".join(VOCABULARY[number] for number in numbers))
