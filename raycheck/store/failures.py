"""What a library's error means: the one place where it becomes ours."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

from botocore import exceptions as boto

from raycheck.errors import (
    ConfigError,
    ObjectNotFoundError,
    RaycheckError,
    StorageError,
    StoragePermissionError,
)
from raycheck.store.retry import Verdict

_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_MISSING_CODES = {"NoSuchKey", "NoSuchVersion", "NotFound", "404"}
_TRANSIENT_CODES = {
    "SlowDown",
    "RequestTimeout",
    "RequestTimeoutException",
    "ServiceUnavailable",
    "InternalError",
    "InternalFailure",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "RequestThrottled",
    "TooManyRequests",
    "BandwidthLimitExceeded",
    "OperationAborted",
    # A body that was damaged on its way; the checksums make that visible.
    "BadDigest",
    "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch",
    "IncompleteBody",
}
_PERMISSION_CODES = {
    "AccessDenied",
    "AllAccessDisabled",
    "AccountProblem",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "RequestTimeTooSkewed",
    "403",
    "401",
}
_TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504, 509}
_TRANSIENT_ERRNO = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.EIO,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.EREMOTEIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
_PERMISSION_ERRNO = {errno.EACCES, errno.EPERM, errno.EROFS}
_TRANSIENT_BOTO = (
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    boto.ResponseStreamingError,
    boto.ChecksumError,
    boto.FlexibleChecksumError,
    boto.MetadataRetrievalError,
    boto.CredentialRetrievalError,
)
_PERMISSION_BOTO = (boto.NoCredentialsError, boto.PartialCredentialsError, boto.NoAuthTokenError)
_CONFIG_BOTO = (
    boto.ParamValidationError,
    boto.InvalidRegionError,
    boto.ProfileNotFound,
    boto.NoRegionError,
    boto.InvalidEndpointConfigurationError,
)


def judge(error: BaseException) -> Verdict:
    """Return whether trying again can help."""
    if isinstance(error, RaycheckError):
        return Verdict.GIVE_UP
    for cause in _chain(error):
        verdict = _judge_one(cause)
        if verdict is not None:
            return verdict
    return Verdict.GIVE_UP


def to_storage_error(error: Exception, *, operation: str, url: str, key: str) -> RaycheckError:
    """Return our error for what a library raised; the caller chains it with ``from``.

    The text is the library's own, which names codes and addresses but no secrets.
    """
    if isinstance(error, RaycheckError):
        return error
    place = f"{url}/{key}" if key else url
    reason = str(error) or type(error).__name__
    facts = {"key": key, "operation": operation, "url": url}
    if _find(error, _is_missing_bucket) or _find(error, lambda e: isinstance(e, _CONFIG_BOTO)):
        return ConfigError(f"storage {url} is not usable: {reason}", field="storage_path", value=url)
    if _find(error, _is_missing):
        return ObjectNotFoundError(f"cannot {operation} {place}: there is no such object", **facts)
    if _find(error, _is_permission) or judge(error) is Verdict.REFRESH:
        return StoragePermissionError(f"cannot {operation} {place}: permission refused: {reason}", **facts)
    return StorageError(f"cannot {operation} {place}: {reason}", **facts)


def error_code(error: BaseException) -> str:
    """Return the code of an S3 error, such as "NoSuchUpload", or ""."""
    if isinstance(error, boto.ClientError):
        return str(error.response.get("Error", {}).get("Code", ""))
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and what caused it: fsspec hides the true error one level down."""
    cause: BaseException | None = error
    for _ in range(5):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__


def _find(error: BaseException, matches: Callable[[BaseException], bool]) -> bool:
    return any(matches(cause) for cause in _chain(error))


def _judge_one(error: BaseException) -> Verdict | None:
    code = error_code(error)
    if code in _EXPIRED_CODES:
        return Verdict.REFRESH
    if code in _TRANSIENT_CODES or _status(error) in _TRANSIENT_STATUS:
        return Verdict.RETRY
    if code:
        return Verdict.GIVE_UP
    if isinstance(error, (*_TRANSIENT_BOTO, ConnectionError, TimeoutError)):
        return Verdict.RETRY
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return Verdict.RETRY
    return None


def _status(error: BaseException) -> int | None:
    if isinstance(error, boto.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        # How the clients of other clouds carry it.
        status = next(
            (getattr(error, name) for name in ("status_code", "status", "code") if hasattr(error, name)), None
        )
    return int(status) if isinstance(status, int) or (isinstance(status, str) and status.isdigit()) else None


def _is_missing(error: BaseException) -> bool:
    return (
        isinstance(error, FileNotFoundError)
        or error_code(error) in _MISSING_CODES
        or (not isinstance(error, boto.ClientError) and _status(error) == 404)
    )


def _is_missing_bucket(error: BaseException) -> bool:
    return error_code(error) in ("NoSuchBucket", "InvalidBucketName")


def _is_permission(error: BaseException) -> bool:
    return (
        isinstance(error, (PermissionError, *_PERMISSION_BOTO))
        or error_code(error) in _PERMISSION_CODES
        or _status(error) in (401, 403)
        or (isinstance(error, OSError) and error.errno in _PERMISSION_ERRNO)
    )
