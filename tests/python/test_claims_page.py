"""docs/documents_claims.md: the planned figures are what the program says today."""

import importlib.util


def test_planned_figures_are_those_of_the_program(tessera_program, source_dir):
    spec = importlib.util.spec_from_file_location("claims_table", source_dir / "tests/claims_table.py")
    claims = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(claims)
    text = claims.PAGE.read_text()
    section = claims.planned(tessera_program)
    assert section in text and claims.replaced(text, section) == text, "python3 tests/claims_table.py PROGRAM writes them"
