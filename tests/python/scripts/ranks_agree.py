"""What several ranks must agree on at prepare(). Rank 0 writes JSON: losses of a script without a seed beside PyTorch's
from rank 0's weights, and for each planted disagreement what every rank was told. Arguments: output, layouts tp,pp."""

import copy
import logging
import sys

from results import fresh_states, write_results
import torch
import transformers

from tessera import Accelerator
from tessera.state import PartialState
from tessera.utils import MegatronLMPlugin, gather_object


def make_model(dropout: float = 0.0, seed: int = None) -> torch.nn.Module:
    if seed is not None:
        torch.manual_seed(seed)
    config = transformers.GPT2Config(n_layer=2, n_embd=24, n_head=4, vocab_size=97, n_positions=16, resid_pdrop=dropout,
                                     embd_pdrop=dropout, attn_pdrop=dropout)
    return transformers.GPT2LMHeadModel(config)


def accelerator_of(tp: int, pp: int, **options) -> Accelerator:
    plugin = MegatronLMPlugin(tp_degree=tp, pp_degree=pp, num_micro_batches=1, gradient_clipping=options.pop("clip", 0.0))
    return Accelerator(megatron_lm_plugin=plugin, **options)


def reset(accelerator=None) -> None:
    if accelerator is not None:
        accelerator.free_memory()
    fresh_states()


def without_a_seed(tp: int, pp: int) -> dict:
    """Every rank has a model of its own; on the last one it has no weights at all."""
    rank, size = PartialState().process_index, PartialState().num_processes
    model = make_model(seed=100 + rank)
    reference = copy.deepcopy(model)
    model.transformer.wpe.weight.requires_grad_(False)
    if rank == size - 1 and size > 2:
        model = model.to("meta")
        model.tie_weights()
    accelerator = accelerator_of(tp, pp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    plain = torch.optim.SGD([p for n, p in reference.named_parameters() if "wpe" not in n], lr=0.5)
    ids = torch.randint(0, 97, (4, 12), generator=torch.Generator().manual_seed(7))
    dp, place = accelerator.state.mesh.dp, accelerator.state.mesh.coordinates["dp"]
    rows, losses, expected = 4 // dp, [], []
    for _ in range(4):
        own = ids[place * rows: (place + 1) * rows]
        loss = model(input_ids=own, labels=own).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        loss = reference(input_ids=ids, labels=ids).loss
        loss.backward()
        plain.step()
        plain.zero_grad()
        expected.append(loss.item())
    reset(accelerator)
    return {"losses": losses, "expected": expected}


def planted(name: str, tp: int, pp: int) -> list:
    """What each rank is told where the last one differs in one thing."""
    last = PartialState().process_index == PartialState().num_processes - 1
    accelerator, told = None, "nothing"
    try:
        accelerator = accelerator_of(tp, pp, clip=0.5 if last and name == "plugin" else 0.0,
                                     gradient_accumulation_steps=2 if last and name == "accumulation" else 1)
        if name == "loader":
            accelerator.prepare_data_loader(torch.utils.data.DataLoader(list(range(8)), batch_size=2 if last else 4))
        model = make_model(dropout=0.1 if last and name == "dropout" else 0.0, seed=1)
        if last and name == "frozen":
            model.lm_head.weight.requires_grad_(False)
        decayed = [p for n, p in model.named_parameters() if p.ndim > 1 or last and name == "groups" and "ln_f" in n]
        rest = [p for p in model.parameters() if all(p is not each for each in decayed)]
        optimizer = torch.optim.AdamW([{"params": decayed}, *([{"params": rest, "weight_decay": 0.0}] if rest else [])],
                                      lr=2e-3 if last and name == "lr" else 1e-3,
                                      betas=(0.9, 0.98) if last and name == "betas" else (0.9, 0.95))
        scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 2, 20 if last and name == "schedule" else 10)
        objects = [model, optimizer, scheduler]
        if last and name == "no optimizer":
            objects[1:] = []
        if last and name == "unsupported":
            objects[1] = torch.optim.RMSprop(model.parameters())
        accelerator.prepare(*objects)
    except ValueError as error:
        told = f"{type(error).__name__}: {error}"
    reset(accelerator)
    return gather_object([told])


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    output, *layouts = sys.argv[1:]
    result = {"losses": {}, "planted": {}}
    for layout in layouts:
        tp, pp = map(int, layout.split(","))
        result["losses"][layout] = without_a_seed(tp, pp)
        names = ["plugin", "accumulation", "dropout", "frozen", "groups", "lr", "betas", "schedule", "no optimizer", "unsupported",
                 "loader"]
        result["planted"][layout] = {name: planted(name, tp, pp) for name in names}
    write_results(output, result)


if __name__ == "__main__":
    main()
