"""Our checkpoint_reshaping_and_interoperability.py beside the one of Transformers 4, where that is installed (PyPI, 4.45 was tried)."""

import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
FOLDER = Path(transformers.__file__).parent / "models/megatron_gpt2"
if not (FOLDER / "checkpoint_reshaping_and_interoperability.py").exists():
    pytest.skip("this Transformers has no converter for Megatron", allow_module_level=True)
from megatron_runs import flat  # noqa: E402
from megatron_writer import write  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

OURS = Path(__file__).resolve().parents[2] / "examples/python"
PADDING = '''
def _vocab_size_with_padding(tokens, args):
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-tokens // multiple) * multiple
'''


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """What their program imports of Megatron: its version, and how many rows the vocabulary gets."""
    folder = tmp_path_factory.mktemp("megatron_lm")
    for package in ("megatron", "megatron/core", "megatron/training", "megatron/training/tokenizer"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
    (folder / "megatron/core/package_info.py").write_text('__version__ = "0.7.0"\n')
    (folder / "megatron/training/tokenizer/tokenizer.py").write_text(PADDING)
    return folder


def convert(python_build, program: Path, *flags) -> None:
    python_build.run(program / "checkpoint_reshaping_and_interoperability.py", *flags, plain=True, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")


def gpt2(gelu: str, inner: int):
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=61, n_positions=16, n_embd=24, n_layer=4, n_head=4, n_inner=inner, bos_token_id=0, eos_token_id=0, activation_function=gelu))
    with torch.no_grad():
        for value in model.parameters():
            value.normal_()
    return model


@pytest.mark.parametrize("tp, pp, dtype, gelu", [(1, 1, "fp32", "gelu_new"), (2, 2, "bf16", "gelu"), (4, 1, "fp16", "gelu_new"),
                                                 (1, 4, "fp32", "gelu")])
def test_to_megatron(python_build, tmp_path, megatron, tp, pp, dtype, gelu):
    gpt2(gelu, 80).save_pretrained(tmp_path / "hf", safe_serialization=False, max_shard_size="40KB")
    gpt2(gelu, 80).save_pretrained(tmp_path / "hf")
    flags = ("--load_path", tmp_path / "hf", "--target_tensor_model_parallel_size", tp, "--target_pipeline_model_parallel_size", pp,
             "--target_params_dtype", dtype, "--make_vocab_size_divisible_by", 8)
    convert(python_build, FOLDER, *flags, "--megatron-path", megatron, "--save_path", tmp_path / "theirs")
    convert(python_build, OURS, *flags, "--save_path", tmp_path / "ours")
    names = sorted(str(path.relative_to(tmp_path / "theirs")) for path in (tmp_path / "theirs").rglob("*") if path.is_file())
    assert len(names) == tp * pp + 1
    assert names == sorted(str(path.relative_to(tmp_path / "ours")) for path in (tmp_path / "ours").rglob("*") if path.is_file())
    for name in names[1:]:
        theirs, ours = (torch.load(tmp_path / side / name, weights_only=False) for side in ("theirs", "ours"))
        wanted, found = flat(theirs["model"]), flat(ours["model"])
        assert found.keys() == wanted.keys(), name
        for key, value in wanted.items():
            assert found[key].dtype == value.dtype and torch.equal(found[key], value), (name, key)
        assert ours["checkpoint_version"] == theirs["checkpoint_version"] and ours["optimizer"] == theirs["optimizer"]
        for key, value in vars(theirs["args"]).items():
            assert getattr(ours["args"], key) == value, key


@pytest.mark.parametrize("tp, pp, gelu", [(1, 1, "gelu"), (2, 2, "gelu_new"), (4, 1, "gelu_new"), (1, 4, "gelu")])
def test_to_transformers(python_build, tmp_path, tp, pp, gelu):
    """Of a folder that PyTorch wrote, in Megatron's older names, which their program knows."""
    from tokenizers import Tokenizer, models
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    write(tmp_path / "megatron", gpt2(gelu, 96), era="2021", version=3, tp=tp, pp=pp, namespace=types.SimpleNamespace)
    flags = ("--convert_checkpoint_from_megatron_to_transformers", "--load_path", tmp_path / "megatron/iter_0000007",
             "--tokenizer_name", tmp_path / "tokenizer")
    convert(python_build, FOLDER, *flags, "--save_path", tmp_path / "theirs")
    convert(python_build, OURS, *flags, "--save_path", tmp_path / "ours")
    wanted, found = torch.load(tmp_path / "theirs/pytorch_model.bin"), load_file(tmp_path / "ours/model.safetensors")
    assert torch.equal(wanted.pop("lm_head.weight"), wanted["transformer.wte.weight"])  # tied: stored once in safetensors
    wanted = {name: value for name, value in wanted.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    theirs, ours = (transformers.GPT2Config.from_pretrained(tmp_path / side) for side in ("theirs", "ours"))
    for key in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "activation_function", "layer_norm_epsilon",
                "bos_token_id", "eos_token_id", "tokenizer_class"):
        assert getattr(ours, key) == getattr(theirs, key), key
