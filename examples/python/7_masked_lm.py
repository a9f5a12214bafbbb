"""Pre-trains a small BERT on masked tokens, with a tokenizer made here and the collator of Transformers.

    python examples/python/7_masked_lm.py --output runs/masked_lm
    tessera launch --config_file examples/python/configs/megatron_tp2_pp2.yaml examples/python/7_masked_lm.py

The folder it leaves, tokenizer included, is where 8_classify.py begins."""

import argparse

import torch
from text import lines_of_text
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from tessera import Accelerator
from tessera.utils import set_seed

LENGTH = 48
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_tokenizer(lines: list) -> PreTrainedTokenizerFast:
    """WordPiece, as BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(lines, trainers.WordPieceTrainer(vocab_size=1000, special_tokens=SPECIAL, show_progress=False))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", SPECIAL.index("[SEP]")), ("[CLS]", SPECIAL.index("[CLS]")))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
                                   mask_token="[MASK]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps")
    parser.add_argument("--output", default="runs/masked_lm", help="where the model is written")
    args = parser.parse_args()

    accelerator = Accelerator()
    # The collator draws its masks from torch's generator: all ranks of a model draw the same ones from the same seed.
    set_seed(7)
    wanted = 4 * 16 * args.steps
    lines = lines_of_text(max(wanted, 10_000))
    with accelerator.main_process_first():  # training a tokenizer twice need not give the same one
        if accelerator.is_main_process:
            make_tokenizer(lines).save_pretrained(args.output)
        tokenizer = AutoTokenizer.from_pretrained(args.output)
    model = BertForMaskedLM(BertConfig(num_hidden_layers=4, hidden_size=64, num_attention_heads=4, intermediate_size=256,
                                       vocab_size=len(tokenizer), max_position_embeddings=LENGTH, pad_token_id=tokenizer.pad_token_id))
    texts = [" ".join(lines[i: i + 4]) for i in range(0, wanted, 4)]
    rows = [tokenizer(text, truncation=True, max_length=LENGTH, padding="max_length") for text in texts]
    plugin = accelerator.state.megatron_lm_plugin
    parts = accelerator.state.mesh.dp * (plugin.num_micro_batches if plugin is not None else 1)
    loader = torch.utils.data.DataLoader(rows, batch_size=16 // parts, shuffle=True,
                                         collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for step, batch in enumerate(loader, start=1):
        loss = model(**batch).loss  # the mean over the masked tokens of all samples, whichever rank has them
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 25 == 0 or step == len(loader):
            accelerator.print(f"step {step}  loss {loss.item():.6f}")

    model.save_pretrained(args.output)  # beside the tokenizer
    accelerator.print(f"the model is in {args.output}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
