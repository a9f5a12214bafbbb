"""Checkpoints of PyTorch's own programs to Transformers' folders: torch.distributed.checkpoint and Accelerate by themselves,
DeepSpeed by a writer of its layout."""

import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import environment, run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import torch.distributed.checkpoint as dcp  # noqa: E402
from deepspeed_writer import write_stage2, write_stage3, write_universal  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_megatron_checkpoints import failing, random_model  # noqa: E402


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request):
    return random_model(request.param)


@pytest.fixture(scope="module")
def gpt2():
    return random_model("gpt2")


def config_of(model, folder: Path) -> Path:
    model.config.save_pretrained(folder)
    return folder


def converted(tessera_program, form: str, source: Path, target: Path, *more) -> dict:
    run(tessera_program, "convert", "--from", form, source, "--to", "hf", target, *more)
    return load_file(target / "model.safetensors")


def same(tensors: dict, model) -> None:
    """All weights, bit for bit; a tied head may be there or not."""
    state = model.state_dict()
    assert set(state) - set(tensors) <= {"lm_head.weight"} and set(tensors) <= set(state)
    for name, value in tensors.items():
        assert torch.equal(value, state[name]), name


# Two processes with tensors cut by rows and by columns, unevenly.
SHARDED = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from transformers import AutoModelForCausalLM
rank, folder, target = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
model = AutoModelForCausalLM.from_pretrained(folder)
state = {}
for i, (name, value) in enumerate(model.state_dict().items()):
    wrapped = name.replace("h.1.", "h.1._checkpoint_wrapped_module.")
    state["_orig_mod." + wrapped] = distribute_tensor(value, mesh, [Shard(i % value.dim())]) if i % 5 else value
moments = {name: {"exp_avg": value} for name, value in state.items()}
dcp.save({"model": state, "optimizer": {"state": moments}, "step": 3}, checkpoint_id=target)
"""


def test_distributed_checkpoints_of_two_processes(tessera_program, tmp_path, gpt2):
    gpt2.save_pretrained(tmp_path / "model")
    target = tmp_path / "saved" / "pytorch_model_fsdp_0"  # as Accelerate's FSDP names it
    ranks = [subprocess.Popen([sys.executable, "-c", SHARDED, str(rank), str(tmp_path / "model"), str(target)],
                              env=environment(OMP_NUM_THREADS="1")) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert len(list(target.glob("*.distcp"))) == 2
    done = run(tessera_program, "convert", "--from", "dcp", target, "--hf_config", tmp_path / "model", "--to", "hf", tmp_path / "hf")
    assert "tensors of the optimizer are not taken over" in done.stderr
    same(load_file(tmp_path / "hf" / "model.safetensors"), gpt2)
    same(converted(tessera_program, "accelerate", target.parent, tmp_path / "hf2", "--hf_config", tmp_path / "model" / "config.json"), gpt2)
    # To Megatron's files, tensors cut in two, from the same.
    run(tessera_program, "convert", "--from", "dcp", target, "--hf_config", tmp_path / "model", "--to", "megatron", tmp_path / "mega",
        "--tensor", 2)
    same(converted(tessera_program, "megatron", tmp_path / "mega", tmp_path / "hf3"), gpt2)


def save_dcp(model, folder: Path) -> Path:
    dcp.save({"app": {"model": model.state_dict()}, "step": 1}, checkpoint_id=folder)
    config_of(model, folder)
    return folder


def test_distributed_checkpoint_of_one_process(tessera_program, tmp_path, model):
    same(converted(tessera_program, "dcp", save_dcp(model, tmp_path / "dcp"), tmp_path / "hf"), model)


def test_written_for_distributed_checkpoint(tessera_program, tmp_path, model):
    """What we write, torch.distributed.checkpoint loads into a model, cut over ranks or not; and so do we."""
    model.save_pretrained(tmp_path / "model")
    run(tessera_program, "convert", "--from", "hf", tmp_path / "model", "--to", "dcp", tmp_path / "dcp")
    again = type(model)(model.config)
    state = {"model": again.state_dict()}
    if "lm_head.weight" not in load_file(tmp_path / "model" / "model.safetensors"):
        del state["model"]["lm_head.weight"]  # tied: one of the two names is stored
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    again.load_state_dict(state["model"], strict=False)
    same(again.state_dict(), model)
    same(converted(tessera_program, "dcp", tmp_path / "dcp", tmp_path / "back"), model)
    run(tessera_program, "convert", "--from", "dcp", tmp_path / "dcp", "--to", "dcp", tmp_path / "bare", "--dcp_key", "",
        "--dtype", "bfloat16")
    bare = {name: torch.empty_like(value, dtype=torch.bfloat16) for name, value in state["model"].items()}
    dcp.load(bare, checkpoint_id=tmp_path / "bare")
    assert all(torch.equal(value, model.state_dict()[name].bfloat16()) for name, value in bare.items())
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # as its command does
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")["model"]
    assert set(whole) == set(state["model"]) and all(torch.equal(value, model.state_dict()[name]) for name, value in whole.items())


def test_metadata_that_does_not_fit(tessera_program, tmp_path, gpt2):
    whole = save_dcp(gpt2, tmp_path / "whole")

    def refused(name: str, change, *words: str) -> None:
        folder = tmp_path / name
        shutil.copytree(whole, folder)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        (folder / ".metadata").write_bytes(pickle.dumps(change(metadata, folder) or metadata))
        done = failing(tessera_program, "convert", "--from", "dcp", folder, "--to", "hf", tmp_path / "out")
        assert all(word in done.stderr for word in words), done.stderr
        assert not (tmp_path / "out").exists()

    name = "app.model.transformer.wte.weight"

    def place(metadata):
        return next(info for index, info in metadata.storage_data.items() if index.fqn == name)

    def chunk(metadata):
        return metadata.state_dict_metadata[name].chunks

    refused("outside", lambda m, _: setattr(place(m), "relative_path", "../whole/__0_0.distcp"), name, "no file of this folder")
    refused("far", lambda m, _: setattr(place(m), "offset", 10**9), "outside of the file")
    refused("packed", lambda m, _: setattr(place(m), "transform_descriptors", ["zstd"]), name, "compressed")
    refused("lost", lambda m, _: (m.storage_data.clear(), None)[1], "nothing says where")
    refused("twice", lambda m, _: chunk(m).append(chunk(m)[0]), "overlap")
    refused("less", lambda m, _: chunk(m).clear(), "its parts have 0 elements")
    refused("larger", lambda m, _: setattr(m.state_dict_metadata[name], "size", torch.Size([2**40, 2**40])), "larger than any file")
    refused("another", lambda m, _: setattr(m.state_dict_metadata[name], "size", torch.Size([60, 24])), "outside of it")
    refused("cut", lambda _, folder: (folder / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes()[:5000]) and None,
            "__0_0.distcp")
    refused("hostile", lambda m, _: subprocess.Popen, "subprocess.Popen", "no place in a checkpoint")
    refused("none", lambda m, folder: (folder / "config.json").unlink(), "config.json", "Name the model's configuration")
    llama = config_of(random_model("llama"), tmp_path / "llama")
    done = failing(tessera_program, "convert", "--from", "dcp", whole, "--hf_config", llama, "--to", "hf", tmp_path / "out")
    assert "embed_tokens.weight" in done.stderr and "config.json is that of this model" in done.stderr


def test_accelerates_folders(tessera_program, tmp_path, gpt2):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, _ = accelerator.prepare(gpt2, torch.optim.AdamW(gpt2.parameters()))
    hf = config_of(gpt2, tmp_path / "config")
    for safe in (True, False):
        folder = tmp_path / f"state{safe}"
        accelerator.save_state(str(folder), safe_serialization=safe)
        same(converted(tessera_program, "accelerate", folder, tmp_path / f"hf{safe}", "--hf_config", hf), gpt2)
    accelerator.save_model(prepared, str(tmp_path / "split"), max_shard_size="20KB", safe_serialization=False)
    assert len(list((tmp_path / "split").glob("*.bin"))) > 1
    same(converted(tessera_program, "accelerate", tmp_path / "split", tmp_path / "hf_split", "--hf_config", hf), gpt2)
    (tmp_path / "full").mkdir()
    torch.save(gpt2.state_dict(), tmp_path / "full" / "pytorch_model_fsdp.bin")
    same(converted(tessera_program, "accelerate", tmp_path / "full", tmp_path / "hf_full", "--hf_config", hf), gpt2)
    write_stage2(gpt2, tmp_path / "ds" / "pytorch_model", ranks=2)
    same(converted(tessera_program, "accelerate", tmp_path / "ds", tmp_path / "hf_ds", "--hf_config", hf), gpt2)
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "pytorch_model_fsdp_rank0.bin").touch()
    done = failing(tessera_program, "convert", "--from", "accelerate", tmp_path / "local", "--hf_config", hf, "--to", "hf", tmp_path / "x")
    assert "LOCAL_STATE_DICT" in done.stderr
    done = failing(tessera_program, "convert", "--from", "accelerate", hf, "--to", "hf", tmp_path / "x")
    assert "no model that Accelerate saved" in done.stderr


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_deepspeeds_stages(tessera_program, tmp_path, model, ranks):
    hf = config_of(model, tmp_path / "config")
    plain = write_stage2(model, tmp_path / "two", ranks)
    same(converted(tessera_program, "deepspeed", plain, tmp_path / "hf2", "--hf_config", hf), model)
    padded = write_stage2(model, tmp_path / "padded", ranks, padded=True)
    same(converted(tessera_program, "deepspeed", padded / "global_step7", tmp_path / "hf2p", "--hf_config", hf), model)
    frozen = tuple(name for name, _ in model.named_parameters() if ".1." in name)[:3]
    third = write_stage3(model, tmp_path / "three", ranks, frozen)
    same(converted(tessera_program, "deepspeed", third, tmp_path / "hf3", "--hf_config", hf), model)


def test_deepspeeds_universal_and_unpartitioned_forms(tessera_program, tmp_path, model):
    hf = config_of(model, tmp_path / "config")
    same(converted(tessera_program, "deepspeed", write_universal(model, tmp_path / "all"), tmp_path / "hf", "--hf_config", hf), model)
    for file in write_stage2(model, tmp_path / "none", 1).rglob("*optim_states.pt"):
        file.unlink()
    done = run(tessera_program, "convert", "--from", "deepspeed", tmp_path / "none", "--hf_config", hf, "--to", "hf", tmp_path / "module")
    assert "weights are as the module has them" in done.stderr
    weights = load_file(tmp_path / "module" / "model.safetensors")
    assert all(torch.equal(value, model.state_dict()[name].bfloat16()) for name, value in weights.items())


def test_deepspeeds_folders_that_do_not_fit(tessera_program, tmp_path, gpt2):
    hf = config_of(gpt2, tmp_path / "config")

    def refused(write, change, *words: str) -> None:
        folder = tmp_path / "ds"
        shutil.rmtree(folder, ignore_errors=True)
        change(write(gpt2, folder, 2) / "global_step7")
        done = failing(tessera_program, "convert", "--from", "deepspeed", folder, "--hf_config", hf, "--to", "hf", tmp_path / "out")
        assert all(word in done.stderr for word in words), done.stderr
        assert not (tmp_path / "out").exists()

    def edit(name: str, change):
        def apply(tag):
            value = torch.load(tag / name, weights_only=False)
            change(value)
            torch.save(value, tag / name)
        return apply

    optimizer, model = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"
    refused(write_stage2, lambda tag: (tag / optimizer).unlink(), "partition_count")
    refused(write_stage2, lambda tag: (tag / optimizer.replace("_1_", "_0_")).unlink(), "rank 0 is missing")
    refused(write_stage2, lambda tag: (tag / model).unlink(), "holds no file *model_states.pt")
    refused(write_stage2, lambda tag: shutil.copy(tag / model, tag / "mp_rank_01_model_states.pt"), "tensor or pipeline ranks")
    refused(write_stage2, lambda tag: (tag.parent / "latest").write_text("../x"), "latest", "no folder beside it")
    refused(write_stage2, edit(optimizer, lambda v: v["optimizer_state_dict"].update(zero_stage=1)), "zero_stage")
    refused(write_stage2, edit(model, lambda v: v["param_shapes"][0].popitem()), "its parameters")
    refused(write_stage2, edit(model, lambda v: v["param_shapes"].pop()), "groups")
    refused(write_stage3, lambda tag: (tag / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink(), "files of models")
    third = "zero_pp_rank_1_mp_rank_00_optim_states.pt"

    def shorten(value):
        groups = value["optimizer_state_dict"]["fp32_flat_groups"]
        groups[1] = groups[1][:-3].clone()

    refused(write_stage3, edit(third, lambda v: v["optimizer_state_dict"]["fp32_flat_groups"].pop()), "number of groups")
    refused(write_stage3, edit(third, shorten), "elements, its parameters")


def test_options_that_do_not_belong(tessera_program, tmp_path):
    done = failing(tessera_program, "convert", "--from", "hf", tmp_path, "--to", "deepspeed", tmp_path / "out")
    assert "--to deepspeed: these folders are read, not written" in done.stderr
    done = failing(tessera_program, "convert", "--from", "hf", tmp_path, "--to", "tessera", tmp_path / "out", "--hf_config", tmp_path)
    assert "--hf_config is for --from dcp, deepspeed and accelerate" in done.stderr
    done = failing(tessera_program, "convert", "--from", "hf", tmp_path, "--to", "tessera", tmp_path / "out", "--dcp_key", "model")
    assert "--dcp_key is for --to dcp" in done.stderr
