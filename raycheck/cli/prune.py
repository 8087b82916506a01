"""``raycheck prune``: delete old checkpoints of a stored run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from raycheck.cli.access import (
    BAD,
    DONE,
    FAILED,
    JsonOption,
    OptionsOption,
    RunArgument,
    open_run,
    print_json,
    reported,
)
from raycheck.cli.output import Listing
from raycheck.cli.runs import describe
from raycheck.cli.units import age_text, bytes_text, parse_duration
from raycheck.core.lineage import newer_claim
from raycheck.core.pruning import LIVE_KEEP, Choice, Rules, choose, may_be_alive, refusal
from raycheck.errors import ConfigError, StorageError
from raycheck.observe.inventory import Inventory, read_inventory
from raycheck.store.run import RunStore


def prune(
    run: RunArgument,
    keep: Annotated[
        int | None, typer.Option("--keep", min=1, help="How many of the newest usable ones stay.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Delete older ones only: 7d, 12h, 30m.")
    ] = None,
    keep_every_steps: Annotated[
        int | None, typer.Option(min=1, help="As in the run's settings: one of each period stays.")
    ] = None,
    keep_every: Annotated[
        str | None, typer.Option(metavar="AGE", help="One of each period of this length stays.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go, and stop.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    not_running: Annotated[
        bool, typer.Option("--not-running", help="You know that no job of this run is alive.")
    ] = False,
    as_json: JsonOption = False,
    options: OptionsOption = "{}",
) -> None:
    """Delete checkpoints that are older than the newest ones, and those that were left behind.

    Never deletes the only usable checkpoint, one that is registered with Ray Train, a damaged one, or one that
    another run's start wrote. While a job may be alive the newest two stay whatever --keep says, and while one is
    starting nothing is deleted. It does not know the run's settings: milestones that keep_every_steps or keep_every_s
    kept stay only if the same is given here.

    Exit codes: 0 done, or nothing to do; 1 refused, or you said no; 2 wrong options, or the store failed.

    Examples:
        raycheck prune /data/runs/gpt --keep 3 --dry-run
        raycheck prune s3://bucket/runs/gpt --keep 2 --older-than 7d --yes
        raycheck prune s3://bucket/runs/gpt --keep 1 --keep-every-steps 10000 --yes
    """
    with reported("prune"):
        rules = _rules(keep, older_than, keep_every_steps, keep_every, not_running)
        run_store = open_run(run, options)
        inventory = read_inventory(run_store)
        now_unix_s = time.time()
        reason = _refusal(run_store, inventory, rules, now_unix_s)
        choices = choose(inventory.stock, inventory.facts, rules, now_unix_s=now_unix_s)
        going = [] if reason else [choice for choice in choices if choice.goes]
        if reason is None and not dry_run:
            _check_consent(going, yes=yes, as_json=as_json)
        if not as_json:
            _print_plan(inventory, rules, choices, reason, now_unix_s)
        is_agreed = reason is None and not dry_run and (yes or not going or typer.confirm("Delete them?"))
        deleted, failure = _delete(run_store, inventory, going) if is_agreed else ([], None)
    code = FAILED if failure else BAD if reason or not (dry_run or is_agreed) else DONE
    if as_json:
        print_json(_to_json(run, choices, going, deleted, reason or failure, now_unix_s, code))
    elif reason is None:
        _print_end(going, deleted, failure, is_dry_run=dry_run, is_agreed=is_agreed)
    raise typer.Exit(code)


def is_asked() -> bool:
    """Return whether there is somebody who could answer."""
    return sys.stdin.isatty()


def _rules(
    keep: int | None,
    older_than: str | None,
    keep_every_steps: int | None,
    keep_every: str | None,
    not_running: bool,
) -> Rules:
    if keep is None and older_than is None:
        raise ConfigError("give --keep, --older-than or both: what is to stay?", field="keep", value=None)
    return Rules(
        keep=keep or 1,
        older_than_s=None if older_than is None else parse_duration(older_than),
        keep_every_steps=keep_every_steps,
        keep_every_s=None if keep_every is None else parse_duration(keep_every),
        is_running=not not_running,
    )


def _refusal(run_store: RunStore, inventory: Inventory, rules: Rules, now_unix_s: float) -> str | None:
    claimed_unix_s = None
    if inventory.facts.starting is not None:
        claimed = run_store.claim_facts(inventory.facts.starting).get("claimed_unix_s")
        claimed_unix_s = float(claimed) if isinstance(claimed, int | float) else None
    return refusal(inventory.facts, rules, claimed_unix_s=claimed_unix_s, now_unix_s=now_unix_s)


def _check_consent(going: Sequence[Choice], *, yes: bool, as_json: bool) -> None:
    if going and not yes and (as_json or not is_asked()):
        raise ConfigError(
            f"{len(going)} checkpoints would be deleted, and there is nobody to ask: give --yes or --dry-run",
            field="yes",
            value=False,
        )


def _delete(
    run_store: RunStore, inventory: Inventory, going: Sequence[Choice]
) -> tuple[list[Choice], str | None]:
    """Delete one after the other; return those that are gone, and what stopped it."""
    deleted: list[Choice] = []
    newest = inventory.facts.newest_claim
    for choice in going:
        try:
            # A start may go back to any checkpoint that it finds: from its claim on they are its own.
            newer = None if newest is None else newer_claim(newest, run_store.claims())
            if newer is not None:
                return deleted, f"{newer} has started meanwhile and may need them: the rest stays"
            if choice.stored.ref in run_store.registered():
                continue
            run_store.delete(choice.stored.ref)
        except StorageError as error:
            return deleted, f"step {choice.stored.ref.step}: {error}"
        deleted.append(choice)
    return deleted, None


def _print_plan(
    inventory: Inventory, rules: Rules, choices: Sequence[Choice], reason: str | None, now_unix_s: float
) -> None:
    if reason is not None:
        typer.echo(f"refused: {reason}")
        return
    listing = Listing(">step", ">age", ">size", "generation", "", "reason")
    for choice in choices:
        stored = choice.stored
        created_unix_s = stored.created_unix_s
        listing.add(
            str(stored.ref.step),
            age_text(None if created_unix_s is None else now_unix_s - created_unix_s),
            bytes_text(stored.num_bytes),
            str(stored.ref.generation),
            "goes" if choice.goes else "stays",
            choice.reason,
            style="red" if choice.goes else "",
        )
    if choices:
        listing.print()
    if may_be_alive(inventory.facts, rules) and rules.keep < LIVE_KEEP:
        typer.echo(
            f"A job may be alive: the newest {LIVE_KEEP} stay, not {rules.keep} (--not-running says none is)."
        )


def _print_end(
    going: Sequence[Choice],
    deleted: Sequence[Choice],
    failure: str | None,
    *,
    is_dry_run: bool,
    is_agreed: bool,
) -> None:
    if failure:
        typer.echo(f"raycheck prune: {failure}", err=True)
    if not (is_dry_run or is_agreed):
        typer.echo("nothing was deleted")
        return
    verb, which = ("would be deleted", going) if is_dry_run else ("deleted", deleted)
    size = bytes_text(sum(choice.stored.num_bytes for choice in which))
    typer.echo(f"{len(which)} {'checkpoint' if len(which) == 1 else 'checkpoints'}, {size}, {verb}")


def _to_json(
    run: str,
    choices: Sequence[Choice],
    going: Sequence[Choice],
    deleted: Sequence[Choice],
    refused: str | None,
    now_unix_s: float,
    code: int,
) -> dict[str, Any]:
    return {
        "run": run,
        "exit_code": code,
        "refused": refused,
        "deleted": [choice.stored.ref.step for choice in deleted],
        "num_bytes_deleted": sum(choice.stored.num_bytes for choice in deleted),
        "checkpoints": [
            {**describe(choice.stored, now_unix_s), "goes": choice in going, "reason": choice.reason}
            for choice in choices
        ],
    }
