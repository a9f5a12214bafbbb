"""What scripts do with the model, its parameters and the optimizer after prepare(), beside plain PyTorch. Rank 0 writes, by
layout, how far numbers are apart and what was said, as JSON. Arguments: output, then layouts tp,pp,zero."""

import copy
import io
import sys

from results import fresh_states, write_results
import torch
import transformers

from tessera import Accelerator
from tessera.utils import MegatronLMPlugin, full_parameters, load_parameters

IDS = torch.randint(0, 40, (4, 8), generator=torch.Generator().manual_seed(2))


def gpt2() -> torch.nn.Module:
    torch.manual_seed(4)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0))


def llama() -> torch.nn.Module:
    torch.manual_seed(4)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, vocab_size=40,
        max_position_embeddings=16))


def said(action) -> str:
    """What `action` raises."""
    try:
        action()
    except (ValueError, AttributeError, RuntimeError) as error:
        return str(error)
    return ""


class Case:
    """One accelerator, and what a data rank has of a batch."""

    def __init__(self, tp: int, pp: int, zero: int):
        self.accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(
            tp_degree=tp, pp_degree=pp, gradient_clipping=0.0, use_distributed_optimizer=bool(zero)))
        mesh = self.accelerator.state.mesh
        part = len(IDS) // mesh.dp
        self.ids = IDS[mesh.coordinates["dp"] * part:][:part]

    def backward(self, model: torch.nn.Module) -> None:
        self.accelerator.backward(model(input_ids=self.ids, labels=self.ids).loss)

    def evaluate(self, model: torch.nn.Module) -> float:
        model.eval()
        loss = model(input_ids=self.ids, labels=self.ids).loss.item()
        model.train()
        return loss

    def end(self) -> None:
        self.accelerator.free_memory()
        fresh_states()


def backward(model: torch.nn.Module) -> float:
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.item()


def apart(model: torch.nn.Module, reference: torch.nn.Module) -> float:
    return max([(value - reference.get_parameter(name)).abs().max().item() for name, value in full_parameters(model).items()], default=0.0)


def averages(case: Case) -> dict:
    """Norm and moving average of the weights; the average is evaluated, and training goes on."""
    original = gpt2()
    reference = copy.deepcopy(original)
    given = torch.optim.AdamW(original.parameters(), lr=1e-2, eps=1e-5)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-5)
    model, optimizer = case.accelerator.prepare(original, given)
    average, plain_average = full_parameters(model), copy.deepcopy(reference)
    for _ in range(3):
        case.backward(model)
        optimizer.step()
        backward(reference)
        plain.step()
        plain.zero_grad()
        for name, value in full_parameters(model).items():
            average[name].lerp_(value, 0.3)
        for mean, value in zip(plain_average.parameters(), reference.parameters()):
            mean.data.lerp_(value.data, 0.3)
    weights = full_parameters(model)
    norm = sum(value.square().sum().item() for value in weights.values()) ** 0.5
    expected = sum(value.square().sum().item() for value in reference.parameters()) ** 0.5
    load_parameters(model, average)
    found = {"averaged loss": case.evaluate(model) - plain_average(input_ids=IDS, labels=IDS).loss.item()}
    model.load_state_dict(weights)
    found["loss again"] = case.evaluate(model) - reference(input_ids=IDS, labels=IDS).loss.item()
    found["norm"] = norm - expected if case.accelerator.is_main_process else 0.0
    head = {"lm_head.weight": torch.zeros(40, 16)}
    keys = model.load_state_dict({**head, "other": torch.zeros(1)}, strict=False)
    assert keys.unexpected_keys == ["other"] and "transformer.wte.weight" not in keys.missing_keys, keys
    found["lone head"] = case.evaluate(model) - torch.tensor(40.0).log().item()
    return {"numbers": found, "said": {**refusals(model, original, given), **loads(model)}, "print": repr(model)}


def loads(model: torch.nn.Module) -> dict:
    """Values that do not fit are refused on every rank, before anything has changed."""
    bias = "transformer.ln_f.bias"
    return {"unknown name": said(lambda: load_parameters(model, {"other": torch.zeros(1)}, strict=False)),
            "missing names": said(lambda: model.load_state_dict({bias: torch.zeros(16)})),
            "shape": said(lambda: load_parameters(model, {bias: torch.zeros(3)}, strict=False)),
            "not values": said(lambda: load_parameters(model, {bias: dict(model.named_parameters())[bias]}, strict=False))}


def refusals(model: torch.nn.Module, original: torch.nn.Module, given: torch.optim.Optimizer) -> dict:
    parameter = next(model.parameters())
    assert parameter is next(original.parameters())
    actions = {
        "mul_": lambda: parameter.mul_(0), "copy_": torch.no_grad()(lambda: parameter.copy_(torch.zeros(parameter.shape))),
        "item": lambda: parameter.item(), "cpu": lambda: parameter.cpu(),
        "clone": lambda: parameter.clone(), "norm": lambda: torch.norm(parameter), "pow": lambda: (parameter ** 2).sum(),
        "data.copy_": lambda: parameter.data.copy_(parameter), "data =": lambda: setattr(parameter, "data", None),
        "init": lambda: torch.nn.init.zeros_(parameter), "save": lambda: torch.save(parameter, io.BytesIO()),
        "hook": lambda: parameter.register_hook(print), "deepcopy": lambda: copy.deepcopy(model),
        "average": lambda: torch.optim.swa_utils.AveragedModel(model), "pickle": lambda: torch.save(model, io.BytesIO()),
        "old model": lambda: original(IDS), "old state": lambda: original.state_dict(), "old step": lambda: given.step(),
        "half": lambda: model.half(), "to": lambda: model.to(torch.bfloat16), "layers": lambda: model.transformer,
        "head": lambda: model.lm_head,
        "embeddings": lambda: model.get_input_embeddings(), "step hook": lambda: given.register_step_post_hook(print) and None}
    return {name: said(action) for name, action in actions.items() if name != "step hook"}


def groups_of_one(case: Case) -> dict:
    """A group for each parameter, the optimizer made of the prepared model's; then one of them gets another rate."""
    model = llama()
    reference = copy.deepcopy(model)
    model = case.accelerator.prepare(model)

    def optimizer_of(parameters):
        return torch.optim.AdamW([{"params": [each]} for each in parameters], lr=1e-2, eps=1e-5)

    given = optimizer_of(model.parameters())
    optimizer, plain = case.accelerator.prepare(given), optimizer_of(reference.parameters())
    for _ in range(2):
        case.backward(model)
        optimizer.step()
        backward(reference)
        plain.step()
        plain.zero_grad()
    found = {"weights": apart(model, reference)}
    case.backward(model)
    optimizer.param_groups[1]["lr"] = 1.0
    return {"numbers": found, "said": {"unequal": said(optimizer.step)}}


def evaluated_first(case: Case) -> dict:
    """The optimizer comes when the model was evaluated, and its weights changed, before."""
    model = gpt2()
    reference = copy.deepcopy(model)
    model = case.accelerator.prepare(model)
    found = {"loss": case.evaluate(model) - reference(input_ids=IDS, labels=IDS).loss.item()}
    load_parameters(model, {"transformer.ln_f.bias": torch.full((16,), 0.3)}, strict=False)
    torch.nn.init.constant_(reference.transformer.ln_f.bias, 0.3)
    optimizer = case.accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5))
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-5)
    found["loss after prepare"] = case.evaluate(model) - reference(input_ids=IDS, labels=IDS).loss.item()
    for _ in range(2):
        case.backward(model)
        optimizer.step()
        backward(reference)
        plain.step()
        plain.zero_grad()
    found["weights"] = apart(model, reference)
    return {"numbers": found, "said": {}}


def trained_first(case: Case) -> dict:
    """The optimizer comes when the model was called, and backwarded, in training mode before."""
    model = gpt2()
    reference = copy.deepcopy(model)
    model = case.accelerator.prepare(model)
    early = model(input_ids=case.ids, labels=case.ids).loss
    found = {"loss": early.item() - reference(input_ids=IDS, labels=IDS).loss.item()}
    load_parameters(model, {"transformer.ln_f.bias": torch.full((16,), 0.3)}, strict=False)
    torch.nn.init.constant_(reference.transformer.ln_f.bias, 0.3)
    case.backward(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    texts = {"gradient": said(lambda: case.accelerator.prepare(optimizer))}
    model.zero_grad()
    optimizer = case.accelerator.prepare(optimizer)
    texts["early loss"] = said(early.backward)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-5)
    for _ in range(2):
        case.backward(model)
        optimizer.step()
        optimizer.zero_grad()
        backward(reference)
        plain.step()
        plain.zero_grad()
    found["weights"] = apart(model, reference)
    return {"numbers": found, "said": texts}


def subset(case: Case) -> dict:
    """clip_grad_norm_ of all parameters, where the optimizer trains some of them and the others have the rate 0."""
    model = gpt2()
    reference = copy.deepcopy(model)

    def optimizer_of(model):
        parts = {True: [], False: []}
        for name, parameter in model.named_parameters():
            parts["mlp" in name].append(parameter)
        return torch.optim.SGD([{"params": parts[True]}, {"params": parts[False], "lr": 0.0}], lr=0.1)

    model, optimizer = case.accelerator.prepare(model, optimizer_of(model))
    plain = optimizer_of(reference)
    case.backward(model)
    backward(reference)
    norm = case.accelerator.clip_grad_norm_(model.parameters(), 0.1)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    optimizer.step()
    plain.step()
    return {"numbers": {"norm": float(norm - expected), "weights": apart(model, reference)}, "said": {}}


def penalty(case: Case) -> dict:
    """An L2 term of the loss is Adam's weight decay of twice its factor."""
    model = gpt2()
    reference = copy.deepcopy(model)
    model, optimizer = case.accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=2 * 0.3))
    plain = torch.optim.Adam(reference.parameters(), lr=1e-3, eps=1e-4)
    for _ in range(2):
        case.backward(model)
        optimizer.step()
        (0.3 * sum(p.square().sum() for p in reference.parameters())).backward()
        backward(reference)
        plain.step()
        plain.zero_grad()
    return {"numbers": {"weights": apart(model, reference)}, "said": {}}


def left_out(case: Case) -> dict:
    """An optimizer that was never prepared trains nothing, and says so."""
    original = gpt2()
    given = torch.optim.AdamW(original.parameters())
    model = case.accelerator.prepare(original)
    return {"numbers": {}, "said": {"backward": said(lambda: case.backward(model)), "step": said(given.step)}}


def refused_optimizers(case: Case) -> dict:
    """An own step() or a hook of it is refused, and the model is as before."""

    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    model = gpt2()
    hooked, wrapped = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    hooked.register_step_pre_hook(print)
    wrapped.step = lambda: None
    texts = {name: said(lambda: case.accelerator.prepare(model, optimizer)) for name, optimizer in (
        ("own step", Own(model.parameters())), ("hook", hooked), ("replaced step", wrapped))}
    scheduled = torch.optim.AdamW([model.transformer.wte.weight], lr=1e-2)  # of one parameter: a warning names the others
    torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: 1.0)  # wraps step, and is no step of one's own
    before = model.transformer.wte.weight.detach().sum().item()
    model, optimizer = case.accelerator.prepare(model, scheduled)
    parameters = full_parameters(model)
    after = parameters["transformer.wte.weight"].sum().item() if parameters else before
    texts["hook afterwards"] = said(lambda: optimizer.register_step_post_hook(print))
    return {"numbers": {"weights after refusals": after - before}, "said": texts}


def main() -> None:
    output, *layouts = sys.argv[1:]
    results = {}
    for layout in layouts:
        for run in (averages, groups_of_one, evaluated_first, trained_first, subset, penalty, left_out, refused_optimizers):
            case = Case(*map(int, layout.split(",")))
            results[f"{run.__name__} {layout}"] = run(case)
            case.end()
    write_results(output, results)


if __name__ == "__main__":
    main()
