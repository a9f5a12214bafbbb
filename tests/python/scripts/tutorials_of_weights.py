"""Scripts that read and write weights while they train, beside plain PyTorch; see tutorials.py."""

import copy

import torch

from tessera import Accelerator
from tessera.utils import full_parameters
from tutorials import Differences, collate, evaluate, gpt2, lines_of, plain_evaluation, plugin_of, run, weights_apart

BATCH = 6


def average(tp: int, pp: int, micro_batches: int) -> dict:
    """An exponential moving average of the weights; the average is evaluated, then training goes on with the weights."""
    import colorsys as source
    import keyword as held_out

    decay = 0.9
    torch.manual_seed(7)
    model = gpt2()
    reference = copy.deepcopy(model)
    plain_average = copy.deepcopy(model).requires_grad_(False)
    accelerator = Accelerator(megatron_lm_plugin=plugin_of(tp, pp, micro_batches, return_logits=True, gradient_clipping=0.0))
    lines, held_lines = lines_of(source)[:53], lines_of(held_out)[:29]
    whole_batch = BATCH * accelerator.state.mesh.dp
    loaders = [torch.utils.data.DataLoader(each, batch_size=BATCH // micro_batches, collate_fn=collate) for each in (lines, held_lines)]
    model, optimizer, loader, held_loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), *loaders)
    plain_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    found = Differences()
    averaged = {name: value.clone() for name, value in full_parameters(model).items()}
    for _ in range(2):
        for step, batch in enumerate(loader):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            for name, value in full_parameters(model).items():
                averaged[name].lerp_(value, 1 - decay)
            if not accelerator.is_main_process:
                continue
            plain = reference(**collate(lines[step * whole_batch: (step + 1) * whole_batch])).loss
            plain.backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            for mean, value in zip(plain_average.parameters(), reference.parameters()):
                mean.lerp_(value, 1 - decay)
            found.note("loss", loss, plain)
        kept = {name: value.clone() for name, value in full_parameters(model).items()}
        model.load_state_dict(averaged)
        mean, accuracy, _ = evaluate(accelerator, model, held_loader, BATCH // micro_batches)
        model.load_state_dict(kept)
        if accelerator.is_main_process:
            plain_mean, plain_accuracy, _ = plain_evaluation(plain_average, held_lines, whole_batch)
            found.note("average's loss", mean, plain_mean)
            found.note("average's accuracy", accuracy, plain_accuracy)
    found["weights"] = weights_apart(model, reference)
    return found


def unfreeze(tp: int, pp: int, micro_batches: int) -> dict:
    """Gradual unfreezing: the head's norm first, then a layer more each epoch, from above."""
    import colorsys as source

    torch.manual_seed(8)
    model = gpt2(n_layer=4)
    reference = copy.deepcopy(model)
    stages = (("ln_f",), ("ln_f", ".h.3."), ("ln_f", ".h.3.", ".h.2."), ("",))

    def thaw(of, parts: tuple) -> None:
        for name, parameter in of.named_parameters():
            parameter.requires_grad_(any(part in name for part in parts))

    accelerator = Accelerator(megatron_lm_plugin=plugin_of(tp, pp, micro_batches, gradient_clipping=0.0))
    lines = lines_of(source)[:29]
    whole_batch = BATCH * accelerator.state.mesh.dp
    loader = torch.utils.data.DataLoader(lines, batch_size=BATCH // micro_batches, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4), loader)
    plain_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, eps=1e-4)
    found = Differences()
    for parts in stages:
        thaw(model, parts)
        thaw(reference, parts)
        for step, batch in enumerate(loader):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.is_main_process:
                plain = reference(**collate(lines[step * whole_batch: (step + 1) * whole_batch])).loss
                plain.backward()
                plain_optimizer.step()
                plain_optimizer.zero_grad()
                found.note("loss", loss, plain)
    found["weights"] = weights_apart(model, reference)
    return found


if __name__ == "__main__":
    run({"average": average, "unfreeze": unfreeze})
