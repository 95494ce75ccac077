"""Asks the target for answers and keeps them as token ids, in the format of `corpus.py`.

Answers are made by our own engine, many at once. Prompts keep their order: shard k holds those of
[k * shard_size, (k + 1) * shard_size), and what a prompt is answered with depends on its number and the seed alone. A
shard appears whole or not at all, so a collection that is stopped goes on with the first shard that is not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from paceline.drafting.checkpoints.writing import write_json
from paceline.engine.load_runner import load_runner
from paceline.engine.loader import ModelDtype, find_eos_token_ids
from paceline.engine.local import Generation, LocalRequest, LocalResult
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.errors import ConfigurationError, InvalidArgument, from_failure
from paceline.messages import Failed, SamplingParams
from paceline.model_source import default_name, resolve
from paceline.text.chat_template import ChatTemplate
from paceline.text.tokenizer import Tokenizer
from paceline.training.options import CollectOptions
from paceline.training.prompts import Conversation, read_prompts, template_prompts
from paceline.training.report import now, package_versions
from paceline.training.target import weights_digest

COLLECTION_FILE = "collection.json"
_MAX_PASS_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Collection:
    """What a collection is made from. Shards of one folder agree in all of it.

    Attributes:
        target: name of the target.
        target_digest: of its weights and configuration.
        prompts_digest: of the prompts' tokens, in their order.
        num_prompts: how many there are.
        options: sampling, lengths and so on.
    """

    target: str
    target_digest: str
    prompts_digest: str
    num_prompts: int
    options: dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class CollectStatus:
    """How far a collection is.

    Attributes:
        done: prompts answered, those found in earlier shards included.
        total: prompts.
        new_tokens: answer tokens made by this process.
        seconds: time that it took.
    """

    done: int
    total: int
    new_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection made.

    Attributes:
        folder: of the shards.
        prompts: answered in all.
        new_tokens: answer tokens made by this process.
        seconds: time that it took.
    """

    folder: Path
    prompts: int
    new_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Answer:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


def collect(
    options: CollectOptions,
    *,
    on_status: Callable[[CollectStatus], None] = lambda _status: None,
    progress: Callable[[str], None] = lambda _line: None,
) -> Collected:
    """Collects answers, or goes on with a collection that was stopped.

    Raises:
        PacelineError: target, prompts or options do not fit, or the folder holds another collection.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    folder = resolve(options.target, progress=progress)
    prompts = _prompt_tokens(options, folder)
    collection = _collection(options, folder, prompts)
    _claim(options.out, collection)
    shards = [range(begin, min(begin + options.shard_size, len(prompts))) for begin in _begins(options, prompts)]
    missing = [index for index, _ in enumerate(shards) if not _shard_path(options.out, index).is_file()]
    done = sum(len(shard) for index, shard in enumerate(shards) if index not in missing)
    began_s, new_tokens = time.monotonic(), 0
    on_status(CollectStatus(done, len(prompts), 0, 0.0))
    if missing:
        progress(f"{len(prompts) - done} of {len(prompts)} prompts are to be answered")
        engine, eos = _engine(options, folder)
        numbers = [number for index in missing for number in shards[index]]
        requests = ((number, _request(options, number, prompts[number])) for number in numbers)
        waiting = {index: dict[int, _Answer]() for index in missing}
        for number, result in _answers(engine, requests, eos, options.sessions):
            index = number // options.shard_size
            waiting[index][number] = _Answer(prompts[number], tuple(result.tokens))
            done, new_tokens = done + 1, new_tokens + len(result.tokens)
            if len(waiting[index]) == len(shards[index]):
                answers = waiting.pop(index)
                _write_shard(_shard_path(options.out, index), [answers[place] for place in shards[index]], collection)
            on_status(CollectStatus(done, len(prompts), new_tokens, time.monotonic() - began_s))
    return Collected(options.out, len(prompts), new_tokens, round(time.monotonic() - began_s, 1))


def _begins(options: CollectOptions, prompts: Sequence[tuple[int, ...]]) -> range:
    return range(0, len(prompts), options.shard_size)


def _prompt_tokens(options: CollectOptions, folder: Path) -> list[tuple[int, ...]]:
    conversations = read_prompts(options.prompts) if options.prompts else template_prompts()
    conversations = conversations[: options.limit or None]
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, tokenizer.special_tokens)
    encoded = [_encode(conversation, tokenizer, template, chat=options.chat) for conversation in conversations]
    room = (tokenizer.max_model_len or 1 << 30) - options.max_new_tokens
    for number, prompt in enumerate(encoded):
        if not 0 < len(prompt) <= room:
            raise InvalidArgument(
                f"prompt {number + 1} has {len(prompt)} tokens: 1 to {room} fit beside {options.max_new_tokens} new "
                "ones",
                field="prompts",
            )
    return encoded


def _encode(conversation: Conversation, tokenizer: Tokenizer, template: ChatTemplate, *, chat: bool) -> tuple[int, ...]:
    if chat and template.available:
        return tokenizer.encode(template.render(conversation), add_special_tokens=False)
    return tokenizer.encode("\n".join(message.content for message in conversation))


def _collection(options: CollectOptions, folder: Path, prompts: Sequence[tuple[int, ...]]) -> Collection:
    digest = hashlib.blake2b(json.dumps([list(prompt) for prompt in prompts]).encode(), digest_size=16).hexdigest()
    kept: dict[str, str | int | float] = {
        "greedy_share": options.greedy_share,
        "temperatures": options.temperatures,
        "max_new_tokens": options.max_new_tokens,
        "shard_size": options.shard_size,
        "seed": options.seed,
        "dtype": options.dtype,
    }
    return Collection(default_name(options.target), weights_digest(folder), digest, len(prompts), kept)


def _claim(folder: Path, collection: Collection) -> None:
    """Notes what is collected in a folder.

    Raises:
        ConfigurationError: something else is.
    """
    path = folder / COLLECTION_FILE
    folder.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        differing = sorted(name for name, value in asdict(collection).items() if found.get(name) != value)
        if differing:
            raise ConfigurationError(
                f"{folder} holds a collection with another {', '.join(differing)}: name another folder, or give the "
                "options that it was begun with",
                field="out",
            )
        return
    if any(folder.glob("*.safetensors")):
        raise ConfigurationError(
            f"{folder} holds safetensors files and no {COLLECTION_FILE}: name another folder", field="out"
        )
    write_json(path, asdict(collection))


def _engine(options: CollectOptions, folder: Path) -> tuple[TargetEngine, tuple[int, ...]]:
    runner = load_runner(
        folder,
        dtype=ModelDtype(options.dtype),
        device=options.device,
        options=RunnerOptions(kv_bytes=options.kv_mb << 20),
    )
    eos = find_eos_token_ids(folder)
    limits = TargetOptions(max_sessions=options.sessions, max_batch_tokens=_MAX_PASS_TOKENS)
    vocab_size = Tokenizer.load(folder).vocab_size
    return TargetEngine(runner, eos_token_ids=eos, vocab_size=vocab_size, options=limits), eos


def _request(options: CollectOptions, number: int, prompt: tuple[int, ...]) -> LocalRequest:
    """What a prompt is answered with, by its number alone."""
    draw = hashlib.blake2b(f"{options.seed} {number}".encode(), digest_size=16).digest()
    share = int.from_bytes(draw[:8], "big") / 2**64
    seed = int.from_bytes(draw[8:], "big") % 2**62
    temperatures = parse_temperatures(options.temperatures)
    temperature = 0.0 if share < options.greedy_share else temperatures[number % len(temperatures)]
    return LocalRequest(prompt, SamplingParams(temperature=temperature, seed=seed), options.max_new_tokens)


def parse_temperatures(text: str) -> tuple[float, ...]:
    """The temperatures of an option such as `0.6,0.9`.

    Raises:
        InvalidArgument: it is none.
    """
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < value <= 2 for value in found):
        raise InvalidArgument(f"temperatures is {text!r}: give numbers above 0, such as 0.6,0.9", field="temperatures")
    return found


def _answers(
    engine: TargetEngine, requests: Iterator[tuple[int, LocalRequest]], eos: tuple[int, ...], sessions: int
) -> Iterator[tuple[int, LocalResult]]:
    """Answers as they end; a new request is begun as soon as there is room for it."""
    under_way: dict[str, tuple[int, Generation]] = {}

    def begin() -> None:
        while len(under_way) < sessions and (entry := next(requests, None)) is not None:
            number, request = entry
            generation = Generation(engine, request, eos)
            under_way[generation.session] = (number, generation)
            generation.start_round()

    try:
        begin()
        while under_way:
            for answer in engine.step():
                if isinstance(answer, Failed):
                    raise from_failure(answer.failure)
                number, generation = under_way[answer.session]
                generation.take(answer)
                if generation.done:
                    engine.close(answer.session)
                    del under_way[answer.session]
                    yield number, generation.result
                else:
                    generation.start_round()
            begin()
    finally:
        for session in under_way:
            engine.close(session)


def _shard_path(folder: Path, index: int) -> Path:
    return folder / f"answers-{index:05d}.safetensors"


def _write_shard(path: Path, answers: Sequence[_Answer], collection: Collection) -> None:
    sequences = [answer.prompt + answer.tokens for answer in answers]
    lengths = torch.tensor([0, *(len(sequence) for sequence in sequences)])
    tensors = {
        "token_ids": torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int32),
        "offsets": lengths.cumsum(0),
        "prompt_len": torch.tensor([len(answer.prompt) for answer in answers], dtype=torch.int32),
    }
    about = {"collection": asdict(collection), "versions": package_versions(), "date": now()}
    # Named so that nobody takes it for a shard.
    scratch = path.with_suffix(".part")
    save_file(tensors, scratch, metadata={name: json.dumps(value) for name, value in about.items()})
    scratch.chmod(0o644)
    with scratch.open("rb") as written:
        os.fsync(written.fileno())
    scratch.replace(path)
