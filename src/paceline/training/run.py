"""One training run from its options to the files it leaves.

In `out` lie the checkpoint that drafting loads (`config.json` and safetensors), `provenance.json`, `history.json`,
`loss.png`, `acceptance.png`, and `checkpoint/`, from which a run goes on and which may be removed when it is done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import DistributedDataParallelKwargs  # type: ignore[import-untyped]

from paceline.model_source import CacheSettings, default_name, lasting_reference, resolve
from paceline.training import report
from paceline.training.batches import BatchSource
from paceline.training.checkpoint import CheckpointFolder
from paceline.training.corpus import Corpus, Split, load_corpus
from paceline.training.features import FeatureStore
from paceline.training.learner import Learner
from paceline.training.loop import TrainingLoop
from paceline.training.methods import Materials, method_of
from paceline.training.options import TrainOptions
from paceline.training.status import OnStatus
from paceline.training.target import TrainingTarget

_FREE_TO_CHANGE = {
    *("data", "target", "out", "restart", "max_steps", "max_seconds", "patience", "eval_every", "checkpoint_every"),
    *("checkpoint_seconds", "threads", "cpu", "cache_dir", "cache_gb"),
}
"""Options that a run may be continued with other values of. Data and target count by their contents."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run made.

    Attributes:
        folder: of the checkpoint.
        steps: steps taken, earlier runs included.
        tokens: answer tokens learnt from.
        seconds: time spent.
        initial: held-out acceptance before the first step.
        best: of the parameters that were written.
    """

    folder: Path
    steps: int
    tokens: int
    seconds: float
    initial: report.Figures
    best: report.Figures


def train(
    options: TrainOptions,
    *,
    on_status: OnStatus = lambda _status: None,
    progress: Callable[[str], None] = lambda _line: None,
) -> TrainResult | None:
    """Trains a drafter, or goes on with a run that was stopped.

    Args:
        options: an instance of one method's options; its class says which method.
        on_status: told after each step.
        progress: told what is being done before the first one.

    Returns:
        What was made; None in all processes but the main one where there are several.

    Raises:
        PacelineError: data, target or options do not fit, or the loss stopped being a number.
    """
    method = method_of(options)
    if options.threads:
        torch.set_num_threads(options.threads)
    accelerator = Accelerator(
        cpu=options.cpu,
        mixed_precision=options.precision.value,
        gradient_accumulation_steps=options.accumulate,
        # The frozen tables of the target are the same everywhere.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    if not accelerator.is_main_process:
        progress = _silent
    corpus = load_corpus(options.data)
    split = corpus.split(options.held_out)
    progress(f"{len(corpus)} answers, {corpus.num_answer_tokens} tokens; {len(split.held_out)} are held out")
    folder = resolve(options.target, progress=progress)
    target = TrainingTarget(folder, device=_device_name(accelerator))
    corpus.check_vocabulary(target.vocab_size)
    torch.manual_seed(options.seed)
    learner = method.learner(options, Materials(target, corpus, split, progress))
    fingerprint = _fingerprint(method.name, options, corpus, target)
    checkpoints = CheckpointFolder(options.out / "checkpoint")
    if options.restart and accelerator.is_main_process:
        checkpoints.forget()
    accelerator.wait_for_everyone()
    loop = TrainingLoop(
        accelerator,
        learner,
        source=_source(options, corpus, target, learner),
        train=split.train,
        held_out=split.held_out,
        options=options,
        checkpoints=checkpoints,
        fingerprint=fingerprint,
        on_status=on_status,
    )
    loop.run()
    result = TrainResult(
        folder=options.out,
        steps=loop.step,
        tokens=loop.tokens,
        seconds=round(loop.seconds, 1),
        initial=report.figures_of(loop.history, best=False),
        best=report.figures_of(loop.history, best=True),
    )
    if accelerator.is_main_process:
        learner.eval()
        learner.prepare_to_write(loop.eval_batches())
        learner.write(options.out, lasting_reference(options.target))
        report.write_history(options.out, loop.history)
        machine = report.machine_facts(_device_name(accelerator), accelerator.num_processes)
        report.write_provenance(options.out, _provenance(method.name, options, corpus, split, target, result, machine))
    accelerator.wait_for_everyone()
    return result if accelerator.is_main_process else None


def _silent(_line: str) -> None:
    """What other processes than the main one say."""


def _device_name(accelerator: Accelerator) -> str:
    device = accelerator.device
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def _source(options: TrainOptions, corpus: Corpus, target: TrainingTarget, learner: Learner) -> BatchSource:
    max_len = min(options.max_len, target.max_model_len)
    if not learner.layers:
        return BatchSource(corpus, max_len=max_len, features=None)
    folder = options.cache_dir or CacheSettings().folder / "features"
    features = FeatureStore(
        folder, corpus, target, learner.layers, max_bytes=int(options.cache_gb * 2**30), max_len=max_len
    )
    return BatchSource(corpus, max_len=max_len, features=features)


def _fingerprint(method: str, options: TrainOptions, corpus: Corpus, target: TrainingTarget) -> str:
    kept = {field.name: str(getattr(options, field.name)) for field in fields(options)}
    kept = {name: value for name, value in kept.items() if name not in _FREE_TO_CHANGE}
    content = json.dumps([method, corpus.digest, target.digest, kept], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _provenance(
    method: str,
    options: TrainOptions,
    corpus: Corpus,
    split: Split,
    target: TrainingTarget,
    result: TrainResult,
    machine: dict[str, str | int],
) -> report.Provenance:
    return report.Provenance(
        method=method,
        target={"name": default_name(options.target), "digest": target.digest},
        data={
            "name": options.data.name,
            "digest": corpus.digest,
            "sequences": len(corpus),
            "answer_tokens": corpus.num_answer_tokens,
            "held_out_sequences": len(split.held_out),
        },
        options=report.plain_options(options),
        steps=result.steps,
        tokens=result.tokens,
        seconds=result.seconds,
        initial=result.initial,
        best=result.best,
        machine=machine,
        versions=report.package_versions(),
        commit=report.source_commit(),
        date=report.now(),
    )
