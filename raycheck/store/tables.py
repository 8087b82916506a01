"""Parquet objects whose bytes nobody vouches for: bounded, and one error for whatever is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

MAX_TEXT_BYTES = 1 << 20
"""Of one name in a table."""

_BATCH_ROWS = 4096


def iter_rows(data: bytes, schema: pa.Schema, *, max_rows: int) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a Parquet object in the order of ``schema``, whose columns it must have.

    Memory is that of a batch: a few bytes may claim any number of equal rows, so
    whoever keeps them must look at what comes.

    Args:
        data: The object.
        schema: Numbers, texts and lists of numbers. Further columns are left out.
        max_rows: How many there may be at most.

    Raises:
        ValueError: If it is no such table; before the first row or at any later one.
    """
    texts = [field.name for field in schema if pa.types.is_string(field.type)]
    try:
        # One text that many rows share is read once, however long it is.
        file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=texts)
        _check_sizes(file, schema, max_rows)
        for batch in file.iter_batches(_BATCH_ROWS, columns=schema.names, use_threads=False):
            # Lengths, places in a dictionary, UTF-8: nothing below looks at them again.
            batch.validate(full=True)
            columns = [_values(batch.column(field.name), field) for field in schema]
            yield from zip(*columns, strict=True)
    # The library's errors, and what its conversions to Python raise.
    except (pa.ArrowException, OSError, KeyError, TypeError, OverflowError, NotImplementedError) as error:
        raise ValueError(f"no readable table: {str(error)[:300]}") from error


def _check_sizes(file: pq.ParquetFile, schema: pa.Schema, max_rows: int) -> None:
    found = file.schema_arrow
    for field in schema:
        if found.names.count(field.name) != 1:
            raise ValueError(f"no column {field.name}")
        kind = found.field(field.name).type
        if (kind.value_type if pa.types.is_dictionary(kind) else kind) != field.type:
            raise ValueError(f"column {field.name} holds {kind}, not {field.type}")
    metadata = file.metadata
    if not 0 <= metadata.num_rows <= max_rows:
        raise ValueError(f"{metadata.num_rows} rows, {max_rows} are the most")
    # No look at the columns' own metadata: damaged statistics end the process there (pyarrow 26).


def _values(column: pa.Array, field: pa.Field) -> list[Any]:
    if column.null_count:
        raise ValueError(f"column {field.name} lacks values")
    if not pa.types.is_dictionary(column.type):
        values: list[Any] = column.to_pylist()
        return values
    if (pc.max(pc.binary_length(column.dictionary)).as_py() or 0) > MAX_TEXT_BYTES:
        raise ValueError(f"column {field.name} holds texts of more than {MAX_TEXT_BYTES} bytes")
    texts = column.dictionary.to_pylist()
    return [texts[i] for i in column.indices.to_pylist()]
