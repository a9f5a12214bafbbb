"""Megatron's indexed datasets from Python: `build_iterators` (training, validation and test batches over .idx/.bin),
`IndexedDataset` (reader), `IndexedDatasetBuilder` (writer), `GPTDataset` (samples). The work is done in C++."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, BinaryIO, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from tessera.errors import CommunicationError, ConfigError, DataError

_HEADER = 34  # bytes of an .idx before the sequence lengths
_INT32 = np.iinfo(np.int32)
_HEARTBEAT_S = 5.0

DataPath = Union[str, os.PathLike, Sequence[Any]]


def data_words(data_path: DataPath) -> List[str]:
    """Megatron's --data-path as its words: a prefix, "w1 p1 w2 p2 ..." (also as a list), or prefixes alone."""
    if isinstance(data_path, (str, os.PathLike)):
        text = os.fspath(data_path)
        # A prefix may hold spaces; a list of words is no file.
        words = [text] if os.path.exists(text + ".idx") else text.split()
    else:
        words = [word if isinstance(word, str) else os.fspath(word) if isinstance(word, os.PathLike) else repr(word)
                 for word in data_path]
        if len(words) == 1:
            return data_words(words[0])
    if not words:
        raise ConfigError("data_path names no dataset; give the prefix of an .idx/.bin pair, or weights and prefixes")
    return words


def sample_counts(train_iters: int, eval_iters: int, eval_interval: Optional[int],
                  global_batch_size: int) -> Tuple[int, int, int]:
    """Samples of (train, valid, test) that a run draws, as Megatron counts them: one evaluation each `eval_interval`
    steps and one at the end."""
    evaluations = train_iters // eval_interval + 1 if eval_interval else 1
    evaluation = eval_iters * global_batch_size
    return train_iters * global_batch_size, evaluations * evaluation, evaluation


def _said(error: BaseException) -> bytes:
    return f"{type(error).__name__}\n{error}".encode()


def _as_here(said: bytes) -> Exception:
    """Another rank's error, of the same type where it is one of ours."""
    import tessera.errors

    name, _, text = said.decode(errors="replace").partition("\n")
    kind = getattr(tessera.errors, name, None)
    if isinstance(kind, type) and issubclass(kind, tessera.errors.Error):
        return kind(text)
    return CommunicationError(f"rank 0 failed: {name}: {text}")


def _built_by_first(world: Any, build: Callable[[], Any]) -> Any:
    """`build()` on rank 0 while the others wait, for as long as rank 0 lives: it sends a sign of life every few
    seconds. Its error is raised everywhere. Returns its result on rank 0, None elsewhere."""
    result: List[Any] = []
    failure: List[BaseException] = []

    def work() -> None:
        try:
            result.append(build())
        except BaseException as error:  # handed over to every rank below
            failure.append(error)

    if world.rank == 0:
        thread = threading.Thread(target=work, name="tessera-index", daemon=True)
        thread.start()
        thread.join(_HEARTBEAT_S)
        while thread.is_alive():
            world.broadcast_bytes(b"wait")
            thread.join(_HEARTBEAT_S)
        world.broadcast_bytes(b"-" + _said(failure[0]) if failure else b"+")
        if failure:
            raise failure[0]
        return result[0]
    while True:
        message = world.broadcast_bytes(None)
        if message == b"+":
            return None
        if message != b"wait":
            raise _as_here(message[1:])


def first_then_all(world: Any, build: Callable[[], Any]) -> Any:
    """`build()` on every rank, on rank 0 before all others, so that what it leaves on disk is there for them. An error
    on one rank is raised on all. Collective."""
    if world is None or world.size == 1:
        return build()
    result = _built_by_first(world, build)
    failure: Optional[Exception] = None
    if world.rank != 0:
        try:
            result = build()
        except Exception as error:  # the others must hear of it before it ends this rank
            failure = error
    said = world.all_gather_bytes(_said(failure) if failure else b"")
    if failure is not None:
        raise failure
    for rank, each in enumerate(said):
        if each:
            raise CommunicationError(f"rank {rank} failed: {each.decode(errors='replace')}")
    return result


def _tensors(batch: Dict[str, np.ndarray]) -> Dict[str, Any]:
    """The arrays as torch tensors, in place, if the script uses torch."""
    torch = sys.modules.get("torch")
    return batch if torch is None else {name: torch.from_numpy(array) for name, array in batch.items()}


class SampleIterator:
    """One data rank's part of one global batch after another: {"text": int64 [b, seq_length + 1], ...}, numpy arrays,
    or torch tensors once torch is imported. Step k is samples [consumed + k * G, ...) of the split, data rank r takes
    the r-th run of G / data_ranks of them. It ends when less than a global batch is left, and does not begin anew.

    `samples` are IndexedSamples, or anything with `len` and `[i]` that gives a mapping of arrays (no padding is done).
    Errors: DataError when more samples are consumed than there are."""

    def __init__(self, samples: Any, *, global_batch_size: int, data_rank: int = 0, data_ranks: int = 1,
                 consumed_samples: int = 0, name: str = "train"):
        if global_batch_size < 1 or global_batch_size % data_ranks or not 0 <= data_rank < data_ranks:
            raise ConfigError(f"data rank {data_rank} of {data_ranks} cannot share global batches of "
                              f"{global_batch_size} samples")
        self.dataset = samples
        self.total_batch_size = global_batch_size
        self.batch_size = global_batch_size // data_ranks
        self.name = name
        self._rank, self._ranks = data_rank, data_ranks
        self._loader: Any = None
        self._consumed = 0
        self.load_state_dict({"consumed_samples": consumed_samples})

    @property
    def consumed_samples(self) -> int:
        """Of all ranks."""
        return self._consumed

    @property
    def total_dataset_length(self) -> int:
        return len(self.dataset)

    def __len__(self) -> int:
        """Global batches of the whole split."""
        return len(self.dataset) // self.total_batch_size

    def __iter__(self) -> "SampleIterator":
        return self

    def __next__(self) -> Dict[str, Any]:
        batch = self._read()
        if batch is None:
            raise StopIteration
        self._consumed += self.total_batch_size
        return batch

    def _read(self) -> Optional[Dict[str, Any]]:
        from tessera import _C

        if isinstance(self.dataset, _C.IndexedSamples):
            if self._loader is None:  # its thread begins to read only when somebody does
                self._loader = _C.SampleLoader(self.dataset, self.total_batch_size, self._rank, self._ranks,
                                               self._consumed)
            batch = self._loader.next()
            return None if batch is None else _tensors(batch)
        if self._consumed + self.total_batch_size > len(self.dataset):
            return None
        begin = self._consumed + self._rank * self.batch_size
        rows = [self.dataset[i] for i in range(begin, begin + self.batch_size)]
        if not isinstance(rows[0], Mapping):
            raise DataError(f"a dataset gave a {type(rows[0]).__name__}; samples are mappings such as {{'text': ids}}")
        return _tensors({key: np.stack([np.asarray(row[key]) for row in rows]) for key in rows[0]})

    @property
    def tokenizer(self) -> Optional[str]:
        """The record of the tokenizer that made the ids, as JSON, where the files have one."""
        return getattr(self.dataset, "tokenizer", None)

    def state_dict(self) -> Dict[str, Any]:
        tokenizer = {} if self.tokenizer is None else {"tokenizer": self.tokenizer}
        return {"consumed_samples": self._consumed, **tokenizer}

    def check_state_dict(self, state: Mapping) -> None:
        """Whether load_state_dict() would take it. Errors: ConfigError, DataError."""
        if self.tokenizer is not None and state.get("tokenizer") is not None:
            from tessera import _C

            _C.check_same_tokenizer(state["tokenizer"], self.tokenizer)
        consumed = int(state["consumed_samples"])
        if not 0 <= consumed <= len(self.dataset):
            raise DataError(f"the {self.name} split has {len(self.dataset)} samples, but {consumed} are consumed "
                            "already; resume with the data, seq_length and train_iters the run began with")

    def load_state_dict(self, state: Mapping) -> None:
        self.check_state_dict(state)
        self._consumed, self._loader = int(state["consumed_samples"]), None


Iterators = Tuple[Optional[SampleIterator], Optional[SampleIterator], Optional[SampleIterator]]


def of_splits(opened: Callable[[DataPath, str], Sequence[Any]], data_path: Optional[DataPath], split: str,
              split_paths: Optional[Sequence[Optional[DataPath]]]) -> Sequence[Any]:
    """(train, valid, test) of `opened(path, shares)`: shares of one path, or, where `split_paths` are given, each of a path of its
    own. Errors: ConfigError without any."""
    if data_path is None and split_paths is None:
        raise ConfigError("indexed data needs data_path, the prefix of an .idx/.bin pair")
    if split_paths is None:
        return opened(data_path, split)  # type: ignore[arg-type]
    shares = ("1,0,0", "0,1,0", "0,0,1")
    return tuple(None if path is None else opened(path, share)[i] for i, (path, share) in enumerate(zip(split_paths, shares)))


def open_samples(data_path: Optional[DataPath], counts: Sequence[Optional[int]], seq_length: int, *, split: str = "969,30,1", seed: int = 1234,
                 eos_token_id: Optional[int] = None, reset_position_ids: bool = False, reset_attention_mask: bool = False,
                 eod_mask_loss: bool = False, cache_dir: Optional[DataPath] = None, vocab_size: int = 0,
                 split_paths: Optional[Sequence[Optional[DataPath]]] = None) -> Sequence[Any]:
    """(train, valid, test) IndexedSamples, None for a split without a share; `split_paths` gives each split data of its own, whole,
    in place of a share of `data_path`. The options are explained at build_iterators. Errors: ConfigError, DataError."""
    from tessera import _C

    def opened(path: DataPath, parts: str) -> Any:
        return _C.open_gpt_samples(
            data_words(path), parts, tuple(counts), seq_length, seed,
            end_of_document=-1 if eos_token_id is None else eos_token_id, reset_position_ids=reset_position_ids,
            reset_attention_mask=reset_attention_mask, eod_mask_loss=eod_mask_loss,
            cache_dir="" if cache_dir is None else os.fspath(cache_dir), vocab_size=vocab_size)

    return of_splits(opened, data_path, split, split_paths)


def build_iterators(*, data_path: Optional[DataPath], seq_length: int, micro_batch_size: int, num_micro_batches: int,
                    train_iters: int, data_rank: int = 0, data_ranks: int = 1, eval_iters: int = 100,
                    eval_interval: Optional[int] = 1000, consumed_samples: Iterable[int] = (0, 0, 0), world: Any = None,
                    datasets_provider: Optional[Callable[[Tuple[int, int, int]], Sequence[Any]]] = None,
                    **options: Any) -> Iterators:
    """(train, valid, test) as SampleIterators, None for a split without a share; `options` are those of open_samples. Collective
    over `world`: rank 0 builds index files that are missing, the others read them.

    Batches hold `text` int64 [micro_batch_size * num_micro_batches, seq_length + 1], and where the options ask for it
    `labels` (eod_mask_loss: -100 after an `eos_token_id`), `position_ids` and `document_ids`, [b, seq_length]. Samples,
    their order and their number are Megatron's for the same data_path, split, seed and iterations. Data that
    `tessera preprocess` made know their tokenizer: `eos_token_id` follows from it, and another one, or a model's
    `vocab_size` (0: unknown) that is smaller than its, is refused. Other data are looked through for ids at or above
    `vocab_size` first. `consumed_samples`: of (train, valid, test), to go on from there.
    `datasets_provider(num_samples) -> (train, valid, test)` gives datasets of the caller's instead.
    Errors: ConfigError, DataError."""
    consumed = (list(consumed_samples) + [0, 0, 0])[:3]
    whole = micro_batch_size * num_micro_batches * data_ranks
    counts = sample_counts(train_iters, eval_iters, eval_interval, whole)

    def build() -> Sequence[Any]:
        if datasets_provider is not None:
            return datasets_provider(counts)
        return open_samples(data_path, counts, seq_length, **options)

    datasets = first_then_all(world, build)
    names = ("train", "valid", "test")
    return tuple(None if each is None else  # type: ignore[return-value]
                 SampleIterator(each, global_batch_size=whole, data_rank=data_rank, data_ranks=data_ranks,
                                consumed_samples=used, name=name)
                 for each, used, name in zip(datasets, consumed, names))


class GPTDataset:
    """GPT samples of one split: `dataset[i]` is {"text": int64 [seq_length + 1], ...}; `options` are those of open_samples."""

    def __init__(self, data_path: DataPath, seq_length: int, *, num_samples: Optional[int] = None, split: str = "1,0,0",
                 which: str = "train", **options: Any):
        names = ("train", "valid", "test")
        if which not in names:
            raise ConfigError(f"there is no split {which!r}, only {', '.join(names)}")
        counts = tuple(num_samples if name == which else 0 for name in names)
        opened = open_samples(data_path, counts, seq_length, split=split, **options)[names.index(which)]
        if opened is None:
            raise DataError(f"split {split!r} leaves nothing for {which}")
        self.samples = opened

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {name: column[0] for name, column in _tensors(self.samples.fetch([index % len(self)])).items()}


def _read(file: BinaryIO, dtype: Any, offset: int, entries: int) -> np.ndarray:
    """`entries` values from byte `offset` on, read-only."""
    size = entries * np.dtype(dtype).itemsize
    pieces = []
    while size > 0:
        pieces.append(os.pread(file.fileno(), size, offset))
        if not pieces[-1]:
            raise DataError(f"{file.name}: ended at byte {offset} while it was in use. Write data under a new name while "
                            "a script reads the old one")
        offset += len(pieces[-1])
        size -= len(pieces[-1])
    return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), dtype)


class IndexedDataset:
    """Reader of PREFIX.idx and PREFIX.bin. `dataset[i]` is sequence i, `document(i)` a document with its sequences
    joined: read-only numpy arrays, read when they are asked for (a map of a file that shrinks would end the process).
    The index is read and checked when it is opened, ids are not. Errors: DataError, naming file, place and remedy."""

    def __init__(self, path_prefix: Union[str, os.PathLike]):
        from tessera import _C

        self.files = _C.IndexedFiles(os.fspath(path_prefix))
        count = self.files.sequences
        self.dtype = np.dtype(self.files.dtype)

        with open(self.files.prefix + ".idx", "rb") as index:
            self.sequence_lengths = _read(index, "<i4", _HEADER, count)
            self._pointers = _read(index, "<i8", _HEADER + 4 * count, count)
            self.document_indices = _read(index, "<i8", _HEADER + 12 * count, self.files.documents + 1)
        self._tokens = open(self.files.prefix + ".bin", "rb", buffering=0)

    def __len__(self) -> int:
        """Sequences."""
        return self.files.sequences

    @property
    def documents(self) -> int:
        return self.files.documents

    def __getitem__(self, index: int) -> np.ndarray:
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: Optional[int] = None) -> np.ndarray:
        """Tokens [offset, offset + length) of a sequence (length None: up to its end)."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)} in {self.files.prefix}.idx")
        tokens = self._sequences(index % len(self), index % len(self) + 1)
        end = len(tokens) if length is None else offset + length
        if not 0 <= offset <= end <= len(tokens):
            raise IndexError(f"tokens [{offset}, {end}) of a sequence of {len(tokens)} in {self.files.prefix}.bin")
        return tokens[offset:end]

    def document(self, index: int) -> np.ndarray:
        """All tokens of a document."""
        if not 0 <= index < self.documents:
            raise IndexError(f"document {index} of {self.documents} in {self.files.prefix}.idx")
        return self._sequences(int(self.document_indices[index]), int(self.document_indices[index + 1]))

    def _sequences(self, first: int, last: int) -> np.ndarray:
        def begin(sequence: int) -> int:
            return int(self._pointers[sequence]) if sequence < len(self) else self.files.tokens * self.dtype.itemsize

        return _read(self._tokens, self.dtype.newbyteorder("<"), begin(first),
                     (begin(last) - begin(first)) // self.dtype.itemsize)


class IndexedDatasetBuilder:
    """Writes PREFIX.idx and PREFIX.bin, byte for byte as Megatron does; both appear with finalize(). `dtype` of the
    tokens, or the one Megatron chooses for `vocab_size`."""

    def __init__(self, path_prefix: Union[str, os.PathLike], dtype: Any = None, vocab_size: Optional[int] = None):
        from tessera import _C

        if (dtype is None) == (vocab_size is None):
            raise ConfigError("give either dtype or vocab_size")
        name = _C.token_dtype(vocab_size) if dtype is None else np.dtype(dtype).name
        self.dtype = np.dtype(name)
        self._writer = _C.IndexedWriter(os.fspath(path_prefix), name)

    def add_item(self, tokens: Any) -> None:
        """Appends a sequence, [n] ids (a list, an array or a torch tensor), to the open document."""
        ids = np.asarray(tokens)
        if ids.size == 0:
            ids = np.zeros(0, np.int32)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DataError(f"token ids are whole numbers in one dimension, not {ids.dtype} {list(ids.shape)}")
        if ids.size and (ids.min() < _INT32.min or ids.max() > _INT32.max):
            raise DataError(f"token ids from {ids.min()} to {ids.max()} do not fit 32 bits")
        self._writer.add_sequence(np.ascontiguousarray(ids, np.int32))

    def end_document(self) -> None:
        """Closes the open document, which may be empty."""
        self._writer.end_document()

    def add_document(self, tokens: Any) -> None:
        """A document of one sequence."""
        self.add_item(tokens)
        self.end_document()

    def add_index(self, path_prefix: Union[str, os.PathLike]) -> None:
        """Appends all documents of another pair of files of the same dtype."""
        from tessera import _C

        self._writer.append(_C.IndexedFiles(os.fspath(path_prefix)))

    def finalize(self) -> None:
        self._writer.finish()
