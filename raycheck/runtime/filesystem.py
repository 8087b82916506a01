"""The URL and options of a place that somebody names by a pyarrow file system.

The agents make clients of their own, in their own processes: from a URL and
options, never from a pickled client.
"""

from __future__ import annotations

from typing import Any

import pyarrow.fs

from raycheck.errors import ConfigError

Place = tuple[str, dict[str, Any] | None]


def place_of(path: str, filesystem: Any) -> Place:
    """Return a URL and fsspec options for ``path`` in ``filesystem``.

    Args:
        path: As the file system takes it, without a scheme.
        filesystem: pyarrow's local or S3 file system, a part of one, or an
            fsspec file system, which pyarrow may have wrapped.

    Raises:
        ConfigError: If it is of another kind.
    """
    if isinstance(filesystem, pyarrow.fs.SubTreeFileSystem):
        return place_of(f"{filesystem.base_path.rstrip('/')}/{path.lstrip('/')}", filesystem.base_fs)
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        return path, None
    if isinstance(filesystem, pyarrow.fs.S3FileSystem):
        return f"s3://{path.lstrip('/')}", _s3_options(filesystem)
    if isinstance(filesystem, pyarrow.fs.PyFileSystem):
        filesystem = getattr(filesystem.handler, "fs", None)
    protocol = getattr(filesystem, "protocol", None)
    if protocol is None or not hasattr(filesystem, "storage_options"):
        raise ConfigError(
            f"RunConfig(storage_filesystem={type(filesystem).__name__}) cannot be opened by raycheck's own "
            "processes; give the same place as a URL: AutoCheckpoint(storage_path=..., storage_options=...)",
            field="storage_path",
            value=None,
        )
    scheme = protocol if isinstance(protocol, str) else protocol[0]
    options = dict(filesystem.storage_options) or None
    return (path if scheme in ("file", "local") else f"{scheme}://{path.lstrip('/')}"), options


def _s3_options(filesystem: pyarrow.fs.S3FileSystem) -> dict[str, Any]:
    _, (known,) = filesystem.__reduce__()
    options: dict[str, Any] = {}
    if known["anonymous"]:
        options["anon"] = True
    elif known["access_key"] and not known["session_token"] and not known["role_arn"]:
        # Temporary ones end in mid-run: the agents find their own, by the same chain.
        options |= {"key": known["access_key"], "secret": known["secret_key"]}
    if known["endpoint_override"]:
        host = known["endpoint_override"]
        options["endpoint_url"] = host if "://" in host else f"{known['scheme'] or 'https'}://{host}"
    if known["region"]:
        options["client_kwargs"] = {"region_name": known["region"]}
    return options
