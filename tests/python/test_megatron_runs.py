"""Runs of Megatron-LM that go on in Tessera, against plain torch, and back."""

import copy
import json
from pathlib import Path

import pytest
from bert_reference import write_sentences
from cli_support import metrics, run, write_config, write_corpus

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from megatron_runs import lr_at, moments, optimizer_of, train, write_run  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_megatron_checkpoints import Harmful, failing, random_model, same  # noqa: E402

SEQUENCE = 12
TOKENS = torch.tensor([(7 * i * i + 3 * i) % 61 for i in range(SEQUENCE)] + [0])


class Started:
    """A model before and after some updates of torch's, its two moments, and what it is after some more."""

    def __init__(self, kind: str, updates: int = 3, more: int = 4) -> None:
        self.updates, self.more = updates, more
        model = random_model(kind, tied=kind == "gpt2")
        with torch.no_grad():
            for value in model.parameters():
                value.mul_(0.2).add_(value.dim() == 1)
        for each in model.modules():
            if isinstance(each, torch.nn.Dropout):
                each.p = 0.0
        self.before = copy.deepcopy(model)
        optimizer = optimizer_of(model)
        train(model, optimizer, TOKENS, 0, updates)
        self.model = random_model(kind, tied=kind == "gpt2")
        self.model.load_state_dict(model.state_dict())
        self.averages, self.squares = moments(model, optimizer)
        train(model, optimizer, TOKENS, updates, more)
        self.after = model

    def write(self, folder: Path, **options) -> Path:
        return write_run(folder, self.model, self.averages, self.squares, **{"updates": self.updates} | options)


@pytest.fixture(scope="module")
def gpt2():
    return Started("gpt2")


@pytest.fixture(scope="module")
def llama():
    return Started("llama")


class Drawn(Started):
    """A BERT whose moments are drawn, not trained."""

    def __init__(self) -> None:
        self.updates = 3
        self.model, self.averages, self.squares = (random_model("bert") for _ in range(3))
        with torch.no_grad():
            for value in self.averages.parameters():
                value.normal_()
            for value in self.squares.parameters():
                value.uniform_()


@pytest.fixture(scope="module")
def bert():
    return Drawn()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """One document, in which each sample is the same one."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus", [TOKENS[:-1].tolist() * 400 + [0]])


def to_run(program, source: Path, target: Path, *more):
    return run(program, "convert", "--from", "megatron", source, "--to", "tessera", target, "--with_optimizer", *more)


def tensors(folder: Path, step: int) -> dict:
    found = {}
    for file in (folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"):
        found |= load_file(file)
    return found


def go_on(program, folder: Path, corpus: Path, steps: int, *more):
    return run(program, "train", folder / "config.yaml", f"data.path={corpus}", f"data.cache_dir={folder}/cache", f"training.steps={steps}",
               "lr_schedule.decay_steps=20", "device.threads=1", "device.type=cpu", *more)


def close(program, folder: Path, started: Started, tmp_path: Path) -> None:
    run(program, "convert", "--from", "tessera", folder, "--to", "hf", tmp_path / "after")
    wanted = started.after.state_dict()
    for name, value in load_file(tmp_path / "after/model.safetensors").items():
        expected = wanted[name]
        if name.endswith("c_attn.bias"):  # that of keys has no gradient but what rounding makes, which Adam makes a step of
            value, expected = torch.cat([value[:24], value[48:]]), torch.cat([expected[:24], expected[48:]])
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")


LAYOUTS = [("gpt2", {}, []), ("gpt2", {"tp": 2, "pp": 2, "torch_step": True}, []),
           ("gpt2", {"tp": 2, "pp": 2, "vpp": 2}, ["parallel.pipeline=2", "parallel.data=2"]),
           ("llama", {"era": "core te", "pp": 2}, ["parallel.tensor=2"])]


@pytest.mark.parametrize("kind, layout, parallel", LAYOUTS)
def test_it_goes_on_as_with_torch(tessera_program, tmp_path, request, corpus, kind, layout, parallel):
    started = request.getfixturevalue(kind)
    to_run(tessera_program, started.write(tmp_path / "megatron", **layout), tmp_path / "run")
    go_on(tessera_program, tmp_path / "run", corpus, started.updates + started.more, *parallel)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [4, 5, 6, 7]
    assert [line["lr"] for line in lines] == pytest.approx([lr_at(update) for update in range(3, 7)])
    close(tessera_program, tmp_path / "run", started, tmp_path)


def same_run(a: dict, b: dict) -> None:
    assert a.keys() == b.keys() and len(a) > 60
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@pytest.fixture(scope="module")
def plain(tessera_program, gpt2, tmp_path_factory):
    """What tp1, pp1 and fp32 give."""
    folder = tmp_path_factory.mktemp("plain")
    to_run(tessera_program, gpt2.write(folder / "megatron"), folder / "run")
    return tensors(folder / "run", 3)


@pytest.mark.parametrize("kind, options", [
    ("bf16", {"tp": 2}), ("distributed bf16", {}), ("distributed bf16", {"tp": 2, "pp": 2, "bucket_size": 1250}),
    ("distributed bf16", {"pp": 2, "vpp": 2, "bucket_size": 2458, "era": "core te"}), ("distributed fp32", {"bucket_size": 1})])
def test_every_form_of_the_optimizer_holds_the_same(tessera_program, tmp_path, gpt2, plain, kind, options):
    to_run(tessera_program, gpt2.write(tmp_path / "megatron", kind=kind, **options), tmp_path / "run")
    same_run(tensors(tmp_path / "run", 3), plain)
    assert f"precision: {kind.split()[-1]}\n" in (tmp_path / "run/config.yaml").read_text()


@pytest.mark.parametrize("kind, options", [("bf16", {"tp": 2, "pp": 2}), ("distributed bf16", {"pp": 2, "bucket_size": 2458}),
                                           ("distributed bf16", {"tp": 2, "pp": 2, "vpp": 2, "era": "core te", "module": "module."})])
def test_bert_in_every_form(tessera_program, tmp_path, bert, kind, options):
    to_run(tessera_program, bert.write(tmp_path / "plain"), tmp_path / "one")
    to_run(tessera_program, bert.write(tmp_path / "megatron", kind=kind, **options), tmp_path / "two")
    same_run(tensors(tmp_path / "two", 3), tensors(tmp_path / "one", 3))
    found, averages = tensors(tmp_path / "two", 3), bert.averages.state_dict()
    assert torch.equal(found["adam_m.lm_head.bias"], averages["cls.predictions.bias"])
    assert torch.equal(found["adam_m.lm_head.dense.weight"], averages["cls.predictions.transform.dense.weight"])
    assert torch.equal(found["adam_m.pooler.dense.bias"], averages["bert.pooler.dense.bias"])


def test_half_precision_goes_on_with_its_loss_scale(tessera_program, tmp_path, gpt2, plain, corpus):
    source = gpt2.write(tmp_path / "megatron", kind="fp16", iteration=5, updates=3)
    to_run(tessera_program, source, tmp_path / "run")
    same_run(tensors(tmp_path / "run", 5), plain)
    go_on(tessera_program, tmp_path / "run", corpus, 7)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [6, 7] and [line["skipped"] for line in lines] == [2, 2]
    assert [line["loss_scale"] for line in lines] == [1024.0, 1024.0]
    assert [line["lr"] for line in lines] == pytest.approx([lr_at(3), lr_at(4)])  # by updates, not by iterations


def test_rounded_weights_go_on(tessera_program, tmp_path, gpt2, corpus):
    """bf16: within what its arithmetic gives, the way of fp32."""
    to_run(tessera_program, gpt2.write(tmp_path / "megatron", kind="bf16", tp=2, pp=2), tmp_path / "run")
    go_on(tessera_program, tmp_path / "run", corpus, 7, "parallel.data=2")
    to_run(tessera_program, gpt2.write(tmp_path / "plain"), tmp_path / "exact")
    go_on(tessera_program, tmp_path / "exact", corpus, 7)
    for line, exact in zip(metrics(tmp_path / "run"), metrics(tmp_path / "exact")):
        assert line["loss"] == pytest.approx(exact["loss"], rel=0.02)


def refused(program, source: Path, tmp_path: Path, *words: str) -> None:
    done = failing(program, "convert", "--from", "megatron", source, "--to", "tessera", tmp_path / "refused", "--with_optimizer")
    assert not (tmp_path / "refused").exists() and not list(tmp_path.glob(".incomplete-*"))
    for word in words:
        assert word in done.stderr, done.stderr


def test_what_no_run_goes_on_from_is_refused(tessera_program, tmp_path, gpt2):
    def broken(name: str, *words: str, change=None, **options):
        refused(tessera_program, gpt2.write(tmp_path / name, change=change, **options), tmp_path, *words)

    def state(optimizer):
        return lambda rank, r, p: rank.update(optimizer=optimizer)

    def group(**changes):
        return lambda rank, r, p: rank["optimizer"]["param_groups"][0].update(changes)

    def argument(**changes):
        return {"change": lambda rank, r, p: [setattr(rank["args"], name, value) for name, value in changes.items()]}

    broken("none", "optimizer", "there is none in this checkpoint", change=state(None))
    broken("dummy", "holds no state", change=state({"step": 0, "param_groups": [{"lr": 0.0, "params": []}]}))
    broken("other", "is of a kind that is not read: it holds loss_scaler", change=state({"loss_scaler": 1}))
    broken("chain", "chained", change=state({0: {}, 1: {}}))
    broken("multiplier", "param_groups[0]", "lr_mult", change=group(lr_mult=0.1))
    broken("decoupled", "is_decoupled_lr is true", change=group(is_decoupled_lr=True))
    broken("sgd", "another optimizer than Adam", change=lambda rank, r, p: rank["optimizer"]["param_groups"][0].pop("betas"))
    broken("uncounted", "does not say how many updates", change=lambda rank, r, p: [g.pop("step") for g in rank["optimizer"]["param_groups"]])
    broken("counts", "3 and 4 updates", change=lambda rank, r, p: rank["optimizer"]["param_groups"][1].update(step=4))
    broken("less", "has nothing of", change=lambda rank, r, p: rank["optimizer"]["state"].pop(3))
    broken("shape", "exp_avg", "float32 [3]", change=lambda rank, r, p: rank["optimizer"]["state"][0].update(exp_avg=torch.zeros(3)))
    broken("fewer", "a group has", change=lambda rank, r, p: rank["optimizer"]["param_groups"][1]["params"].pop())
    broken("ranks", "updates, that of the first rank 3", tp=2,
           change=lambda rank, r, p: [g.update(step=3 + r) for g in rank["optimizer"]["param_groups"]])
    broken("mixed", "iteration", "that of the first rank 3", tp=2, change=lambda rank, r, p: rank.update(iteration=3 + r))
    broken("differs", "differs from that of tensor rank 0", tp=2,
           change=lambda rank, r, p: rank["optimizer"]["state"][len(rank["optimizer"]["state"]) - 1]["exp_avg"].add_(r))
    broken("masters", "the optimizer's weights", "rounded they are not the model's", kind="bf16",
           change=lambda rank, r, p: rank["optimizer"]["fp32_from_fp16_params"][0][0].mul_(1.5))
    broken("precision", "(bf16, fp16) imply float32", kind="bf16", change=lambda rank, r, p: setattr(rank["args"], "bf16", False))
    broken("ramp", "args.rampup_batch_size", "ramp-up", **argument(rampup_batch_size=["4", "4", "100"]))
    broken("rate", "args.decoupled_lr", **argument(decoupled_lr=0.1))
    broken("method", "args.optimizer", "'sgd' is not read", **argument(optimizer="sgd"))
    broken("eight", "args.fp8", **argument(fp8="hybrid"))
    broken("schedule", "opt_param_scheduler.num_steps", "16 samples far; 3 updates of batches of 4",
           change=lambda rank, r, p: rank["opt_param_scheduler"].update(num_steps=16))
    broken("warmup", "lr_warmup_steps", "no whole number of batches", change=lambda rank, r, p: rank["opt_param_scheduler"].update(lr_warmup_steps=5))
    broken("style", "lr_decay_style", "'step' is not read", change=lambda rank, r, p: rank["opt_param_scheduler"].update(lr_decay_style="step"))
    broken("scale", "grad_scaler.scale", "no factor of a loss", kind="fp16", change=lambda rank, r, p: rank["optimizer"]["grad_scaler"].update(scale=0.0))
    broken("tracker", "grad_scaler.growth_tracker", kind="fp16", change=lambda rank, r, p: rank["optimizer"]["grad_scaler"].update(growth_tracker=-1))
    broken("endless", "args.train_iters", "no length of a run", **argument(train_iters=2**50))
    broken("window", "args.loss_scale_window", **argument(loss_scale_window=float("nan")))
    broken("samples", "args.consumed_train_samples", **argument(consumed_train_samples=2**62))
    broken("over", "iteration", "is 21; the arguments say that the run has 20", iteration=21)


def test_distributed_optimizers_that_are_not_read_are_refused(tessera_program, tmp_path, gpt2):
    def broken(name: str, *words: str, **options):
        refused(tessera_program, gpt2.write(tmp_path / name, kind="distributed bf16", **options), tmp_path, *words)

    def key(whole):
        return next(iter(whole[0]))

    broken("old", "a distributed optimizer of before 2024 saved it",
           distributed=lambda whole: {"per_bucket_numel": [], 0: whole[0]})
    broken("chain", "chained", distributed=lambda whole: [whole, whole])
    broken("types", "has parameters of 2 types", distributed=lambda whole: whole | {0: whole[0] | {"other": whole[0][key(whole)]}})
    broken("missing", "0: is missing", distributed=lambda whole: {"buckets_coalesced": True})
    broken("more", "beyond those of the model's 1 chunks", distributed=lambda whole: whole | {1: whole[0]})
    broken("number", "args.ddp_num_buckets", ddp_num_buckets=4)
    broken("short", "elements; the model's parameters", bucket_size=2458, overlap_grad_reduce=False)
    broken("turned", "rounded they are not the model's",
           distributed=lambda whole: whole | {0: {key(whole): whole[0][key(whole)] | {"param": whole[0][key(whole)]["param"].flip(0)}}})
    source = gpt2.write(tmp_path / "gone", kind="distributed bf16", tp=2)
    (source / "iter_0000003/mp_rank_01/distrib_optim.pt").unlink()
    refused(tessera_program, source, tmp_path, "mp_rank_01", "there is no distrib_optim.pt beside the file")


def test_options_that_do_not_go_together(tessera_program, tmp_path, gpt2):
    source = gpt2.write(tmp_path / "megatron")
    def message(*more):
        return failing(tessera_program, "convert", "--from", "megatron", source, "--with_optimizer", *more).stderr
    assert "--with_optimizer is for" in message("--to", "hf", tmp_path / "x")
    assert "--torch_adam is for --to megatron" in message("--to", "tessera", tmp_path / "x", "--torch_adam")
    assert "--dtype is for weights alone" in message("--to", "tessera", tmp_path / "x", "--dtype", "bfloat16")
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").write_text("")
    assert "already exists" in message("--to", "tessera", tmp_path / "used")
    done = to_run(tessera_program, source, tmp_path / "run")
    assert "states of random numbers are left out" in done.stderr and "name no data_path" in done.stderr and "wrote" in done.stdout


def to_megatron(program, folder: Path, target: Path, *more) -> Path:
    run(program, "convert", "--from", "tessera", folder, "--to", "megatron", target, "--with_optimizer", "--make_vocab_size_divisible_by", 8, *more)
    return target


def settings(folder: Path) -> list:
    return [line for line in (folder / "config.yaml").read_text().splitlines() if str(folder) not in line]


@pytest.mark.parametrize("kind, family, layout", [
    ("fp32", "gpt2", ["--tensor", 2, "--pipeline", 2]), ("bf16", "gpt2", ["--pipeline", 2, "--virtual", 2, "--names", "local"]),
    ("fp32", "gpt2", ["--tensor", 2, "--torch_adam"]), ("fp16", "gpt2", ["--pipeline", 2, "--torch_adam"]),
    ("fp16", "gpt2", ["--tensor", 4]), ("fp16", "gpt2", ["--tensor", 2, "--distributed_optimizer"]),
    ("bf16", "bert", ["--pipeline", 2, "--distributed_optimizer"]), ("fp32", "gpt2", ["--distributed_optimizer", "--names", "local"]),
    ("bf16", "gpt2", ["--tensor", 2, "--pipeline", 2, "--virtual", 2, "--distributed_optimizer"]), ("bf16", "bert", ["--tensor", 2, "--pipeline", 2]), ("bf16", "llama", ["--tensor", 2, "--pipeline", 2, "--names", "transformer_engine"])])
def test_there_and_back(tessera_program, tmp_path, request, kind, family, layout):
    """Megatron, Tessera, Megatron in another layout, Tessera: every bit of weights and moments, every setting."""
    started = request.getfixturevalue(family)
    to_run(tessera_program, started.write(tmp_path / "megatron", kind=kind, iteration=5, data_path=["0.3", "a", "0.7", "b"]), tmp_path / "one")
    to_run(tessera_program, to_megatron(tessera_program, tmp_path / "one", tmp_path / "again", *layout), tmp_path / "two")
    one, two = tensors(tmp_path / "one", 5), tensors(tmp_path / "two", 5)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert settings(tmp_path / "one") == settings(tmp_path / "two")
    manifests = [json.loads((tmp_path / name / "checkpoints/step-00000005/manifest.json").read_text()) for name in ("one", "two")]
    assert manifests[0]["user"]["optimizer_updates"] == 3 and manifests[0]["consumed_samples"] == 20
    for key in ("step", "consumed_samples", "user"):
        assert manifests[0][key] == manifests[1][key]
    assert (tmp_path / "again/latest_checkpointed_iteration.txt").read_text() == "5"


def test_what_is_written_is_megatrons(tessera_program, tmp_path, gpt2):
    """Rank 1 of 2 in stage 1 of 2, loaded by torch, against what the writer of the tests makes."""
    to_run(tessera_program, gpt2.write(tmp_path / "megatron", kind="fp16"), tmp_path / "run")
    to_megatron(tessera_program, tmp_path / "run", tmp_path / "again", "--tensor", 2, "--pipeline", 2)
    gpt2.write(tmp_path / "wanted", kind="fp16", tp=2, pp=2)
    found, wanted = [torch.load(tmp_path / name / "iter_0000003/mp_rank_01_001/model_optim_rng.pt", weights_only=False) for name in ("again", "wanted")]
    assert found["iteration"] == 3 and found["opt_param_scheduler"] == wanted["opt_param_scheduler"]
    for name in ("consumed_train_samples", "global_batch_size", "micro_batch_size", "seq_length", "train_iters", "fp16", "bf16", "seed", "lr",
                 "min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "adam_beta2", "adam_eps", "clip_grad", "split",
                 "start_weight_decay", "tensor_model_parallel_size", "pipeline_model_parallel_size", "padded_vocab_size", "hidden_dropout"):
        assert getattr(found["args"], name) == getattr(wanted["args"], name), name
    ours, theirs = found["optimizer"], wanted["optimizer"]
    assert ours.keys() == theirs.keys()
    assert ours["grad_scaler"] == theirs["grad_scaler"]
    for own, their in zip(ours["optimizer"]["param_groups"], theirs["optimizer"]["param_groups"]):
        assert own["params"] == their["params"] and (own["wd_mult"], own["step"]) == (their["wd_mult"], their["step"])
        assert (list(own["betas"]), own["weight_decay"]) == (list(their["betas"]), their["weight_decay"])
    rows = slice(0, 29)  # of the vocabulary: the rest is padding
    for own, their in zip(ours["fp32_from_fp16_params"], theirs["fp32_from_fp16_params"]):
        assert [v.shape for v in own] == [v.shape for v in their]
        assert all(torch.equal(a[rows] if a.shape == (32, 24) else a, b[rows] if a.shape == (32, 24) else b) for a, b in zip(own, their))
    for number, state in theirs["optimizer"]["state"].items():
        for kind in ("exp_avg", "exp_avg_sq"):
            a, b = ours["optimizer"]["state"][number][kind], state[kind]
            assert torch.equal(a[rows], b[rows]) and not a[29:].any() if a.shape == (32, 24) else torch.equal(a, b)


def test_a_run_of_tesseras_goes_on_elsewhere_and_here(tessera_program, tmp_path, gpt2, corpus):
    """Three steps, to Megatron and back, four more: as seven in one go."""
    to_run(tessera_program, gpt2.write(tmp_path / "megatron"), tmp_path / "run")
    go_on(tessera_program, tmp_path / "run", corpus, 5)
    to_run(tessera_program, to_megatron(tessera_program, tmp_path / "run", tmp_path / "again", "--tensor", 2), tmp_path / "two")
    go_on(tessera_program, tmp_path / "two", corpus, 7)
    go_on(tessera_program, tmp_path / "run", corpus, 7)
    a, b = tensors(tmp_path / "run", 7), tensors(tmp_path / "two", 7)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_runs_that_megatron_cannot_hold(tessera_program, tmp_path, gpt2, corpus):
    to_run(tessera_program, gpt2.write(tmp_path / "megatron"), tmp_path / "run")
    def message(source, *more):
        done = failing(tessera_program, "convert", "--from", "tessera", source, "--to", "megatron", tmp_path / "x", "--with_optimizer", *more)
        assert not (tmp_path / "x").exists()
        return done.stderr
    assert "do not divide by 8 tensor ranks" in message(tmp_path / "run", "--tensor", 8)
    go_on(tessera_program, tmp_path / "run", corpus, 4, 'optimizer.no_decay=["*norm*"]')
    assert "optimizer.no_decay" in message(tmp_path / "run")
    run(tessera_program, "convert", "--from", "tessera", tmp_path / "run", "--to", "tessera", tmp_path / "weights")
    assert "--with_optimizer is for" in message(tmp_path / "weights")


def config_of(folder: Path) -> dict:
    """The keys of config.yaml that have one line."""
    pairs = [line.strip().split(": ", 1) for line in (folder / "config.yaml").read_text().splitlines() if ": " in line]
    return dict(pairs)


def test_settings_come_from_the_schedule_and_the_arguments(tessera_program, tmp_path, gpt2):
    def convert(name: str, change=None, **options) -> dict:
        to_run(tessera_program, gpt2.write(tmp_path / name, change=change, **options), tmp_path / (name + "_run"))
        return config_of(tmp_path / (name + "_run"))

    def replace(**schedule):
        def change(rank, r, p):
            state = rank.pop("opt_param_scheduler")
            if schedule:
                rank["lr_scheduler"] = schedule
            return state
        return change

    old = convert("old", replace(max_lr=0.5, min_lr=0.25, warmup_steps=8, decay_steps=64, decay_style="linear", num_steps=12))
    assert (old["lr"], old["min_lr"], old["warmup_steps"], old["decay_steps"], old["style"]) == ("0.5", "0.25", "2", "16", "linear")
    wsd = convert("wsd", replace(), lr_decay_style="WSD", lr_wsd_decay_style="minus_sqrt", lr_wsd_decay_iters=3, decoupled_weight_decay=False,
                  train_iters=None, train_samples=48, lr_decay_iters=None, lr_warmup_iters=0, lr_warmup_fraction=0.25)
    assert (wsd["style"], wsd["wsd_style"], wsd["wsd_decay_steps"], wsd["steps"], wsd["warmup_steps"]) == ("wsd", "minus_sqrt", "3", "12", "3")
    assert wsd["name"] == "adam"
    decay = convert("decay", replace(), lr_decay_style="inverse-square-root", start_weight_decay=0.05, end_weight_decay=0.2,
                    weight_decay_incr_style="cosine", eod_mask_loss=True, data_path=["here"], seed=5)
    assert (decay["style"], decay["weight_decay"], decay["end_weight_decay"]) == ("inverse-square-root", "0.05", "0.2")
    assert (decay["weight_decay_style"], decay["eod_mask_loss"], decay["path"], decay["seed"]) == ("cosine", "true", "here", "5")


def test_a_hostile_optimizer_runs_nothing(tessera_program, tmp_path, gpt2):
    refused(tessera_program, gpt2.write(tmp_path / "plain", change=lambda rank, r, p: rank.update(optimizer=Harmful(tmp_path / "ran"))), tmp_path,
            "it names posix.system", "nothing of it was run")
    refused(tessera_program, gpt2.write(tmp_path / "apart", kind="distributed bf16", distributed=lambda whole: Harmful(tmp_path / "ran")), tmp_path,
            "distrib_optim.pt", "it names posix.system")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_from_transformers_through_both_and_back(tessera_program, tmp_path, kind, corpus):
    """Transformers, Megatron (2 x 2), Tessera (four data ranks, a step too small for any bit), Transformers: the same bits."""
    model = random_model(kind, tied=kind == "gpt2")
    model.save_pretrained(tmp_path / "hf")
    run(tessera_program, "convert", "--from", "hf", tmp_path / "hf", "--to", "megatron", tmp_path / "m", "--tensor", 2, "--pipeline", 2)
    run(tessera_program, "convert", "--from", "megatron", tmp_path / "m", "--to", "tessera", tmp_path / "t")
    description = json.loads((tmp_path / "t/tessera.json").read_text())["model"]
    sentences = {"cls_id": 57, "sep_id": 58, "mask_id": 59, "pad_id": 0, "masking_do_full_word": False} if kind == "bert" else {}
    if kind == "bert":
        corpus = write_sentences(tmp_path / "sentences", [[[(5 * i + j) % 50 + 1 for j in range(6)] for i in range(4)] for _ in range(20)])
    config = write_config(tmp_path, corpus, model__init_from=str(tmp_path / "t"), parallel__data=4, optimizer__lr=1e-30, optimizer__weight_decay=0.0, lr_schedule__style="constant",
                          lr_schedule__warmup_steps=0, training__steps=1, training__seq_length=12, training__micro_batch_size=1,
                          training__global_batch_size=4, data__split="100,0,0", **{f"data__{key}": value for key, value in sentences.items()},
                          **{f"model__{key}": value for key, value in description.items() if not isinstance(value, dict) and key != "hf_model_type"})
    run(tessera_program, "train", config)
    run(tessera_program, "convert", "--from", "tessera", tmp_path / "run", "--to", "hf", tmp_path / "again")
    same(load_file(tmp_path / "again/model.safetensors"), model)
