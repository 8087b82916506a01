"""The ``raycheck`` command. A subcommand is imported when it is used: some need torch and Ray, most do not."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

_COMMANDS = {
    "demo": (
        "demo",
        "Train a small GPT, kill a worker, kill the whole job, and check that nothing was lost.",
    ),
    "plan": (
        "planning",
        "Show the interval that would be chosen, why, and what it would cost at other sizes.",
    ),
    "simulate": (
        "planning",
        "Simulate a job that fails, with one policy, and show what becomes of its time.",
    ),
    "ls": ("runs", "List the checkpoints of a run, the newest last."),
    "show": (
        "show",
        "Show what a checkpoint holds: its tensors, who wrote it, and how the interval was chosen then.",
    ),
    "verify": ("verify", "Read every byte of checkpoints and compare it with the checksums of the commit."),
    "export": ("export", "Write a checkpoint's tensors, whole, in a format that others read."),
    "prune": (
        "prune",
        "Delete checkpoints that are older than the newest ones, and those that were left behind.",
    ),
    "audit": ("audit", "Prove from a run's telemetry which items each epoch consumed."),
    "report": ("report", "Make one HTML file that shows what a run did and where its time went."),
    "watch": ("watch", "Show live how a running job stands: steps, the next checkpoint, uploads, overhead."),
    "dashboard": ("dashboard", "Print a Grafana dashboard of raycheck's metrics, as JSON."),
    "doctor": ("doctor", "Check whether this machine, or a Ray cluster's nodes, have what raycheck needs."),
}
"""Per command the module below this one that has its function, and the first line of its help."""


class _LazyGroup(TyperGroup):
    """Shows commands without importing them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load_command(name), rest


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="raycheck: the Ray Train option that makes a job checkpoint itself.",
)


def load_command(name: str) -> Any:
    """Import a subcommand and return it as typer runs it."""
    function = getattr(importlib.import_module(f"raycheck.cli.{_COMMANDS[name][0]}"), name)
    single = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    single.command(name, help=_flowed(inspect.getdoc(function) or ""))(function)
    return get_command(single)


def _flowed(text: str) -> str:
    """Return a docstring with one line per paragraph, which terminals of any width wrap; examples stay."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(p if "\n  " in p else p.replace("\n", " ") for p in paragraphs)


def _stand_in() -> None:
    raise AssertionError("a command is replaced by its own before it runs")


for _name, (_, _help) in _COMMANDS.items():
    app.command(_name, help=_help)(_stand_in)


def main() -> None:
    """Run the command line."""
    app()
