"""Tiny Transformers models, and changes of one thing at a time: of a config, a module, the tree of modules, an optimizer."""

import copy
import dataclasses
import types
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Tuple

import torch
import transformers
from torch import nn

WIDTH, VOCAB, POSITIONS = 32, 97, 64
SIZES = dict(hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
             vocab_size=VOCAB, max_position_embeddings=POSITIONS, bos_token_id=0, eos_token_id=0)
CONFIGS = {
    "gpt2": (transformers.GPT2Config, dict(n_layer=2, n_embd=WIDTH, n_head=4, vocab_size=VOCAB, n_positions=POSITIONS, resid_pdrop=0.0,
                                           embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)),
    "llama": (transformers.LlamaConfig, SIZES),
    "mistral": (transformers.MistralConfig, SIZES | {"sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, SIZES),
    "gpt_bigcode": (transformers.GPTBigCodeConfig, dict(n_layer=2, n_embd=WIDTH, n_head=4, vocab_size=VOCAB, n_positions=POSITIONS,
                                                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)),
    "starcoder2": (transformers.Starcoder2Config, SIZES),
    "gpt_neox": (transformers.GPTNeoXConfig, {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}),
}
ENCODER = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"} | {
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# By class, as its config does not say which head it is.
ENCODERS = {
    "BertForMaskedLM": (transformers.BertConfig, ENCODER),
    "BertForPreTraining": (transformers.BertConfig, ENCODER),
    "MegatronBertForSequenceClassification": (transformers.MegatronBertConfig, ENCODER | {"num_labels": 3}),
}
# Fields of a config whose other values do not follow from their type, and fields that a class does not list but code reads.
ROPES = [{"rope_type": "default", "rope_theta": 500.0}, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
         {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
         {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
         {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8},
         {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
          "original_max_position_embeddings": 8},
         {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}]
VALUES = {
    "activation_function": ["gelu", "relu", "silu", "gelu_pytorch_tanh", "gelu_fast", "tanh", "quick_gelu"],
    "hidden_act": ["gelu", "relu", "swish", "gelu_new"], "n_inner": [40, 128], "pad_token_id": [0, 5, 96, -1],
    "head_dim": [16, 4], "rope_parameters": ROPES, "num_key_value_heads": [1, 4, None], "num_attention_heads": [2, 8],
    "n_head": [2, 8], "num_hidden_layers": [1, 3], "n_layer": [1, 3], "vocab_size": [98, 128], "n_positions": [65, 12, 8],
    "max_position_embeddings": [12, 8, 128], "sliding_window": [4, 11, 64, None], "max_window_layers": [0, 1],
    "layer_types": [["full_attention", "sliding_attention"], ["full_attention"] * 2], "hidden_size": [48], "n_embd": [48],
    "intermediate_size": [40], "bos_token_id": [3], "eos_token_id": [3, [3, 4]], "dtype": ["bfloat16"],
    "architectures": [["OtherForCausalLM"], None], "problem_type": ["regression"], "id2label": [{0: "a"}], "label2id": [{"a": 0}],
    "summary_activation": ["tanh"], "summary_type": ["last"], "transformers_version": ["4.0.0"], "pretraining_tp": [2],
    "use_sliding_window": [True], "initializer_range": [0.5], "rms_norm_eps": [1e-2], "layer_norm_epsilon": [1e-2],
    "attention_dropout": [0.3], "resid_pdrop": [0.3], "embd_pdrop": [0.3], "attn_pdrop": [0.3], "summary_first_dropout": [0.3],
    "name_or_path": ["elsewhere"], "hidden_dropout_prob": [0.3], "attention_probs_dropout_prob": [0.3], "classifier_dropout": [0.3],
    "type_vocab_size": [3], "layer_norm_eps": [1e-2]}
UNLISTED = {"is_causal": False, "output_attentions": True, "attention_chunk_size": 4, "quantization_config": {"quant_method": "fp8"},
            "loss_type": "ForMaskedLM", "attention_bias": True, "mlp_bias": True, "use_sliding_window": True, "num_labels": 3,
            "scale_attn_weights": False, "add_cross_attention": True, "rope_theta": 500.0, "layer_types": ["sliding_attention"] * 2,
            "tie_word_embeddings": True, "hidden_activation": "relu", "my_own_note": "x", "is_decoder": True, "pruned_heads": {},
            "_attn_implementation": "eager", "residual_multiplier": 2.0, "logits_scaling": 2.0, "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 1.0, "partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}


@dataclass
class Mutation:
    """One change. `config`: of the keywords that the config is made with; `model`: of the model that it makes, in place
    unless another one is returned."""

    name: str
    config: dict = field(default_factory=dict)
    model: Callable[[Any], Any] = lambda model: None
    words: Tuple[str, ...] = ()  # one of which a refusal has


def make(family: str, mutation: Mutation) -> nn.Module:
    torch.manual_seed(11)
    kind, keywords = {**CONFIGS, **ENCODERS}[family]
    config = kind(**{**keywords, **mutation.config})
    model = getattr(transformers, family)(config) if family in ENCODERS else transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # norms and biases count in every number
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter.dtype) * 0.05)
    changed = mutation.model(model)
    return model if changed is None else changed


def base(model: Any) -> nn.Module:
    return model.transformer if hasattr(model, "transformer") else model.model


def layers(model: Any) -> nn.ModuleList:
    return base(model).h if hasattr(model, "transformer") else base(model).layers


# Of the config, before the model is made from it and after.

def other_values(key: str, value: Any) -> list:
    if key in VALUES:
        return [other for other in VALUES[key] if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1]
    raise AssertionError(f"a new field of a config: give VALUES another value of {key} than {value!r}")


def of_config(family: str) -> Iterator[Mutation]:
    kind, keywords = {**CONFIGS, **ENCODERS}[family]
    config = kind(**keywords)
    names = [each.name for each in dataclasses.fields(kind) if hasattr(config, each.name)]
    changes = [(key, other) for key in names for other in other_values(key, getattr(config, key))]
    changes += [(key, value) for key, value in UNLISTED.items() if key not in names]
    for key, value in changes:
        words = (key, *WORDS.get(key, ()))
        if key != "transformers_version":
            yield Mutation(f"config {key}={value}", config={key: value}, words=words)
        yield Mutation(f"config of the model {key}={value}", model=lambda model, k=key, v=value: setattr(model.config, k, v),
                       words=words)


# What a refusal may say instead of a config's field: where its value went.
WORDS = {
    "hidden_act": ("act_fn", "mlp.act"), "use_bias": ("bias",), "norm_epsilon": ("eps",), "activation_function": ("act",), "rms_norm_eps": ("variance_epsilon",), "layer_norm_epsilon": ("eps",),
    "num_attention_heads": ("num_heads", "num_key_value_groups", "head_dim", "head_size", "q_proj"), "n_head": ("num_heads",),
    "num_key_value_heads": ("num_key_value_groups", "k_proj", "a field of it was changed"), "num_hidden_layers": ("layers",), "n_layer": ("layers",),
    "vocab_size": ("num_embeddings",), "hidden_size": ("embedding_dim", "rotary positions"), "n_embd": ("embed_dim",), "n_inner": ("c_fc", "nf"),
    "intermediate_size": ("gate_proj", "c_fc", "dense_h_to_4h", "intermediate"), "type_vocab_size": ("token_type",), "id2label": ("num_labels",), "layer_norm_eps": ("eps",), "n_positions": ("wpe", "position"), "max_position_embeddings": ("position",),
    "rope_parameters": ("rope", "inv_freq", "rope_type", "rotary", "a field of it was changed"), "head_dim": ("head_dim",), "tie_word_embeddings": ("head", "decoder.weight"),
    "pad_token_id": ("padding_id", "padding_idx"), "rope_scaling": ("rope", "a field of it was changed"), "rope_theta": ("inv_freq", "rope"),
    "attention_bias": ("bias",), "mlp_bias": ("bias",), "dtype": ("dtype",), "partial_rotary_factor": ("rotary", "rope"),
    "resid_pdrop": ("dropout",), "embd_pdrop": ("dropout",), "attn_pdrop": ("dropout",), "architectures": ("architectures",),
    "sliding_window": ("window", "sliding"), "layer_types": ("layer_type", "sliding", "a field of it was changed"), "add_cross_attention": ("crossattention", "cross-attention", "a field of it was changed"),
    "use_sliding_window": ("sliding",), "max_window_layers": ("window", "sliding"), "_attn_implementation": ("attn",),
}


# Of modules' attributes: each once, on the last layer and outside layers.

def of_attributes(family: str) -> Iterator[Mutation]:
    model = make(family, Mutation("none"))
    for name, module in model.named_modules():
        if ".0." in name or name.endswith(".0"):
            continue
        for key, value in vars(module).items():
            if key.startswith("_") or key in ("layer_idx", "config", "generation_config", "name_or_path", "kernel_config", "warnings_issued"):
                continue
            for other in attribute_values(key, value):
                yield Mutation(f"attribute {name}.{key}={other if not callable(other) else 'function'}",
                               model=lambda model, n=name, k=key, v=other: setattr(model.get_submodule(n), k, v),
                               words=(key, *(("eval mode",) if key == "training" else ()), *(("loss_function",) if key == "loss_type" else ())))


def attribute_values(key: str, value: Any) -> list:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(1, value // 2)]
    if isinstance(value, float):
        return [value + 0.25]
    if key in ("padding_idx", "sliding_window"):
        return [3]
    if key == "max_norm":
        return [0.5]
    if isinstance(value, str):
        return ["linear", "other"]
    return [lambda x, *more: x * 0.5] if callable(value) else []


# Of parameters: frozen, hooked, of another shape or type, shared.

def of_parameters(family: str) -> Iterator[Mutation]:
    model = make(family, Mutation("none"))
    for name, _ in model.named_parameters():
        def frozen(model, name=name):
            model.get_parameter(name).requires_grad_(False)

        yield Mutation(f"parameter {name} frozen", model=frozen, words=(name, name.rpartition(".")[0]))
        if ".0." in name:
            continue

        def reshaped(model, name=name):
            owner, _, key = name.rpartition(".")
            old = model.get_parameter(name)
            setattr(model.get_submodule(owner), key, nn.Parameter(torch.cat([old, old[:1]]).detach()))

        def absent(model, name=name):
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, None)

        def hooked(model, name=name):
            model.get_parameter(name).register_hook(lambda gradient: gradient * 0.5)

        def mixed(model, name=name):
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.to(torch.bfloat16)

        for what, change in (("reshaped", reshaped), ("absent", absent), ("with a hook", hooked), ("in bfloat16", mixed)):
            yield Mutation(f"parameter {name} {what}", model=change, words=(name, "dtype"))


# Of the tree of modules and what hangs on it.

class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.5


class Adapted(nn.Module):
    """As adapters do it: a module around a module."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.base_layer = inside
        self.low = nn.Parameter(torch.zeros(1))

    def forward(self, *given, **named):
        return self.base_layer(*given, **named)


class Around(nn.Module):
    """A model around a model, with its config, under a name that ends as a language model's."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.base_model, self.config = inside, inside.config

    def forward(self, **given):
        return self.base_model(**given)


Around.__name__ = Around.__qualname__ = "PeftModelForCausalLM"


def subclassed(model: Any, at: str, **members: Any) -> None:
    module = model.get_submodule(at)
    module.__class__ = type(f"My{type(module).__name__}", (type(module),), members)


def halved(self, *given, **named):
    out = super(type(self), self).forward(*given, **named)
    if hasattr(out, "loss"):
        out.loss = out.loss * 0.5
        return out
    return tuple(each * 0.5 if torch.is_tensor(each) else each for each in out) if isinstance(out, tuple) else out * 0.5


def instance_forward(model: Any, at: str) -> None:
    module = model.get_submodule(at)
    old = module.forward
    module.forward = types.MethodType(lambda self, *given, **named: halve(old(*given, **named)), module)


def halve(out: Any) -> Any:
    if hasattr(out, "loss"):
        out.loss = out.loss * 0.5
        return out
    return tuple(each * 0.5 if torch.is_tensor(each) else each for each in out) if isinstance(out, tuple) else out * 0.5


def my_loss(logits, labels, vocab_size, **others):
    return logits.float().pow(2).mean()


def head_of_its_own(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)


def head_of_the_embedding(model: Any) -> None:
    model.lm_head.weight = model.get_input_embeddings().weight


def replaced(at: str, new: Callable[[nn.Module], nn.Module]) -> Callable[[Any], None]:
    def change(model):
        owner, _, key = at.rpartition(".")
        setattr(model.get_submodule(owner), key, new(model.get_submodule(at)))

    return change


def on(at: str, call: Callable[[nn.Module], Any]) -> Callable[[Any], None]:
    def change(model):
        call(model.get_submodule(at))

    return change


def with_layers(change: Callable[[list], list]) -> Callable[[Any], None]:
    def apply(model):
        new = nn.ModuleList(change(list(layers(model))))
        setattr(base(model), "h" if hasattr(model, "transformer") else "layers", new)

    return apply


def of_tree(family: str) -> Iterator[Mutation]:
    gpt2 = family == "gpt2"
    root = "transformer" if gpt2 else "model"
    layer = f"{root}.{'h' if gpt2 else 'layers'}.1"
    attention, mlp = (f"{layer}.attn", f"{layer}.mlp") if gpt2 else (f"{layer}.self_attn", f"{layer}.mlp")
    linear = f"{mlp}.c_fc" if gpt2 else f"{mlp}.up_proj"
    norm = f"{layer}.ln_1" if gpt2 else f"{layer}.input_layernorm"
    table = f"{root}.wte" if gpt2 else f"{root}.embed_tokens"
    activation = f"{mlp}.act" if gpt2 else f"{mlp}.act_fn"

    def tree(name: str, change: Callable[[Any], Any], *words: str) -> Mutation:
        return Mutation(f"tree: {name}", model=change, words=words)

    for name, change in {"one layer fewer": lambda own: own[:1], "one more": lambda own: own + [copy.deepcopy(own[0])],
                         "a layer twice": lambda own: [own[0], own[0]], "layers swapped": lambda own: own[::-1],
                         "a layer is Identity": lambda own: [own[0], nn.Identity()]}.items():
        yield tree(name, with_layers(change), "layers", "h.1")
    yield tree("own head", head_of_its_own, "tie_word_embeddings")
    yield tree("tied head", head_of_the_embedding, "tie_word_embeddings")
    yield tree("head shares memory", lambda model: setattr(model.lm_head.weight, "data", model.get_input_embeddings().weight.data),
               "lm_head")
    yield tree("head with bias", replaced("lm_head", lambda old: nn.Linear(WIDTH, VOCAB)), "lm_head")
    yield tree("two norms are one", replaced(norm, lambda old: old), "nothing")

    def shared_norm(model):
        owner, _, key = norm.rpartition(".")
        first = model.get_submodule(norm.replace(".1.", ".0."))
        setattr(model.get_submodule(owner), key, first)

    yield tree("layers share a norm", shared_norm, norm)
    for at, new in ((norm, lambda old: nn.LayerNorm(WIDTH)), (norm, lambda old: nn.Identity()), (activation, lambda old: nn.ReLU()),
                    (activation, lambda old: nn.Tanh()), (linear, lambda old: Adapted(old)), (attention, lambda old: Adapted(old)),
                    (mlp, lambda old: nn.Identity()), (linear, lambda old: nn.Sequential(old)),
                    (table, lambda old: nn.Embedding(VOCAB, WIDTH, padding_idx=3, max_norm=1.0)),
                    (linear, lambda old: torch.compile(old, backend="eager"))):
        yield tree(f"{at} replaced by {type(new(nn.Linear(1, 1))).__name__}", replaced(at, new), at)
    for at in ("", root, layer, attention, mlp, linear, norm, table, "lm_head", activation):
        label = at or "model"
        yield tree(f"forward of a subclass at {label}", lambda model, at=at: subclassed(model, at, forward=halved), "forward")
        yield tree(f"a subclass at {label} that adds a method",
                   lambda model, at=at: subclassed(model, at, helpful=lambda self: 1), "helpful")
        yield tree(f"instance's forward at {label}", lambda model, at=at: instance_forward(model, at), "forward")
        for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
            yield tree(f"{kind} at {label}", on(at, lambda module, kind=kind: getattr(module, f"register_{kind}")(
                lambda *given: None)), "hook")
    yield tree("state_dict hook", on(layer, lambda module: module.register_state_dict_post_hook(lambda *given: None)), "hook")
    yield tree("loss_function", lambda model: setattr(model, "loss_function", my_loss), "loss_function")
    yield tree("loss_type", lambda model: setattr(model, "loss_type", "ForMaskedLM"), "loss_function")
    yield tree("loss of a subclass", lambda model: subclassed(model, "", loss_function=property(lambda self: my_loss)),
               "loss_function")
    yield tree("parametrised", on(linear, lambda module: nn.utils.parametrize.register_parametrization(
        module, "weight", nn.Tanh())), "Parametrized")
    yield tree("weight_norm", on(linear, lambda module: nn.utils.parametrizations.weight_norm(module)), "Parametrized")
    yield tree("pruned", on(linear, prune), "hook", "weight")
    yield tree("extra module", on(layer, lambda module: module.add_module("extra", nn.Linear(3, 3))), "extra")
    yield tree("extra parameter", on(layer, lambda module: module.register_parameter("extra", nn.Parameter(torch.ones(2)))), "extra")
    yield tree("extra buffer", on(layer, lambda module: module.register_buffer("extra", torch.ones(2))), "extra")
    yield tree("post-accumulate hook", lambda model: model.get_parameter(f"{norm}.weight").register_post_accumulate_grad_hook(
        lambda parameter: None) and None, "hook")
    yield tree("attribute deleted", on(attention, lambda module: delattr(module, "scaling")), "scaling")
    yield tree("own config of a layer", lambda model: setattr(model.get_submodule(attention), "config", other_config(model)),
               "config")
    yield tree("DataParallel", nn.DataParallel, "config")
    yield tree("a model around it", Around, "PeftModelForCausalLM")
    yield tree("base model alone", base, "head")
    yield tree("float64", lambda model: model.double(), "dtype")
    yield tree("eval mode of one layer", on(layer, lambda module: module.eval()), "eval")
    yield tree("eval mode", lambda model: model.eval(), "eval")
    yield tree("checkpointed", lambda model: model.gradient_checkpointing_enable(), "checkpointing")
    yield tree("compiled", lambda model: torch.compile(model, backend="eager"), "compile")
    yield tree("hidden states were asked for", lambda model: model(torch.zeros(1, 3, dtype=torch.long),
                                                                   output_hidden_states=True) and None, "hook")
    yield tree("resized", lambda model: model.resize_token_embeddings(101, mean_resizing=False) and None, "vocab_size")
    if gpt2:
        yield tree("Conv1D replaced by Linear", replaced(linear, lambda old: nn.Linear(WIDTH, 4 * WIDTH)), linear)
        for at in (f"{root}.drop", f"{attention}.attn_dropout", f"{attention}.resid_dropout", f"{mlp}.dropout"):
            yield tree(f"{at} is Identity", replaced(at, lambda old: nn.Identity()), at)
        return
    for key in ("inv_freq", "original_inv_freq"):
        yield tree(key, on(f"{root}.rotary_emb", lambda module, key=key: getattr(module, key).mul_(0.5)), key)


def prune(module: nn.Module) -> None:
    from torch.nn.utils import prune as pruning

    pruning.l1_unstructured(module, "weight", amount=0.5)


def other_config(model: Any) -> Any:
    config = copy.deepcopy(model.config)
    config.vocab_size = 5
    return config


# Of the optimizer.

ADAM = dict(lr=[1e-2, torch.tensor(1e-2), 0.0], betas=[(0.5, 0.9), (0.0, 0.0)], eps=[1e-2, 0.1], weight_decay=[0.3, 0.0],
            amsgrad=[True], maximize=[True], foreach=[True, False], capturable=[True], differentiable=[True], fused=[True])
SGD = dict(lr=[0.5], momentum=[0.9], dampening=[0.5], weight_decay=[0.3], nesterov=[True], maximize=[True], foreach=[True],
           differentiable=[True], fused=[True])


def of_optimizer() -> Iterator[Tuple[str, Callable[[Any], Any], Tuple[str, ...]]]:
    """Name, maker from a model, words."""
    for kind, options in ((torch.optim.AdamW, ADAM), (torch.optim.Adam, ADAM), (torch.optim.SGD, SGD)):
        # Where a gradient is zero but for rounding, a small eps would make a whole step of it.
        usual = {"lr": 1e-3} if kind is torch.optim.SGD else {"lr": 1e-3, "eps": 1e-3}
        for key, values in options.items():
            for value in values:
                given = usual | {key: value}
                if key in ("dampening", "nesterov"):
                    given["momentum"] = 0.8
                yield f"{kind.__name__} {key}={value}", lambda model, kind=kind, given=given: kind(model.parameters(), **given), (key,)
                if key in ("lr", "betas", "eps", "weight_decay", "momentum"):
                    def groups(model, kind=kind, key=key, value=value, usual=usual):
                        first, *others = model.parameters()
                        return kind([{"params": [first], key: value}, {"params": others}], **usual)

                    yield f"{kind.__name__} {key}={value} of one group", groups, (key,)
    for name in ("Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "Adadelta", "Adafactor"):
        yield name, lambda model, name=name: getattr(torch.optim, name)(model.parameters(), lr=1e-3), (name,)
    yield "a part of the parameters", lambda model: torch.optim.AdamW(list(model.parameters())[2:5], eps=1e-3), ("parameters",)
