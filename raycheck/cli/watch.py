"""``raycheck watch``: how a running job stands, from its coordinator or from its telemetry."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from raycheck.cli.access import BAD, DONE, OptionsOption, open_run, parse_options, reported
from raycheck.errors import ConfigError
from raycheck.observe import watch_text
from raycheck.observe.watch import View, is_of_run, new_events, to_json, view_of_events, view_of_status
from raycheck.observe.watch_store import TelemetryTail
from raycheck.store.objects import Store
from raycheck.store.run import RunStore

_LIVE_EVERY_S, _STORE_EVERY_S = 1.0, 5.0
_GONE_S = 30.0
"""How long a coordinator that is listed may be silent: it is back sooner when it is killed."""

_RETRY_S = 0.5

_STYLES: dict[watch_text.Tone, str] = {
    "": "", "title": "bold", "dim": "dim", "good": "green", "warn": "yellow", "bad": "bold red",
}  # fmt: skip


class Source(Protocol):
    """Where views come from."""

    every_s: float

    def look(self) -> View | None:
        """Return the present view; None: there is nothing to watch any more."""


def watch(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="The run's folder, URL or name. Default: the only job there is."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", help="The Ray cluster. Default: RAY_ADDRESS, or one on this machine."),
    ] = None,
    from_store: Annotated[
        bool, typer.Option("--from-store", help="Look at the run's telemetry, not for a cluster.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    every: Annotated[
        float | None,
        typer.Option("--every", min=0.1, help="Seconds between two looks. Default: 1; store: 5."),
    ] = None,
    options: OptionsOption = "{}",
) -> None:
    """Show live how a running job stands: steps, the next checkpoint, uploads, overhead.

    Asks the run's coordinator in the Ray cluster. Where there is no cluster, or no job of the run in it, it reads the
    telemetry in the run's store, which tells of checkpoints and little in between. On a terminal it shows a screen;
    piped, a line for each change. It never disturbs the job. docs/watch.md says what the numbers mean.

    Exit codes: 0 shown, until the job was over or you stopped it; 1 there is no job to watch; 2 neither the cluster nor
    the run can be read.

    Examples:
        raycheck watch
        raycheck watch s3://bucket/runs/gpt
        raycheck watch gpt --address 10.0.0.1:6379 --once
        raycheck watch /data/runs/gpt --from-store --json
    """
    with reported("watch"), _source(run, address, options, from_store=from_store) as source, _stoppable():
        source.every_s = every or source.every_s
        view = source.look()
        if view is None:
            typer.echo("raycheck watch: the job has just ended", err=True)
            raise typer.Exit(BAD)
        console = Console(highlight=False)
        if once:
            show_once(view, console, as_json=as_json)
        elif as_json:
            follow_json(view, source)
        elif console.is_terminal:
            follow_on_terminal(view, source, console)
        else:
            follow_in_lines(view, source)
    is_running = not (once and view.is_over)
    raise typer.Exit(DONE if is_running else BAD)


# Showing.


def show_once(view: View, console: Console, *, as_json: bool) -> None:
    """Print a view."""
    if as_json:
        _print_json(view, None)
        return
    for line in watch_text.screen(view, width=console.width):
        console.print(_styled(line), soft_wrap=True)


def follow_json(view: View, source: Source) -> None:
    """Print an object for each look; of events each once."""
    before: View | None = None
    for now in _views(view, source):
        _print_json(now, before)
        before = now


def follow_in_lines(view: View, source: Source) -> None:
    """Print a line for each change."""
    before, told_unix_s = None, 0.0
    for now in _views(view, source):
        lines, has_told = watch_text.changes(before, now, progress_told_unix_s=told_unix_s)
        for line in lines:
            typer.echo(line)
        before, told_unix_s = now, now.unix_s if has_told else told_unix_s


def follow_on_terminal(view: View, source: Source, console: Console) -> None:
    """Keep a screen up to date, and leave the last one standing."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for now in _views(view, source):
            live.update(render(now, width=console.width), refresh=True)


def render(view: View, *, width: int) -> Text:
    """Return the screen of a view as rich shows it."""
    return Text("\n").join(_styled(line) for line in watch_text.screen(view, width=width))


def _styled(line: watch_text.Line) -> Text:
    text = watch_text.plain(line)
    styled = Text(text, no_wrap=True, overflow="ellipsis")
    begin = 0 if line.label is None else len(text) - len(line.text)
    styled.stylize("bold cyan", 0, begin)
    styled.stylize(_STYLES[line.tone], begin)
    return styled


def _print_json(now: View, before: View | None) -> None:
    typer.echo(json.dumps(to_json(now, new_events(before, now)), allow_nan=False))


def _views(first: View, source: Source) -> Iterator[View]:
    now: View | None = first
    while now is not None:
        yield now
        if now.is_over:
            return
        time.sleep(source.every_s)
        now = source.look()
    typer.echo("the coordinator is gone: the job is over, or its driver has died", err=True)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    with contextlib.suppress(KeyboardInterrupt):
        yield


# Finding.


class StoreSource:
    """Views from the telemetry of a stored run."""

    def __init__(self, run_store: RunStore) -> None:
        self.every_s = _STORE_EVERY_S
        self._url = run_store.store.url
        self._tail = TelemetryTail(run_store.store)

    def look(self) -> View:
        """Read what is new. Blocks for storage."""
        return view_of_events(self._url, self._tail.read(), time.time())


class CoordinatorSource:
    """Views from a coordinator in the connected Ray cluster.

    Args:
        name: Its actor's.
        store_url: Of its run: another coordinator of it is as good, the job has started again.
        status: Its first answer.
    """

    def __init__(self, name: str, store_url: str, status: Mapping[str, Any]) -> None:
        self.every_s = _LIVE_EVERY_S
        self._name, self._store_url = name, store_url
        self._first: Mapping[str, Any] | None = status

    def look(self) -> View | None:
        """Ask. Blocks while a coordinator that is still there does not answer, half a minute at most."""
        from raycheck.runtime import watching

        status, self._first = self._first, None
        deadline_s = time.monotonic() + _GONE_S
        while status is None:
            status = watching.ask(self._name)
            if status is None:
                found = choose(self._store_url, watching.ask_all())
                if found is not None:
                    self._name, status = found
                elif time.monotonic() > deadline_s or self._name not in watching.names():
                    return None
                else:
                    # It is being restarted.
                    time.sleep(_RETRY_S)
        return view_of_status(status, time.time())


@contextlib.contextmanager
def _source(run: str | None, address: str | None, options: str, *, from_store: bool) -> Iterator[Source]:
    if from_store:
        if run is None:
            raise ConfigError("--from-store needs RUN: the run's folder or URL", field="RUN", value=None)
        yield StoreSource(open_run(run, options))
        return
    # Ray takes a second or two to import: not for the store alone.
    from raycheck.cli.nodes import ClusterError, connected

    place = address or os.environ.get("RAY_ADDRESS") or "auto"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(connected(place))
        except ClusterError as error:
            if address is not None or run is None:
                raise ConfigError(
                    f"{error}; give RUN alone to watch by its telemetry", field="address", value=place
                ) from error
            typer.echo("no Ray cluster can be reached: from the run's telemetry alone", err=True)
            yield StoreSource(open_run(run, options))
            return
        yield _in_cluster(run, options, place)


def _in_cluster(run: str | None, options: str, place: str) -> Source:
    """Return the source for a run, the cluster being connected.

    Raises:
        typer.Exit: If there is no job to watch.
        ConfigError: If there are several and RUN does not say which, or RUN is none.
    """
    from raycheck.runtime import watching

    statuses = watching.ask_all()
    urls = sorted({str(status["store_url"]) for status in statuses.values()})
    if run is None:
        if not urls:
            typer.echo(f"raycheck watch: no job with raycheck runs in the cluster ({place})", err=True)
            raise typer.Exit(BAD)
        if len(urls) > 1:
            raise ConfigError(
                f"{len(urls)} runs are going on: say which, RUN is one of\n  " + "\n  ".join(urls),
                field="RUN",
                value=None,
            )
        run = urls[0]
    found = choose(run, statuses) or choose(_canonical(run, options), statuses)
    if found is not None:
        name, status = found
        return CoordinatorSource(name, str(status["store_url"]), status)
    source = StoreSource(open_run(run, options))
    typer.echo("no job of this run is in the cluster: from the run's telemetry alone", err=True)
    return source


def choose(run: str, statuses: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the coordinator of a run and its status: of several the one with the newest start.

    Raises:
        ConfigError: If several runs have this name.
    """
    fitting = {name: s for name, s in statuses.items() if is_of_run(run, str(s.get("store_url", "")))}
    urls = sorted({str(status["store_url"]) for status in fitting.values()})
    if len(urls) > 1:
        raise ConfigError(
            f"RUN={run}: {len(urls)} runs have this name; say which, RUN is one of\n  " + "\n  ".join(urls),
            field="RUN",
            value=run,
        )
    return max(fitting.items(), key=lambda each: (each[1].get("generation") or "", each[0]), default=None)


def _canonical(run: str, options: str) -> str:
    try:
        return Store(run, parse_options(options)).url
    except ConfigError:
        # A name, or a URL that some coordinator may know all the same.
        return run
