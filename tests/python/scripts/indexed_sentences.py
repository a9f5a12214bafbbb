"""Trains a tiny encoder on .idx/.bin of sentences through MegatronLMDummyDataLoader. Rank 0 writes its losses and the numbers of the
first samples it read as JSON. Arguments: the kind of model, prefix of the data, output, micro-batches of a data rank."""

import sys

import torch
from plugin_support import make_encoder
from results import write_results

from tessera import Accelerator
from tessera.utils import MegatronLMDummyDataLoader, MegatronLMDummyScheduler, MegatronLMPlugin

STEPS = 5
RULES = dict(mask_prob=0.3, masking_max_ngram=2, short_seq_prob=0.2)


def main() -> None:
    kind, prefix, output, micro_batches = sys.argv[1:]
    model = make_encoder(kind, max_position_embeddings=24)
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(
        num_micro_batches=int(micro_batches), train_iters=STEPS, eval_iters=1, eval_interval=STEPS, other_megatron_args=RULES))
    dummy = MegatronLMDummyDataLoader(data_path=prefix, split="8,2,0", encoder_seq_length=24, micro_batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    model, optimizer, scheduler, train, valid, test = accelerator.prepare(model, optimizer, MegatronLMDummyScheduler(optimizer),
                                                                          dummy, dummy, dummy)
    assert test is None
    losses, first = [], None
    for batch in train:
        first = first or batch["text"][0].tolist()
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == STEPS:
            break
    model.eval()
    with torch.no_grad():
        losses.append(model(**next(valid)).loss.item())
    write_results(output, {"losses": losses, "first": first})


main()
