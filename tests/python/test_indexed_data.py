"""Indexed data from Python: files, samples, and the iterators of training, validation and test."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cli_support import write_corpus
from launch_support import free_port
from tessera.data import indexed
from tessera.errors import CommunicationError, ConfigError, DataError, InvalidArgument

_C = pytest.importorskip("tessera._C", reason="the compiled module is not installed")

DOCUMENTS = [[d * 20 + i for i in range(length)] for d, length in enumerate([5, 7, 3, 10])]


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "golden", DOCUMENTS)


@pytest.fixture
def long_corpus(tmp_path):
    """700 documents of 10 tokens, so that the default split leaves something for every part."""
    return write_corpus(tmp_path / "long", [[d * 10 + i for i in range(10)] for d in range(700)])


def iterators(prefix, **changes):
    options = dict(data_path=str(prefix), split="1,0,0", seq_length=4, micro_batch_size=1, num_micro_batches=1,
                   train_iters=6, eval_iters=0, cache_dir=str(prefix.parent / "cache"))
    return indexed.build_iterators(**{**options, **changes})


def texts(batches):
    return [np.asarray(row).tolist() for batch in batches for row in batch["text"]]


# Samples in reading order by (document, position) of the joined stream, from the tables of Megatron's own functions.
GOLDEN = {6: ([0, 1, 2, 3], [3, 2, 1, 0, 5, 4]),
          8: ([0, 1, 2, 3, 1, 2, 3, 0], [2, 0, 4, 3, 5, 1, 7, 11, 8, 6, 10, 9]),
          10: ([2, 1, 2, 0, 0, 1, 3, 3], [10, 3, 5, 11, 4, 8, 0, 2, 6, 9, 7, 1])}


@pytest.mark.parametrize("count", GOLDEN)
@pytest.mark.parametrize("ranks, micro", [(1, 1), (1, 2), (2, 1)])
def test_batches_are_megatrons_samples_in_megatrons_order(corpus, count, ranks, micro):
    documents, order = GOLDEN[count]
    stream = [token for d in documents for token in DOCUMENTS[d]]
    expected = [stream[4 * i:4 * i + 5] for i in order]
    whole = ranks * micro
    parts = [list(iterators(corpus, data_rank=rank, data_ranks=ranks, num_micro_batches=micro,
                            train_iters=count // whole)[0]) for rank in range(ranks)]
    assert [text for batches in zip(*parts) for text in texts(batches)] == expected
    assert all(batch["text"].shape == (micro, 5) for batch in parts[0]) and set(parts[0][0]) == {"text"}
    assert len(iterators(corpus, train_iters=count)[0]) == len(order)


def test_the_number_of_samples_is_megatrons(long_corpus):
    assert indexed.sample_counts(100, 10, 30, 8) == (800, 4 * 10 * 8, 80)
    assert indexed.sample_counts(100, 10, 100, 8) == (800, 2 * 10 * 8, 80)
    assert indexed.sample_counts(100, 10, None, 8) == (800, 80, 80)
    asked = []
    train, valid, test = iterators(long_corpus, data_path=None, train_iters=9, eval_iters=2, eval_interval=4,
                                   num_micro_batches=2, data_ranks=2, data_rank=1,
                                   datasets_provider=lambda counts: asked.append(counts) or (
                                       [{"text": np.full(5, i)} for i in range(counts[0])], None, []))
    assert asked == [(36, 3 * 2 * 4, 8)] and valid is None
    assert [np.asarray(batch["text"])[:, 0].tolist() for batch in train] == [[4 * k + 2, 4 * k + 3] for k in range(9)]
    assert list(test) == []


def test_the_default_split_gives_three_parts_that_share_no_document(long_corpus):
    parts = iterators(long_corpus, split="969,30,1", train_iters=1600, eval_iters=2, eval_interval=100)
    assert len(parts[0]) >= 1600 and len(parts[1]) >= 17 * 2 and len(parts[2]) >= 2
    seen = [{token // 10 for text in texts(part) for token in text} for part in parts]
    assert seen == [set(range(678)), set(range(678, 699)), {699}]
    assert iterators(long_corpus, split="99,1,0")[2] is None


def test_resuming_at_every_place_equals_going_on(corpus):
    whole = list(iterators(corpus, train_iters=10)[0])
    train = iterators(corpus, train_iters=10)[0]
    for at in range(len(whole) + 1):
        state = train.state_dict()
        assert state == {"consumed_samples": at}
        again = iterators(corpus, train_iters=10, consumed_samples=[at])[0]
        assert texts(again) == texts(whole[at:])
        again.load_state_dict(state)
        assert texts([next(again)] if at < len(whole) else []) == texts(whole[at:at + 1])
        if at < len(whole):
            next(train)
    with pytest.raises(StopIteration):
        next(train)
    with pytest.raises(DataError, match="the train split has 6 samples, but 7 are consumed"):
        iterators(corpus, consumed_samples=(7, 0, 0))


def test_ends_of_documents(tmp_path):
    prefix = write_corpus(tmp_path / "ends", [[1, 2, 256], [3, 256], [4, 5, 6, 256, 7]])
    options = dict(eos_token_id=256, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    for batch in iterators(prefix, seq_length=9, train_iters=1, **options)[0]:
        (text,) = np.asarray(batch["text"])
        ends = text[:9] == 256
        assert np.asarray(batch["labels"])[0].tolist() == [-100 if end else after for end, after in zip(ends, text[1:])]
        before = np.concatenate([[0], np.cumsum(ends)[:-1]])
        assert np.asarray(batch["document_ids"])[0].tolist() == before.tolist()
        assert np.asarray(batch["position_ids"])[0].tolist() == [int((before[:i] == before[i]).sum()) for i in range(9)]
    for option in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        with pytest.raises(ConfigError, match="set eos_token_id"):
            iterators(prefix, seq_length=9, train_iters=1, **{option: True})
    column = {"reset_position_ids": "position_ids", "reset_attention_mask": "document_ids", "eod_mask_loss": "labels"}
    for option, name in column.items():
        train = iterators(prefix, seq_length=9, train_iters=1, eos_token_id=256, **{option: True})[0]
        assert set(next(train)) == {"text", name}


def test_data_know_their_tokenizer(tmp_path, tessera_program):
    (tmp_path / "text.txt").write_text("abc " * 300)
    subprocess.run([tessera_program, "preprocess", "--input", tmp_path / "text.txt", "--output-prefix", tmp_path / "made",
                    "--append-eod"], check=True, capture_output=True)
    prefix = tmp_path / "made_text_document"
    train = iterators(prefix, train_iters=1, eod_mask_loss=True, vocab_size=257)[0]
    assert set(next(train)) == {"text", "labels"} and json.loads(train.tokenizer)["type"] == "bytes"
    with pytest.raises(ConfigError, match=r"eos_token_id is 5, but the data were made with bytes .* is 256"):
        iterators(prefix, train_iters=1, eos_token_id=5)
    with pytest.raises(ConfigError, match="bytes .* vocabulary is 256: they do not belong together"):
        iterators(prefix, train_iters=1, vocab_size=256)
    state = train.state_dict()
    train.load_state_dict(state)
    other = dict(json.loads(state["tokenizer"]), type="HuggingFaceTokenizer", file="/data/tokenizer.json", hash="00")
    with pytest.raises(ConfigError, match="saved with data of HuggingFaceTokenizer /data/tokenizer.json"):
        train.load_state_dict(state | {"tokenizer": json.dumps(other)})
    unknown = write_corpus(tmp_path / "unknown", [[1, 2, 300] * 20])
    with pytest.raises(DataError, match="token id 300"):
        iterators(unknown, train_iters=1, vocab_size=257)  # before the first batch is read


def test_the_forms_of_data_path(tmp_path, monkeypatch):
    first = write_corpus(tmp_path / "a b", [[1] * 50])
    second = write_corpus(tmp_path / "second", [[2] * 50])
    monkeypatch.chdir(tmp_path)
    for path in (str(first), first, [first], ["a b"]):
        assert texts(iterators(first, data_path=path, train_iters=1)[0])[0] == [1] * 5
    for path in ([0.5, first, 0.5, str(second)], ["0.5", first, "0.5", second]):
        found = [text[0] for text in texts(iterators(first, data_path=path, train_iters=6)[0])]
        assert found[:6] == [1, 2, 1, 2, 1, 2]
    for path in ("1 second", ["1 second"], "second"):
        assert texts(iterators(first, data_path=path, train_iters=1)[0])[0] == [2] * 5
    assert {text[0] for text in texts(iterators(first, data_path=[first, second], train_iters=20)[0])} == {1, 2}
    for path in ("", []):
        with pytest.raises(ConfigError, match="names no dataset"):
            iterators(first, data_path=path)
    with pytest.raises(ConfigError, match="needs data_path"):
        iterators(first, data_path=None)
    with pytest.raises(DataError, match="nothing.idx"):
        iterators(first, data_path="nothing")


def test_torch_tensors_when_the_script_uses_torch(corpus):
    torch = pytest.importorskip("torch")
    batch = next(iterators(corpus)[0])
    assert isinstance(batch["text"], torch.Tensor) and batch["text"].dtype == torch.int64


def test_bad_requests_say_what_to_do(corpus, tmp_path):
    with pytest.raises(ConfigError, match="seq_length"):
        iterators(corpus, seq_length=0)
    with pytest.raises(DataError, match="data.split"):
        iterators(corpus, split="969,30,1", eval_iters=1)
    with pytest.raises(DataError, match="another tokenizer"):
        list(iterators(corpus, vocab_size=60)[0])
    with pytest.raises(ConfigError, match="cannot share"):
        iterators(corpus, data_rank=2, data_ranks=2)
    train = iterators(corpus)[0]
    with pytest.raises(InvalidArgument):
        train.dataset.fetch([6])
    with pytest.raises(DataError, match="samples are mappings"):
        next(iterators(corpus, datasets_provider=lambda counts: ([1] * 6, None, None))[0])


class World:
    """Ranks as threads."""

    def __init__(self, size):
        self.size, self.barrier, self.boxes = size, threading.Barrier(size, timeout=30), [None] * size
        self.order = []

    def view(self, rank):
        world = self

        class View:
            size = world.size
            beats = 0

            def __init__(self):
                self.rank = rank

            def all_gather_bytes(self, data):
                world.boxes[rank] = data
                world.barrier.wait()
                found = list(world.boxes)
                world.barrier.wait()
                return found

            def broadcast_bytes(self, data, root=0):
                self.beats += data == b"wait"
                return self.all_gather_bytes(data)[root]

        return View()


def on_ranks(size, fn):
    world = World(size)
    views = [world.view(rank) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(fn, view) for view in views]
        return views, [future.exception() or future.result() for future in futures]


def test_rank_0_builds_the_indices_and_the_others_read_them(corpus):
    _, found = on_ranks(3, lambda world: texts(iterators(corpus, train_iters=2, world=world, data_rank=world.rank,
                                                         data_ranks=3)[0]))
    stream = [token for document in DOCUMENTS for token in document]
    assert found == [[stream[4 * i:4 * i + 5] for i in order] for order in ([3, 0], [2, 5], [1, 4])]
    assert len(list((corpus.parent / "cache").glob("*-shuffle_index.npy"))) == 1


def test_the_others_wait_as_long_as_rank_0_works(monkeypatch):
    monkeypatch.setattr(indexed, "_HEARTBEAT_S", 0.05)
    order = []

    def build(rank):
        if rank == 0:
            threading.Event().wait(0.5)
        order.append(rank)
        return rank

    views, found = on_ranks(3, lambda world: indexed.first_then_all(world, lambda: build(world.rank)))
    assert found == [0, 1, 2] and order[0] == 0 and views[0].beats >= 3


PROCESS = """
import sys, time
from tessera import _C
from tessera.data import indexed
from tessera.data_loader import prepare_data_loader
import numpy as np

world = _C.connect_world(60.0)
indexed._HEARTBEAT_S = 0.1
train = indexed.build_iterators(data_path=sys.argv[1], split="1,0,0", seq_length=4, micro_batch_size=1,
                                 num_micro_batches=1, train_iters=2, eval_iters=0, cache_dir=sys.argv[2], world=world,
                                 data_rank=world.rank, data_ranks=3)[0]
print([batch["text"].tolist() for batch in train])
indexed.first_then_all(world, lambda: time.sleep(0.5 if world.rank == 0 else 0))
batches = [{"x": np.arange(5) + 5 * i + 100 * world.rank} for i in range(2)]
sent = prepare_data_loader(batches, data_rank=world.rank, data_ranks=3, split_batches=True, dispatch_batches=True,
                           world=world)
print([batch["x"].tolist() for batch in sent])
try:
    indexed.first_then_all(world, lambda: indexed.IndexedDataset("nothing"))
except indexed.DataError as error:
    print(error)
world.barrier()
"""


def test_over_real_processes(corpus):
    port = free_port()
    ranks = [subprocess.Popen([sys.executable, "-c", PROCESS, str(corpus), str(corpus.parent / "cache")], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3",
                                   "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
             for rank in range(3)]
    said = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], said
    stream = [token for document in DOCUMENTS for token in document]
    expected = [[[stream[4 * i:4 * i + 5]] for i in order] for order in ([3, 0], [2, 5], [1, 4])]
    assert [lines[0] for lines in said] == [str(each) for each in expected]
    assert [lines[1] for lines in said] == ["[[0, 1], [5, 6]]", "[[2, 3], [7, 8]]", "[[4], [9]]"]
    assert all("nothing.idx: cannot be opened" in lines[2] for lines in said)


def test_an_error_on_one_rank_reaches_all(corpus):
    _, found = on_ranks(2, lambda world: iterators(corpus, world=world, data_path="nothing"))
    assert [type(each) for each in found] == [DataError, DataError] and str(found[0]) == str(found[1])

    def only_on_1(world):
        return indexed.first_then_all(world, lambda: 1 // (1 - world.rank))

    _, found = on_ranks(2, only_on_1)
    assert isinstance(found[1], ZeroDivisionError)
    assert isinstance(found[0], CommunicationError) and "rank 1 failed: ZeroDivisionError" in str(found[0])


def test_files_written_here_are_read_back(tmp_path):
    builder = indexed.IndexedDatasetBuilder(tmp_path / "made", vocab_size=1000)
    assert builder.dtype == np.uint16
    builder.add_item([1, 2, 3])
    builder.add_item(np.array([4, 5], np.int64))
    builder.end_document()
    builder.add_document([])
    builder.add_document([999])
    assert not (tmp_path / "made.idx").exists() and not (tmp_path / "made.bin").exists()
    builder.finalize()
    data = indexed.IndexedDataset(tmp_path / "made")
    assert [each.tolist() for each in data] == [[1, 2, 3], [4, 5], [], [999]] and len(data) == 4
    assert [data.document(i).tolist() for i in range(data.documents)] == [[1, 2, 3, 4, 5], [], [999]]
    assert data.sequence_lengths.tolist() == [3, 2, 0, 1] and data.document_indices.tolist() == [0, 2, 3, 4]
    assert data.get(0, 1, 1).tolist() == [2] and data[-1].tolist() == [999]
    assert not data[0].flags.writeable and not data.sequence_lengths.flags.writeable
    for wrong in (lambda: data[4], lambda: data.document(3), lambda: data.get(0, 2, 2)):
        with pytest.raises(IndexError):
            wrong()
    both = indexed.IndexedDatasetBuilder(tmp_path / "both", dtype=np.uint16)
    for _ in range(2):
        both.add_index(tmp_path / "made")
    both.finalize()
    assert [len(each) for each in indexed.IndexedDataset(tmp_path / "both")] == [3, 2, 0, 1] * 2
    data.files.check_vocabulary(1000)
    with pytest.raises(DataError, match="999"):
        data.files.check_vocabulary(999)


def test_a_file_that_shrinks_is_an_error(tmp_path):
    """Not SIGBUS, which ends the interpreter."""
    builder = indexed.IndexedDatasetBuilder(tmp_path / "d", dtype=np.uint16)
    for number in range(3000):
        builder.add_document([number] * 5)
    builder.finalize()
    data = indexed.IndexedDataset(tmp_path / "d")
    os.truncate(tmp_path / "d.bin", 4096)
    os.truncate(tmp_path / "d.idx", 0)
    assert data[5].tolist() == [5] * 5 and len(data) == 3000
    with pytest.raises(DataError, match="d.bin: ended at byte"):
        data[2999]


def test_written_bytes_are_megatrons(tmp_path):
    prefix = write_corpus(tmp_path / "by_hand", [[1, 2, 3], [65535], [7] * 9])
    builder = indexed.IndexedDatasetBuilder(tmp_path / "ours", dtype="uint16")
    for document in ([1, 2, 3], [65535], [7] * 9):
        builder.add_document(document)
    builder.finalize()
    for suffix in (".idx", ".bin"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == prefix.with_suffix(suffix).read_bytes()


def test_what_cannot_be_written_or_read(tmp_path):
    builder = indexed.IndexedDatasetBuilder(tmp_path / "x", dtype=np.uint16)
    for ids in ([70000], [-1], [2**40], [0.5], [[1]]):
        with pytest.raises(DataError):
            builder.add_item(ids)
    for options in ({}, {"dtype": np.int32, "vocab_size": 3}):
        with pytest.raises(ConfigError, match="either"):
            indexed.IndexedDatasetBuilder(tmp_path / "y", **options)
    with pytest.raises(InvalidArgument, match="float16"):
        indexed.IndexedDatasetBuilder(tmp_path / "y", dtype=np.float16)
    prefix = write_corpus(tmp_path / "cut", [[1, 2, 3]])
    prefix.with_suffix(".bin").write_bytes(b"12345")
    with pytest.raises(DataError, match="cut.bin"):
        indexed.IndexedDataset(prefix)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32", "int64", "float32", "float64"])
def test_every_token_type(tmp_path, dtype):
    builder = indexed.IndexedDatasetBuilder(tmp_path / dtype, dtype=dtype)
    builder.add_document([0, 1, 127])
    builder.finalize()
    data = indexed.IndexedDataset(tmp_path / dtype)
    assert data[0].dtype == dtype and data[0].tolist() == [0, 1, 127]


def test_gpt_dataset_by_number(corpus):
    data = indexed.GPTDataset(corpus, 4, num_samples=6, cache_dir=corpus.parent / "cache")
    stream = [token for document in DOCUMENTS for token in document]
    order = (3, 2, 1, 0, 5, 4)
    assert [np.asarray(data[i]["text"]).tolist() for i in range(6)] == [stream[4 * i:4 * i + 5] for i in order]
    assert len(data) == 6 and np.asarray(data[-1]["text"]).tolist() == stream[16:21]
    with pytest.raises(IndexError):
        data[6]
    with pytest.raises(ConfigError, match="no split"):
        indexed.GPTDataset(corpus, 4, which="dev")
    with pytest.raises(DataError, match="leaves nothing"):
        indexed.GPTDataset(corpus, 4, which="test")


def test_byte_tokenizer():
    tokenizer = _C.ByteTokenizer()
    assert tokenizer.vocab_size == 257 and tokenizer.end_of_document == 256
    ids = tokenizer.encode("aä")
    assert ids.dtype == np.int32 and ids.tolist() == [97, 195, 164] == tokenizer.encode("aä".encode()).tolist()
    assert tokenizer.decode(np.append(ids, 256)).decode() == "aä"
    assert tokenizer.encode(b"\xff\x00").tolist() == [255, 0]
    with pytest.raises(DataError):
        tokenizer.decode([257])


def test_other_threads_run_during_a_call(tmp_path):
    """The interpreter lock is released: another thread takes several steps inside one call, were it one of a hundred on a
    machine that has other things to do. With the lock held it takes one at most, as the call ends."""
    builder = indexed.IndexedDatasetBuilder(tmp_path / "large", dtype=np.uint8)
    tokens = np.zeros(30_000_000, np.int32)
    builder.add_document(tokens)
    builder.finalize()
    files = indexed.IndexedDataset(tmp_path / "large").files
    done, steps = threading.Event(), []

    def tick():
        while not done.wait(0.0005):
            steps.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    inside = []
    while len(inside) < 100 and max(inside, default=0) < 4:
        begin = time.monotonic()
        files.check_vocabulary(1)
        end = time.monotonic()
        inside.append(sum(begin < step < end for step in steps))
    done.set()
    thread.join()
    assert max(inside) >= 4
