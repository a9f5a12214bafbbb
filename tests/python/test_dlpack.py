"""Outputs and their gradients cross between the engine and other libraries by DLPack."""

import sys

import numpy as np
import pytest

from tessera import AdamW, Accelerator, CausalLM
from tessera.errors import InvalidArgument
from tessera.state import AcceleratorState, GradientState

CONFIG = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 31, "n_positions": 8,
          "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class Foreign:
    """An array of a library of which only DLPack is known; counts who asked."""

    def __init__(self, array):
        self.array, self.asked = array, 0

    def __dlpack__(self, **options):
        self.asked += 1
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.fixture
def session():
    accelerator = Accelerator()
    model, _ = accelerator.prepare(CausalLM(CONFIG), AdamW(lr=1e-3))
    yield model.session
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def forward(session):
    """A recorded pass: (its tapes, logits)."""
    batch = session.batch(np.arange(12, dtype=np.int64).reshape(2, 6))
    return session.engine.forward(batch, "logits", True)


def gradients(session, tapes, upstream):
    session.engine.backward(tapes, upstream)
    result = session.collect(gradients=True)
    session.engine.zero_grad()
    return result


def test_gradient_of_any_library(session):
    batch = session.batch(np.arange(12, dtype=np.int64).reshape(2, 6))
    found = []
    for wrap in (lambda array: array, Foreign):
        tapes, logits = session.engine.forward(batch, "logits", True)
        upstream = np.cos(np.arange(logits.size, dtype=np.float32)).reshape(logits.shape)
        found.append(gradients(session, tapes, wrap(upstream)))
    assert found[0].keys() == found[1].keys() and found[0]
    for name, values in found[0].items():
        assert np.abs(values).max() > 0 and np.array_equal(values, found[1][name]), name


def test_memory_is_given_back(session, forward):
    tapes, logits = forward
    array = np.ones(logits.shape, dtype=np.float32)
    before = sys.getrefcount(array)
    foreign = Foreign(array)
    session.engine.backward(tapes, foreign)
    assert foreign.asked == 1
    del foreign
    assert sys.getrefcount(array) == before


def test_torch_shares_the_logits(forward):
    torch = pytest.importorskip("torch")
    _, logits = forward
    tensor = torch.from_dlpack(logits)
    assert tensor.data_ptr() == logits.ctypes.data and tuple(tensor.shape) == (2, 6, 31)


@pytest.mark.parametrize("make, words", [
    (lambda shape: Foreign(np.ones(shape[::-1], dtype=np.float32).T), "contiguous"),
    (lambda shape: Foreign(np.ones(shape, dtype=np.complex64)), "DLPack's type code 5"),
    (lambda shape: Foreign(np.ones(shape, dtype=np.float64)), "dtype float64"),
    (lambda shape: Foreign(np.ones((*shape[:2], 3), dtype=np.float32)), "upstream gradient of shape"),
    (lambda shape: [[1.0]], "a <class 'list'> is neither a NumPy array nor anything with __dlpack__"),
])
def test_what_cannot_be_a_gradient(session, forward, make, words):
    tapes, logits = forward
    with pytest.raises(InvalidArgument) as error:
        session.engine.backward(tapes, make(logits.shape))
    assert words in str(error.value)
