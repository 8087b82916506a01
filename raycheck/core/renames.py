"""Names of a checkpoint under which a program knows them now."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from raycheck.errors import ConfigError


class Renames:
    """Renames tensors and parts by the beginning of their dotted names.

    Args:
        pairs: From a name in the checkpoint to its name now. It stands for
            everything below it too; of two that fit, the longer one is used.
        optimizers: Parts whose names contain another part's: ``optimizer.`` +
            a parameter's name + ``.exp_avg``. That name is renamed as well.

    Raises:
        ConfigError: If a name is empty or no string.
    """

    def __init__(self, pairs: Mapping[str, str], optimizers: Collection[str] = ()) -> None:
        for pair in pairs.items():
            if not all(isinstance(name, str) and name.strip(".") for name in pair):
                raise ConfigError(
                    f"rename={{{pair[0]!r}: {pair[1]!r}}}: must be two dotted names, the one in the "
                    'checkpoint and the one now, such as {"model.encoder": "model.backbone"}',
                    field="rename",
                    value=dict(pairs),
                )
        self._pairs = dict(pairs)
        self._optimizers = frozenset(optimizers)

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def __call__(self, name: str) -> str:
        """Return the name now."""
        if not self._pairs:
            return name
        renamed = self._begin(name)
        part, dot, rest = renamed.partition(".")
        if dot and part in self._optimizers:
            return f"{part}.{self._begin(rest)}"
        return renamed

    def all(self, names: Iterable[str]) -> dict[str, str]:
        """Return each name with its name now.

        Raises:
            ValueError: If two get the same one.
        """
        renamed: dict[str, str] = {}
        before: dict[str, str] = {}
        for name in names:
            now = renamed[name] = self(name)
            if before.setdefault(now, name) != name:
                raise ValueError(f"rename: {before[now]} and {name} of the checkpoint would both be {now}")
        return renamed

    def _begin(self, name: str) -> str:
        end = len(name)
        while end > 0:
            known = self._pairs.get(name[:end])
            if known is not None:
                return known + name[end:]
            end = name.rfind(".", 0, end)
        return name
