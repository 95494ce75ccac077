"""`paceline train ...`: trains drafters. The options of each command are the fields of its options class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Annotated, Any, get_args, get_type_hints

import typer

from paceline.cli.console import errors_as_json
from paceline.training.options import (
    CollectOptions,
    DraftModelOptions,
    Eagle3Options,
    EagleOptions,
    LayerSkipOptions,
    MedusaOptions,
    TrainOptions,
)

train_app = typer.Typer(
    name="train",
    no_args_is_help=True,
    help="Trains a drafter for a target on the target's own answers.",
)


def takes(options_class: type[Any]) -> Callable[[Callable[[Any, bool], None]], Callable[..., None]]:
    """Makes a command of a function of (options, json_output): one option for each field of the class."""

    def decorate(function: Callable[[Any, bool], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            json_output = values.pop("json_output")
            with errors_as_json(json_output):
                function(options_class(**values), json_output)

        hints = get_type_hints(options_class, include_extras=True)
        parameters = [_parameter(entry, hints[entry.name]) for entry in fields(options_class)]
        parameters.append(
            inspect.Parameter(
                "json_output",
                inspect.Parameter.KEYWORD_ONLY,
                default=False,
                annotation=Annotated[
                    bool, typer.Option("--json", help="One JSON object on standard output at the end.")
                ],
            )
        )
        command.__name__ = function.__name__
        command.__doc__ = function.__doc__
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(entry: Field[Any], annotation: Any) -> inspect.Parameter:
    kind, shown = get_args(annotation)
    # A switch that is off by default needs no counterpart.
    names = ["--" + entry.name.replace("_", "-")] if kind is bool and entry.default is False else []
    option = typer.Option(*names, help=shown.text, min=shown.minimum)
    return inspect.Parameter(
        entry.name, inspect.Parameter.KEYWORD_ONLY, default=entry.default, annotation=Annotated[kind, option]
    )


@train_app.command()
@takes(CollectOptions)
def collect(options: CollectOptions, json_output: bool) -> None:
    """Collects the target's answers to prompts: what all trainers learn from.

    Stopped at any time, it goes on where it was when the same command is given again.
    """
    from paceline.cli.train_run import run_collect

    run_collect(options, json_output=json_output)


@train_app.command()
@takes(MedusaOptions)
def medusa(options: MedusaOptions, json_output: bool) -> None:
    """Trains Medusa heads: small, quick to train, and they draft inside the verifier.

    Each head guesses one token further ahead from the same hidden state of the target.
    """
    _train(options, json_output)


@train_app.command()
@takes(EagleOptions)
def eagle(options: EagleOptions, json_output: bool) -> None:
    """Trains an EAGLE-1 head: one layer that continues the target's own hidden states.

    Also the head of EAGLE-2, which grows trees of drafts with it. Its logits are made by the target's own head.
    """
    _train(options, json_output)


@train_app.command()
@takes(Eagle3Options)
def eagle3(options: Eagle3Options, json_output: bool) -> None:
    """Trains an EAGLE-3 head: one layer that sees three layers of the target; drafts best for its size.

    It has a small vocabulary of its own and learns on its own drafts.
    """
    _train(options, json_output)


@train_app.command("draft_model")
@takes(DraftModelOptions)
def draft_model(options: DraftModelOptions, json_output: bool) -> None:
    """Distils a small draft model from the target: some of its layers, trained on its answers.

    It drafts anywhere, also far from the target: it needs the text only.
    """
    _train(options, json_output)


@train_app.command()
@takes(LayerSkipOptions)
def layerskip(options: LayerSkipOptions, json_output: bool) -> None:
    """Trains the target to exit early (LayerSkip), as an adapter or whole; its first layers then draft for it.

    What comes out is a target of its own: its text is not the same as the original model's.
    """
    _train(options, json_output)


def _train(options: TrainOptions, json_output: bool) -> None:
    from paceline.cli.train_run import run_train

    run_train(options, json_output=json_output)
