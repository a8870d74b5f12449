"""Steps of a model as CUDA graphs: several arms of one step, replayed in turn and timed."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from skinny_lab.bench import race

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x, w) -> y."""


class GraphStep(ABC):
    """One decode step for `m` sequences. What an arm is, a subclass says; a mapping of names to `Linear`s is one."""

    m: int

    @abstractmethod
    def run(self, arm: Any) -> torch.Tensor:
        """The step with an arm, on the current stream."""

    @abstractmethod
    def scale(self, name: str) -> float:
        """Calls in the model per call in this step, of what an arm swaps by that name."""

    def at(self, m: int) -> Self:
        """The same step, weights shared, for m sequences; at most as many as it was made for."""
        if not 0 < m <= self.m:
            raise ValueError(f"M = {m}: the step was made for {self.m}")
        found = copy.copy(self)
        found.m = m
        found._take_rows(m)
        return found

    @abstractmethod
    def _take_rows(self, m: int) -> None:
        """Replace every tensor with a row per sequence by its first m rows."""

    def compare(self, arms: Mapping[str, Any], *, rounds: int) -> dict[str, float]:
        """Median microseconds of one step per arm; see `times`."""
        return {name: times.p50 for name, times in self.times(arms, rounds=rounds).items()}

    def times(self, arms: Mapping[str, Any], *, rounds: int) -> dict[str, race.Times]:
        """Microseconds of one step per arm; all arms in every round, each starting one further along."""
        graphs = {name: self._capture(arm) for name, arm in arms.items()}
        return race.repeated(list(arms), lambda name, turn: replay(graphs[name]), rounds=rounds)

    def _capture(self, arm: Any) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            self.run(arm)  # compiles and loads: nothing may do so during the capture
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self.run(arm)
        graph.replay()
        torch.cuda.synchronize()
        return graph


def enough_layers(layer_bytes: int, l2_bytes: int, most: int) -> int:
    """Layers whose weights are read far enough apart that none is still in the L2: at least 2, at most `most`."""
    return max(1, min(most, max(2, -(-race.L2_FACTOR * l2_bytes // max(1, layer_bytes)))))


def replay(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay. One runs ahead of it: on an idle device the time would hold the host's work for the
    launch, and the L2 what another arm left there.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
