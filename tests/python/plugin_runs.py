"""What a run shows of the plugin: each function makes one with these fields and returns what can be seen of it."""

import logging
import tempfile
from pathlib import Path
from types import SimpleNamespace

import plugin_support
import torch
from plugin_support import IDS, indexed, make_model, prepared, step

from tessera import Accelerator
from tessera.causal_lm import CausalLM
from tessera.errors import Error
from tessera.utils import GPTTrainStep, MegatronLMDummyDataLoader, MegatronLMDummyScheduler, MegatronLMPlugin
from tessera.utils.megatron_lm import avg_losses_across_data_parallel_group

BATCH = {"input_ids": IDS, "labels": IDS}
NEW = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 16, "resid_pdrop": 0.0,
       "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def second_loss(**fields) -> float:
    """After a step of SGD."""
    made = prepared(optimizer=sgd, **fields)
    step(*made)
    return step(*made)


def weights(decay: float = 0.5, **fields) -> list:
    accelerator, model, optimizer = prepared(**fields)
    optimizer.param_groups[0]["weight_decay"] = decay
    step(accelerator, model, optimizer)
    return [value.sum().item() for value in model.state_dict().values()]


def new_model(config=NEW, **fields) -> tuple:
    """Loss and number of parameters of a model that has no weights yet."""
    plugin_support.forget_states()
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**fields))
    model = accelerator.prepare(CausalLM(config))
    return float(model(IDS.numpy(), labels=IDS.numpy()).loss), model.session.engine.elements_held


def peak_bytes(mixed_precision=None, **fields) -> int:
    """The most bytes that the engine held in a step of four layers."""
    def deep(model):
        return make_model(n_layer=4, n_embd=32, n_positions=64)

    accelerator, model, optimizer = prepared(change=deep, mixed_precision=mixed_precision, **fields)
    ids = torch.randint(0, 40, (8, 64), generator=torch.Generator().manual_seed(2))
    step(accelerator, model, optimizer, {"input_ids": ids, "labels": ids})
    return model.session.engine.peak_bytes


def where_state_lies(**fields) -> list:
    """What the log says of it after a step; this is a run on the CPU."""
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("tessera").addHandler(handler)
    try:
        second_loss(**fields)
    finally:
        logging.getLogger("tessera").removeHandler(handler)
    return [text for text in texts if "offload" in text]


def loaded(sizes=(2,), **fields) -> list:
    """The shapes of the first batches of loaders with these batch sizes, and the plugin's micro-batch."""
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1)]
    made = prepared(*[torch.utils.data.DataLoader(rows, batch_size=size) for size in sizes], **fields)
    return [tuple(next(iter(loader))["input_ids"].shape) for loader in made[3:]] + [made[0].state.megatron_lm_plugin.micro_batch_size]


def rates(**fields) -> list:
    """(learning rate, weight decay) of six steps."""
    accelerator, model, optimizer, scheduler = prepared(lambda optimizer: MegatronLMDummyScheduler(optimizer), **fields)
    found = []
    for _ in range(6):
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]))
        scheduler.step()
    return found


def too_long(**fields) -> str:
    return failure(lambda: step(*prepared(**fields)))


def encoder_too_long(**fields) -> str:
    return failure(lambda: step(*prepared(change=lambda model: plugin_support.make_encoder(), **fields)))


def failure(run) -> str:
    try:
        run()
    except (Error, ValueError, NotImplementedError) as error:
        return str(error)
    return ""


def indexed_run(loader=None, **fields) -> SimpleNamespace:
    """Over .idx/.bin: numbers of samples, the first batch, what was kept of the index files."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"data_path": indexed(Path(folder)), "split": "900,50,50", "seq_length": 8, "micro_batch_size": 2, **(loader or {})}
        dummy = MegatronLMDummyDataLoader(**{name: value for name, value in given.items() if value is not None})
        run = {"train_iters": 4, "eval_iters": 1, "eval_interval": 2, **fields}
        made = prepared(lambda optimizer: MegatronLMDummyScheduler(optimizer), dummy, dummy, dummy, **run)
        loaders = [loader for loader in made[4:] if loader is not None]
        return SimpleNamespace(counts=[len(each.dataset) for each in loaders], text=next(loaders[0])["text"].tolist())


def sample_counts(**fields) -> list:
    return indexed_run(**fields).counts


def first_text(**fields) -> list:
    return indexed_run(**fields).text


def own_provider(counts):
    return tuple([{"text": torch.full((9,), i % 40).numpy()} for i in range(count)] for count in counts)


def flags(**fields) -> list:
    """What a custom step's get_batch_func hears."""
    heard = []

    class Step(GPTTrainStep):
        def get_batch_func(self, accelerator, megatron_dataset_flag):
            heard.append(megatron_dataset_flag)
            return super().get_batch_func(accelerator, megatron_dataset_flag)

    prepared(custom_train_step_class=Step, **fields)
    return heard


def scalars(**fields) -> set:
    """The files of tensorboard_dir, which stands for a new folder, and the names in them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as folder:
        if "tensorboard_dir" in fields or "tensorboard_dir" in (fields.get("other_megatron_args") or {}):
            place = fields if "tensorboard_dir" in fields else fields["other_megatron_args"]
            place["tensorboard_dir"] = folder
        accelerator, model, optimizer = prepared(**fields)
        for _ in range(2):
            step(accelerator, model, optimizer)
        accelerator.free_memory()
        events = EventAccumulator(folder)
        events.Reload()
        return set(events.Tags()["scalars"])


def logits(**fields) -> bool:
    return prepared(**fields)[1](**BATCH).logits is not None


def not_finite(**fields) -> str:
    accelerator, model, optimizer = prepared(**fields)
    accelerator.backward(model(**BATCH).loss * float("inf"))
    return failure(optimizer.step)


def third_loss_after_loading(**fields) -> list:
    """Two losses after load_state of a state with moments."""
    with tempfile.TemporaryDirectory() as folder:
        accelerator, model, optimizer = prepared()
        step(accelerator, model, optimizer)
        accelerator.save_state(folder)
        made = prepared(**fields)
        made[0].load_state(folder)
        return [step(*made) for _ in range(3)]


def saved_bytes(**fields) -> int:
    with tempfile.TemporaryDirectory() as folder:
        made = prepared(**fields)
        step(*made)
        made[0].save_state(folder)
        return sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))


def tripled(loss_mask, losses):
    loss = (losses.float() * loss_mask).sum() / loss_mask.sum() * 3.0
    return loss, {"tripled": avg_losses_across_data_parallel_group([loss])[0]}


def first_tokens(data_iterator):
    """A get_batch of one's own: half of the sequence."""
    ids = next(data_iterator)["input_ids"][:, :4]
    labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    return ids, labels, (labels != -100).float(), None, None


class Scaled(GPTTrainStep):
    def __init__(self, args, *, factor=2.0):
        self.factor = factor
        super().__init__(args)

    def get_loss_func(self, accelerator=None):
        def loss_func(loss_mask, losses):
            loss = tripled(loss_mask, losses)[0] / 3.0 * self.factor
            return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}

        return loss_func


def said(caplog, run) -> list:
    """The warnings of a run."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tessera"):
        run()
    return [record.getMessage() for record in caplog.records if record.name.startswith("tessera")]
