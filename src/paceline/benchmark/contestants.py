"""Which fleets `paceline bench methods` starts, and which ways to draft take turns on each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.benchmark.compare import Configuration
from paceline.cli.drafting_options import Placement
from paceline.cli.fleet_options import FleetOptions
from paceline.errors import InvalidArgument
from paceline.head_source import example_of
from paceline.method_names import HEAD_METHODS, METHOD_NAMES
from paceline.model_source import resolve

CHAIN = "ngram,draft_model"
METHODS = ("draft_model", "ngram", CHAIN, "medusa", "eagle", "eagle3", "layerskip")
"""All that is measured, in the order of the table."""
POOL, VERIFIER = Placement.POOL.value, Placement.VERIFIER.value
_COPY = "int8"


@dataclass(frozen=True, slots=True)
class Contestant:
    """One row of the table.

    Attributes:
        name: of the method, as the table has it.
        placement: where drafts are made.
        way: how it is asked for.
    """

    name: str
    placement: str
    way: Configuration


@dataclass(frozen=True, slots=True)
class Heat:
    """One fleet and those that take turns on it.

    Attributes:
        options: of the fleet.
        contestants: at least one.
    """

    options: FleetOptions
    contestants: tuple[Contestant, ...]


@dataclass(frozen=True, slots=True)
class Absentee:
    """A row without figures.

    Attributes:
        name: of the method.
        placement: where drafts would be made.
        reason: why it was not measured, and what to do.
    """

    name: str
    placement: str
    reason: str


@dataclass(frozen=True, slots=True)
class Field:
    """What is asked for.

    Attributes:
        options: of every fleet, but for its method.
        methods: some of `METHODS`.
        heads: checkpoints by method; for those that are not there the examples of the repository are taken.
    """

    options: FleetOptions
    methods: tuple[str, ...] = METHODS
    heads: Mapping[str, str] = field(default_factory=dict)

    @property
    def bare(self) -> FleetOptions:
        """The options without those that belong to some methods only."""
        return replace(self.options, eagle_topk=None, num_draft_tokens=None, exit_layer=None)

    def check(self) -> None:
        """Refuses what is unknown.

        Raises:
            InvalidArgument: a method, or what a checkpoint is given for.
        """
        trained = [name for name in METHOD_NAMES if name != "ngram"]
        for flag, names, known in (("method", self.methods, METHODS), ("head", self.heads, trained)):
            for name in names:
                if name not in known:
                    raise InvalidArgument(f"--{flag} {name}: name one of {', '.join(known)}", field=flag)

    def heats(self) -> Iterator[Heat | Absentee]:
        """The fleets one after the other, and what cannot be measured."""
        yield from self._drafters()
        if "draft_model" in self.methods:
            yield self._trained_draft_model()
        for method in HEAD_METHODS:
            if method in self.methods:
                yield from self._head(method)
        if "layerskip" in self.methods:
            yield from self._layerskip()

    def _drafters(self) -> Iterator[Heat]:
        """One fleet for n-grams, a quantised copy of the target, and the chain of both."""
        size = self.options.num_speculative_tokens
        copy = f"draft_model, {_COPY} copy"
        rows = (("draft_model", copy), ("ngram", "ngram"), (CHAIN, f"ngram, then {_COPY} copy"))
        asked = [(method, name) for method, name in rows if method in self.methods]
        if not asked:
            return
        drafts = CHAIN if asked != [("ngram", "ngram")] else "ngram"
        ways = [Configuration(name, size, "" if method == CHAIN else method) for method, name in asked]
        options = replace(self.bare, method=drafts, drafter_model=_COPY)
        yield Heat(options, tuple([Contestant(way.name, POOL, way) for way in ways]))

    def _trained_draft_model(self) -> Heat | Absentee:
        model = self._checkpoint("draft_model")
        if not model:
            return self._absent("draft_model", POOL)
        options = replace(self.bare, method="draft_model", drafter_model=model)
        return self._heat("draft_model, trained", POOL, options)

    def _head(self, method: str) -> Iterator[Heat | Absentee]:
        head = self._checkpoint(method)
        for placement in (Placement.VERIFIER, Placement.POOL):
            if head:
                options = replace(self.bare, method=method, head=head, placement=placement)
                options = replace(options, num_draft_tokens=self.options.num_draft_tokens)
                if method != "medusa":
                    options = replace(options, eagle_topk=self.options.eagle_topk)
                yield self._heat(method, placement.value, options)
            else:
                yield self._absent(method, placement.value)

    def _layerskip(self) -> Iterator[Heat | Absentee]:
        """The trained target, and the untrained one with the same exit."""
        head = self._checkpoint("layerskip")
        if head:
            yield self._heat("layerskip", VERIFIER, replace(self.bare, method="layerskip", head=head))
        else:
            yield self._absent("layerskip", VERIFIER)
        exit_layer = self.options.exit_layer or _exit_layer(head) or _num_layers(self.options.model) // 4
        untrained = replace(self.bare, method="layerskip", exit_layer=max(exit_layer, 1))
        yield self._heat("layerskip, untrained", VERIFIER, untrained)

    def _heat(self, name: str, placement: str, options: FleetOptions) -> Heat:
        way = Configuration(f"{name} in the {placement}", options.num_speculative_tokens)
        return Heat(options, (Contestant(name, placement, way),))

    def _checkpoint(self, method: str) -> str:
        return self.heads.get(method) or example_of(method, self.options.model)

    def _absent(self, method: str, placement: str) -> Absentee:
        return Absentee(
            method,
            placement,
            f"no checkpoint for {self.options.model} is known: give one with --head {method}=FOLDER; "
            f"`paceline train {method}` makes one",
        )


def _exit_layer(adapter: str) -> int | None:
    """The exit layer that an adapter's folder names."""
    config = Path(adapter).expanduser() / "config.json"
    if not adapter or not config.is_file():
        return None
    value = json.loads(config.read_text(encoding="utf-8")).get("exit_layer")
    return value if isinstance(value, int) else None


def _num_layers(model: str) -> int:
    return int(json.loads((resolve(model) / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])
