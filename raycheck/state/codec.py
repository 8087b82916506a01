"""Plain values as JSON with type tags, so that nothing read back can run code.

Numbers, strings, None, lists and dicts with string keys are themselves;
anything else is an object with the key "!", which names its type. Tensors
are not stored here: they are replaced by their names.
"""

from __future__ import annotations

import base64
import collections
import datetime
import json
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from raycheck.errors import CorruptCheckpointError, StateError

_TAG = "!"
_MAX_SAME_HASH = 100
_TORCH_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Codec:
    """Encodes plain values and decodes them again.

    Args:
        allow_pickle: Types that may be stored with pickle, in both directions.
    """

    def __init__(self, allow_pickle: tuple[type, ...] = ()) -> None:
        self._allowed = {_type_name(cls): cls for cls in allow_pickle}

    def to_bytes(self, coded: Any) -> bytes:
        """Return what `encode` returned as JSON text."""
        return json.dumps(coded, separators=(",", ":"), allow_nan=False).encode()

    def loads(
        self,
        data: bytes,
        tensors: Mapping[str, torch.Tensor],
        wants: Callable[[str], bool] = lambda part: True,
    ) -> Any:
        """Return what `encode` was given.

        Args:
            data: The JSON text.
            tensors: By the names that were stored in their place.
            wants: Which keys of the outermost dict to decode; the others are None.

        Raises:
            CorruptCheckpointError: If the text is damaged, or names a type that
                is not allowed here.
        """
        try:
            coded = json.loads(data)
            if isinstance(coded, dict):
                coded = {key: value if wants(key) else None for key, value in coded.items()}
            return self._decode(coded, tensors)
        # Whatever the constructors of the types raise for arguments that are none.
        except (
            *(ValueError, TypeError, LookupError, AttributeError),
            *(OverflowError, RuntimeError, SyntaxError),
        ) as error:
            raise CorruptCheckpointError(f"stored values are damaged: {repr(error)[:300]}") from error

    def encode(self, value: Any, path: str, on_tensor: Callable[[str, torch.Tensor], str]) -> Any:
        """Return ``value`` as JSON values.

        Args:
            value: Any nesting of supported types.
            path: The name it has in the state, for names and messages.
            on_tensor: Called with the path of each tensor; returns the name to store in its place.

        Raises:
            StateError: If something in it cannot be stored; names its path.
        """
        if value is None or (isinstance(value, bool | str) and type(value) in (bool, str)):
            return value
        kind = type(value)
        if kind is int:
            return value
        if kind is float:
            return value if math.isfinite(value) else {_TAG: "float", "v": repr(value)}
        if isinstance(value, torch.Tensor):
            return {_TAG: "tensor", "v": on_tensor(path, value)}
        if kind is list:
            if all(type(item) is str for item in value):
                return list(value)
            return [self.encode(item, f"{path}[{i}]", on_tensor) for i, item in enumerate(value)]
        if kind is dict and all(type(key) is str for key in value) and _TAG not in value:
            return {key: self.encode(item, f"{path}.{key}", on_tensor) for key, item in value.items()}
        if kind in (dict, collections.OrderedDict, collections.Counter):
            pairs = [
                [self.encode(key, f"{path} key", on_tensor), self.encode(item, f"{path}[{key!r}]", on_tensor)]
                for key, item in value.items()
            ]
            return {_TAG: kind.__name__, "v": pairs}
        if kind in (tuple, set, frozenset, collections.deque):
            items = sorted(value, key=repr) if kind in (set, frozenset) else value
            coded = [self.encode(item, f"{path}[{i}]", on_tensor) for i, item in enumerate(items)]
            tagged = {_TAG: kind.__name__, "v": coded}
            if kind is collections.deque:
                tagged["maxlen"] = value.maxlen
            return tagged
        return self._encode_leaf(value, path)

    def _encode_leaf(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is bytes:
            return {_TAG: "bytes", "v": base64.b64encode(value).decode()}
        if kind is complex:
            return {_TAG: "complex", "v": repr(value)}
        if isinstance(value, np.ndarray | np.generic) and _is_plain(value.dtype):
            array = np.ascontiguousarray(value)
            return {
                _TAG: "ndarray" if isinstance(value, np.ndarray) else "npscalar",
                "dtype": array.dtype.str,
                "shape": list(value.shape),
                "v": base64.b64encode(array.tobytes()).decode(),
            }
        if isinstance(value, torch.dtype | torch.device):
            return {_TAG: "torch." + kind.__name__, "v": str(value)}
        if kind is torch.Size:
            return {_TAG: "torch.Size", "v": list(value)}
        if kind is datetime.timedelta:
            return {_TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]}
        if kind in (datetime.datetime, datetime.date, datetime.time):
            return {_TAG: kind.__name__, "v": value.isoformat()}
        name = _type_name(kind)
        if name in self._allowed:
            return {_TAG: "pickle", "type": name, "v": base64.b64encode(pickle.dumps(value)).decode()}
        raise StateError(
            f"{path} is a {name}, which cannot be saved without pickle; leave it out of the state, "
            f"give it state_dict/load_state_dict, or allow its type with "
            f"AutoCheckpoint(allow_pickle=({kind.__name__},))",
            key=path,
        )

    def _decode(self, coded: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
        if isinstance(coded, list):
            return [self._decode(item, tensors) for item in coded]
        if not isinstance(coded, dict):
            return coded
        if _TAG not in coded:
            return {key: self._decode(item, tensors) for key, item in coded.items()}
        tag, value = coded[_TAG], coded["v"]
        if tag == "tensor":
            return tensors[value]
        if tag in ("dict", "OrderedDict", "Counter"):
            pairs = [(self._decode(key, tensors), self._decode(item, tensors)) for key, item in value]
            _check_spread([key for key, _ in pairs])
            made: dict[Any, Any] = {"dict": dict, "OrderedDict": collections.OrderedDict}.get(
                tag, collections.Counter
            )()
            made.update(pairs) if tag != "Counter" else made.update(dict(pairs))
            return made
        if tag in ("tuple", "set", "frozenset", "deque"):
            items = [self._decode(item, tensors) for item in value]
            if tag == "deque":
                return collections.deque(items, coded["maxlen"])
            if tag != "tuple":
                _check_spread(items)
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](items)
        return self._decode_leaf(tag, value, coded)

    def _decode_leaf(self, tag: str, value: Any, coded: dict[str, Any]) -> Any:
        match tag:
            case "float":
                return float(value)
            case "complex":
                return complex(value)
            case "bytes":
                return base64.b64decode(value)
            case "ndarray" | "npscalar":
                if type(coded["dtype"]) is not str:
                    raise TypeError("a dtype that is no text")
                dtype = np.dtype(coded["dtype"])
                if dtype.hasobject:
                    raise ValueError("an array of objects")
                array = np.frombuffer(base64.b64decode(value), dtype).reshape(coded["shape"]).copy()
                return array if tag == "ndarray" else array[()]
            case "torch.dtype":
                return _TORCH_DTYPES[value]
            case "torch.device":
                return torch.device(value)
            case "torch.Size":
                return torch.Size(value)
            case "timedelta":
                return datetime.timedelta(*value)
            case "datetime" | "date" | "time":
                return getattr(datetime, tag).fromisoformat(value)
            case "pickle":
                return self._unpickle(coded["type"], value)
        raise ValueError(f"unknown type tag {tag!r}")

    def _unpickle(self, name: str, value: str) -> Any:
        if name not in self._allowed:
            raise CorruptCheckpointError(
                f"the checkpoint holds a pickled {name}, and reading it can run code; if you trust the "
                f"checkpoint, allow it with AutoCheckpoint(allow_pickle=({name.rpartition('.')[2]},))"
            )
        loaded = pickle.loads(base64.b64decode(value))
        if _type_name(type(loaded)) != name:
            raise ValueError(f"a pickled {_type_name(type(loaded))} in the place of a {name}")
        return loaded


def _check_spread(keys: Sequence[Any]) -> None:
    """Refuse many keys of one hash: numbers can be chosen so, and a table of them takes quadratic time."""
    if len(keys) > _MAX_SAME_HASH and max(collections.Counter(map(hash, keys)).values()) > _MAX_SAME_HASH:
        raise ValueError(f"more than {_MAX_SAME_HASH} keys have one hash")


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether the dtype's text says all of it: fields would lose their names."""
    return not dtype.hasobject and dtype.names is None


def _type_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
