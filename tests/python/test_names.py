"""Our names beside Accelerate's: what it exports, with which members, parameters and defaults. Each difference stands, with its
reason, in the table of docs/guides/coming_from_accelerate.md; one that is not there fails, and so does one that is gone."""

import ast
import dataclasses
import enum
import importlib
import importlib.metadata
import inspect
import itertools
import pkgutil
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, List, Set

import pytest

GUIDES = Path(__file__).resolve().parents[2] / "docs/guides"
GUIDE = GUIDES / "coming_from_accelerate.md"
VERSION = "1.15"  # the table's
# Not for scripts: the command line is compared by its own tests, and test_utils are the tests of Accelerate.
NOT_FOR_SCRIPTS = ("accelerate.commands", "accelerate.test_utils")


def ours(name: str) -> str:
    return "tessera" + name[len("accelerate"):]


def module_or_none(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def their_modules() -> Dict[str, ModuleType]:
    """Every module of Accelerate that scripts import from, packages first."""
    import accelerate

    names = ["accelerate", *(info.name for info in pkgutil.walk_packages(accelerate.__path__, "accelerate."))]
    wanted = [name for name in names if not name.startswith(NOT_FOR_SCRIPTS) and not name.rpartition(".")[2].startswith("_")]
    found = {name: module_or_none(name) for name in sorted(wanted, key=lambda name: (name.count("."), name))}
    return {name: module for name, module in found.items() if module is not None}


def assigned(module: ModuleType) -> Set[str]:
    """Names that a module's own code assigns at its top level."""
    names: Set[str] = set()

    def visit(body: list) -> None:
        for node in body:
            if isinstance(node, ast.Assign):
                names.update(target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, (ast.If, ast.Try)):
                visit([*node.body, *node.orelse])

    visit(ast.parse(inspect.getsource(module)).body)
    return names - {"logger"}


def exported(module: ModuleType) -> Dict[str, Any]:
    """What a module has to give: what it defines, and a package also what it gathers from its modules."""
    package = hasattr(module, "__path__")
    own = assigned(module)
    found = {}
    for name, value in vars(module).items():
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if inspect.isclass(value) or inspect.isroutine(value):
            home = getattr(value, "__module__", "") or ""
            public = home == module.__name__ or (package and home.startswith("accelerate")) or name in own
        else:
            public = name in own or (package and name.isupper())
        if public:
            found[name] = value
    return found


def plain(value: Any) -> str:
    """A default as text that two packages can agree on."""
    if isinstance(value, enum.Enum):
        value = value.value
    return re.sub(r" at 0x\w+", "", repr(value)).replace("accelerate.", "tessera.")


def signature_differences(theirs: Callable, own: Callable) -> Iterator[str]:
    try:
        expected, found = (inspect.signature(each).parameters for each in (theirs, own))
    except (TypeError, ValueError):  # written in C
        return
    expected, found = ({n: p for n, p in each.items() if n not in ("self", "cls")} for each in (expected, found))
    star = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if expected and all(p.kind in star for p in expected.values()):  # a wrapper, whose own parameters cannot be seen
        return
    stars = [p.kind for p in found.values() if p.kind in star]
    if len(stars) == 2:  # whatever it is called with
        return
    expected = {n: p for n, p in expected.items() if p.kind not in stars}  # whatever the star is called
    found = {n: p for n, p in found.items() if p.kind not in star or p.kind in [e.kind for e in expected.values()]}
    missing = [name for name in expected if name not in found]
    more = [name for name in found if name not in expected]
    common = [name for name in expected if name in found]
    if missing:
        yield "without " + ", ".join(missing)
    if more:
        yield "also " + ", ".join(more)
    if common != [name for name in found if name in expected]:
        yield "another order"
    for name in common:
        a, b = expected[name], found[name]
        if (a.kind is a.KEYWORD_ONLY) != (b.kind is b.KEYWORD_ONLY):
            yield f"{name} by {'keyword' if b.kind is b.KEYWORD_ONLY else 'place too'}"
        if plain(a.default) != plain(b.default):
            yield f"{name}: " + ("must be given" if b.default is b.empty else
                                 "need not be given" if a.default is a.empty else f"{plain(b.default)} by default")


def members(kind: type) -> Dict[str, Any]:
    """Public methods, properties and constants that a class and its bases within Accelerate define."""
    found: Dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("accelerate"):
            found.update((name, value) for name, value in vars(base).items() if not name.startswith("_"))
    return found


def class_differences(name: str, theirs: type, own: type) -> Iterator[tuple]:
    if issubclass(theirs, enum.Enum):
        values = [each.name for each in theirs if each.name not in own.__members__ or own[each.name].value != each.value]
        if values:
            yield name, "without " + ", ".join(values)
        return
    if dataclasses.is_dataclass(theirs) and dataclasses.is_dataclass(own):
        expected, found = ([field.name for field in dataclasses.fields(each)] for each in (theirs, own))
        lost = [field for field in expected if field not in found]
        if lost:
            yield name, "no field " + ", ".join(lost)
    for difference in signature_differences(theirs, own):
        yield name, difference
    for member, value in members(theirs).items():
        if dataclasses.is_dataclass(theirs) and member in {field.name for field in dataclasses.fields(theirs)}:
            continue
        path = f"{name}.{member}"
        if not hasattr(own, member):
            yield path, "missing"
            continue
        there = inspect.getattr_static(own, member)
        if callable(getattr(theirs, member)) and not isinstance(value, property):
            if not callable(getattr(own, member)):
                yield path, "not a method"
            elif inspect.isroutine(getattr(theirs, member)):
                for difference in signature_differences(getattr(theirs, member), getattr(own, member)):
                    yield path, difference
        elif isinstance(value, property) and inspect.isfunction(there):
            yield path, "a method"


def refuses(value: Any) -> bool:
    """Whether it exists only to say that it belongs to another engine."""
    from tessera.compat import foreign

    return getattr(value, "refused", False) is True or (inspect.isclass(value) and issubclass(value, foreign._Foreign))


def differences() -> Dict[str, str]:
    """Of every name that differs: how. A thing that several modules export is compared where its path is shortest."""
    found: Dict[str, List[str]] = {}
    seen: Dict[int, str] = {}
    for module_name, module in their_modules().items():
        own_module = module_or_none(ours(module_name))
        prefix = module_name[len("accelerate."):] + "." if module_name != "accelerate" else ""
        if own_module is None:
            found[prefix[:-1]] = ["no such module"]
            continue
        for name, value in exported(module).items():
            path = prefix + name
            shared = inspect.isclass(value) or inspect.isroutine(value)
            known = seen.get(id(value)) if shared else None
            if not hasattr(own_module, name):
                if known is None or known not in found:
                    found[path] = ["missing"]
            elif known is None:
                own = getattr(own_module, name)
                if refuses(own):
                    found[path] = ["refused"]
                elif inspect.isclass(value) and inspect.isclass(own):
                    for where, difference in class_differences(path, value, own):
                        found.setdefault(where, []).append(difference)
                elif inspect.isroutine(value):
                    found.update({path: list(signature_differences(value, own))} if callable(own) else {path: ["not callable"]})
            if shared:
                seen.setdefault(id(value), path)
    return {path: "; ".join(each) for path, each in sorted(found.items()) if each}


def table(page: Path, head: str) -> List[str]:
    """The rows of the table with that head."""
    rest = page.read_text(encoding="utf-8").partition(head + "\n")[2].splitlines()[1:]
    return list(itertools.takewhile(lambda line: line.startswith("|"), rest))


def listed() -> Dict[str, str]:
    """The guide's table: several names may share a row."""
    rows: Dict[str, str] = {}
    for line in table(GUIDE, "| Name | Difference | Reason |"):
        names, difference, reason = (cell.strip() for cell in line.strip("|").split(" | "))
        assert len(reason) > 10, f"this row gives no reason: {line}"
        for name in re.findall(r"`([\w.]+)`", names):
            assert name not in rows, f"{name} stands in two rows"
            rows[name] = difference.replace("`", "")
    return rows


@pytest.fixture(scope="module")
def found() -> Dict[str, str]:
    accelerate = pytest.importorskip("accelerate")
    if not accelerate.__version__.startswith(VERSION + "."):
        pytest.skip(f"accelerate {accelerate.__version__} is installed; the table is that of {VERSION}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return differences()


def test_every_difference_is_in_the_guide_with_its_reason(found):
    rows = listed()
    assert {name: how for name, how in found.items() if rows.get(name) != how} == {}


def test_every_difference_in_the_guide_is_one(found):
    assert {name: how for name, how in listed().items() if found.get(name) != how} == {}


def test_a_wrong_table_is_found(found, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("| Name | Difference | Reason |\n|---|---|---|\n| `Accelerator.walks` | missing | it never did walk |\n")
    monkeypatch.setitem(globals(), "GUIDE", page)
    for test in (test_every_difference_is_in_the_guide_with_its_reason, test_every_difference_in_the_guide_is_one):
        with pytest.raises(AssertionError):
            test(found)


def test_yaml_keys_of_the_guides_exist():
    keys, section = set(), ""
    for line in (GUIDES.parent / "configuration.md").read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| `([a-z_.]+)` \|", line)
        if line.startswith("### "):
            section = line[4:]
        elif row and section:
            keys.add(f"{section}.{row.group(1)}")
    sections = {key.partition(".")[0] for key in keys}
    named = re.findall(r"`([a-z_]+)\.([a-z_.]+)`", (GUIDES / "coming_from_megatron.md").read_text(encoding="utf-8"))
    found = {f"{section}.{key}" for section, key in named if section in sections}
    assert len(found) > 40 and found - keys == set()
