"""Who announces that a node will be taken away: sources, and the thread that asks them."""

from __future__ import annotations

import datetime
import json
import logging
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from raycheck.core.notice import Notice

logger = logging.getLogger("raycheck")

_TIMEOUT_S = 2.0
_TOKEN_S = 300
_MAX_REPLY_BYTES = 1 << 16


class NoticeSource(Protocol):
    """Something that can be asked whether the end is near."""

    every_s: float
    """How often to ask, seconds."""

    def ask(self) -> list[Notice]:
        """Return what is announced at present; a notice is told again until it is over.

        Blocks for a few seconds at most. Raises `OSError` or `ValueError` if
        there is no answer now.
        """


class NoticeWatcher:
    """Asks sources, each in a thread of its own, and passes on what they say.

    Args:
        sources: Whom to ask.
        tell: Takes a notice; called from several threads.
    """

    def __init__(self, sources: Iterable[NoticeSource], tell: Callable[[Notice], None]) -> None:
        self._tell = tell
        self._closed = threading.Event()
        for source in sources:
            name = f"raycheck-{type(source).__name__}"
            threading.Thread(target=self._watch, args=(source,), name=name, daemon=True).start()

    def close(self) -> None:
        """Ask nobody any more."""
        self._closed.set()

    def _watch(self, source: NoticeSource) -> None:
        has_warned = False
        while not self._closed.wait(source.every_s):
            try:
                for notice in source.ask():
                    self._tell(notice)
            except Exception as error:  # noqa: BLE001  a source that fails once may be the one that matters later
                if not has_warned:
                    logger.info("%s does not answer, and is asked again: %r", type(source).__name__, error)
                has_warned = True


class Ec2Source:
    """The instance metadata of AWS, with its session tokens: spot interruptions and rebalance advice.

    Args:
        endpoint: Root of the metadata service.
        every_s: How often to ask. AWS advises five seconds for an interruption.
        now: Wall clock, seconds; the notice names a time of day.
    """

    def __init__(self, endpoint: str, *, every_s: float = 5.0, now: Callable[[], float] = time.time) -> None:
        self.every_s = every_s
        self._endpoint = endpoint.rstrip("/")
        self._now = now
        self._token: tuple[str, float] = "", float("-inf")
        # An HTTP proxy would be asked for its own instance's data.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self) -> list[Notice]:
        """See `NoticeSource`."""
        notices = []
        interruption = self._get("spot/instance-action")
        if interruption is not None:
            left_s = _seconds_until(interruption["time"], self._now())
            notices.append(
                Notice("spot", max(left_s, 0.0), f"spot instance, {interruption['action']} announced")
            )
        if self._get("events/recommendations/rebalance") is not None:
            notices.append(Notice("rebalance", None, "this spot instance is at elevated risk"))
        return notices

    def _get(self, path: str) -> Mapping[str, str] | None:
        try:
            reply = self._open("GET", f"meta-data/{path}", {"X-aws-ec2-metadata-token": self._fresh_token()})
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            # A token that is not taken any more: the next time there is another.
            self._token = "", float("-inf")
            raise
        found = json.loads(reply)
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise ValueError(f"{path}: not a notice")
        return found

    def _fresh_token(self) -> str:
        token, until_s = self._token
        if time.monotonic() >= until_s:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            token = self._open("PUT", "api/token", headers).strip()
            self._token = token, time.monotonic() + _TOKEN_S / 2
        return token

    def _open(self, method: str, path: str, headers: Mapping[str, str]) -> str:
        request = urllib.request.Request(
            f"{self._endpoint}/latest/{path}", method=method, headers=dict(headers)
        )
        with self._opener.open(request, timeout=_TIMEOUT_S) as reply:
            return str(reply.read(_MAX_REPLY_BYTES).decode())


def _seconds_until(text: str, now_unix_s: float) -> float:
    at = datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.timezone.utc)
    return at.timestamp() - now_unix_s


class DrainSource:
    """Nodes that Ray is draining.

    Args:
        draining: Returns deadlines by node, in milliseconds since 1970; 0: none.
        nodes: Returns the nodes that have workers.
        every_s: How often to ask.
    """

    def __init__(
        self,
        draining: Callable[[], Mapping[str, int]],
        nodes: Callable[[], Iterable[str]],
        *,
        every_s: float = 1.0,
    ) -> None:
        self.every_s = every_s
        self._draining = draining
        self._nodes = nodes

    def ask(self) -> list[Notice]:
        """See `NoticeSource`."""
        ours = set(self._nodes())
        notices = []
        for node, deadline_ms in sorted(self._draining().items()):
            if node in ours:
                left_s = max(deadline_ms / 1e3 - time.time(), 0.0) if deadline_ms else None
                notices.append(Notice("drain", left_s, f"node {node} is being drained", node))
        return notices


def sources_of_this_machine(
    environment: Mapping[str, str] = os.environ, vendor_file: str = "/sys/class/dmi/id/sys_vendor"
) -> list[NoticeSource]:
    """Return the sources that this machine has by itself.

    The environment variables are those that AWS's own tools know. Elsewhere
    than on EC2 nobody is asked: its address may be anyone's there.
    """
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return []
    endpoint = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
    if endpoint is None:
        try:
            vendor = Path(vendor_file).read_text()
        except OSError:
            return []
        if not vendor.startswith("Amazon EC2"):
            return []
        endpoint = "http://169.254.169.254"
    return [Ec2Source(endpoint)]
