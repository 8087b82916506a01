"""``raycheck plan`` and ``raycheck simulate``: what an interval will cost, without a cluster."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from raycheck.cli.loss_plot import loss_plot_svg
from raycheck.core import simulate as simulation
from raycheck.core.failure_rate import DEFAULT_GPU_DAYS_PER_FAILURE
from raycheck.core.interval import (
    DAY_S,
    Costs,
    Decision,
    Failures,
    Limits,
    LossSplit,
    choose_interval,
    split_loss,
)
from raycheck.core.interval_text import duration_text, percent, seconds_text

app = typer.Typer(no_args_is_help=True, help="Plan and simulate checkpoint intervals.")

PolicyName = Literal["tuned", "fixed", "checkfreq", "young-daly", "continuous"]

_SIZES = tuple(8 * 4**i for i in range(8))
_UNITS = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_bytes(text: str) -> float:
    """Return a number of bytes such as ``3.5GB``, ``200MB/s`` or ``4GiB``.

    Raises:
        typer.BadParameter: If it is not one.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?i?)b?(?:/s)?\s*", text.lower())
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or match[2] not in _UNITS or not math.isfinite(number):
        raise typer.BadParameter(f"{text!r} is not a size such as 3.5GB, 200MB/s or 4GiB")
    return number * _UNITS[match[2]]


BytesOption = Annotated[str, typer.Option("--bytes", help="State that each GPU's worker writes.")]
BandwidthOption = Annotated[str, typer.Option(help="Upload rate per worker.")]
CopyOption = Annotated[str, typer.Option("--copy-bandwidth", help="Memory copy rate per worker.")]
StallOption = Annotated[
    float | None, typer.Option(help="Training blocked per checkpoint, s. Default: bytes by copy rate.")
]
PersistOption = Annotated[float | None, typer.Option(help="Upload time, s. Default: bytes by bandwidth.")]
SlowdownOption = Annotated[float, typer.Option(help="Share of training lost while uploading.")]
StepOption = Annotated[float, typer.Option("--step-time", help="Time of one step, s.")]
GpusOption = Annotated[int, typer.Option(help="GPUs of the job.")]
RateOption = Annotated[float, typer.Option("--gpu-days-per-failure", help="GPU-days between failures.")]
BoundOption = Annotated[float, typer.Option("--max-overhead", help="Bound on the cost, as a fraction.")]
RecoveryOption = Annotated[
    float | None, typer.Option("--recovery-point", help="Training that a failure may cost at most, s.")
]
ConflictOption = Annotated[
    Literal["bound", "recovery_point", "error"],
    typer.Option(help="What wins when bound and recovery point conflict."),
]
RestartOption = Annotated[float, typer.Option("--restart", help="Failure to first new step, s.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def plan(
    state: BytesOption = "10GB",
    bandwidth: BandwidthOption = "200MB/s",
    copy_bandwidth: CopyOption = "10GB/s",
    stall: StallOption = None,
    persist: PersistOption = None,
    slowdown: SlowdownOption = 0.03,
    step_time: StepOption = 1.0,
    gpus: GpusOption = 8,
    gpu_days_per_failure: RateOption = DEFAULT_GPU_DAYS_PER_FAILURE,
    max_overhead: BoundOption = 0.035,
    recovery_point: RecoveryOption = None,
    on_conflict: ConflictOption = "bound",
    restart: RestartOption = 60.0,
    as_json: JsonOption = False,
    plot: Annotated[Path | None, typer.Option(help="Write loss against interval as SVG.")] = None,
) -> None:
    """Show the interval that would be chosen, why, and what it would cost at other sizes."""
    try:
        costs = _costs(state, bandwidth, copy_bandwidth, stall, persist, slowdown, step_time, restart)
        limits = Limits(max_overhead=max_overhead, recovery_point_s=recovery_point, on_conflict=on_conflict)
        decision, split = _decide(costs, gpu_days_per_failure, gpus, limits)
        # Another size must not refuse the whole table.
        lenient = dataclasses.replace(limits, on_conflict="bound") if on_conflict == "error" else limits
        sizes = [_decide(costs, gpu_days_per_failure, size, lenient) for size in _SIZES]
        if plot is not None:
            plot.write_text(loss_plot_svg(decision), encoding="utf-8")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        report = {**_plan_dict(decision, split), "sizes": [_plan_dict(*size) for size in sizes]}
        typer.echo(json.dumps(_without_infinity(report), indent=2))
        return
    console = Console()
    _print_decision(console, decision, split)
    console.print(_size_table(sizes))
    if plot is not None:
        console.print(f"plot written to {plot}", soft_wrap=True)


@app.command()
def simulate(
    policy: Annotated[PolicyName, typer.Option(help="Who decides when to checkpoint.")] = "tuned",
    every: Annotated[float, typer.Option(help="Interval of the fixed policy, s.")] = 1800.0,
    failures: Annotated[
        str, typer.Option(help="exponential, weibull, bathtub, or a file with failure times in s.")
    ] = "exponential",
    days: Annotated[float, typer.Option(help="Length of the job, days.")] = 30.0,
    runs: Annotated[int, typer.Option(help="Simulated runs.", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="The same seed gives the same result.")] = 0,
    state: BytesOption = "10GB",
    bandwidth: BandwidthOption = "200MB/s",
    copy_bandwidth: CopyOption = "10GB/s",
    stall: StallOption = None,
    persist: PersistOption = None,
    slowdown: SlowdownOption = 0.03,
    step_time: StepOption = 1.0,
    gpus: GpusOption = 8,
    gpu_days_per_failure: RateOption = DEFAULT_GPU_DAYS_PER_FAILURE,
    prior: Annotated[float, typer.Option(help="GPU-days per failure believed at first.")] = (
        DEFAULT_GPU_DAYS_PER_FAILURE
    ),
    max_overhead: BoundOption = 0.035,
    recovery_point: RecoveryOption = None,
    restart: RestartOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Simulate a job that fails, with one policy, and show what becomes of its time."""
    try:
        job = simulation.Job(
            costs=_costs(state, bandwidth, copy_bandwidth, stall, persist, slowdown, step_time, restart),
            num_gpus=gpus,
            gpu_days_per_failure=gpu_days_per_failure,
            duration_s=days * DAY_S,
            failures=_failure_model(failures),
        )
        limits = Limits(max_overhead=max_overhead, recovery_point_s=recovery_point)
        make = _policy_maker(policy, every, limits, prior)
        outcomes = simulation.compare(job, {policy: make}, num_runs=runs, seed=seed)[policy]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    summary = _summary(outcomes)
    if as_json:
        report = {"policy": policy, "gpus": gpus, "days": days, "runs": runs, "seed": seed}
        typer.echo(json.dumps({**report, **_without_infinity(summary)}, indent=2))
        return
    table = Table(
        "", "mean", "± standard error", title=f"{policy}, {gpus:,} GPUs, {days:g} days, {runs} runs"
    )
    for name, row in summary.items():
        show = percent if name in ("ettr", "overhead", "recomputed", "restarting") else "{:,.1f}".format
        table.add_row(name.replace("_", " "), show(row["mean"]), show(row["error"]) if runs > 1 else "-")
    Console().print(table)


def _costs(
    state: str,
    bandwidth: str,
    copy_bandwidth: str,
    stall: float | None,
    persist: float | None,
    slowdown: float,
    step_time: float,
    restart: float,
) -> Costs:
    num_bytes = parse_bytes(state)
    rates = {"--bandwidth": parse_bytes(bandwidth), "--copy-bandwidth": parse_bytes(copy_bandwidth)}
    for option, bytes_per_s in rates.items():
        if bytes_per_s <= 0:
            raise typer.BadParameter(f"{option} must be above 0")
    return Costs(
        step_s=step_time,
        stall_s=num_bytes / rates["--copy-bandwidth"] if stall is None else stall,
        persist_s=num_bytes / rates["--bandwidth"] if persist is None else persist,
        slowdown=slowdown,
        restart_s=restart,
    )


def _decide(
    costs: Costs, gpu_days_per_failure: float, num_gpus: int, limits: Limits
) -> tuple[Decision, LossSplit]:
    failures = Failures(gpu_days_per_failure=gpu_days_per_failure, num_gpus=num_gpus)
    decision = choose_interval(costs, failures, limits)
    return decision, split_loss(decision.interval_s, costs, failures)


def _plan_dict(decision: Decision, split: LossSplit) -> dict[str, Any]:
    assert decision.failures is not None, "a plan has a failure rate"
    return {
        "gpus": decision.failures.num_gpus,
        "mttf_s": decision.failures.mttf_s,
        "interval_s": decision.interval_s,
        "interval_steps": decision.interval_steps,
        "period_s": decision.period_s,
        "decided_by": decision.decided_by,
        "reason": decision.reason,
        "overhead": decision.overhead,
        "ettr": decision.ettr,
        "best_interval_s": decision.best_interval_s,
        "best_ettr": decision.best_ettr,
        "constraints": [dataclasses.asdict(constraint) for constraint in decision.constraints],
        "loss": {**dataclasses.asdict(split), "total": split.total},
    }


def _print_decision(console: Console, decision: Decision, split: LossSplit) -> None:
    console.print(f"[bold]{decision.reason}[/bold]")
    steps, period = f"{decision.interval_steps:,}", seconds_text(decision.period_s)
    console.print(f"Every {steps} steps, that is every {period} of wall time.")
    best_s = seconds_text(decision.best_interval_s or 0.0)
    console.print(f"Expected: {percent(decision.overhead)} overhead, ETTR {_or_dash(decision.ettr)};")
    console.print(f"without limits ETTR {_or_dash(decision.best_ettr)} at {best_s}.")
    losses = Table("where time goes", "share of wall time", title="Expected loss", box=box.SIMPLE)
    for name, part in (*dataclasses.asdict(split).items(), ("total", split.total)):
        losses.add_row(_LOSS_NAMES[name], percent(part))
    console.print(losses)
    for constraint in decision.constraints:
        name = constraint.term.replace("_", " ")
        at = seconds_text(constraint.interval_s)
        console.print(f"The {name} asks for {at} and alone costs {percent(constraint.loss)}.")


_LOSS_NAMES = {
    "stall": "stall",
    "slowdown": "slower steps during uploads",
    "recompute": "work done again after failures",
    "restart": "restarts",
    "total": "total",
}


def _size_table(sizes: list[tuple[Decision, LossSplit]]) -> Table:
    table = Table(
        title="The same job at other sizes, with the same bytes per GPU", box=box.SIMPLE, padding=(0, 1)
    )
    for name in ("GPUs", "fails every", "interval", "overhead", "ETTR"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("decided by", no_wrap=True)
    for decision, _ in sizes:
        assert decision.failures is not None, "a plan has a failure rate"
        table.add_row(
            f"{decision.failures.num_gpus:,}",
            duration_text(decision.failures.mttf_s),
            seconds_text(decision.interval_s),
            percent(decision.overhead),
            _or_dash(decision.ettr),
            decision.decided_by.replace("_", " "),
        )
    return table


def _or_dash(ettr: float | None) -> str:
    return "-" if ettr is None else f"{ettr * 100:.2f} %"


def _failure_model(name: str) -> simulation.FailureModel | simulation.Recorded:
    models: dict[str, simulation.FailureModel] = {
        "exponential": simulation.Exponential(),
        "weibull": simulation.Weibull(shape=0.7),
        "bathtub": simulation.Bathtub(),
    }
    if name in models:
        return models[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"--failures {name}: neither {', '.join(models)} nor a file")
    lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return simulation.Recorded(tuple(float(line) for line in lines if line))


def _policy_maker(
    name: PolicyName, every: float, limits: Limits, prior: float
) -> Callable[[], simulation.Policy]:
    if name == "fixed":
        return lambda: simulation.Fixed(every)
    if name == "checkfreq":
        return lambda: simulation.CheckFreq(limits.max_overhead)
    if name == "young-daly":
        return lambda: simulation.YoungDaly(prior)
    if name == "continuous":
        return simulation.Continuous
    return lambda: simulation.Tuned(limits, prior_gpu_days_per_failure=prior)


def _summary(outcomes: list[simulation.Outcome]) -> dict[str, dict[str, float]]:
    columns = {
        "ettr": [outcome.ettr for outcome in outcomes],
        "overhead": [outcome.overhead for outcome in outcomes],
        "recomputed": [outcome.recomputed_s / outcome.duration_s for outcome in outcomes],
        "restarting": [outcome.restarting_s / outcome.duration_s for outcome in outcomes],
        "failures": [float(outcome.num_failures) for outcome in outcomes],
        "checkpoints": [float(outcome.num_checkpoints) for outcome in outcomes],
    }
    pairs = {name: simulation.mean_and_error(values) for name, values in columns.items()}
    return {name: {"mean": mean, "error": error} for name, (mean, error) in pairs.items()}


def _without_infinity(value: Any) -> Any:
    """JSON has no infinity and no NaN: None stands for both."""
    if isinstance(value, dict):
        return {key: _without_infinity(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_infinity(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
