"""What is written for Megatron Core, against its own classes, where megatron-core is installed (PyPI, without its dependencies)."""

import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("megatron.core")
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, _get_param_groups  # noqa: E402
from megatron_core_support import call, gpt, one_process  # noqa: E402
from megatron_runs import buffer  # noqa: E402
from test_megatron_runs import TOKENS, Started, to_megatron, to_run  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Megatron Core's model of one rank on the CPU."""
    with one_process(tmp_path_factory.mktemp("store")):
        yield gpt().eval()


def test_it_loads_and_numbers_parameters_alike(tessera_program, tmp_path, model):
    started = Started("gpt2")
    to_run(tessera_program, started.write(tmp_path / "megatron"), tmp_path / "run")
    folder = to_megatron(tessera_program, tmp_path / "run", tmp_path / "again", "--names", "local")
    state = torch.load(folder / "iter_0000003/mp_rank_00/model_optim_rng.pt", weights_only=False)
    model.load_state_dict(state["model"])
    tokens = TOKENS[None, :-1]
    with torch.no_grad():
        torch.testing.assert_close(call(model, tokens)[..., :61], started.model.eval()(tokens).logits, rtol=1e-5, atol=1e-5)

    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = _get_param_groups([model], OptimizerConfig(lr=1e-3, min_lr=1e-4, weight_decay=0.1), None)
    numbers = {}
    for theirs, ours in zip(groups, state["optimizer"]["param_groups"]):
        assert theirs["wd_mult"] == ours["wd_mult"] and len(theirs["params"]) == len(ours["params"])
        numbers |= {names[parameter]: number for parameter, number in zip(theirs["params"], ours["params"])}
    averages = dict(started.averages.named_parameters())
    for layer in range(4):
        for name, wanted in (("self_attention.linear_proj.bias", "attn.c_proj.bias"), ("input_layernorm.weight", "ln_1.weight"),
                             ("mlp.linear_fc1.weight", "mlp.c_fc.weight"), ("pre_mlp_layernorm.bias", "ln_2.bias")):
            value = averages[f"transformer.h.{layer}.{wanted}"]
            found = state["optimizer"]["state"][numbers[f"decoder.layers.{layer}.{name}"]]["exp_avg"]
            assert torch.equal(found, value.T if value.dim() == 2 else value), (layer, name)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [None, 500, 2458, 20])
def test_buckets_are_those_of_the_tests_writer(model, size, shared):
    """The distributed optimizer's buffer, from which what is read in test_megatron_runs.py is made."""
    parameters = list(model.parameters())
    parameters[0].shared_embedding = shared
    groups = types.SimpleNamespace(tp=parallel_state.get_tensor_model_parallel_group(), dp_cp=parallel_state.get_data_parallel_group())
    whole = _ParamAndGradBuffer(DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=size),
                                torch.float32, torch.float32, parameters, groups.dp_cp, size,
                                {parameter: name for name, parameter in model.named_parameters()}, 1.0, list(range(len(parameters))),
                                False, groups)
    found = torch.cat([whole.param_data[bucket.offset:bucket.offset + bucket.numel_unpadded] for bucket in whole.buckets])
    values = [(i == 0 and shared, [parameter.detach()] * 3) for i, parameter in enumerate(parameters)]
    assert torch.equal(found, buffer(values, size)["param"])
