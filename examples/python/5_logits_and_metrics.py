"""A loss of your own on the logits, metrics over all data ranks, a log file and a progress bar.

    python examples/python/5_logits_and_metrics.py
    tessera launch --config_file examples/python/configs/megatron_tp2_pp2.yaml examples/python/5_logits_and_metrics.py

The log is runs/logits/metrics.jsonl. log_with="all" would add TensorBoard, Weights & Biases and others that are installed."""

import argparse

import torch
from text import END, VOCAB_SIZE, rows_of_text
from transformers import GPT2Config, GPT2LMHeadModel

from tessera import Accelerator
from tessera.utils import MegatronLMPlugin, set_seed, tqdm

LENGTH = 64


def smoothed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with label smoothing: [batch, seq, vocab] and [batch, seq] to one number."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--logging_dir", default="runs", help="where the folder with the log is made")
    args = parser.parse_args()

    # return_logits: outputs.logits are there beside outputs.loss. Called without labels, a model returns them anyway.
    plugin = MegatronLMPlugin(return_logits=True)
    accelerator = Accelerator(megatron_lm_plugin=plugin, log_with="jsonl", project_dir=args.logging_dir)
    accelerator.init_trackers("logits", config=vars(args))
    set_seed(7)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=VOCAB_SIZE, n_positions=LENGTH,
                                       bos_token_id=END, eos_token_id=END, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    micro_batch = 16 // (accelerator.state.mesh.dp * plugin.num_micro_batches)
    rows = rows_of_text(16 * args.steps + 20, LENGTH)
    train = torch.utils.data.DataLoader(rows[:-20], batch_size=micro_batch, shuffle=True)
    held_out = torch.utils.data.DataLoader(rows[-20:], batch_size=micro_batch)  # the last batch is short
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)

    for step, batch in enumerate(tqdm(train), start=1):  # a bar on the main process only
        outputs = model(**batch)
        loss = smoothed_loss(outputs.logits, batch["labels"])
        accelerator.backward(loss)  # through torch to the logits, then through the engine
        optimizer.step()
        optimizer.zero_grad()
        # This loss is that of one data rank's samples; the mean over data ranks is what is minimised.
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.log({"loss": mean, "model's own loss": outputs.loss.item()}, step=step)

    model.eval()
    hits, samples = [], 0
    with torch.no_grad():
        for batch in held_out:
            guess = model(**batch).logits[:, :-1].argmax(dim=-1)
            right = (guess == batch["labels"][:, 1:]).float().mean(dim=1)  # of each sample
            right = accelerator.gather_for_metrics(right)  # each sample once, also of the short batch
            hits.append(right)
            samples += len(right)
    accuracy = torch.cat(hits).mean().item()
    accelerator.log({"accuracy": accuracy}, step=len(train))
    accelerator.print(f"of {samples} samples {100 * accuracy:.2f} % of the next tokens were guessed")
    accelerator.end_training()


if __name__ == "__main__":
    main()
