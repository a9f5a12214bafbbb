"""Names that are there for scripts to import: facts about PyTorch modules, and what only refuses."""

import pytest

from tessera.compat import foreign_functions


@pytest.fixture(scope="module")
def modeling():
    pytest.importorskip("torch")
    from tessera.utils import modeling

    return modeling


def tied():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    model[1].register_buffer("scratch", torch.zeros(2), persistent=False)
    return model


def test_sizes(modeling):
    import torch

    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2), (torch.int64, 8), (torch.bool, 1 / 8)):
        assert modeling.dtype_byte_size(dtype) == size
    assert [modeling.convert_file_size_to_int(size) for size in (7, "5GB", "200MiB")] == [7, 5 * 10**9, 200 * 2**20]
    with pytest.raises(ValueError, match="large"):
        modeling.convert_file_size_to_int("large")


def test_tensors_of_a_module(modeling):
    model = tied()
    norm = [name for name, _ in modeling.named_module_tensors(model[1])]
    assert norm == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked", "scratch"]
    assert "scratch" not in dict(modeling.named_module_tensors(model[1], remove_non_persistent=True))
    assert [name for name, _ in modeling.named_module_tensors(model, include_buffers=False, recurse=True)] == [
        "0.weight", "1.weight", "1.bias"]
    assert list(modeling.named_module_tensors(model)) == []


def test_tied_parameters(modeling):
    assert modeling.find_tied_parameters(tied()) == [["0.weight", "2.weight"]]
    assert modeling.find_tied_parameters(tied()[1]) == []
    assert not modeling.is_peft_model(tied())


def test_as_accelerate_says(modeling):
    pytest.importorskip("accelerate")
    import torch
    from accelerate.utils import modeling as theirs

    model = tied()
    for options in ({}, {"recurse": True}, {"include_buffers": False, "recurse": True}):
        own, expected = ([name for name, _ in each.named_module_tensors(model, **options)] for each in (modeling, theirs))
        assert own == expected
    for dtype in (torch.float16, torch.int8, torch.bool, torch.float64):
        assert modeling.dtype_byte_size(dtype) == theirs.dtype_byte_size(dtype)
    assert modeling.find_tied_parameters(model) == list(theirs.find_tied_parameters(model))


@pytest.mark.parametrize("name", sorted(foreign_functions._FUNCTIONS))
def test_functions_of_other_engines_refuse(name):
    with pytest.raises(NotImplementedError, match=f"^{name} is for .+, which Tessera does not run; .+"):
        foreign_functions.find(name)(1, key=2)


def test_they_are_found_where_scripts_look():
    from tessera import inference, local_sgd, parallelism_config, utils
    from tessera.utils import constants, megatron_lm

    assert utils.save_fsdp_model is foreign_functions.find("save_fsdp_model")
    assert megatron_lm.initialize.refused and local_sgd.LocalSGD.refused
    assert parallelism_config.ParallelismConfig is utils.ParallelismConfig
    assert utils.SAFE_WEIGHTS_NAME == constants.SAFE_WEIGHTS_NAME == "model.safetensors"
    with pytest.raises(NotImplementedError, match="prepare_pippy"):
        inference.prepare_pippy(None)
    for module in (utils, megatron_lm):
        with pytest.raises(AttributeError, match="no attribute 'walk'"):
            module.walk
