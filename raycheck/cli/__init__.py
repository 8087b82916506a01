"""The ``raycheck`` command."""

from __future__ import annotations

import typer

from raycheck.cli import planning
from raycheck.cli.audit import audit
from raycheck.cli.demo import demo

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="raycheck: the Ray Train option that makes a job checkpoint itself.",
)
app.command()(demo)
app.command()(planning.plan)
app.command()(planning.simulate)
app.command()(audit)


def main() -> None:
    """Run the command line."""
    app()
