"""What commands on a stored run share: where it is, which checkpoint is meant, how a command ends."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from raycheck.core.layout import CHECKPOINTS, ROOT
from raycheck.errors import CheckpointError, CheckpointNotFoundError, ConfigError, RaycheckError
from raycheck.store.objects import Store
from raycheck.store.run import RunStore

DONE, BAD, FAILED = 0, 1, 2
"""Exit codes: all is well; something is wrong with what was looked at; it could not be looked at."""

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's folder or URL: storage path and run name.")
]
StepOption = Annotated[
    int | None, typer.Option("--step", min=0, help="The checkpoint of this step. Default: the newest usable.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
OptionsOption = Annotated[
    str,
    typer.Option("--storage-options", metavar="JSON", help="Options of the file system, as a JSON object."),
]
ParallelOption = Annotated[int, typer.Option("--parallel", min=1, max=64, help="Requests at a time.")]


def open_run(run: str, options: str) -> RunStore:
    """Return the store of a run, given as Ray Train names it or as raycheck's own folder in it.

    Raises:
        ConfigError: If the options or the URL are wrong, or there is no run.
        StorageError: If the store cannot be read.
    """
    given = parse_options(options)
    for url in (join_url(run, ROOT), run):
        run_store = RunStore(Store(url, given))
        if run_store.claims() or run_store.store.list_children(CHECKPOINTS):
            return run_store
    raise ConfigError(
        f"there is no raycheck run in {Store(run, given).url}: neither generations/ nor {ROOT}/generations/; "
        "give the storage path and the run's name, such as s3://bucket/runs/gpt",
        field="RUN",
        value=run,
    )


def parse_options(options: str) -> dict[str, Any]:
    """Return the options of a file system.

    Raises:
        ConfigError: If they are no JSON object.
    """
    try:
        given = json.loads(options)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--storage-options: not valid JSON ({error}); write an object such as "
            '\'{"endpoint_url": "http://host:9000"}\'',
            field="storage-options",
            value=options,
        ) from error
    if not isinstance(given, dict):
        raise ConfigError("--storage-options: must be a JSON object", field="storage-options", value=options)
    return given


def join_url(url: str, name: str) -> str:
    """Append a name to a path or URL, before its query if it has one."""
    base, mark, query = url.partition("?") if "://" in url else (url, "", "")
    return f"{base.rstrip('/')}/{name}{mark}{query}"


@contextlib.contextmanager
def reported(command: str) -> Iterator[None]:
    """End the command with a message and an exit code where raycheck raises."""
    try:
        yield
    except RaycheckError as error:
        typer.echo(f"raycheck {command}: {error}", err=True)
        is_damage = isinstance(error, CheckpointError) and not isinstance(error, CheckpointNotFoundError)
        raise typer.Exit(BAD if is_damage else FAILED) from error


def print_json(value: Any) -> None:
    """Print JSON, which has no infinity and no NaN: null stands for both."""
    typer.echo(json.dumps(_finite(value), indent=2))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
