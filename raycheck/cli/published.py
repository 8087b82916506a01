"""Files and folders that appear under their name when they are whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from raycheck.errors import ConfigError
from raycheck.store.local import make_folders, sync_folder


@contextlib.contextmanager
def published(path: Path, *, is_folder: bool) -> Iterator[Path]:
    """Yield a place to write to that becomes ``path`` when the block ends well.

    It lies beside ``path``, under a hidden name. What was written is durable
    when the block has ended; if it raises, nothing is left.

    Raises:
        ConfigError: If there is something at ``path`` already.
        OSError: If it cannot be written.
    """
    if os.path.lexists(path):
        raise ConfigError(f"--to {path}: it exists already; give another name", field="to", value=str(path))
    parent = path.absolute().parent
    make_folders(str(parent))
    temporary = parent / f".{path.name}.{secrets.token_hex(4)}.partial"
    try:
        if is_folder:
            temporary.mkdir()
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                _sync(os.path.join(folder, name))
            sync_folder(folder)
        if temporary.is_file():
            _sync(str(temporary))
        os.rename(temporary, path)
        sync_folder(str(parent))
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
