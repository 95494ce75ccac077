"""From settings to a drafting method: which methods, which model, which runner."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from paceline.drafting.draft_id_map import DraftIdMap
from paceline.drafting.draft_model import DraftModelMethod, DraftSampleMethod
from paceline.drafting.draft_runner import DraftRunner
from paceline.drafting.fallback import FallbackMethod
from paceline.drafting.method import DraftMethod
from paceline.drafting.ngram import NgramMethod
from paceline.drafting.onnx_runner import OnnxDraftRunner, is_onnx_model
from paceline.drafting.torch_runner import TorchDraftRunner
from paceline.drafting.tree_shape import DEFAULT_MEDUSA_TREE
from paceline.engine.runner_options import DEFAULT_KV_BYTES, Quantization, RunnerChoice, RunnerOptions
from paceline.engine.simulated.runner import SIMULATED_DRAFTER, SimulatedModel, SimulatedRunner
from paceline.errors import ConfigurationError
from paceline.method_names import CUT_METHODS, HEAD_METHODS, METHOD_NAMES
from paceline.model_source import Progress, resolve
from paceline.quantize import Bits, quantize
from paceline.text.tokenizer import Tokenizer


class RunnerKind(Enum):
    """What runs the draft model."""

    AUTO = "auto"
    """ONNX for a folder that holds such a model, else the engine."""
    TORCH = "torch"
    """The engine: its native runner for a model that it knows, else the one of `transformers`."""
    TRANSFORMERS = "transformers"
    """The engine, with the runner of `transformers`."""
    ONNX = "onnx"
    """ONNX; a model that is not one is quantised first, once."""
    SIMULATED = "simulated"
    """Nothing: a pass takes a stated time, and tokens come from a table."""


@dataclass(frozen=True, slots=True)
class MethodSettings:
    """How to draft.

    Attributes:
        methods: names in order of preference; several make a fallback chain.
        draft_model: folder, GGUF file, hub id or built-in name of the draft model; a folder written by
            `paceline quantize` selects the ONNX runner. For a head, the target: its embedding and head are used; for
            `layerskip` the target too: its first layers are.
        draft_head: the head's checkpoint, a folder or hub id, for `medusa`, `eagle` and `eagle3`.
        eagle_topk: candidates per node of an EAGLE tree; 1 drafts chains.
        medusa_tree: shape of a Medusa tree.
        exit_layer: layers of the target that `layerskip` drafts with; None for what its config.json names.
        max_draft_tokens: most tokens of a tree.
        runner: what runs it.
        bits: width of the weights when `runner` asks for a quantised copy.
        quantization: of the weights in the engine's native runner.
        device: of the engine.
        dtype: of the engine: `float32`, `bfloat16` or `float16`.
        kv_bytes: memory for key/value rows, which all sessions share.
        num_threads: threads of a pass of the ONNX runner; torch's are the process's own.
        max_sessions: sessions at once; 0 for any number.
        max_model_len: most tokens of a session; None for what the model and `kv_bytes` allow.
        max_batch_tokens: most tokens of a pass; longer contexts are fed in steps.
        draft_sample_method: how `draft_model` chooses drafts for sampled requests under the rule `ratio`.
        prompt_lookup_min: shortest suffix that `ngram` looks up.
        prompt_lookup_max: longest one.
        simulated: what to simulate where `runner` says so; `draft_model` then gives the tokenizer.
    """

    methods: tuple[str, ...] = ("draft_model",)
    draft_model: str = ""
    draft_head: str = ""
    eagle_topk: int = 1
    medusa_tree: str = DEFAULT_MEDUSA_TREE
    exit_layer: int | None = None
    max_draft_tokens: int = 16
    runner: RunnerKind = RunnerKind.AUTO
    bits: Bits = Bits.INT8
    quantization: Quantization = Quantization.NONE
    device: str = "cpu"
    dtype: str = "float32"
    kv_bytes: int = DEFAULT_KV_BYTES
    num_threads: int = 1
    max_sessions: int = 0
    max_model_len: int | None = None
    max_batch_tokens: int = 256
    draft_sample_method: DraftSampleMethod = DraftSampleMethod.PROBABILISTIC
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 5
    simulated: SimulatedModel = SIMULATED_DRAFTER


def build_method(settings: MethodSettings, progress: Progress = lambda _line: None) -> DraftMethod:
    """Loads what the settings name.

    Args:
        settings: how to draft.
        progress: told what is being done when it takes long.

    Raises:
        ConfigurationError: a method is unknown, `draft_model` is missing, or an extra is not installed.
        NotFound, Unavailable, ModelError: the model cannot be found, fetched or loaded.
    """
    of_target = {*HEAD_METHODS, *CUT_METHODS}
    unknown = [name for name in settings.methods if name not in METHOD_NAMES]
    if unknown or not settings.methods:
        raise ConfigurationError(
            f"drafting methods {list(settings.methods)}: name one or more of {', '.join(METHOD_NAMES)}", field="methods"
        )
    if "draft_model" in settings.methods and set(settings.methods) & of_target:
        raise ConfigurationError(
            f"drafting methods {list(settings.methods)}: draft_model needs its own model, a head or layerskip the "
            "target, so they cannot be in one chain; start a drafter for each",
            field="methods",
        )
    methods = [_one_method(name, settings, progress) for name in settings.methods]
    return methods[0] if len(methods) == 1 else FallbackMethod(methods)


def _one_method(name: str, settings: MethodSettings, progress: Progress) -> DraftMethod:
    if name == "ngram":
        return NgramMethod(settings.prompt_lookup_min, settings.prompt_lookup_max)
    if settings.runner is RunnerKind.SIMULATED and name != "draft_model":
        raise ConfigurationError(
            f"the method {name} builds on a real target: set runner to auto, or method to draft_model", field="runner"
        )
    if name in HEAD_METHODS:
        # Here, because it imports `transformers`, which the ONNX runner and ngram do without.
        from paceline.drafting.pool_head import build_pool_head

        return build_pool_head(name, settings, progress)
    if not settings.draft_model:
        raise ConfigurationError(
            f"the method {name} needs a model: set draft_model to a folder, a .gguf file, a hub id, a built-in name "
            "or, for draft_model, the folder that `paceline quantize` made",
            field="draft_model",
        )
    if settings.runner is RunnerKind.SIMULATED:
        return _simulated(settings, Tokenizer.load(resolve(settings.draft_model, weights=False, progress=progress)))
    if name in CUT_METHODS:
        _refuse_onnx(name, settings)
    folder = _model_folder(settings, progress)
    num_layers = _exit_layer(folder, settings) if name in CUT_METHODS else None
    tokenizer = Tokenizer.load(folder)
    return DraftModelMethod(
        _runner(folder, settings, num_layers),
        name=name,
        tokenizer_hash=tokenizer.fingerprint,
        vocabulary=tokenizer.vocabulary,
        vocab_limit=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        draft_sample_method=settings.draft_sample_method,
        id_map=DraftIdMap.load(folder, tokenizer.vocab_size),
    )


def _simulated(settings: MethodSettings, tokenizer: Tokenizer) -> DraftMethod:
    runner = SimulatedRunner(
        settings.simulated,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        kv_bytes=settings.kv_bytes,
        max_sessions=settings.max_sessions or 1,
        max_model_len=settings.max_model_len,
    )
    return DraftModelMethod(
        TorchDraftRunner(runner, settings.max_sessions, settings.max_batch_tokens),
        tokenizer_hash=tokenizer.fingerprint,
        vocabulary=tokenizer.vocabulary,
        eos_token_ids=tokenizer.eos_token_ids,
        draft_sample_method=settings.draft_sample_method,
    )


def _model_folder(settings: MethodSettings, progress: Progress) -> Path:
    path = Path(settings.draft_model).expanduser()
    if is_onnx_model(path):
        if settings.runner in {RunnerKind.TORCH, RunnerKind.TRANSFORMERS}:
            raise ConfigurationError(
                f"{path} holds an ONNX model, which runner {settings.runner.value} cannot load: set runner to onnx or "
                "auto",
                field="runner",
            )
        _refuse_quantization(settings)
        return path
    if settings.runner is RunnerKind.ONNX:
        _refuse_quantization(settings)
        return quantize(settings.draft_model, bits=settings.bits, progress=progress)
    return resolve(settings.draft_model, progress=progress)


def _refuse_onnx(name: str, settings: MethodSettings) -> None:
    if settings.runner is RunnerKind.ONNX or is_onnx_model(Path(settings.draft_model).expanduser()):
        raise ConfigurationError(
            f"the method {name} runs the first layers of the target, which runner onnx cannot: set runner to torch and "
            "draft_model to the target",
            field="runner",
        )


def _exit_layer(folder: Path, settings: MethodSettings) -> int:
    from paceline.drafting.checkpoints.layerskip import load_layerskip
    from paceline.drafting.checkpoints.target_facts import read_target_facts

    return load_layerskip(folder, read_target_facts(folder), settings.exit_layer).exit_layer


def _refuse_quantization(settings: MethodSettings) -> None:
    if settings.quantization is not Quantization.NONE:
        raise ConfigurationError(
            f"quantization {settings.quantization.value} is for models that the engine runs, and this one runs with "
            "onnx: set runner to torch, or quantization to none and quantize_bits to the width you want",
            field="quantization",
        )


def _runner(folder: Path, settings: MethodSettings, num_layers: int | None) -> DraftRunner:
    if is_onnx_model(folder):
        return OnnxDraftRunner(
            folder,
            kv_bytes=settings.kv_bytes,
            max_sessions=settings.max_sessions,
            max_model_len=settings.max_model_len,
            max_batch_tokens=settings.max_batch_tokens,
            num_threads=settings.num_threads,
        )
    return _torch_runner(folder, settings, num_layers)


def _torch_runner(folder: Path, settings: MethodSettings, num_layers: int | None) -> DraftRunner:
    # Here, because these import `transformers`, which takes seconds and the ONNX runner does without.
    from paceline.engine.load_runner import load_runner
    from paceline.engine.loader import ModelDtype

    generic = settings.runner is RunnerKind.TRANSFORMERS
    options = RunnerOptions(
        kv_bytes=settings.kv_bytes,
        max_model_len=settings.max_model_len,
        runner=RunnerChoice.TRANSFORMERS if generic else RunnerChoice.AUTO,
        quantization=settings.quantization,
    )
    runner = load_runner(
        folder, dtype=ModelDtype(settings.dtype), device=settings.device, options=options, num_layers=num_layers
    )
    return TorchDraftRunner(runner, settings.max_sessions, settings.max_batch_tokens)
