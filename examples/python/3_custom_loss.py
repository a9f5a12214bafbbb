"""A train step with a loss of its own: samples that hold certain words count more.

    python examples/python/3_custom_loss.py
    tessera launch --config_file examples/python/configs/megatron_tp2_pp2.yaml examples/python/3_custom_loss.py

The engine gives the loss of every token; what becomes of them is said here, in torch, and its gradient drives the engine's
backward pass."""

import argparse

import torch
from text import END, VOCAB_SIZE, rows_of_text
from transformers import GPT2Config, GPT2LMHeadModel

from tessera import Accelerator
from tessera.utils import GPTTrainStep, MegatronLMPlugin, avg_losses_across_data_parallel_group, set_seed

LENGTH = 64


class KeywordWeighted(GPTTrainStep):
    """Each sample's loss is multiplied by 1 + alpha x how many keywords are in it."""

    def __init__(self, accelerator, args, keywords, alpha):
        super().__init__(accelerator, args)
        self.keywords = [torch.tensor(list(word.encode())) for word in keywords]
        self.alpha = alpha

    def count(self, tokens: torch.Tensor) -> torch.Tensor:
        """Occurrences of all keywords in each of the samples [batch, seq]: [batch]."""
        found = torch.zeros(len(tokens))
        for word in self.keywords:
            windows = tokens.unfold(1, len(word), 1)  # [batch, places, length of the word]
            found += (windows == word.to(tokens.device)).all(dim=-1).sum(dim=-1)
        return found

    def get_loss_func(self, accelerator):
        def loss_func(tokens, loss_mask, token_losses):
            sample_losses = (token_losses * loss_mask).sum(dim=1) / loss_mask.sum(dim=1)
            weights = 1.0 + self.alpha * self.count(tokens).to(sample_losses.device)
            loss = (weights * sample_losses).mean()
            return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}

        return loss_func

    def get_forward_step_func(self):
        def forward_step(data_iterator, model):
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            token_losses = model(tokens, position_ids, attention_mask, labels=labels)
            return token_losses, lambda output: self.loss_func(tokens, loss_mask, output)

        return forward_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--alpha", type=float, default=0.5, help="how much more a keyword makes a sample count; 0: no keywords")
    args = parser.parse_args()

    # Fields that are not given here come from the launch file.
    plugin = MegatronLMPlugin(custom_train_step_class=KeywordWeighted,
                              custom_train_step_kwargs={"keywords": ["def ", "return"], "alpha": args.alpha})
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    set_seed(7)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=VOCAB_SIZE, n_positions=LENGTH,
                                       bos_token_id=END, eos_token_id=END, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    micro_batch = 16 // (accelerator.state.mesh.dp * plugin.num_micro_batches)
    loader = torch.utils.data.DataLoader(rows_of_text(16 * args.steps, LENGTH), batch_size=micro_batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, batch in enumerate(loader, start=1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 20 == 0 or step == len(loader):
            accelerator.print(f"step {step}  loss {loss.item():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
