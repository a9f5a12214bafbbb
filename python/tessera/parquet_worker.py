"""Gives the rows of a Parquet file to the C++ side as JSON lines: framed answers on standard output.

A frame is u32 kind, u64 length, payload (little-endian), as in tokenize_worker.

=======  ===========================  ====================================================================
kind     request                      answer
=======  ===========================  ====================================================================
rows 1   (sent unasked at the start)  u64 rows of the file
rows 1   nothing                      u64 rows so far, their lines since the last answer; no lines at the end
refused  4                            UTF-8 message: the file cannot be used
missing  5                            UTF-8 message: a package is missing
=======  ===========================  ====================================================================
"""

import json
import struct
import sys

from tessera.tokenize_worker import Refused, answer_with, read_frame, write_frame

ROWS = 1
ROWS_AT_ONCE = 512


def is_text(kind):
    import pyarrow.types as types

    return types.is_string(kind) or types.is_large_string(kind) or (types.is_dictionary(kind) and is_text(kind.value_type))


def open_columns(path, columns):
    """The file, whose `columns` hold text."""
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise Refused(f"cannot be read as Parquet: {error}. Copy the file again") from error
    schema = file.schema_arrow
    for column in columns:
        if schema.names.count(column) != 1:
            raise Refused(f"has no column {column!r}, or several; it has {', '.join(schema.names)}. "
                          f"Name the columns that hold text with --json-keys")
        kind = schema.field(column).type
        if not is_text(kind):
            raise Refused(f"its column {column!r} holds {kind}, not strings")
    return file


def batches(file, columns):
    import pyarrow

    try:
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns, use_threads=False):
            yield batch.num_rows, batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        raise Refused(f"is damaged: {error}. Copy the file again") from error


def serve(path, columns, requests, answers):
    file = open_columns(path, columns)
    write_frame(answers, ROWS, struct.pack("<Q", file.metadata.num_rows))
    done, rows = 0, batches(file, columns)
    while True:
        try:
            read_frame(requests)
        except EOFError:
            return
        count, values = next(rows, (0, []))
        while count and not values:
            count, values = next(rows, (0, []))
        done += count
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in values)
        write_frame(answers, ROWS, struct.pack("<Q", done) + lines.encode())


def main(arguments=None):
    path, *columns = sys.argv[1:] if arguments is None else arguments
    return answer_with("pyarrow", lambda requests, answers: serve(path, columns, requests, answers))


if __name__ == "__main__":
    sys.exit(main())
