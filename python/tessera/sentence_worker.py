"""Splits texts into sentences for the C++ side, with nltk's punkt: frames as those of tessera.tokenize_worker.

=======  ==========================================  ==================================================
kind     request                                     answer
=======  ==========================================  ==================================================
hello 1  (sent unasked, once punkt is loaded)        nothing
refused 4                                            UTF-8 message: text that cannot be used
missing 5                                            UTF-8 message: the package or punkt's data are missing
split 6  u32 count, u32 bytes of each text, texts    u32 count, u32 sentences of each text, u32 bytes of
                                                     each sentence, sentences
=======  ==========================================  ==================================================
"""

import argparse
import struct
import sys

from tessera.tokenize_worker import HELLO, MISSING, REFUSED, Refused, read_frame, texts_of, u32_bytes, write_frame

SPLIT = 6
ELSE = "Or put one sentence on each line and use --sentence-splitter lines."


class Missing(Exception):
    """What is not installed; the message says how to install it."""


def load_punkt(language):
    try:
        import nltk
    except ImportError as error:
        raise Missing(f"The Python package 'nltk' is missing ({sys.executable}: {error}). Install it: {sys.executable} -m pip install "
                      f"nltk. {ELSE}") from error
    try:
        nltk.tokenize.sent_tokenize("One. Two.", language=language)
    except LookupError as error:
        raise Missing(f"nltk has no data of punkt for '{language}'. Fetch it: {sys.executable} -m nltk.downloader punkt_tab. {ELSE}") \
            from error
    return lambda text: nltk.tokenize.sent_tokenize(text, language=language)


def split(sentences_of, payload):
    rows = [[sentence.encode("utf-8") for sentence in sentences_of(text)] for text in texts_of(payload)]
    parts = [struct.pack("<I", len(rows)), u32_bytes([len(row) for row in rows]),
             u32_bytes([len(sentence) for row in rows for sentence in row])]
    parts.extend(sentence for row in rows for sentence in row)
    return b"".join(parts)


def serve(sentences_of, requests, answers):
    write_frame(answers, HELLO, b"")
    while True:
        try:
            _, payload = read_frame(requests)
        except EOFError:
            return
        try:
            write_frame(answers, SPLIT, split(sentences_of, payload))
        except Refused as error:
            write_frame(answers, REFUSED, str(error).encode())


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Splits texts for `tessera preprocess` over standard input and output.")
    parser.add_argument("--language", default="english", help="of nltk's punkt")
    options = parser.parse_args(arguments)
    answers = sys.stdout.buffer
    try:
        sentences_of = load_punkt(options.language)
    except Missing as error:
        write_frame(answers, MISSING, str(error).encode())
        return 1
    serve(sentences_of, sys.stdin.buffer, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
