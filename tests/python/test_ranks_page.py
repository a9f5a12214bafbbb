"""docs/guides/ranks.md: its tables are those of the process mesh, as `tessera plan` prints them."""

import json
import re

import pytest
from cli_support import run, write_config

HEADING = re.compile(r"## \w+ processes: tensor (\d+), pipeline (\d+), data (\d+)\n(.*?)(?=\n## |\Z)", re.S)


def sections(source_dir) -> list:
    return HEADING.findall((source_dir / "docs/guides/ranks.md").read_text())


@pytest.mark.parametrize("number", [0, 1])
def test_tables_are_those_of_the_mesh(tessera_program, source_dir, tmp_path, number):
    tensor, pipeline, data, text = sections(source_dir)[number]
    config = write_config(tmp_path, tmp_path / "corpus", model__num_heads=4, parallel__tensor=int(tensor),
                          parallel__pipeline=int(pipeline), parallel__data=int(data))
    plan = json.loads(run(tessera_program, "plan", config, "--json").stdout)
    places = {each["rank"]: (each["tensor"], each["stage"], each["data"]) for each in plan["ranks"]}
    rows = [tuple(map(int, row)) for row in re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.M)]
    assert len(rows) >= 5
    for rank, *place in rows:
        assert places[rank] == tuple(place)
        assert rank == place[0] + int(tensor) * (place[2] + int(data) * place[1])  # the page's formula
    groups = dict(re.findall(r"^\| (tp|dp|pp) \| (.*) \|$", text, re.M))
    printed = {axis: " ".join(f"[{' '.join(map(str, group))}]" for group in plan["groups"][axis]) for axis in ("tp", "dp", "pp")}
    assert groups == printed


def test_the_replicas_are_those_of_the_first_table(tessera_program, source_dir, tmp_path):
    text = " ".join((source_dir / "docs/guides/ranks.md").read_text().split())
    config = write_config(tmp_path, tmp_path / "corpus", model__num_heads=4, parallel__tensor=2, parallel__pipeline=2,
                          parallel__data=2)
    plan = json.loads(run(tessera_program, "plan", config, "--json").stdout)
    first, second = ([each["rank"] for each in plan["ranks"] if each["data"] == data] for data in (0, 1))
    assert f"is {first[0]}, {first[1]}, {first[2]} and {first[3]}, and the other is {', '.join(map(str, second[:3]))} and {second[3]}." in text
    assert f"no: {', '.join(map(str, first))} and {', '.join(map(str, second))}." in text
