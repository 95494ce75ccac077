"""What a run is told, method by method. The command line makes its options from these classes.

Imports no torch, so that help is quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

from paceline.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Help:
    """What an option is for.

    Attributes:
        text: what help shows.
        minimum: the least value that makes sense; None where there is none.
    """

    text: str
    minimum: float | None = None


class Precision(Enum):
    """Number format of the trained module's products."""

    NO = "no"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class _TargetOptions:
    """Which target: of training as of collecting."""

    target: Annotated[str, Help("Target: a hub id, a folder, a .gguf file or the built-in name.")] = (
        "smollm2-135m-instruct"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions(_TargetOptions):
    """Options of every method; each field's text says what it does."""

    data: Annotated[Path, Help("The target's answers: a folder of `paceline train collect`, or one file.")] = Path(
        "corpus"
    )
    out: Annotated[Path, Help("Folder of the result; a run that was stopped goes on from there.")] = Path("trained")
    restart: Annotated[bool, Help("Forget an earlier run in --out instead of going on with it.")] = False
    max_steps: Annotated[int, Help("Stop after so many steps; 0: no limit.", minimum=0)] = 0
    max_seconds: Annotated[
        float, Help("Stop after so many seconds, those of earlier runs included; 0: none.", minimum=0)
    ] = 0.0
    patience: Annotated[int, Help("Stop after so many evaluations without improvement; 0: never.", minimum=0)] = 0
    learning_rate: Annotated[
        float, Help("Highest learning rate; rises at first, then falls as a cosine.", minimum=0)
    ] = 1e-3
    warmup: Annotated[float, Help("Share of the run in which the learning rate rises.", minimum=0)] = 0.05
    weight_decay: Annotated[float, Help("Weight decay of AdamW.", minimum=0)] = 0.0
    grad_clip: Annotated[float, Help("Longest gradient; longer ones are shortened to it.", minimum=0)] = 1.0
    batch_tokens: Annotated[int, Help("Tokens of a batch, padding included.", minimum=1)] = 2048
    accumulate: Annotated[int, Help("Batches per step and device.", minimum=1)] = 1
    max_len: Annotated[int, Help("Longer sequences are cut.", minimum=8)] = 2048
    depth: Annotated[int, Help("Drafts per chain that evaluations measure.", minimum=1)] = 4
    held_out: Annotated[float, Help("Share of the prompts kept for evaluation.", minimum=0)] = 0.05
    eval_every: Annotated[int, Help("Steps between evaluations.", minimum=1)] = 100
    eval_sequences: Annotated[int, Help("Held-out answers of an evaluation.", minimum=1)] = 40
    checkpoint_every: Annotated[int, Help("Steps between checkpoints; 0: by time only.", minimum=0)] = 0
    checkpoint_seconds: Annotated[float, Help("Seconds between checkpoints.", minimum=0)] = 60.0
    precision: Annotated[Precision, Help("bf16 computes products in bfloat16, for GPUs that have it.")] = Precision.NO
    threads: Annotated[int, Help("CPU threads of this process; 0: all cores.", minimum=0)] = 0
    cpu: Annotated[bool, Help("Train on the CPU even where there is a GPU.")] = False
    seed: Annotated[int, Help("Seed of initial weights, order of the data and all chance.")] = 0
    cache_dir: Annotated[Path | None, Help("Folder of the target's hidden states; default: in Paceline's cache.")] = (
        None
    )
    cache_gb: Annotated[float, Help("Most disk for them; what does not fit is computed each time.", minimum=0)] = 20.0

    def __post_init__(self) -> None:
        """Refuses values that contradict each other."""
        if not self.max_steps and not self.max_seconds:
            raise InvalidArgument("the run would never end: give max_steps or max_seconds", field="max_steps")
        if not 0 < self.held_out < 1:
            raise InvalidArgument(f"held_out is {self.held_out}: give a share between 0 and 1", field="held_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainedHeadOptions(TrainOptions):
    """Options of methods that train heads over a vocabulary of their own."""

    draft_vocab_size: Annotated[
        int, Help("Tokens that a trained head knows, the most frequent; 0: all.", minimum=0)
    ] = 8192


class MedusaHead(Enum):
    """Where a Medusa head's logits come from."""

    SHARED = "shared"
    """The target's own head, frozen: nothing to store, slow to draft where the vocabulary is large."""
    TRIMMED = "trimmed"
    """One trained head over the draft vocabulary for all."""
    OWN = "own"
    """A trained head over the draft vocabulary for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaOptions(_TrainedHeadOptions):
    """Options of `medusa`."""

    heads: Annotated[int, Help("Heads; head k proposes the token k + 2 places on.", minimum=1)] = 4
    layers: Annotated[int, Help("Residual layers per head.", minimum=1)] = 1
    head: Annotated[
        MedusaHead,
        Help(
            "Where logits come from. shared: the target's head; trimmed: one trained head over the draft vocabulary; "
            "own: one for each."
        ),
    ] = MedusaHead.TRIMMED
    decay: Annotated[float, Help("Weight of head k in the loss: this to the power k.", minimum=0)] = 0.8


class HeadBeginning(Enum):
    """What the layer of an EAGLE head is before it has learnt."""

    TARGET = "target"
    """The target's last layer, where it is built alike: learns sooner."""
    RANDOM = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleOptions(TrainOptions):
    """Options of `eagle`."""

    fc_bias: Annotated[bool, Help("Give the layer that joins token and state a bias; some servers expect none.")] = (
        False
    )
    noise: Annotated[float, Help("Largest noise added to a feature.", minimum=0)] = 0.1
    token_weight: Annotated[float, Help("Weight of the cross entropy beside smooth L1.", minimum=0)] = 0.1
    loss_vocab_size: Annotated[
        int, Help("Tokens that the cross entropy looks at, the most frequent; 0: all; fewer are faster.", minimum=0)
    ] = 0


class FeatureNorm(Enum):
    """What the features of EAGLE-3 go through before they are joined into one."""

    NONE = "none"
    """Nothing, as in the first publication."""
    EACH = "each"
    """A norm for each layer's features (`fc_norm`)."""
    JOINED = "joined"
    """One norm over all of them (`norm_before_fc`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Options(_TrainedHeadOptions):
    """Options of `eagle3`."""

    unroll: Annotated[int, Help("Drafts on drafts that training sees at each position.", minimum=1)] = 4
    decay: Annotated[float, Help("Weight of draft i in the loss: this to the power i.", minimum=0)] = 0.8
    aux_layers: Annotated[
        str, Help("Layers whose entering state is seen, such as 2,15,27; default: low, middle and high.")
    ] = ""
    feature_norm: Annotated[
        FeatureNorm, Help("Norm before these are joined: none, each, or joined (one over all).")
    ] = FeatureNorm.EACH
    beginning: Annotated[
        HeadBeginning, Help("Weights to begin with: target (its last layer and norm, where they fit) or random.")
    ] = HeadBeginning.TARGET
    norm_before_residual: Annotated[bool, Help("Let the layer's residual be the normed state.")] = False
    norm_output: Annotated[bool, Help("Feed the state back after the final norm, not before it.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelOptions(TrainOptions):
    """Options of `draft_model`."""

    keep_layers: Annotated[
        str, Help("Layers of the target to begin with, such as 0,29; default: the first and the last.")
    ] = ""
    draft_vocab_size: Annotated[
        int, Help("Tokens that the draft model knows, the most frequent; 0: all, as any server expects.", minimum=0)
    ] = 0
    target_weight: Annotated[
        float, Help("Share of the loss that compares with the target's probabilities; the rest: its tokens.", minimum=0)
    ] = 0.5


class Curriculum(Enum):
    """After which layers LayerSkip asks for the next token."""

    ROTATIONAL = "rotational"
    """Every R-th layer, shifted by one each step."""
    GRADUAL = "gradual"
    """From the last layer down; all of them by half of the run."""
    FIXED = "fixed"
    """The exit layer only: the cheapest, for short runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSkipOptions(TrainOptions):
    """Options of `layerskip`."""

    exit_layer: Annotated[int, Help("Drafts come from so many layers; 0: a quarter of them.", minimum=0)] = 0
    draft_vocab_size: Annotated[
        int, Help("Tokens that the early exit proposes, the most frequent; 0: all.", minimum=0)
    ] = 8192
    lora_rank: Annotated[
        int, Help("Rank of the adapter that is trained; 0 trains and writes the whole model.", minimum=0)
    ] = 16
    lora_alpha: Annotated[int, Help("Scale of the adapter, divided by its rank.", minimum=0)] = 32
    dropout: Annotated[float, Help("Chance of leaving out the last layer; earlier ones less.", minimum=0)] = 0.1
    curriculum: Annotated[
        Curriculum,
        Help("After which layers the loss is taken: rotational, gradual, or fixed (the exit layer's alone)."),
    ] = Curriculum.ROTATIONAL
    rotation: Annotated[int, Help("rotational: every so many layers.", minimum=1)] = 4
    exit_scale: Annotated[float, Help("Weight of early layers' losses beside the last one's.", minimum=0)] = 0.2
    exit_share: Annotated[float, Help("fixed: share of the loss that is the exit layer's.", minimum=0)] = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectOptions(_TargetOptions):
    """Options of `collect`."""

    prompts: Annotated[
        Path | None,
        Help("File of prompts: one per line, or .jsonl with prompt or messages; default: prompts made from templates."),
    ] = None
    out: Annotated[Path, Help("Folder of the answers; a collection that was stopped goes on from there.")] = Path(
        "corpus"
    )
    limit: Annotated[int, Help("Take only so many prompts; 0: all.", minimum=0)] = 0
    chat: Annotated[bool, Help("Apply the target's chat template, or continue the bare text.")] = True
    max_new_tokens: Annotated[int, Help("Most tokens of an answer.", minimum=1)] = 300
    greedy_share: Annotated[float, Help("Share of the prompts answered greedily.", minimum=0)] = 0.5
    temperatures: Annotated[str, Help("Temperatures of the others, in turn.")] = "0.6,0.9"
    sessions: Annotated[int, Help("Answers under way at once.", minimum=1)] = 48
    shard_size: Annotated[int, Help("Prompts per file; what is under way when it is stopped is lost.", minimum=1)] = 64
    kv_mb: Annotated[int, Help("Memory for key/value rows, in MiB.", minimum=1)] = 1024
    dtype: Annotated[str, Help("Type of the weights: float32, bfloat16 or float16.")] = "float32"
    device: Annotated[str, Help("cpu, cuda or cuda:N.")] = "cpu"
    threads: Annotated[int, Help("CPU threads; 0: all cores.", minimum=0)] = 0
    seed: Annotated[int, Help("Seed of the sampled answers.")] = 0
