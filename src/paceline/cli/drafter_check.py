"""`paceline doctor --drafter --target`: what a drafter is, and whether the target accepts what it drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from paceline.cli.console import err, out, to_json
from paceline.cli.drafter_loading import build_pair, encode_prompts, load_drafter
from paceline.cli.smoke_acceptance import SmokeAcceptance, measure_acceptance
from paceline.drafting.checkpoints.target_facts import read_target_facts
from paceline.errors import InvalidArgument
from paceline.model_source import resolve
from paceline.text.tokenizer import Tokenizer
from paceline.training.report import held_out_acceptance

DEFAULT_MIN_ACCEPTANCE = 0.2
"""Heads that were read wrongly stay far below, heads that were trained a little come far above."""

_MAX_TOKENS = 32

_ADVICE = {
    "eagle": "was it trained for this very target (instruct or base, same version)? Is `bias`, `rope_theta` or "
    "`rms_norm_eps` in its config.json that of its training?",
    "eagle3": "was it trained for this very target? Do the layers above say what enters them, as it was trained? Are "
    "`norm_before_residual`, `norm_before_fc`, `fc_norm` and `norm_output` those of its training?",
    "medusa": "was it trained for this very target, on hidden states after its final norm?",
    "layerskip": "was it trained on this very target, and long enough? Is `exit_layer` that of its training?",
    "draft_model": "does it write like the target: same family, same chat template?",
}
"""What makes each method draft badly without an error."""


@dataclass(frozen=True, slots=True)
class DrafterCheckOptions:
    """What is to be checked.

    Attributes:
        drafter: folder of a head, of a LayerSkip adapter or model, or of a draft model.
        target: as `--model` of `paceline up`.
        device: where both run.
        num_draft_tokens: drafts per block; Medusa has at most one per head.
        min_acceptance: least share of first drafts that must be accepted.
    """

    drafter: str
    target: str
    device: str = "cpu"
    num_draft_tokens: int = 4
    min_acceptance: float = DEFAULT_MIN_ACCEPTANCE


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """What `--json` prints.

    Attributes:
        healthy: enough first drafts were accepted.
        layout: of the checkpoint.
        method: that uses it.
        sizes: in words.
        weights_bytes: memory that the method takes beside the target.
        judged: blocks that reached each position.
        accepted_per_position: share of them that were accepted up to there.
        tokens_per_pass: of the target.
        held_out: the same shares on answers that were held out when it was trained; empty where its folder has none.
        advice: what to look at; empty when nothing is to be done.
    """

    healthy: bool
    layout: str
    method: str
    sizes: str
    weights_bytes: int
    judged: tuple[int, ...] = ()
    accepted_per_position: tuple[float, ...] = ()
    tokens_per_pass: float = 0.0
    held_out: tuple[float, ...] = ()
    advice: str = ""


def run_drafter_check(options: DrafterCheckOptions, *, json_output: bool) -> int:
    """Loads drafter and target in this process, lets the target answer a few prompts, and prints what was found.

    Returns:
        0, or 1 when too few drafts are accepted.

    Raises:
        PacelineError: one of them cannot be loaded, or they do not fit together.
    """
    if not (options.drafter and options.target):
        missing = "target" if options.drafter else "drafter"
        raise InvalidArgument(f"--{missing} is missing: a drafter is checked with its target", field=missing)
    target = resolve(options.target, progress=lambda line: err().print(line, markup=False))
    loaded = load_drafter(Path(options.drafter).expanduser(), read_target_facts(target))
    if not json_output:
        out().print(f"{loaded.layout.value}, for the method {loaded.method}: {loaded.sizes}", markup=False)
    tokenizer = Tokenizer.load(target)
    pair = build_pair(loaded, target, tokenizer, device=options.device, num_draft_tokens=options.num_draft_tokens)
    found = measure_acceptance(
        pair.engine,
        pair.recorder,
        encode_prompts(target, tokenizer),
        num_draft_tokens=options.num_draft_tokens,
        max_tokens=_MAX_TOKENS,
        eos_token_ids=tokenizer.eos_token_ids,
    )
    start = DrafterReport(
        healthy=False,
        layout=loaded.layout.value,
        method=loaded.method,
        sizes=loaded.sizes,
        weights_bytes=pair.recorder.weights_bytes,
        held_out=held_out_acceptance(loaded.folder),
    )
    report = judge(start, found, options.min_acceptance)
    if json_output:
        out().print(to_json(report), markup=False)
    else:
        _print(report)
    return 0 if report.healthy else 1


def judge(report: DrafterReport, found: SmokeAcceptance, min_acceptance: float) -> DrafterReport:
    """The report with what was counted and what follows from it."""
    rates = found.per_position
    healthy = bool(rates) and rates[0] >= min_acceptance
    advice = ""
    if not rates:
        advice = "it drafted nothing at all: an error above says why, or the prompts are longer than its context"
    elif not healthy:
        advice = f"{rates[0]:.0%} of first drafts are accepted, at least {min_acceptance:.0%} should be: "
        advice += _ADVICE[report.method]
        if report.held_out and report.held_out[0] >= min_acceptance:
            advice += (
                f" When it was trained {report.held_out[0]:.0%} of held-out ones were: here are the beginnings of a "
                "few answers to other prompts, which are harder; `paceline bench methods` measures more of them"
            )
    return replace(
        report,
        healthy=healthy,
        judged=found.judged,
        accepted_per_position=rates,
        tokens_per_pass=found.tokens_per_pass,
        advice=advice,
    )


def _print(report: DrafterReport) -> None:
    table = Table("position", "blocks that reached it", "accepted up to it")
    if report.held_out:
        table.add_column("held out in training")
    held_out = [f"{share:.0%}" for share in report.held_out]
    for index, (judged, share) in enumerate(zip(report.judged, report.accepted_per_position, strict=True)):
        table.add_row(str(index + 1), str(judged), f"{share:.0%}", *held_out[index : index + 1])
    console = out()
    console.print(table)
    memory = f"{report.weights_bytes / 1e6:.1f} MB of weights beside the target's"
    console.print(f"{report.tokens_per_pass:.2f} tokens per pass of the target; {memory}", markup=False)
    if report.advice:
        console.print(f"→ {report.advice}", markup=False, style="red")
