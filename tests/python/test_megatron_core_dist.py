"""The format torch_dist against Megatron Core itself, where megatron-core is installed (PyPI, without its dependencies): what is
written is loaded by its dist_checkpointing, and runs that its optimizers made and saved are read."""

import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("megatron.core")
from cli_support import run  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron_core_support import call, gpt, llama, one_process  # noqa: E402
from megatron_runs import SETTINGS, lr_at, schedule_state  # noqa: E402
from megatron_writer import Model, arguments  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_megatron_checkpoints import random_model  # noqa: E402
from test_megatron_distributed import dist  # noqa: E402
from test_megatron_runs import TOKENS, Started, corpus, go_on, to_run  # noqa: E402, F401


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    with one_process(tmp_path_factory.mktemp("store")):
        yield


def load(model, folder: Path, **options) -> None:
    state = dist_checkpointing.load({"model": model.sharded_state_dict(**options)}, str(folder))
    model.load_state_dict(state["model"])


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_weights_are_loaded(tessera_program, tmp_path, kind):
    source = random_model(kind, tied=kind == "gpt2").eval()
    source.save_pretrained(tmp_path / "hf")
    model = {"gpt2": gpt, "llama": llama}[kind]().eval()
    load(model, dist(tessera_program, "hf", tmp_path / "hf", tmp_path / "dist") / "release", metadata={"singleton_local_shards": False})
    run(tessera_program, "convert", "--from", "hf", tmp_path / "hf", "--to", "megatron", tmp_path / "old", "--names", "local",
        "--make_vocab_size_divisible_by", 8)
    wanted = torch.load(tmp_path / "old/release/mp_rank_00/model_optim_rng.pt", weights_only=False)["model"]
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    with torch.no_grad():
        torch.testing.assert_close(call(model, TOKENS[None, :-1])[..., :61], source(TOKENS[None, :-1]).logits, rtol=1e-4, atol=1e-4)


class Run:
    """A model and its optimizer, both Megatron Core's."""

    def __init__(self, distributed: bool, bf16: bool) -> None:
        dtype = torch.bfloat16 if bf16 else torch.float32
        self.metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if distributed:
            self.metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        self.bf16 = bf16
        self.model = gpt(bf16=bf16, params_dtype=dtype).to(dtype)
        self.ddp = DistributedDataParallel(self.model.config, DistributedDataParallelConfig(use_distributed_optimizer=distributed,
                                                                                           grad_reduce_in_fp32=True), self.model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=2e-3, min_lr=2e-4, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8,
                            bf16=bf16, params_dtype=dtype, use_distributed_optimizer=distributed, clip_grad=1.0), [self.ddp])

    def train(self, first: int, steps: int) -> None:
        for update in range(first, first + steps):
            for group in self.optimizer.param_groups:
                group["lr"], group["weight_decay"] = lr_at(update), 0.1 * group["wd_mult"]  # as Megatron's scheduler sets both
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            logits = call(self.ddp, TOKENS[None, :-1])[0, :, :61]
            torch.nn.functional.cross_entropy(logits.float(), TOKENS[1:]).backward()
            self.ddp.finish_grad_sync()
            assert self.optimizer.step()[0]

    def save(self, folder: Path, iteration: int) -> Path:
        settings = arguments(Model(random_model("gpt2")), 1, 1, 1, 64, orig_vocab_size=61) | SETTINGS
        settings |= {"consumed_train_samples": 4 * iteration, "bf16": self.bf16}
        model = self.model.sharded_state_dict(metadata=self.metadata)
        place = folder / f"iter_{iteration:07d}"
        place.mkdir(parents=True)
        dist_checkpointing.save(
            {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, metadata=self.metadata), "iteration": iteration,
             "checkpoint_version": 3.0, "args": types.SimpleNamespace(**settings), "opt_param_scheduler": schedule_state(iteration)},
            str(place), content_metadata=self.metadata)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        return folder


KINDS = [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.parametrize("distributed, bf16", KINDS)
def test_a_real_run_goes_on_here(tessera_program, tmp_path, corpus, distributed, bf16):  # noqa: F811
    """Three updates there; four more there and here."""
    Started("gpt2", updates=1, more=0).model.save_pretrained(tmp_path / "hf")
    theirs = Run(distributed, bf16)
    more = ["--dtype", "bfloat16"] if bf16 else []
    load(theirs.model, dist(tessera_program, "hf", tmp_path / "hf", tmp_path / "start", *more) / "release", metadata=theirs.metadata)
    theirs.optimizer.reload_model_params()
    theirs.train(0, 3)
    to_run(tessera_program, theirs.save(tmp_path / "megatron", 3), tmp_path / "run")

    theirs.train(3, 4)
    if not bf16:
        go_on(tessera_program, tmp_path / "run", corpus, 7)
        theirs.save(tmp_path / "after", 7)
        for name, (where, step) in {"here": (tmp_path / "run", 0), "there": (tmp_path / "after", 7)}.items():
            run(tessera_program, "convert", "--from", "megatron" if step else "tessera", where, "--to", "hf", tmp_path / name)
        here, there = [load_file(tmp_path / name / "model.safetensors") for name in ("here", "there")]
        for name, value in here.items():
            expected = there[name]
            if name.endswith("c_attn.bias"):  # that of keys has no gradient but what rounding makes
                value, expected = torch.cat([value[:24], value[48:]]), torch.cat([expected[:24], expected[48:]])
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")


def optimizer_state(theirs: Run) -> dict:
    """By the model's names: the first moments that its optimizer holds, and how many updates each parameter has had."""
    names = {parameter: name for name, parameter in theirs.model.named_parameters()}
    optimizer = getattr(theirs.optimizer, "chained_optimizers", [theirs.optimizer])[0]
    found = {}
    if hasattr(optimizer, "_get_main_param_and_optimizer_states"):  # the distributed one, whose world of one has all of each parameter
        for parameter, name in names.items():
            values = optimizer._get_main_param_and_optimizer_states(parameter)
            found[name] = {kind: value if kind == "step" else value.view_as(parameter) for kind, value in values.items()}
        return found
    for parameter, name in names.items():
        main = getattr(parameter, "main_param", parameter)
        found[name] = {"param": main.detach()} | {key: optimizer.optimizer.state[main][key] for key in ("exp_avg", "exp_avg_sq", "step")}
    return found


@pytest.fixture
def own_steps(monkeypatch):
    """With PyTorch's Adam its distributed optimizer loads no state, its own neither: it gives all parameters one tensor as their count of
    updates, which then counts all of them, and wants it back from a state that it writes none into. Here each has its own, which stays."""
    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self, parameter, values):
        group, place = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        state["step"] = state["step"].clone()
        put(self, parameter, {"step": state["step"]} | values)
    monkeypatch.setattr(DistributedOptimizer, "_set_main_param_and_optimizer_states", with_step)


@pytest.mark.parametrize("distributed, bf16", KINDS)
def test_a_run_from_here_goes_on_there(tessera_program, tmp_path, own_steps, distributed, bf16):
    """Three updates of plain torch, written here as torch_dist, loaded into its model and optimizer; four more there."""
    started = Started("gpt2")
    to_run(tessera_program, started.write(tmp_path / "megatron", kind="bf16" if bf16 else "fp32"), tmp_path / "run")
    source = dist(tessera_program, "tessera", tmp_path / "run", tmp_path / "dist", "--with_optimizer",
                  "--distributed_optimizer" if distributed else "--torch_adam")
    theirs = Run(distributed, bf16)
    if distributed:
        theirs.train(0, 1)  # with PyTorch's Adam it says what it would load only after a first update
    sharded = theirs.model.sharded_state_dict(metadata=theirs.metadata)
    state = dist_checkpointing.load({"model": sharded, "optimizer": theirs.optimizer.sharded_state_dict(sharded, is_loading=True, metadata=theirs.metadata)},
                                    str(source / "iter_0000003"))
    theirs.model.load_state_dict(state["model"])
    theirs.optimizer.load_state_dict(state["optimizer"])

    run(tessera_program, "convert", "--from", "tessera", tmp_path / "run", "--to", "megatron", tmp_path / "plain", "--names", "local",
        "--make_vocab_size_divisible_by", 8, "--with_optimizer")
    plain = torch.load(tmp_path / "plain/iter_0000003/mp_rank_00/model_optim_rng.pt", weights_only=False)
    same_state(theirs, plain)
    if not bf16:
        goes_on(tessera_program, tmp_path, theirs, started)


def same_state(theirs: Run, saved: dict) -> None:
    """What its optimizer holds against the file of a rank that has the whole model."""
    held = optimizer_state(theirs)
    kept = saved["optimizer"]["optimizer"] if theirs.bf16 else saved["optimizer"]
    order = [name for decays in (True, False) for name, value in saved["model"].items()
             if value is not None and (value.dim() > 1 and not name.endswith(".bias")) == decays]
    assert len(order) == len(held)
    for number, name in enumerate(order):
        assert held[name]["step"] == 3
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(held[name][kind], kept["state"][number][kind]), (name, kind)
        assert torch.equal(held[name]["param"].to(saved["model"][name].dtype), saved["model"][name]), name


def goes_on(program, tmp_path: Path, theirs: Run, started: Started) -> None:
    """Four updates there are those of plain torch."""
    theirs.train(3, 4)
    theirs.save(tmp_path / "after", 7)
    run(program, "convert", "--from", "megatron", tmp_path / "after", "--to", "hf", tmp_path / "hf")
    wanted = started.after.state_dict()
    for name, value in load_file(tmp_path / "hf/model.safetensors").items():
        expected = wanted[name]
        if name.endswith("c_attn.bias"):
            value, expected = torch.cat([value[:24], value[48:]]), torch.cat([expected[:24], expected[48:]])
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("bf16", [False, True])
def test_a_run_in_a_ranks_file_goes_on_there(tessera_program, tmp_path, bf16):
    started = Started("gpt2")
    to_run(tessera_program, started.write(tmp_path / "megatron", kind="bf16" if bf16 else "fp32"), tmp_path / "run")
    run(tessera_program, "convert", "--from", "tessera", tmp_path / "run", "--to", "megatron", tmp_path / "file", "--names", "local",
        "--make_vocab_size_divisible_by", 8, "--with_optimizer", "--torch_adam")
    saved = torch.load(tmp_path / "file/iter_0000003/mp_rank_00/model_optim_rng.pt", weights_only=False)
    theirs = Run(False, bf16)
    theirs.model.load_state_dict(saved["model"])
    theirs.optimizer.load_state_dict(saved["optimizer"])
    same_state(theirs, torch.load(tmp_path / "file/iter_0000003/mp_rank_00/model_optim_rng.pt", weights_only=False))
    if not bf16:
        goes_on(tessera_program, tmp_path, theirs, started)
