"""Adds up calls into records: per shape, M, dtypes, bias, kind of layer and phase, with calls per forward pass."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from skinny_lab.capture.document import Phase, Record

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def pattern(path: str) -> str:
    """A layer's path with whole numbers replaced: "model.layers.3.mlp.fc1" is "model.layers.*.mlp.fc1"."""
    return _NUMBER.sub("*", path)


@dataclass(slots=True)
class _Seen:
    paths: set[str] = field(default_factory=set)
    calls: Counter[int] = field(default_factory=Counter)  # by forward pass


class Tally:
    """Calls of one model, forward pass by forward pass."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], _Seen] = {}
        self._notes: Counter[str] = Counter()
        self._step = 0
        self._phase: Phase = "prefill"

    def step(self, rows: int, sequences: int) -> None:
        """A forward pass begins with `rows` tokens of `sequences` sequences. Calls before the next one belong to it."""
        self._step += 1
        self._phase = "decode" if rows <= sequences else "prefill"

    def add(self, path: str, n: int, k: int, m: int, dtypes: tuple[str, str, str], bias: bool) -> None:
        """One product of the layer at `path`. dtypes: of activation, weight, output. No rows: nothing was issued."""
        if not m:
            return
        seen = self._seen.setdefault((n, k, m, *dtypes, bias, pattern(path), self._phase), _Seen())
        seen.paths.add(path)
        seen.calls[self._step] += 1

    def note(self, text: str) -> None:
        """Something that was seen and is no record; equal texts are counted."""
        self._notes[text] += 1

    def records(self) -> tuple[Record, ...]:
        """Decode first, then by M, then in the order in which the model called them."""
        found = []
        for (n, k, m, activation, weight, output, bias, layer, phase), seen in self._seen.items():
            shape = Record(
                n=n, k=k, m=m, activation=activation, weight=weight, output=output, bias=bias, layer=layer,
                layers=len(seen.paths), calls=max(seen.calls.values()), steps=len(seen.calls), phase=phase,
            )  # fmt: skip
            found.append(shape)
        return tuple(sorted(found, key=lambda r: (r.phase, r.m)))

    def notes(self) -> tuple[str, ...]:
        """Each note once, with how often it was taken."""
        return tuple(text if count == 1 else f"{text} ({count} times)" for text, count in sorted(self._notes.items()))


def summed(paths: Iterable[str]) -> str:
    """ "7 x model.layers.*.mlp.gate, lm_head" of layer paths."""
    counted = Counter(map(pattern, paths))
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counted.items())
