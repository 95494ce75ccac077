"""Options of the command line as types: each says once what it is for and what it may be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.drafting_options import Placement
from paceline.messages import AcceptanceRule
from paceline.method_names import METHOD_NAMES

# Of several commands: what is served, and where.
Model = Annotated[str, typer.Option(help="Target: a hub id, a folder, a .gguf file or the built-in name.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the gateway's gRPC; 0 takes a free one.")]
HttpPort = Annotated[int, typer.Option(min=0, max=65535, help="Port of the gateway's HTTP; 0 takes a free one.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on standard output.")]
JsonOrError = Annotated[
    bool, typer.Option("--json", help="One JSON object on standard output; an error is one too, under `error`.")
]
Address = Annotated[
    str,
    typer.Option(help="The gateway's address, host:port; or several, with commas: a stream goes on over another one."),
]
ApiKey = Annotated[
    str,
    typer.Option(
        envvar="PACELINE_API_KEY",
        show_default=False,
        help="API key to show to the gateway; better in the environment, where no list of processes has it.",
    ),
]
Tls = Annotated[bool, typer.Option("--tls", help="Speak TLS to the gateway.")]
TlsCaFile = Annotated[Path | None, typer.Option(help="PEM authorities to trust; default: the system's.")]
TlsCertFile = Annotated[Path | None, typer.Option(help="PEM certificate chain to show (mutual TLS).")]
TlsKeyFile = Annotated[Path | None, typer.Option(help="PEM private key of --tls-cert-file.")]

# Of one request.
Method = Annotated[
    str, typer.Option(help="Draft by this method only, such as ngram or eagle3; default: whatever the fleet does.")
]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 takes the best token each time.")]
TopP = Annotated[float, typer.Option(help="Sample from the smallest set of tokens with this probability.")]
TopK = Annotated[int, typer.Option(help="Sample from this many best tokens; 0: all.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the best one's probability.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text; default: drawn.")]
Stop = Annotated[list[str] | None, typer.Option(help="String that ends the text; may be given again.")]
BlockSize = Annotated[int | None, typer.Option(help="Draft tokens per block; 0: none; default: the gateway's.")]
Rule = Annotated[
    AcceptanceRule,
    typer.Option(
        "--acceptance-rule",
        help="How drafts are judged; match: the tokens of plain decoding; ratio: its distribution only.",
    ),
]
NoSpeculation = Annotated[bool, typer.Option("--no-speculation", help="Plain decoding through the same services.")]
Plain = Annotated[bool, typer.Option("--no-colour", "--no-color", help="Do not colour tokens by their origin.")]

# Of a fleet on this machine.
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="Type of the weights: float32, bfloat16 or float16.")]
DrafterModel = Annotated[
    str, typer.Option(help="Draft model: int8 or int4 for a quantised copy of the target, or as --model.")
]
MethodChain = Annotated[
    str, typer.Option(help=f"One of {', '.join(METHOD_NAMES)}, or a chain such as ngram,draft_model.")
]
Head = Annotated[
    str,
    typer.Option(
        help="Trained checkpoint of medusa, eagle, eagle3 or layerskip: a folder or hub id; default: the example "
        "for the built-in target."
    ),
]
PlacementChoice = Annotated[
    Placement,
    typer.Option(help="Draft in the verifier itself or in a pool of drafters; auto: as the method is best."),
]
Depth = Annotated[int, typer.Option(min=0, help="Draft tokens per block, or depth of a tree; 0: no drafting.")]
EagleTopk = Annotated[
    int | None, typer.Option(min=1, help="Candidates per node of an EAGLE tree; 1 drafts chains (default).")
]
TreeSize = Annotated[
    int | None, typer.Option(min=1, help="Most nodes of a tree of medusa, eagle or eagle3 (default: 16).")
]
ExitLayer = Annotated[
    int | None, typer.Option(min=1, help="Layers after which layerskip drafts; default: as its checkpoint says.")
]
Verifiers = Annotated[int, typer.Option(min=1, help="Verifier processes.")]
Drafters = Annotated[int, typer.Option(min=0, help="Drafter processes, if there is a pool of them; 0 decodes plainly.")]
RedisUrl = Annotated[str, typer.Option(help="An existing Redis; default: an embedded one is started.")]
LogDir = Annotated[Path, typer.Option(help="Folder of the processes' logs.")]
