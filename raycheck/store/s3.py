"""Objects in S3 and its like.

The options are those of s3fs, and s3fs reads them; the calls go through the
botocore client that lies under it, in plain threads. On one machine and against
one server that path moved 2 GB/s and more for half a CPU second per GB, where
s3fs' own writer moved 0.24 GB/s for four: no event loop, no second copy of the
data, no SHA-256 of the payload. Every part carries its CRC32C instead, which the
server checks. There is no event loop to lose in a fork either.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

from raycheck.errors import ConfigError
from raycheck.store.backend import Bytes, ObjectInfo, Page, PartLimits
from raycheck.store.failures import error_code
from raycheck.store.location import Location

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 15
_DELETE_BATCH = 1000
# ``readinto`` allocates what it is asked for: small pieces keep memory at one buffer.
_READ_PIECE_BYTES = 256 << 10
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_ASYNC_ONLY = ("connector_args", "http_session_cls", "warm_up_loader_caches")


class S3Backend:
    """Objects below a bucket and prefix.

    Keys are passed as they are: no globbing, no URL decoding. Listings come
    from the server every time. A client is made at once, which contacts nobody.
    """

    parts_are_independent = True
    takes_views = False

    def __init__(self, location: Location, options: Mapping[str, Any]) -> None:
        self.limits = PartLimits()
        self._bucket, _, prefix = location.root.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._options = dict(options)
        self.refresh()

    def refresh(self) -> None:
        """Make a new client; calls under way end on the old one."""
        self._client, self._extra = make_client(self._options)

    def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Make one request to the bucket, with the user's extra arguments where they apply."""
        client, extra = self._client, self._extra
        if extra:
            name = client.meta.method_to_api_mapping[operation]
            known = client.meta.service_model.operation_model(name).input_shape.members
            arguments = {name: value for name, value in extra.items() if name in known} | arguments
        answer: dict[str, Any] = getattr(client, operation)(Bucket=self._bucket, **arguments)
        return answer

    def put(self, key: str, data: Bytes, crc32c: int) -> None:
        """Write a whole object."""
        self.call("put_object", Key=self.full_key(key), Body=data, ChecksumCRC32C=encode_crc(crc32c))

    def begin_upload(self, key: str, size_bytes: int) -> S3Upload:
        """Start an object that is written in parts."""
        return S3Upload(self, self.full_key(key))

    def get(self, key: str, most_bytes: int) -> bytes:
        """Return an object, or its first bytes."""
        answer = self.call("get_object", Key=self.full_key(key))
        with contextlib.closing(answer["Body"]) as body:
            if answer["ContentLength"] <= most_bytes:
                # To its end, where the length is checked.
                data: bytes = body.read()
            else:
                data = body.read(most_bytes)
            return data

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset`` on; return fewer bytes at the end of the object."""
        span = f"bytes={offset}-{offset + len(buffer) - 1}"
        try:
            answer = self.call("get_object", Key=self.full_key(key), Range=span)
        except ClientError as error:
            if error_code(error) in ("InvalidRange", "416"):
                return 0
            raise
        with contextlib.closing(answer["Body"]) as body:
            wanted = wanted_bytes(
                answer.get("ContentRange"), answer["ContentLength"], offset=offset, length=len(buffer)
            )
            filled = 0
            while filled < wanted:
                count = body.readinto(buffer[filled : min(filled + _READ_PIECE_BYTES, wanted)])
                if count == 0:
                    raise ConnectionError(f"the answer ended after {filled} of {wanted} bytes of {key}")
                filled += count
            return filled

    def size_bytes(self, key: str) -> int:
        """Return the size."""
        return int(self.call("head_object", Key=self.full_key(key))["ContentLength"])

    def list_page(self, folder: str, token: str | None, *, recursive: bool) -> Page:
        """Return what is below a folder."""
        arguments = {"Prefix": self.full_key(f"{folder}/" if folder else "")}
        if token is not None:
            arguments["ContinuationToken"] = token
        if not recursive:
            arguments["Delimiter"] = "/"
        answer = self.call("list_objects_v2", **arguments)
        return Page(
            [
                ObjectInfo(entry["Key"].removeprefix(self._prefix), int(entry["Size"]))
                for entry in answer.get("Contents", ())
                if not entry["Key"].endswith("/")
            ],
            [
                entry["Prefix"].removeprefix(self._prefix).rstrip("/")
                for entry in answer.get("CommonPrefixes", ())
            ],
            answer.get("NextContinuationToken") if answer.get("IsTruncated") else None,
        )

    def delete(self, keys: Sequence[str]) -> None:
        """Delete what is there."""
        for start in range(0, len(keys), _DELETE_BATCH):
            objects = [{"Key": self.full_key(key)} for key in keys[start : start + _DELETE_BATCH]]
            answer = self.call("delete_objects", Delete={"Objects": objects, "Quiet": True})
            for failure in answer.get("Errors", ()):
                if failure.get("Code") != "NoSuchKey":
                    raise ClientError({"Error": failure}, "DeleteObjects")

    def sweep_uploads(self, older_than_s: float) -> list[str]:
        """Remove uploads that were left over."""
        limit = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=older_than_s)
        swept = []
        for upload in self._open_uploads():
            if upload["Key"].startswith(self._prefix) and upload["Initiated"] <= limit:
                self._abort(upload["Key"], upload["UploadId"])
                swept.append(upload["Key"].removeprefix(self._prefix))
        return swept

    def _open_uploads(self) -> Iterator[dict[str, Any]]:
        markers: dict[str, str] = {}
        while True:
            answer = self.call("list_multipart_uploads", Prefix=self._prefix, **markers)
            yield from answer.get("Uploads", ())
            if not answer.get("IsTruncated"):
                return
            markers = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def _abort(self, full_key: str, upload_id: str) -> None:
        try:
            self.call("abort_multipart_upload", Key=full_key, UploadId=upload_id)
        except ClientError as error:
            if error_code(error) != "NoSuchUpload":
                raise

    def full_key(self, key: str) -> str:
        """Return the key in the bucket."""
        return self._prefix + key


class S3Upload:
    """A multipart upload; it outlives the client that began it."""

    def __init__(self, backend: S3Backend, full_key: str) -> None:
        self._backend = backend
        self._key = full_key
        self._lock = threading.Lock()
        self._parts: dict[int, dict[str, Any]] = {}
        # The algorithm has to be announced, or AWS refuses parts that carry a checksum.
        answer = backend.call("create_multipart_upload", Key=full_key, ChecksumAlgorithm="CRC32C")
        self._upload_id: str = answer["UploadId"]

    def write_part(self, number: int, offset: int, data: Bytes, crc32c: int) -> None:
        """Write one part."""
        s3_number, crc = number + 1, encode_crc(crc32c)
        answer = self._backend.call(
            "upload_part",
            Key=self._key,
            UploadId=self._upload_id,
            PartNumber=s3_number,
            Body=data,
            ChecksumCRC32C=crc,
        )
        with self._lock:
            self._parts[number] = {"PartNumber": s3_number, "ETag": answer["ETag"], "ChecksumCRC32C": crc}

    def complete(self) -> None:
        """Make the object visible and durable."""
        parts = [self._parts[number] for number in sorted(self._parts)]
        try:
            self._backend.call(
                "complete_multipart_upload",
                Key=self._key,
                UploadId=self._upload_id,
                MultipartUpload={"Parts": parts},
            )
        except ClientError as error:
            # An earlier attempt was done although its reply was lost. If it was
            # not, the size check that follows every upload finds no object.
            if error_code(error) != "NoSuchUpload":
                raise

    def abort(self) -> None:
        """Leave nothing behind."""
        self._backend._abort(self._key, self._upload_id)


def wanted_bytes(content_range: str | None, body_bytes: int, *, offset: int, length: int) -> int:
    """Return how many bytes from the start of an answer's body are those of the range that was asked for.

    Judged by what the answer says of its body, not by its status: rclone sends
    the right part with 200, where S3 has 206.

    Args:
        content_range: The header of that name, or None: the body is the whole object.
        body_bytes: The length of the body.
        offset: Of the range.
        length: Of the range; the object may end before.

    Raises:
        OSError: If the body begins elsewhere, or ends before range and object do.
    """
    if content_range is None:
        if offset:
            raise OSError(f"the server ignored a range from byte {offset} on and sent the whole object")
        return min(length, body_bytes)
    match = _CONTENT_RANGE.fullmatch(content_range.strip())
    if match is None or int(match[1]) != offset or int(match[2]) - offset + 1 != body_bytes:
        raise OSError(
            f"asked for {length} bytes from byte {offset} on, the server sent {body_bytes} bytes as {content_range!r}"
        )
    if body_bytes < length and match[3] != "*" and offset + body_bytes < int(match[3]):
        raise OSError(
            f"asked for {length} bytes from byte {offset} on, the server sent only {content_range!r}"
        )
    return min(length, body_bytes)


def encode_crc(crc32c: int) -> str:
    """Return a CRC32C as S3 wants it in a header."""
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode()


def make_client(options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a botocore client for the options of s3fs, and arguments to add to requests.

    Raises:
        ConfigError: If an option is unknown or wrong; the values are not shown.
    """
    # Imported here: it takes 0.3 s, and local runs do not need it.
    import s3fs

    if options.get("session") is not None:
        raise ConfigError("storage_options: session cannot be passed on to other processes", field="session")
    own = {"asynchronous": True, "skip_instance_cache": True, "use_listings_cache": False}
    try:
        read = s3fs.S3FileSystem(**{**options, **own})
        session = botocore.session.Session(**read.kwargs)
        return session.create_client("s3", **_client_arguments(read)), {
            **read.req_kw,
            **read.s3_additional_kwargs,
        }
    except (TypeError, KeyError, ValueError) as error:
        names = ", ".join(sorted(options)) or "none"
        raise ConfigError(
            f"storage_options for S3 are not usable (given: {names}): {error}", field="storage_options"
        ) from error


def _client_arguments(read: Any) -> dict[str, Any]:
    arguments = {
        "aws_access_key_id": read.key,
        "aws_secret_access_key": read.secret,
        "aws_session_token": read.token,
        "endpoint_url": read.endpoint_url,
    }
    arguments = {name: value for name, value in arguments.items() if value is not None}
    arguments = {"use_ssl": read.use_ssl, **read.client_kwargs, **arguments}
    config = {name: value for name, value in read.config_kwargs.items() if name not in _ASYNC_ONLY}
    if read.anon:
        arguments = {name: value for name, value in arguments.items() if not name.startswith("aws_")}
        config["signature_version"] = UNSIGNED
    own: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "read_timeout": READ_TIMEOUT_S,
        "max_pool_connections": 64,
        "tcp_keepalive": True,
        # ``Store`` retries; two layers of retries would multiply.
        "retries": {"total_max_attempts": 1},
        # Our own CRC32C goes with every body; no second sum, and none of downloads.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    s3 = {"payload_signing_enabled": False, **config.pop("s3", {})}
    return {**arguments, "config": Config(**{**own, **config, "s3": s3})}
