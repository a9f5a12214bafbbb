"""prepare() trains rank 0's weights, and what ranks must share is compared over them."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent / "scripts" / "ranks_agree.py"
NAMED = {"plugin": "MegatronLMPlugin.gradient_clipping: 0.0 on {}, 0.5 on", "accumulation": "GradientAccumulationPlugin.num_steps: 1 on",
         "dropout": "config.attn_pdrop: 0.0 on", "frozen": "parameter transformer.wte.weight: ", "groups": "the optimizer's group of ",
         "lr": "optimizer.param_groups[0].", "betas": "optimizer.param_groups[0].betas: [0.9, 0.95] on", "schedule": "10",
         "no optimizer": "argument 2: ", "unsupported": "RMSprop", "loader": "prepare_data_loader(): ranks do not agree:\n  data_loader.batch_size: 4 on {}"}


@pytest.mark.parametrize("processes, layouts", [(2, ["1,1", "2,1", "1,2"]), (4, ["2,2"])])
def test_weights_of_rank_0_and_planted_disagreements(python_build, tmp_path, processes, layouts):
    output = tmp_path / "result.json"
    done = python_build.run(SCRIPT, output, *layouts, launcher=python_build.launcher("--num_processes", processes))
    result = json.loads(output.read_text())
    assert "prepare() trains the weights of rank 0; other ranks had different ones: rank" in done.stdout + done.stderr
    for layout in layouts:
        losses = result["losses"][layout]
        assert losses["losses"] == pytest.approx(losses["expected"], rel=1e-5), layout
        for name, told in result["planted"][layout].items():
            assert len(told) == processes and all("nothing" != text for text in told), (layout, name, told)
            for text in told[:-1]:
                assert NAMED[name].split("{}")[0] in text and f"rank {processes - 1}" in text, (layout, name, text)
