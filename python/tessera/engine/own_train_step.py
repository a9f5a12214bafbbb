"""Which train step a plugin asks for."""

from __future__ import annotations

import inspect
from argparse import Namespace
from typing import Any

from tessera.engine.bert_train_step import BertTrainStep
from tessera.engine.t5_train_step import T5TrainStep
from tessera.engine.train_steps import AbstractTrainStep, GPTTrainStep


def make_train_step(accelerator: Any, plugin: Any, session: Any) -> AbstractTrainStep:
    """The plugin's custom_train_step_class, or a GPTTrainStep, BertTrainStep or T5TrainStep, with the plugin's arguments."""
    kind = plugin.custom_train_step_class
    args = Namespace(**plugin.megatron_lm_default_args)
    args.padded_vocab_size = plugin.megatron_lm_default_args.get("orig_vocab_size")
    args.accelerator = accelerator
    args.custom_get_batch_function = plugin.custom_get_batch_function
    args.custom_loss_function = plugin.custom_loss_function
    if session.rules is not None:
        args.eos_token_id = session.rules.eod
    kwargs = plugin.custom_train_step_kwargs or {}
    if session.heads.encodes:
        for name in ("decoder_start_token_id", "pad_token_id"):
            setattr(args, name, session.config.get(name))
        kind = kind or T5TrainStep
    if kind is None and not session.heads.looks_back:
        return BertTrainStep(accelerator, args)
    if kind is None:
        return GPTTrainStep(accelerator, args)
    try:
        inspect.signature(kind).bind(accelerator, args, **kwargs)
        return kind(accelerator, args, **kwargs)
    except TypeError:
        return kind(args, **kwargs)
