"""Which checkpoint somebody means by a path, a URL or a ``ray.train.Checkpoint``. Blocks for storage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from raycheck.core import layout, lineage
from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    ObjectNotFoundError,
)
from raycheck.runtime.filesystem import place_of
from raycheck.store.objects import Store
from raycheck.store.run import RunStore

Options = Mapping[str, Any] | None
_T = TypeVar("_T")


def find_checkpoint(checkpoint: Any, *, step: int | None, options: Options) -> tuple[RunStore, CheckpointRef]:
    """Return the store of a checkpoint and which one it is there.

    Args:
        checkpoint: As `raycheck.load` takes it.
        step: Which one of a run; None: the newest that counts and has a manifest.
        options: Of the file system; None: what comes with ``checkpoint``.

    Raises:
        ConfigError: If there is no run or checkpoint.
        CheckpointNotFoundError: If the run has no such checkpoint.
        StorageError: If the store cannot be read.
    """
    url, own_options = _place(checkpoint)
    given = options if options is not None else own_options
    folder, name = _split(url)
    ref = layout.parse_checkpoint_name(name)
    if ref is not None and _split(folder)[1] == layout.CHECKPOINTS:
        _check_step(url, ref, step)
        return RunStore(Store(_split(folder)[0], given)), ref
    for root in (_join(url, layout.ROOT), url):
        run_store = RunStore(Store(root, given))
        if run_store.claims():
            return run_store, _choose(run_store, step)
    return _open_alone(url, given, step)


def _place(checkpoint: Any) -> tuple[str, Options]:
    # By its attributes, so that Ray need not be imported to read a file.
    path, filesystem = (getattr(checkpoint, name, None) for name in ("path", "filesystem"))
    if isinstance(path, str) and filesystem is not None:
        return place_of(path, filesystem)
    if isinstance(checkpoint, str | os.PathLike):
        return os.fspath(checkpoint), None
    raise ConfigError(
        f"checkpoint is a {type(checkpoint).__qualname__}: must be a ray.train.Checkpoint, a path or a URL",
        field="checkpoint",
        value=type(checkpoint).__qualname__,
    )


def _choose(run_store: RunStore, step: int | None) -> CheckpointRef:
    tip = lineage.tip(run_store.records())
    counting = lineage.selectable(tip, run_store.attempts())
    if step is not None:
        counting = [ref for ref in counting if ref.step == step] or counting
    for ref in counting:
        if (step is None or ref.step == step) and run_store.is_committed(ref):
            return ref
    steps = sorted({ref.step for ref in counting if run_store.is_committed(ref)})
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise CheckpointNotFoundError(
        f"{run_store.store.url}: {wanted} in this run; available steps: {', '.join(map(str, steps)) or 'none'}",
        step=step,
        available=steps,
    )


def _open_alone(url: str, options: Options, step: int | None) -> tuple[RunStore, CheckpointRef]:
    """Open a checkpoint's folder that was taken out of its run, as `Checkpoint.as_directory` does."""
    store = Store(url, options)
    try:
        fields = json.loads(store.get(layout.MANIFEST))
        number, id_ = fields["generation"]
        ref = CheckpointRef(fields["step"], GenerationId(number, id_), fields["plan_id"])
        is_ref = layout.parse_checkpoint_name(layout.checkpoint_name(ref)) == ref
    except ObjectNotFoundError:
        raise ConfigError(
            f"{store.url}: neither a run (no {layout.GENERATIONS}/ in it or in {layout.ROOT}/) nor a checkpoint (no "
            f"{layout.MANIFEST}); give the storage path and the run's name, such as s3://bucket/runs/gpt",
            field="checkpoint",
            value=store.url,
        ) from None
    except (ValueError, TypeError, LookupError, RecursionError):
        is_ref = False
    if not is_ref:
        raise CorruptCheckpointError(f"{store.url}/{layout.MANIFEST} is damaged", key=layout.MANIFEST)
    _check_step(url, ref, step)
    return RunStore(_FolderStore(url, options, ref)), ref


def _check_step(url: str, ref: CheckpointRef, step: int | None) -> None:
    if step is not None and step != ref.step:
        raise ConfigError(
            f"step={step}: {url} is the checkpoint of step {ref.step}; leave step out, or give the run's folder",
            field="step",
            value=step,
        )


class _FolderStore(Store):
    """One checkpoint's folder, read as if it lay in its run."""

    def __init__(self, url: str, options: Options, ref: CheckpointRef) -> None:
        super().__init__(url, options)
        self._prefix = layout.checkpoint_prefix(ref) + "/"

    def run(self, operation: str, key: str, attempt: Callable[[Any], _T], **options: Any) -> _T:
        """Have every key looked for in the folder itself."""
        here = self._key_here(key)
        return super().run(
            operation, here, lambda backend: attempt(_FolderBackend(backend, self._key_here)), **options
        )

    def _key_here(self, key: str) -> str:
        if key.startswith(f"{layout.LAYOUTS}/"):
            return layout.LAYOUT_COPY
        return key.removeprefix(self._prefix)


class _FolderBackend:
    """Reads of a backend with other keys; there is nothing else to do in such a folder."""

    def __init__(self, backend: Any, key_here: Callable[[str], str]) -> None:
        self._backend = backend
        self._key_here = key_here

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._backend, name)
        # Of every read the key comes first.
        return lambda key, *rest: call(self._key_here(key), *rest)


def _split(url: str) -> tuple[str, str]:
    """Return the folder of a path or URL, its query kept, and the last name."""
    base, mark, query = url.partition("?") if "://" in url else (url, "", "")
    folder, _, name = base.rstrip("/").rpartition("/")
    return f"{folder}{mark}{query}", name


def _join(url: str, name: str) -> str:
    base, mark, query = url.partition("?") if "://" in url else (url, "", "")
    return f"{base.rstrip('/')}/{name}{mark}{query}"
