"""eod_mask_loss, reset_position_ids and reset_attention_mask: on layouts, in train steps, in batches; the id that ends documents."""

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import plugin_support  # noqa: E402
from plugin_support import prepared, step  # noqa: E402

from tessera import Accelerator  # noqa: E402
from tessera.data.documents import documents_of_mask, hidden_keys  # noqa: E402
from tessera.errors import ConfigError, InvalidArgument  # noqa: E402
from tessera.causal_lm import CausalLM  # noqa: E402
from tessera.utils import GPTTrainStep, MegatronLMPlugin  # noqa: E402

SCRIPT = Path(__file__).parent / "scripts" / "document_ends.py"
END = 7
IDS = torch.tensor([[1, END, 3, 4, END, END, 2, 9], [END, 1, 2, 3, 4, 5, 6, END]])
fresh_states = plugin_support.fresh_states


@pytest.mark.parametrize("family, processes, layouts", [("gpt2", 2, ["1,1", "2,1", "1,2"]), ("llama", 1, ["1,1"])])
def test_layouts_equal_pytorch(python_build, tmp_path, family, processes, layouts):
    output = tmp_path / "errors.json"
    python_build.run(SCRIPT, family, output, *layouts, launcher=python_build.launcher("--num_processes", processes))
    errors = json.loads(output.read_text())
    assert len(errors) == 6 * len(layouts)
    assert max(errors.values()) <= 1e-5, {case: error for case, error in errors.items() if error > 1e-5}


def by_loops(ids, loss=False, positions=False, attention=False):
    """Megatron's (attention mask, loss mask, position ids)."""
    rows, size = ids.shape
    hidden = ~torch.ones(size, size, dtype=torch.bool).tril().repeat(rows, 1, 1, 1)
    counted, places = torch.ones(rows, size), torch.arange(size).repeat(rows, 1)
    for row in range(rows):
        begin = 0
        for end in (ids[row] == END).nonzero().flatten().tolist():
            if loss:
                counted[row, end] = 0.0
            if attention:
                hidden[row, 0, end + 1:, : end + 1] = True
            if positions:
                places[row, end + 1:] -= end + 1 - begin
                begin = end + 1
    return hidden, counted, places


def get_batch(batch, **rules):
    return GPTTrainStep(Namespace(eos_token_id=END, **rules)).get_batch(iter([batch]))


def test_a_train_steps_batch_is_megatrons():
    text = torch.cat([IDS, torch.tensor([[5], [5]])], dim=1)
    for batch, last in (({"input_ids": IDS}, -100), ({"text": text}, 5)):
        tokens, labels, loss_mask, attention, positions = get_batch(batch, eod_mask_loss=True, reset_position_ids=True,
                                                                    reset_attention_mask=True)
        hidden, counted, places = by_loops(IDS, True, True, True)
        counted[:, -1] *= last != -100  # nothing follows the last token
        assert torch.equal(tokens, IDS) and labels[:, -1].tolist() == [last, last] and torch.equal(labels[:, :-1], IDS[:, 1:])
        assert torch.equal(loss_mask, counted) and torch.equal(positions, places) and torch.equal(attention, hidden)
    padding = torch.tensor([[1] * 8, [0, 0] + [1] * 6])
    *_, attention, positions = get_batch({"input_ids": IDS, "attention_mask": padding}, reset_attention_mask=True)
    assert torch.equal(attention, by_loops(IDS, attention=True)[0] | (padding == 0)[:, None, None, :]) and positions is None
    *_, attention, positions = get_batch({"input_ids": IDS, "attention_mask": padding}, reset_position_ids=True)
    assert torch.equal(attention, padding) and torch.equal(positions, by_loops(IDS, positions=True)[2])
    assert get_batch({"input_ids": IDS})[3:] == (None, None)
    *_, attention, _ = get_batch({"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])})  # packed
    assert not attention[0, 0, 4, 3] and attention[1, 0, 4, 2]
    with pytest.raises(ConfigError, match="eod_mask_loss needs the id"):
        GPTTrainStep(Namespace(eod_mask_loss=True)).get_batch(iter([{"input_ids": IDS}]))


def test_masks_and_documents():
    documents = np.array([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    keys = np.array([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]])
    for shown in (False, True):
        mask = hidden_keys(documents, keys) ^ shown
        found, seen = documents_of_mask(mask, 2)
        assert np.array_equal(hidden_keys(found, seen), hidden_keys(documents, keys))
    assert documents_of_mask(hidden_keys(np.zeros((1, 5))), 3) == (None, None)
    assert documents_of_mask(np.zeros((1, 1, 1, 1)), 3) == (None, None)
    found, seen = documents_of_mask(hidden_keys(documents[:1]), 3)
    assert found.tolist() == documents[:1].tolist() * 3 and seen is None
    window = hidden_keys(np.zeros((1, 6)))
    window[0, 0, 5, 2] = True
    both_ways = np.zeros((1, 1, 6, 6), dtype=bool)
    for bad in (window, both_ways, np.zeros((2, 4, 6, 6)), np.zeros((3, 6, 6)), np.zeros((4, 1, 6, 6))):
        with pytest.raises(InvalidArgument, match="attention_mask"):
            documents_of_mask(bad, 2)


def with_end(model):
    model.config.eos_token_id = END
    return model


def test_the_end_of_documents_and_where_it_is_known_from(tmp_path, caplog):
    def loss(change=with_end, **fields) -> float:
        accelerator, model, optimizer = prepared(change=change, eod_mask_loss=True, **fields)
        return step(accelerator, model, optimizer, {"input_ids": IDS, "labels": IDS})

    by_config = loss()
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text(json.dumps({"a": 1, "<|endoftext|>": END}))
    same = [loss(change=lambda model: model, other_megatron_args=arguments)
            for arguments in ({"eos_token_id": END}, {"--eos-token-id": END}, {"vocab_file": str(vocabulary)})]
    assert same == [by_config] * 3 and loss(other_megatron_args={"eos_token_id": 2}) != by_config
    for change, fields, message in (
            (lambda model: model, {}, "the id that ends a document is 50256, and the model has 40 tokens"),
            (lambda model: setattr(model.config, "eos_token_id", None) or model, {}, "eod_mask_loss needs the id that ends a document"),
            (lambda model: setattr(model.config, "eos_token_id", [3, 4]) or model, {}, "a document has one end"),
            (with_end, {"other_megatron_args": {"vocab_file": str(tmp_path / "none.json")}}, "cannot be read as a vocabulary"),
            (with_end, {"other_megatron_args": {"vocab_file": __file__}}, "cannot be read as a vocabulary")):
        with pytest.raises(ConfigError, match=message):
            loss(change, **fields)
    (tmp_path / "few.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no <|endoftext|>"):
        loss(other_megatron_args={"vocab_file": str(tmp_path / "few.json")})
    accelerator, model, optimizer = prepared(change=with_end, other_megatron_args={"reset_position_ids": True})
    step(accelerator, model, optimizer, {"input_ids": IDS, "labels": IDS, "position_ids": torch.arange(8)[None]})
    assert "batches bring position_ids of their own, which count" in caplog.text


def test_models_without_pytorch(tmp_path):
    rules = {"eod_mask_loss": True, "other_megatron_args": {"reset_position_ids": True, "reset_attention_mask": True}}
    accelerator, model, optimizer = prepared(change=with_end, **rules)
    model.save_pretrained(tmp_path)
    expected = step(accelerator, model, optimizer, {"input_ids": IDS, "labels": IDS})
    for fields, same in ((rules, True), ({}, False)):
        plugin_support.forget_states()
        accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**fields))
        model = accelerator.prepare(CausalLM.from_pretrained(tmp_path))
        found = float(model(IDS.numpy(), labels=IDS.numpy()).loss)
        assert (found == pytest.approx(expected, rel=1e-6)) == same


def test_masks_of_a_train_step_of_ones_own():
    """Attention masks as Megatron's function makes them reach the engine; others are refused by name."""
    def own(hidden):
        def get_batch(data_iterator):
            ids = next(data_iterator)["input_ids"]
            labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
            return ids, labels, (labels != -100).float(), hidden(ids), None

        return step(*prepared(custom_get_batch_function=get_batch), {"input_ids": IDS, "labels": IDS})

    ruled = step(*prepared(change=with_end, other_megatron_args={"reset_attention_mask": True}), {"input_ids": IDS, "labels": IDS})
    usual = step(*prepared(), {"input_ids": IDS, "labels": IDS})
    assert own(lambda ids: by_loops(ids, attention=True)[0]) == pytest.approx(ruled, rel=1e-6) != pytest.approx(usual, rel=1e-6)
    assert own(lambda ids: by_loops(ids)[0][:1]) == pytest.approx(usual, rel=1e-6)
    with pytest.raises(InvalidArgument, match="more than causal attention within documents"):
        own(lambda ids: torch.zeros(1, 1, 8, 8, dtype=torch.bool))
