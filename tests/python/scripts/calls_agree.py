"""Ranks of a script that come apart. The last rank does something else than the others, in each planted case; rank 0 writes
as JSON what every rank was told, and losses with batches that peers had to give. Arguments: output, layouts tp,pp."""

import sys
import tempfile

from results import fresh_states, write_results
import torch
import transformers

from tessera import Accelerator
from tessera.errors import Error
from tessera.utils import MegatronLMPlugin
from tessera.utils.objects import decode, encode

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class Run:
    """What a script has in its hands; `odd` on the rank that does something else."""

    def __init__(self, tp: int, pp: int):
        torch.manual_seed(5)
        config = transformers.GPT2Config(n_layer=2, n_embd=24, n_head=4, vocab_size=97, n_positions=16, resid_pdrop=0.0,
                                         embd_pdrop=0.0, attn_pdrop=0.0)
        plugin = MegatronLMPlugin(tp_degree=tp, pp_degree=pp, num_micro_batches=1, gradient_clipping=0.0)
        self.accelerator = Accelerator(megatron_lm_plugin=plugin)
        model = transformers.GPT2LMHeadModel(config)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.odd = self.accelerator.process_index == self.accelerator.num_processes - 1
        self.whole = torch.randint(0, 97, (4, 10), generator=torch.Generator().manual_seed(7))
        mesh = self.accelerator.state.mesh
        rows = 4 // mesh.dp
        self.peers = mesh.tp * mesh.pp > 1
        self.ids = self.whole[mesh.coordinates["dp"] * rows:][:rows]

    def loss(self, ids=None, labels=None):
        ids = self.ids if ids is None else ids
        return self.model(input_ids=ids, labels=ids if labels is None else labels).loss


@case
def saves_alone(run):
    if run.odd:
        with tempfile.TemporaryDirectory() as folder:
            run.model.save_pretrained(folder)
    run.accelerator.wait_for_everyone()


@case
def main_saves_alone(run):
    if run.accelerator.is_main_process:
        with tempfile.TemporaryDirectory() as folder:
            run.model.save_pretrained(folder)
    run.accelerator.wait_for_everyone()


@case
def skips_backward(run):
    loss = run.loss()
    if not run.odd:
        loss.backward()
    run.loss()


@case
def skips_a_step(run):
    run.loss().backward()
    if not run.odd:
        run.optimizer.step()
    run.loss()


@case
def evaluates_instead(run):
    run.model.train(not run.odd)
    try:
        run.loss()
    finally:
        run.model.train()


@case
def gathers_alone(run):
    if run.odd:
        run.accelerator.check_trigger()
    run.accelerator.wait_for_everyone()


@case
def another_rate(run):
    run.loss().backward()
    run.optimizer.param_groups[0]["lr"] = 0.2 if run.odd else 0.1
    run.optimizer.step()


@case
def another_factor(run):
    (run.loss() * (2.0 if run.odd else 1.0)).backward()


@case
def another_norm(run):
    run.loss().backward()
    run.accelerator.clip_grad_norm_(run.model.parameters(), 2.0 if run.odd else 1.0)


@case
def a_label_beyond_the_vocabulary(run):
    labels = run.ids.clone()
    labels[0, 3] = 97 if run.odd else labels[0, 3]
    run.loss(labels=labels)


@case
def another_token(run):
    ids = run.ids.clone()
    ids[1, 4] = (ids[1, 4] + run.odd) % 97
    run.loss(ids)


@case
def another_token_without_labels(run):
    ids = run.ids.clone()
    ids[1, 4] = (ids[1, 4] + run.odd) % 97
    run.model.eval()
    try:
        run.model(input_ids=ids)
    finally:
        run.model.train()


@case
def another_label(run):
    labels = run.ids.clone()
    labels[0, 3] = -100 if run.odd else labels[0, 3]
    run.loss(labels=labels)


@case
def another_length(run):
    run.loss(run.ids[:, : 8 if run.odd else 10])


@case
def another_mask(run):
    mask = torch.ones_like(run.ids)
    mask[0, 8:] = 0 if run.odd else 1
    run.model(input_ids=run.ids, labels=run.ids, attention_mask=mask)


def told(run, body):
    """The error of each rank; "" where there was none."""
    text = ""
    try:
        body(run)
    except Error as error:
        text = f"{type(error).__name__}: {error}"
    run.optimizer.param_groups[0]["lr"] = 0.1
    run.model.zero_grad()
    return [decode(each) for each in run.accelerator.state.world.all_gather_bytes(encode(text))]


def losses(run, own_batch):
    """Two steps; ranks without `own_batch` come with empty hands."""
    found = []
    for step in range(2):
        ids = run.ids.roll(step, 1)
        loss = run.model(**({"input_ids": ids, "labels": ids} if own_batch else {})).loss
        run.accelerator.backward(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
        found.append(loss.item())
    return found


def main(output, layouts):
    results = {}
    for layout in layouts:
        run = Run(*map(int, layout.split(",")))
        found = results[layout] = {name: told(run, body) for name, body in CASES.items()}
        if run.peers:
            found["losses"] = losses(run, own_batch=not run.odd)
            run.accelerator.free_memory()
            fresh_states()
            run = Run(*map(int, layout.split(",")))
            found["expected"] = losses(run, own_batch=True)
        run.accelerator.free_memory()
        fresh_states()
    write_results(output, results)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
