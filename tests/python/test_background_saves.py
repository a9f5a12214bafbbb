"""save_state(blocking=False): what was there when it was called, whatever is trained meanwhile; in place when it is waited for, at the
next call and at the end of the script."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pathlib import Path

SCRIPT = Path(__file__).parent / "scripts" / "background_saves.py"


@pytest.mark.parametrize("processes, tp", [(1, 1), (2, 2), (2, 1)])
def test_training_goes_on_beside_a_save(python_build, tmp_path, long_run, processes, tp):
    if (processes, tp) == (2, 1) and not long_run:
        pytest.skip("--long")
    python_build.run(SCRIPT, tmp_path, tp, launcher=python_build.launcher("--num_processes", processes) if processes > 1 else ())
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["published"] and facts["again"] == facts["after"] == facts["waited"]
    assert facts["kept"] == ["checkpoint_3", "checkpoint_4"]
    assert "taken" in facts["refused"]
    assert (tmp_path / "last/tessera_state/state.json").exists()
    assert not list(tmp_path.rglob("*incomplete*")) and not list(tmp_path.rglob("*.record"))
