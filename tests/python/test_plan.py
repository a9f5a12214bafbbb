"""`tessera plan`: its numbers against formulas written down here once more, from papers and by hand. Nothing of the
library is used."""

import json
import re
import xml.etree.ElementTree
from math import isclose
from pathlib import Path
from typing import Dict

import pytest
from cli_support import run, write_config

ROOT = Path(__file__).resolve().parents[2]
GPT = {"family": "gpt2", "num_layers": 12, "hidden_size": 240, "num_heads": 12, "ffn_hidden_size": 960, "vocab_size": 1000,
       "max_positions": 64}
LLAMA = {"family": "llama", "num_layers": 12, "hidden_size": 240, "num_heads": 12, "num_kv_heads": 4, "ffn_hidden_size": 636,
         "vocab_size": 1000, "max_positions": 64}
TRAINING = {"seq_length": 48, "micro_batch_size": 2, "global_batch_size": 48, "eval_interval": 0, "precision": "bf16"}
# Layouts that are known to suit GPUs of 80 GB, at sequences of 2048 in bf16.
GUIDELINES = {
    "llama_7b_dp8": (8, 1, 1, 8, None),
    "llama_13b_tp2_dp4": (8, 2, 1, 4, None),
    "gpt_20b_tp4_dp4": (16, 4, 1, 4, None),
    "gpt_40b_tp4_pp2_dp4": (32, 4, 2, 4, 4),
    "llama2_70b_tp8_pp2_dp4": (64, 8, 2, 4, 8),
    "gpt3_175b_tp8_pp4_dp4": (128, 8, 4, 4, 16),
}
# Parameters as published or by arithmetic from the papers' tables.
SIZES = {"gpt2_124m": 124_439_808, "gpt2_xl": 1_557_611_200, "llama_7b": 6_738_415_616, "llama_13b_tp2_dp4": 13_015_864_320,
         "llama2_70b_tp8_pp2_dp4": 68_976_648_192, "llama3_8b": 8_030_261_248}


def plan(program: Path, config: Path, *args, code: int = 0) -> dict:
    return json.loads(run(program, "plan", config, "--json", *args, code=code).stdout)


def shared_bytes(rank: Dict) -> int:
    """What tensor ranks send once in a step: gradients of norms and positions."""
    return sum(t["bytes"] for t in rank["traffic"] if t["axis"] == "tp" and t["name"] == "gradients, all-reduce")


def layer_matrices(m: Dict) -> int:
    kv = m.get("num_kv_heads", m["num_heads"])
    head = m["hidden_size"] // m["num_heads"]
    attention = 2 * m["hidden_size"] ** 2 + 2 * m["hidden_size"] * kv * head
    return attention + (3 if m["family"] == "llama" else 2) * m["hidden_size"] * m["ffn_hidden_size"]


def parameters(m: Dict) -> int:
    c, layers = m["hidden_size"], m["num_layers"]
    if m["family"] == "llama":
        return layers * (layer_matrices(m) + 2 * c) + c + 2 * m["vocab_size"] * c
    biases = 3 * c + c + m["ffn_hidden_size"] + c
    return layers * (layer_matrices(m) + biases + 4 * c) + 2 * c + (m["vocab_size"] + m["max_positions"]) * c


class Layout:
    """The same numbers as the plan's, for ranks 0 < r of every group where the vocabulary splits evenly."""

    def __init__(self, model: Dict, t: int = 1, p: int = 1, d: int = 1, sequence: bool = False, recompute: str = "none",
                 precision: str = "bf16"):
        self.model, self.t, self.p, self.d, self.sequence, self.recompute = model, t, p, d, sequence, recompute
        self.half = precision == "bf16"
        self.e = 2 if self.half else 4
        self.micro_batches = TRAINING["global_batch_size"] // (TRAINING["micro_batch_size"] * d)
        self.elements = TRAINING["micro_batch_size"] * TRAINING["seq_length"] * model["hidden_size"]

    def tensor_bytes(self, stage: int) -> float:
        t, unit = self.t, (self.t - 1) / self.t * self.elements
        forward = (4 if self.sequence else 2 * 2) * unit * self.e
        backward = (6 if self.sequence else 2 * 2) * unit * self.e
        layers = self.model["num_layers"] // self.p
        per_micro_batch = layers * (forward * (2 if self.recompute == "full" else 1) + backward)
        if stage == 0:  # the residual stream is fp32
            per_micro_batch += (1 + 1 if self.sequence else 2) * unit * 4
        if stage == self.p - 1:
            rows = self.elements // self.model["hidden_size"]
            per_micro_batch += 2 * unit * self.e + (t - 1) * 8 * rows
        return per_micro_batch * self.micro_batches

    def replicated_bytes(self, stage: int) -> float:
        """Of norms and positions under sequence parallelism, all data ranks together (each sums its share)."""
        if not self.sequence:
            return 0
        c = self.model["hidden_size"]
        norm = 2 * c if self.model["family"] == "gpt2" else c
        values = 2 * (self.model["num_layers"] // self.p) * norm
        if stage == 0 and self.model["family"] == "gpt2":
            values += self.model["max_positions"] * c
        if stage == self.p - 1:
            values += norm
        return 2 * (self.t - 1) / self.t * 4 * values

    def pipeline_bytes(self, stage: int) -> float:
        boundary = self.elements * 4 / (self.t if self.sequence else 1)
        return ((stage < self.p - 1) + (stage > 0)) * self.micro_batches * boundary


def write(tmp_path: Path, layout: Layout, **parallel) -> Path:
    sections = {"parallel__tensor": layout.t, "parallel__pipeline": layout.p, "parallel__data": layout.d,
                "parallel__sequence": layout.sequence}
    if layout.p > 1:  # equal stages: the formulas here know no others
        sections["parallel__pipeline_layout"] = ",".join([str(layout.model["num_layers"] // layout.p)] * layout.p)
    changes = {f"training__{key}": value for key, value in TRAINING.items()}
    changes |= {f"model__{key}": value for key, value in layout.model.items()}
    if layout.model["family"] == "llama":
        changes |= {"model__dropout": 0.0}
    changes |= sections | {"training__recompute": layout.recompute, "training__precision": "bf16" if layout.half else "fp32"}
    return write_config(tmp_path, tmp_path / "corpus", **changes, **parallel)


LAYOUTS = {
    "tp2": Layout(GPT, t=2), "tp4_sp": Layout(GPT, t=4, sequence=True), "tp2_llama": Layout(LLAMA, t=2, precision="fp32"),
    "tp4_sp_llama": Layout(LLAMA, t=4, sequence=True, d=3), "tp2_sp_pp3": Layout(GPT, t=2, p=3, sequence=True),
    "pp4_dp2": Layout(LLAMA, p=4, d=2), "pp2_gpt_dp3": Layout(GPT, p=2, d=3, precision="fp32"),
    "full": Layout(GPT, t=2, recompute="full"), "full_sp": Layout(LLAMA, t=2, p=2, sequence=True, recompute="full"),
    "dp8": Layout(GPT, d=8), "dp4_fp32": Layout(LLAMA, d=4, precision="fp32"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_per_axis(name: str, tessera_program: Path, tmp_path: Path):
    layout = LAYOUTS[name]
    done = plan(tessera_program, write(tmp_path, layout))
    assert done["processes"] == layout.t * layout.p * layout.d and done["micro_batches"] == layout.micro_batches
    assert done["parameters"] == parameters(layout.model)
    for rank in done["ranks"]:
        r = rank["rank"]
        assert (rank["tensor"], rank["data"], rank["stage"]) == (
            r % layout.t, r // layout.t % layout.d, r // (layout.t * layout.d))
        sent = rank["bytes_sent"]
        assert sent.get("pp", 0) == layout.pipeline_bytes(rank["stage"])
        if layout.t > 1:
            shared = shared_bytes(rank)
            assert sent["tp"] - shared == layout.tensor_bytes(rank["stage"])
        if layout.d > 1:
            held, d = rank["parameters"], layout.d
            # Kernels read norms and tables in fp32, so these are gathered so.
            fp32 = held if not layout.half else sum(
                layout.model[k] * layout.model["hidden_size"] // layout.t
                for k in (["vocab_size", "max_positions"] if layout.model["family"] == "gpt2" else ["vocab_size"])
                if rank["pieces"][0]["embedding"])
            expected = (d - 1) / d * (4 * held + layout.e * held + (4 - layout.e) * (fp32 if layout.half else 0))
            assert isclose(sent["dp"], expected, rel_tol=0.02), "padding and norms are less than 2 %"
            persistent = (6 + 12 / d) * held + 4 * (1 - 1 / d) * fp32 if layout.half else (8 + 8 / d) * held
            assert isclose(rank["persistent_bytes"], persistent, rel_tol=0.02)
        # Sums of 8 bytes go round from the first rank.
        world = done["processes"]
        numbers = 2 * 8 * ((world - 1) if r == 0 else 1)  # loss and norm; before them 64 bytes to each other rank
        assert sent.get("world", 0) == (0 if world == 1 else 64 * (world - 1) + numbers)
    for stage in range(layout.p):
        group = [rank for rank in done["ranks"] if rank["stage"] == stage and rank["tensor"] == layout.t - 1]
        assert abs(sum(map(shared_bytes, group)) - layout.replicated_bytes(stage)) <= 4 * layout.t * layout.d
        tied = sum(rank["bytes_sent"].get("embedding", 0) for rank in group)
        ends = layout.p > 1 and stage in (0, layout.p - 1) and layout.model["family"] == "gpt2"
        assert tied == (4 * layout.model["vocab_size"] * layout.model["hidden_size"] // layout.t if ends else 0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble(schedule: str, tessera_program: Path, tmp_path: Path):
    for stages in (2, 3, 6):
        layout = Layout(LLAMA, p=stages)
        done = plan(tessera_program, write(tmp_path, layout, parallel__schedule=schedule))
        m = layout.micro_batches
        assert isclose(done["schedule"]["even_bubble"], (stages - 1) / (m + stages - 1), rel_tol=1e-9)
        in_flight = [m] * stages if schedule == "gpipe" else [min(stages - r, m) for r in range(stages)]
        assert [done["ranks"][r]["most_in_flight"] for r in range(stages)] == in_flight
        assert done["groups"] == {"pp": [list(range(stages))]}


def test_interleaving_divides_the_bubble(tessera_program: Path, tmp_path: Path):
    layout = Layout(LLAMA, p=3)
    config = write(tmp_path, layout, parallel__schedule="interleaved", parallel__virtual_stages=2)
    done = plan(tessera_program, config, "parallel.pipeline_layout=2,2,2,2,2,2")
    m, v = layout.micro_batches, 2
    # Bubble over ideal time is (p - 1) / (v m); as a share of the whole step:
    assert isclose(done["schedule"]["even_bubble"], 2 / (v * m + 2), rel_tol=1e-9)
    assert done["ranks"][0]["bytes_sent"]["pp"] == 2 * layout.pipeline_bytes(1) - layout.pipeline_bytes(0)


def test_activation_memory_of_one_layer(tessera_program: Path, tmp_path: Path):
    """What 12 more layers cost, per micro-batch: counted by hand, byte by byte per token."""
    def activations(model: Dict, layers: int, **layout) -> int:
        config = write(tmp_path, Layout(dict(model, num_layers=layers), **layout))
        return plan(tessera_program, config)["ranks"][-1]["memory"]["activations"]

    tokens, c, heads = 96, 240, 12
    for t, sequence, recompute in [(1, False, "none"), (1, False, "selective"), (1, False, "full"), (2, False, "none"),
                                   (4, True, "none"), (4, True, "selective"), (4, True, "full")]:
        for model in (GPT, LLAMA):
            share = t if sequence else 1
            kv = c if model is GPT else c // 3
            residual = 4 * c / share  # fp32
            norm = residual + (8 if model is GPT else 4) / share
            outputs = 0 if recompute == "selective" else 2 * c / share
            qkv_o = 2 * (c + 2 * kv + c) / t + 4 * heads / t
            mlp = 2 * model["ffn_hidden_size"] * (1 if model is GPT else 2) / t
            layer = residual if recompute == "full" else 2 * norm + 2 * outputs + qkv_o + mlp
            options = {"t": t, "sequence": sequence, "recompute": recompute}
            # Allocations are rounded up to 256 bytes.
            rounding = 12 * 12 * 256
            more = activations(model, 24, **options) - activations(model, 12, **options)
            assert 0 <= more - 12 * tokens * layer <= rounding, (model["family"], options)


def test_context_ranks_divide_activations(tessera_program: Path, tmp_path: Path):
    """Activations of a layer as above, of own positions. Two ranks send keys and values of these to all others, twice, and their gradients;
    four divide the key-value heads and exchange heads: queries, keys, values and results, both ways, and results of own heads are kept too."""
    c, kv, heads, micro_batches = 240, 80, 12, 24
    layer = 2 * (4 * c + 4) + 2 * 2 * c + 2 * (c + 2 * kv + c) + 4 * heads + 2 * 2 * LLAMA["ffn_hidden_size"]
    for n in (2, 4):
        def last(layers: int) -> Dict:
            config = write(tmp_path, Layout(dict(LLAMA, num_layers=layers)), parallel__context=n)
            return plan(tessera_program, config)["ranks"][-1]

        few, many, tokens = last(12), last(24), 96 // n
        more = many["memory"]["activations"] - few["memory"]["activations"]
        assert 0 <= more - 12 * tokens * (layer + (2 * c if n == 4 else 0)) <= 12 * 12 * 256, n
        sent = many["bytes_sent"]["cp"] - few["bytes_sent"]["cp"]
        per_token = 3 * (n - 1) * 2 * kv if n == 2 else 2 * (n - 1) * (2 * c + 2 * kv) // n
        assert sent == micro_batches * 12 * tokens * per_token * 2, n


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_planned(path: Path, tessera_program: Path):
    done = plan(tessera_program, path, code=0)
    assert done["ranks"] and all(rank["memory_bytes"] > 0 for rank in done["ranks"])
    if path.stem in SIZES:
        assert done["parameters"] == SIZES[path.stem]
    if path.stem in GUIDELINES:
        processes, tensor, pipeline, data, micro_batches = GUIDELINES[path.stem]
        fits = plan(tessera_program, path, "--memory_gb", 80)
        assert fits["fits"] and fits["processes"] == processes
        assert [fits["layout"][axis] for axis in ("tensor", "pipeline", "data")] == [tensor, pipeline, data]
        assert micro_batches is None or fits["micro_batches"] == micro_batches
        if micro_batches is None:  # the guides' rows without stages have one
            one = plan(tessera_program, path, "--memory_gb", 80, f"training.global_batch_size={data}")
            assert one["fits"] and one["micro_batches"] == 1
        text = path.read_text()
        assert "seq_length: 2048" in text and "precision: bf16" in text


def test_guideline_models_have_the_sizes_they_are_named_for(tessera_program: Path):
    for name, billions in [("llama_7b_dp8", 6.7), ("llama_13b_tp2_dp4", 13.0), ("gpt_20b_tp4_dp4", 20.6),
                           ("gpt_40b_tp4_pp2_dp4", 39.1), ("llama2_70b_tp8_pp2_dp4", 69.0), ("gpt3_175b_tp8_pp4_dp4", 174.6)]:
        assert round(plan(tessera_program, ROOT / f"configs/{name}.yaml")["parameters"] / 1e9, 1) == billions


def test_what_does_not_fit_gets_advice_that_does(tessera_program: Path, tmp_path: Path):
    config = ROOT / "configs/llama_7b.yaml"
    text = run(tessera_program, "plan", config, "--processes", 8, "--memory_gb", 40, code=5).stdout
    assert "Does not fit: 8 of 8 ranks need more than 40.00 GB" in text
    advice = re.search(r"What fits: (.*) on (\d+) processes: ([\d.]+) GB", text)
    assert advice and advice.group(2) == "8"
    after = run(tessera_program, "plan", config, *advice.group(1).split(), "--processes", 8, "--memory_gb", 40).stdout
    assert f"needs {advice.group(3)} of 40.00 GB" in after
    done = plan(tessera_program, config, "--processes", 8, "--memory_gb", 40, code=5)
    assert not done["fits"] and done["advice"]["changes"] == advice.group(1).split()


def test_the_documents_shape_fits_with_offload(tessera_program: Path):
    """120 layers of 12288 on 32 GPUs of 80 GB: 18 bytes a parameter do not fit, and without moments, main weights split, 8 do."""
    config = ROOT / "configs/gpt_218b_tp8_pp4_offload.yaml"
    done = plan(tessera_program, config, "--memory_gb", 80)
    whole = parameters({**GPT, "num_layers": 120, "hidden_size": 12288, "num_heads": 96, "ffn_hidden_size": 4 * 12288, "vocab_size": 50257,
                        "max_positions": 2048})
    assert done["parameters"] == whole and isclose(whole, 218.1e9, rel_tol=1e-3)
    assert done["fits"] and all(isclose(rank["memory_bytes"], 65e9, rel_tol=0.12) for rank in done["ranks"])
    on_disk = sum(rank["disk_bytes"] for rank in done["ranks"])
    held = sum(rank["parameters"] for rank in done["ranks"])  # copies of norms, positions and the tied table among them
    assert isclose(on_disk, 8 * held, rel_tol=1e-3)
    assert not plan(tessera_program, config, "--memory_gb", 80, "offload.optimizer=none", "offload.path=null", code=5)["fits"]
    # Everything elsewhere: main weights and moments on disk, gradients, weights and inputs of layers in host memory.
    sharded = ("parallel.pipeline=1", "parallel.data=4", "parallel.zero_stage=3", "optimizer.split_main_weights=false")
    away = ("offload.gradients=cpu", "offload.parameters=cpu", "offload.activations=cpu", "training.recompute=full")
    ranks = plan(tessera_program, config, *sharded, *away)["ranks"]
    assert max(rank["memory_bytes"] for rank in ranks) < 3.5e9
    assert isclose(sum(rank["host_bytes"] for rank in ranks), 1.36e12, rel_tol=0.01)
    assert isclose(sum(rank["disk_bytes"] for rank in ranks), 12 * whole, rel_tol=0.01)
    assert isclose(max(rank["to_device_bytes"] for rank in ranks), 1.02e12, rel_tol=0.01)


def test_recompute_auto_is_the_cheapest_that_fits(tessera_program: Path):
    config = ROOT / "configs/llama_7b_dp8.yaml"

    def needed(*overrides) -> int:
        return max(rank["memory_bytes"] for rank in plan(tessera_program, config, *overrides)["ranks"])

    none, selective = needed(), needed("training.recompute=selective")
    block = needed("training.recompute=full", "training.recompute_method=block", "training.recompute_layers=9")
    for limit, expected in [(none, {"recompute": "none"}), (none - 1, {"recompute": "selective"}),
                            (block, {"recompute": "full", "recompute_method": "block", "recompute_layers": 9})]:
        done = plan(tessera_program, config, "training.recompute=auto", f"device.memory_gb={limit / 1e9!r}")
        auto = done["recompute_auto"]
        assert done["fits"] and done["available_bytes"] == auto["limit_bytes"] == limit and auto["fits"]
        assert auto["chosen"] == expected | {"memory_bytes": max(rank["memory_bytes"] for rank in done["ranks"])}
        assert [tried["memory_bytes"] for tried in auto["tried"][:2]] == [none, selective][:len(auto["tried"])]
    # The flag stands for the key.
    text = run(tessera_program, "plan", config, "training.recompute=auto", "device.memory_gb=1", "--memory_gb", 60).stdout
    assert "recompute  auto is none, the first that fits into 60.0 GB (device.memory_gb): none 59.5 GB" in text
    assert run(tessera_program, "plan", config, "device.memory_gb=80").stdout.endswith("needs 59.47 of 80.00 GB.\n")


def test_recompute_auto_that_finds_nothing_says_what_would_fit(tessera_program: Path):
    config = ROOT / "configs/llama_7b_dp8.yaml"
    auto = ("training.recompute=auto", "device.memory_gb=40")
    text = run(tessera_program, "plan", config, *auto, code=5).stdout
    assert "recompute  auto finds nothing that fits into 40.0 GB (device.memory_gb); least needs full (uniform, " in text
    advice = re.search(r"What fits: (.*) on 8 processes: ([\d.]+) GB", text)
    assert advice and "Fits:" in run(tessera_program, "plan", config, *auto, *advice.group(1).split()).stdout
    for wrong, fault in [("recompute_layers=2", "recompute_layers (2) is for training.recompute auto to find"),
                         ("recompute_method=block", "recompute_method (block) is for training.recompute auto to find"),
                         ("recompute_partition=true", "needs training.recompute full, not auto")]:
        assert fault in run(tessera_program, "plan", config, *auto, f"training.{wrong}", code=2).stderr


def test_recompute_auto_without_a_number_asks_this_machine(tessera_program: Path):
    config = ROOT / "configs/quickstart_tp2_pp2.yaml"
    done = plan(tessera_program, config, "training.recompute=auto", "device.type=cpu")
    assert done["recompute_auto"]["chosen"]["recompute"] == "none"
    assert done["recompute_auto"]["limit_source"].startswith("1 / 4 of a machine's ")


def test_a_recorded_topology_is_asked(tessera_program: Path, tmp_path: Path):
    pairs = tmp_path / "pairs.txt"
    pairs.write_text("\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\n"
                     "GPU0\t X \tNV12\tSYS\tSYS\t0-31\t0\nGPU1\tNV12\t X \tSYS\tSYS\t0-31\t0\n"
                     "GPU2\tSYS\tSYS\t X \tNV12\t32-63\t1\nGPU3\tSYS\tSYS\tNV12\t X \t32-63\t1\n")
    config = ROOT / "configs/llama_13b_tp2_dp4.yaml"
    good = run(tessera_program, "plan", config, "--topology", pairs)
    assert "NVLink" not in good.stderr and "leave" not in good.stderr
    island = run(tessera_program, "plan", config, "--topology", pairs, "parallel.tensor=4", "parallel.data=2").stderr
    assert "all 2 tensor groups leave their NVLink island, such as ranks [0 1 2 3]: GPU0 and GPU2 are connected by SYS" in island
    machine = run(tessera_program, "plan", config, "--json", "--topology", pairs, "parallel.tensor=8", "parallel.data=1")
    assert "all 1 tensor groups leave their machine of 4 GPUs" in machine.stderr and json.loads(machine.stdout)["processes"] == 8
    pairs.write_text("GPU0 GPU1\nGPU0 X NVX\n")
    wrong = run(tessera_program, "plan", config, "--topology", pairs, code=4).stderr
    assert f'{pairs}:2: "NVX" is no connection' in wrong
    assert "cannot be read" in run(tessera_program, "plan", config, "--topology", tmp_path / "nowhere", code=3).stderr


def test_picture_and_refusals(tessera_program: Path, tmp_path: Path):
    svg = tmp_path / "schedule.svg"
    config = ROOT / "configs/gpt3_175b_tp8_pp4_dp4.yaml"
    out = run(tessera_program, "plan", config, "--svg", svg).stdout
    assert xml.etree.ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "Schedule 1f1b: 4 stages, 16 micro-batches, bubble 16.5 %" in out and max(map(len, out.splitlines())) <= 140
    assert "cannot be written" in run(tessera_program, "plan", config, "--svg", tmp_path / "no/folder.svg", code=3).stderr
    faults = run(tessera_program, "plan", config, "parallel.tensor=5", "parallel.pipeline=97", "parallel.data=3", code=2).stderr
    for part in ("does not divide model.num_heads (96)", "less than the 97 pieces", "(1 x 3 = 3)"):
        assert part in faults
    wrong = run(tessera_program, "plan", config, "--processes", 100, code=2).stderr
    assert "tensor 8 x pipeline 4 = 32 ranks hold one copy of the model, but there are 100 processes" in wrong
    assert "start 96 or 128" in wrong
    unknown = run(tessera_program, "plan", config, 'optimizer.no_decay=["*.norm"]', code=2).stderr
    assert 'optimizer.no_decay: "*.norm" matches no parameter of the model' in unknown and "layernorm.weight" in unknown
    run(tessera_program, "plan", config, 'optimizer.no_decay=["*.layers.95.*.weight"]')
    assert "--memory_gb is 0" in run(tessera_program, "plan", config, "--memory_gb", 0, code=2).stderr


def test_nothing_is_started(tessera_program: Path, tmp_path: Path):
    """No run folder, no data needed: the corpus of the shipped files is not here."""
    before = sorted(tmp_path.iterdir())
    run(tessera_program, "plan", ROOT / "configs/quickstart_tp2_pp2.yaml", cwd=tmp_path)
    assert sorted(tmp_path.iterdir()) == before
