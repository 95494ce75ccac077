"""Runs a training command: a line that moves while it trains, a summary at the end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.cli.console import err, out, to_json
from paceline.errors import ConfigurationError
from paceline.training.options import CollectOptions, TrainOptions
from paceline.training.status import Status

if TYPE_CHECKING:
    from paceline.training.collect import CollectStatus

_LINE_EVERY_S = 30.0
"""Where no terminal shows a moving line, a line is printed so often."""


def run_train(options: TrainOptions, *, json_output: bool) -> None:
    """Trains to the end and says what came of it; progress goes to standard error.

    Raises:
        ConfigurationError: a package that training needs is missing.
    """
    try:
        from paceline.training.run import train
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    with StatusLine(err()) as line:
        result = train(options, on_status=line.show, progress=line.say)
    if result is None:  # another process tells
        return
    if json_output:
        out().print(to_json(result), markup=False)
        return
    begin, best = result.initial.tokens_per_pass, result.best.tokens_per_pass
    shares = " ".join(f"{share:.2f}" for share in result.best.at_least)
    err().print(
        f"{result.steps} steps, {result.tokens} tokens, {result.seconds:.0f} s | held out: {best:.2f} tokens per pass "
        f"(at first {begin:.2f}), at least 1, 2, ... accepted: {shares}",
        markup=False,
    )
    out().print(str(result.folder), markup=False)


def run_collect(options: CollectOptions, *, json_output: bool) -> None:
    """Collects to the end and prints the folder; progress goes to standard error.

    Raises:
        ConfigurationError: a package that the engine needs is missing.
    """
    try:
        from paceline.training.collect import collect
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    with StatusLine(err()) as line:
        made = collect(options, on_status=line.show_collected, progress=line.say)
    if json_output:
        out().print(to_json(made), markup=False)
        return
    err().print(f"{made.prompts} answers, {made.new_tokens} new tokens in {made.seconds:.0f} s", markup=False)
    out().print(str(made.folder), markup=False)


def missing_package(error: ModuleNotFoundError) -> ConfigurationError:
    """What to do about a package that is not installed."""
    return ConfigurationError(f"training needs {error.name}: run `pip install 'paceline[engine,train]'`")


class StatusLine:
    """Shows a run's status: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed_s = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=1.0)

    def __enter__(self) -> StatusLine:
        """Starts the line."""
        self._progress.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Leaves it as it is."""
        self._progress.stop()

    def say(self, text: str) -> None:
        """One line above it."""
        self._console.print(text, markup=False, style="dim")

    def show(self, status: Status) -> None:
        """The newest status of a training run."""
        self._show(describe(status), status.share, important=status.evaluated)

    def show_collected(self, status: CollectStatus) -> None:
        """The newest status of a collection."""
        speed = f" | {status.new_tokens / status.seconds:.0f} tok/s" if status.seconds else ""
        text = f"{status.done} of {status.total} answers{speed}"
        self._show(text, status.done / status.total, important=status.done == status.total)

    def _show(self, text: str, share: float, *, important: bool) -> None:
        self._progress.update(self._task, completed=share, description=text)
        now_s = time.monotonic()
        if not self._console.is_terminal and (important or now_s - self._printed_s >= _LINE_EVERY_S):
            self._printed_s = now_s
            self.say(text)


def describe(status: Status) -> str:
    """A status in one line."""
    parts = [f"step {status.step}", f"epoch {status.epoch:.2f}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    if status.evaluation is not None:
        first = status.evaluation.at_least[0]
        parts.append(f"accept {first:.2f}, {status.evaluation.tokens_per_pass:.2f} tokens/pass")
    if status.seconds > 0:
        parts.append(f"{status.tokens / status.seconds:.0f} tok/s")
    return " | ".join(parts)
