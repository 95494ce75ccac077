"""The command line's commands and options. Each command imports what it needs when it runs, so that help is quick."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from paceline import __version__
from paceline.cli import option_types as opt
from paceline.cli.bench import bench_app
from paceline.cli.console import (
    errors_as_json,
    print_error,
    print_os_error,
    read_stdin,
)
from paceline.cli.drafting_options import Placement
from paceline.cli.fleet_options import DEFAULT_ADDRESS, DEFAULT_HTTP_PORT, DEFAULT_MODEL, DEFAULT_PORT, FleetOptions
from paceline.cli.serve import ServiceName
from paceline.cli.train import train_app
from paceline.errors import PacelineError
from paceline.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, exit_code
from paceline.messages import AcceptanceRule


class ErrorsInOneLine(TyperGroup):
    """Turns a typed error, or a file or stream that fails, into one line on standard error and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except PacelineError as error:
            print_error(error)
            raise typer.Exit(exit_code(error)) from None
        except OSError as error:
            print_os_error(error)
            raise typer.Exit(EXIT_FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    name="paceline",
    cls=ErrorsInOneLine,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Speculative decoding for large language models, served as a fleet.",
)
app.add_typer(train_app)
app.add_typer(bench_app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding for large language models, served as a fleet."""


@app.command()
def up(
    model: opt.Model = DEFAULT_MODEL,
    drafter_model: opt.DrafterModel = "int8",
    method: opt.MethodChain = "draft_model",
    head: opt.Head = "",
    placement: opt.PlacementChoice = Placement.AUTO,
    num_speculative_tokens: opt.Depth = 4,
    eagle_topk: opt.EagleTopk = None,
    num_draft_tokens: opt.TreeSize = None,
    exit_layer: opt.ExitLayer = None,
    verifiers: opt.Verifiers = 1,
    drafters: opt.Drafters = 1,
    verifier_device: opt.Device = "cpu",
    drafter_device: opt.Device = "cpu",
    dtype: opt.Dtype = "float32",
    port: opt.Port = DEFAULT_PORT,
    http_port: opt.HttpPort = DEFAULT_HTTP_PORT,
    redis_url: opt.RedisUrl = "",
    log_dir: opt.LogDir = Path("paceline-logs"),
    json_output: opt.Json = False,
) -> None:
    """Starts Redis, verifiers, drafters and a gateway on this machine; Ctrl-C stops them all.

    A method that needs the target's hidden states drafts in the verifiers (see --placement), without drafters.

    PACELINE_GATEWAY_*, PACELINE_VERIFIER_* and PACELINE_DRAFTER_* in the environment reach the services: API keys, TLS,
    log format and all that `paceline serve gateway --help` lists and no option here decides. For example:

    PACELINE_GATEWAY_API_KEYS_FILE=keys.txt PACELINE_GATEWAY_LOG_FORMAT=json paceline up
    """
    from paceline.cli.up import run_up

    options = FleetOptions(
        model=model,
        drafter_model=drafter_model,
        method=method,
        head=head,
        placement=placement,
        num_speculative_tokens=num_speculative_tokens,
        eagle_topk=eagle_topk,
        num_draft_tokens=num_draft_tokens,
        exit_layer=exit_layer,
        verifiers=verifiers,
        drafters=drafters,
        verifier_device=verifier_device,
        drafter_device=drafter_device,
        dtype=dtype,
        port=port,
        http_port=http_port,
        redis_url=redis_url,
        log_dir=log_dir,
    )
    raise typer.Exit(run_up(options, json_output=json_output))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Apply the model's chat template, or continue the bare text.")
    ] = True,
    system: Annotated[str, typer.Option(help="System message before the prompt (with --chat).")] = "",
    model: Annotated[str, typer.Option(help="Which of the served models; default: the only one.")] = "",
    max_tokens: opt.MaxTokens = None,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    method: opt.Method = "",
    num_speculative_tokens: opt.BlockSize = None,
    acceptance_rule: opt.Rule = AcceptanceRule.MATCH,
    no_speculation: opt.NoSpeculation = False,
    address: opt.Address = DEFAULT_ADDRESS,
    api_key: opt.ApiKey = "",
    tls: opt.Tls = False,
    tls_ca_file: opt.TlsCaFile = None,
    tls_cert_file: opt.TlsCertFile = None,
    tls_key_file: opt.TlsKeyFile = None,
    plain_text: opt.Plain = False,
    json_output: opt.JsonOrError = False,
) -> None:
    """Generates one completion, streams it and says what speculation did for it."""
    from paceline.cli.connection import Connection
    from paceline.cli.generate import run_generate
    from paceline.cli.request import RequestOptions

    options = RequestOptions(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        method=method,
        num_speculative_tokens=num_speculative_tokens,
        speculation=not no_speculation,
        rule=acceptance_rule,
    )
    with errors_as_json(json_output):
        asyncio.run(
            run_generate(
                read_stdin() if prompt == "-" else prompt,
                options,
                connection=Connection(address, api_key, tls, tls_ca_file, tls_cert_file, tls_key_file),
                chat=chat,
                system=system,
                colour=not plain_text,
                json_output=json_output,
            )
        )


@app.command()
def chat(
    system: Annotated[str, typer.Option(help="System message.")] = "",
    model: Annotated[str, typer.Option(help="Which of the served models; default: the only one.")] = "",
    max_tokens: opt.MaxTokens = 512,
    temperature: opt.Temperature = 0.7,
    top_p: opt.TopP = 0.95,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    seed: opt.Seed = None,
    method: opt.Method = "",
    num_speculative_tokens: opt.BlockSize = None,
    acceptance_rule: opt.Rule = AcceptanceRule.MATCH,
    no_speculation: opt.NoSpeculation = False,
    address: opt.Address = DEFAULT_ADDRESS,
    api_key: opt.ApiKey = "",
    tls: opt.Tls = False,
    tls_ca_file: opt.TlsCaFile = None,
    tls_cert_file: opt.TlsCertFile = None,
    tls_key_file: opt.TlsKeyFile = None,
    plain_text: opt.Plain = False,
) -> None:
    """Talks with the model; each turn sends the whole conversation. Empty line or Ctrl-D ends."""
    from paceline.cli.chat import run_chat
    from paceline.cli.connection import Connection
    from paceline.cli.request import RequestOptions

    options = RequestOptions(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        method=method,
        num_speculative_tokens=num_speculative_tokens,
        speculation=not no_speculation,
        rule=acceptance_rule,
    )
    connection = Connection(address, api_key, tls, tls_ca_file, tls_cert_file, tls_key_file)
    asyncio.run(run_chat(options, connection=connection, system=system, colour=not plain_text))


class _HelpBeforeService(TyperCommand):
    """Answers `--help` in the service's place; behind its name it is the service's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Prints the help, or reads the arguments."""
        if args[:1] == ["--help"]:
            typer.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()
        return super().parse_args(ctx, args)


@app.command(
    cls=_HelpBeforeService,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def serve(
    context: typer.Context, service: Annotated[ServiceName, typer.Argument(help="Which service to run.")]
) -> None:
    """Runs one service; everything after its name goes to its own settings (try `serve verifier --help`)."""
    from paceline.cli.serve import serve as become

    become(service, context.args)


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="Target: a hub id, a folder, a .gguf file or the built-in name.")],
    bits: Annotated[str, typer.Option(help="int8 (agrees best with the target) or int4 (smaller).")] = "int8",
    out_dir: Annotated[Path | None, typer.Option(help="Folder for the copy; default: one in the cache.")] = None,
    json_output: opt.JsonOrError = False,
) -> None:
    """Makes a quantised copy of a model that drafts for it on a CPU, and prints its folder."""
    from paceline.cli.quantize import run_quantize

    with errors_as_json(json_output):
        run_quantize(model, bits, out_dir, json_output=json_output)


@app.command()
def doctor(
    model: opt.Model = DEFAULT_MODEL,
    verifier_device: opt.Device = "cpu",
    drafter_device: opt.Device = "cpu",
    port: opt.Port = DEFAULT_PORT,
    http_port: opt.HttpPort = DEFAULT_HTTP_PORT,
    redis_url: Annotated[str, typer.Option(help="Check this Redis instead of the embedded one.")] = "",
    drafter: Annotated[
        str,
        typer.Option(help="Check this head, adapter or draft model instead of the machine: a folder; needs --target."),
    ] = "",
    target: Annotated[str, typer.Option(help="What it drafts for: a hub id, a folder or the built-in name.")] = "",
    min_acceptance: Annotated[
        float, typer.Option(min=0, max=1, help="Least share of its first drafts that the target must accept.")
    ] = 0.2,
    json_output: opt.Json = False,
) -> None:
    """Checks this machine, or with --drafter a drafter, and says what to do; exit code 1 if something is amiss."""
    if drafter or target:
        from paceline.cli.drafter_check import DrafterCheckOptions, run_drafter_check

        check = DrafterCheckOptions(drafter, target, verifier_device, min_acceptance=min_acceptance)
        with errors_as_json(json_output):
            raise typer.Exit(run_drafter_check(check, json_output=json_output))
    from paceline.cli.doctor import DoctorOptions, run_doctor

    options = DoctorOptions(model, verifier_device, drafter_device, port, http_port, redis_url)
    raise typer.Exit(asyncio.run(run_doctor(options, json_output=json_output)))
