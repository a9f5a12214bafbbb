"""Tokenizes texts for the C++ side: framed requests on standard input, framed answers on standard output.

A frame is u32 kind, u64 length, payload (little-endian).

=======  ==========================================  ==================================================
kind     request                                     answer
=======  ==========================================  ==================================================
hello 1  (sent unasked, once the model is loaded)    nothing
encode 2 u32 count, u32 bytes of each text, texts    u32 count, u32 ids of each text, u32 ids
decode 3 u32 ids                                     UTF-8 text
refused 4                                            UTF-8 message: text or model file cannot be used
missing 5                                            UTF-8 message: a package is missing
=======  ==========================================  ==================================================
"""

import argparse
import importlib
import os
import signal
import struct
import sys
from array import array

HELLO, ENCODE, DECODE, REFUSED, MISSING = 1, 2, 3, 4, 5


class Refused(Exception):
    """The input cannot be used; the message says why and what to do."""


def write_frame(stream, kind, payload):
    stream.write(struct.pack("<IQ", kind, len(payload)))
    stream.write(payload)
    stream.flush()


def read_exactly(stream, size):
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def read_frame(stream):
    kind, length = struct.unpack("<IQ", read_exactly(stream, 12))
    return kind, read_exactly(stream, length)


def u32_bytes(values):
    numbers = array("I", values)
    if numbers.itemsize != 4:
        return struct.pack(f"<{len(values)}I", *values)
    if sys.byteorder != "little":
        numbers.byteswap()
    return numbers.tobytes()


def load_tokenizer(options):
    from tokenizers import Tokenizer
    from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer

    try:
        if options.model:
            tokenizer = Tokenizer.from_file(options.model)
        else:
            made = BertWordPieceTokenizer(options.vocab_file, lowercase=options.word_piece == "lower") if options.word_piece \
                else ByteLevelBPETokenizer(options.vocab_file, options.merge_file)
            tokenizer = Tokenizer.from_str(made.to_str())
    except Exception as error:  # the package raises plain Exception for damaged files
        raise Refused(f"{options.model or options.vocab_file}: cannot be read as a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def texts_of(payload):
    """The texts of a request: u32 count, u32 bytes of each, texts."""
    (count,) = struct.unpack_from("<I", payload)
    sizes = struct.unpack_from(f"<{count}I", payload, 4)
    at, texts = 4 + 4 * count, []
    for size in sizes:
        try:
            texts.append(payload[at : at + size].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise Refused(f"text is not UTF-8: {error}") from error
        at += size
    return texts


def encode(tokenizer, payload):
    texts = texts_of(payload)
    # The same ids without their places in the text, which nobody asks for; older packages only have the other.
    encode_batch = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
    rows = [encoding.ids for encoding in encode_batch(texts, add_special_tokens=False)]
    answer = [struct.pack("<I", len(texts)), u32_bytes([len(row) for row in rows])]
    answer.extend(u32_bytes(row) for row in rows)
    return b"".join(answer)


def decode(tokenizer, payload):
    ids = list(struct.unpack(f"<{len(payload) // 4}I", payload))
    return tokenizer.decode(ids, skip_special_tokens=True).encode("utf-8", "replace")


def serve(options, requests, answers):
    tokenizer = load_tokenizer(options)
    write_frame(answers, HELLO, b"")
    work = {ENCODE: encode, DECODE: decode}
    while True:
        try:
            kind, payload = read_frame(requests)
        except EOFError:
            return
        try:
            write_frame(answers, kind, work[kind](tokenizer, payload))
        except Refused as error:
            write_frame(answers, REFUSED, str(error).encode())


def answer_with(package, work):
    """Does `work(requests, answers)` on standard input and output, where the package that it needs is there; says why not. The exit
    code."""
    answers = sys.stdout.buffer
    # A terminal sends Ctrl-C to the program that asks here as well, which may still have questions; where it ends, so does its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        importlib.import_module(package)
    except ImportError as error:
        message = f"The Python package '{package}' is missing ({sys.executable}: {error}). Install it: " \
                  f"{sys.executable} -m pip install {package}"
        write_frame(answers, MISSING, message.encode())
        return 1
    try:
        work(sys.stdin.buffer, answers)
    except Refused as error:
        write_frame(answers, REFUSED, str(error).encode())
        return 1
    return 0


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Tokenizes for `tessera preprocess` over standard input and output.")
    parser.add_argument("--model", default="", help="tokenizer.json")
    parser.add_argument("--vocab-file", default="", help="vocab.json of a GPT-2 tokenizer, or vocab.txt")
    parser.add_argument("--word-piece", default="", choices=("", "lower", "case"), help="the vocabulary is a vocab.txt of WordPiece")
    parser.add_argument("--merge-file", default="", help="merges.txt of a GPT-2 tokenizer")
    options = parser.parse_args(arguments)
    # One process per worker is the parallelism; threads inside each would only fight for the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return answer_with("tokenizers", lambda requests, answers: serve(options, requests, answers))


if __name__ == "__main__":
    sys.exit(main())
