"""Where a store is: URLs and paths, normalised once.

A path without a scheme is taken literally. ``file://`` URLs are percent-decoded,
as their standard says. In every other URL the part after the scheme is literal,
and what different programs would read differently is refused: ``%20`` is a space
to some and three characters to others.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import parse_qsl, unquote

import fsspec

from raycheck.errors import ConfigError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_FLATTENED_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/[^/]")
_PERCENT_CODE = re.compile(r"%[0-9A-Fa-f]{2}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,254}")
_IGNORED_QUERY = ("allow_bucket_creation", "allow_bucket_deletion")
_KNOWN_QUERY = ("endpoint_override", "scheme", "region", "force_virtual_addressing", *_IGNORED_QUERY)


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """A normalised root: two spellings of one place are equal, query apart."""

    scheme: str
    """"file", "s3", or another scheme of fsspec."""

    root: str
    """Absolute path, or bucket and prefix; no empty segment, no slash at the end."""

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    """Options of the file system that the URL carried."""

    @property
    def url(self) -> str:
        """The root as one string, without options; ``parse_location`` reads it back."""
        return self.root if self.scheme == "file" else f"{self.scheme}://{self.root}"


def parse_location(url: str | os.PathLike[str]) -> Location:
    """Return where ``url`` points.

    Raises:
        ConfigError: If it is not a usable path or URL; the message holds neither
            user information nor query values, which may be secrets.
    """
    text = os.fspath(url)
    if not isinstance(text, str) or not text.strip():
        _refuse(text, "is not a path or URL")
    if _CONTROL.search(text) or not _is_utf8(text):
        _refuse(text, "contains a control character or is not valid text")
    match = _URL.fullmatch(text)
    if match is None:
        return _parse_path(text)
    scheme, rest = match[1].lower(), match[2]
    if scheme in ("file", "local"):
        return _parse_file_url(text, rest)
    if scheme in ("s3", "s3a"):
        return _parse_s3_url(text, rest)
    return _parse_other_url(text, scheme, rest)


def check_key(key: str) -> str:
    """Return ``key``, which must be segments joined by single slashes.

    Raises:
        ValueError: If a segment is empty, "." or "..", or holds a control character.
    """
    if not is_key(key):
        raise ValueError(f"{key!r} is not a key: it must be names joined by '/', none of them empty or '..'")
    return key


def is_key(key: str) -> bool:
    """Return whether ``key`` can be a key of a store."""
    return not _CONTROL.search(key) and all(part not in ("", ".", "..") for part in key.split("/"))


def _parse_path(text: str) -> Location:
    flattened = _FLATTENED_URL.match(text)
    if flattened and flattened[1].lower() in _known_schemes():
        _refuse(text, "looks like a URL that a path class has shortened; pass the URL as a string")
    return Location("file", os.path.abspath(os.path.expanduser(text)))


def _parse_file_url(text: str, rest: str) -> Location:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        _refuse(text, "must be an absolute path after the scheme: file:///folder/name")
    if "?" in path or "#" in path:
        _refuse(text, "has a '?' or '#', which a file URL cannot hold; pass the plain path instead")
    path = unquote(path)
    if _CONTROL.search(path):
        _refuse(text, "contains a control character")
    return Location("file", os.path.abspath("/" + path))


def _parse_s3_url(text: str, rest: str) -> Location:
    path, _, query = rest.partition("?")
    if "?" in rest and not query:
        _refuse(text, "ends with '?', which cannot be part of a prefix")
    if path.startswith("/"):
        _refuse(text, "names no bucket after s3://")
    bucket, *prefix = _segments(text, path)
    if "@" in bucket:
        _refuse(text, "carries credentials; give them in storage_options or the environment")
    if not _BUCKET.fullmatch(bucket):
        _refuse(text, "does not name a bucket (3 or more letters, digits, '.', '-', '_')")
    return Location("s3", "/".join([bucket, *prefix]), _s3_options(text, query))


def _s3_options(text: str, query: str) -> dict[str, Any]:
    values = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(values) - set(_KNOWN_QUERY))
    if unknown or (query and not values):
        _refuse(
            text,
            f"has the unknown query {', '.join(unknown) or '(empty)'}; known are {', '.join(_KNOWN_QUERY)}. "
            "A '?' cannot be part of a prefix",
        )
    options: dict[str, Any] = {}
    if "endpoint_override" in values:
        address = values["endpoint_override"]
        has_scheme = address.startswith(("http://", "https://"))
        options["endpoint_url"] = address if has_scheme else f"{values.get('scheme', 'https')}://{address}"
    elif values.get("scheme") == "http":
        options["use_ssl"] = False
    if "region" in values:
        options["client_kwargs"] = {"region_name": values["region"]}
    if values.get("force_virtual_addressing", "").lower() == "true":
        options["config_kwargs"] = {"s3": {"addressing_style": "virtual"}}
    return options


def _parse_other_url(text: str, scheme: str, rest: str) -> Location:
    known = _known_schemes()
    if scheme not in known:
        _refuse(text, f"has an unknown scheme; known are {', '.join(known)}")
    try:
        file_system = fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise ConfigError(
            f"storage {_without_secrets(text)!r} needs a package that is not installed: {error}",
            field="storage_path",
            value=_without_secrets(text),
        ) from error
    joined = f"{scheme}://{'/'.join(_segments(text, rest))}"
    options = file_system._get_kwargs_from_urls(joined)
    return Location(scheme, joined.partition("://")[2], options)


def _segments(text: str, path: str) -> list[str]:
    if _PERCENT_CODE.search(path):
        _refuse(text, "holds a percent code; write the characters as they are")
    segments = [part for part in path.split("/") if part]
    if not segments:
        _refuse(text, "names no bucket or folder")
    if any(part in (".", "..") for part in segments):
        _refuse(text, "has a '.' or '..' as a name")
    return segments


def _known_schemes() -> list[str]:
    return sorted({"file", "s3", "s3a", *fsspec.available_protocols()})


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_secrets(text: object) -> str:
    shown = re.sub(r"(://)[^/@]*@", r"\1...@", str(text))
    return re.sub(r"=[^&]*", "=...", shown) if "://" in shown and "?" in shown else shown


def _refuse(text: object, fault: str) -> NoReturn:
    shown = _without_secrets(text)
    raise ConfigError(f"storage {shown!r} {fault}", field="storage_path", value=shown)
