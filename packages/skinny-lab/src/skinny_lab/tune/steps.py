"""The decode steps of a tuning, kept from one M to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from skinny_core.problem import MAX_M
from skinny_lab.bench import in_model, tuning
from skinny_lab.bench.chain_step import ChainStep, Link
from skinny_lab.bench.graph_step import GraphStep
from skinny_lab.tune.request import Model, Site, Target

KEPT = 32
"""Steps at most whose weights stay on the device; one has the weights of a few layers and a head."""


class Steps:
    """Steps by label: of the target's models; of a target without models, the one of all its sites.

    A model whose parts are not known has a step of its projections alone. make_room: called once where a step does not
    fit into the device's memory, before it is tried again.
    """

    def __init__(self, target: Target, l2_bytes: int, make_room: Callable[[], None]) -> None:
        self._sites = target.sites
        self._models = {model.label: model for model in target.models}
        self._l2_bytes, self._make_room = l2_bytes, make_room
        self._kept: dict[str, GraphStep] = {}

    def changes(self, label: str, m: int, measured: Mapping[str, tuning.Measured]) -> dict[str, float]:
        """Microseconds by which each cell, by the name of its site, changes the step of the whole model at M = m.

        Raises `torch.OutOfMemoryError` where the step does not fit even alone.
        """
        step = self._get(label)
        model = self._models.get(label)
        chained = model is None or isinstance(step, ChainStep)
        sites = {site.name: site for site in self._sites}
        swaps = {
            name: ((name,) if chained or model is None else sites[name].projections(model), found)
            for name, found in measured.items()
        }
        return in_model.changes(step, m, swaps)

    def _get(self, label: str) -> GraphStep:
        if label not in self._kept:
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            try:
                self._kept[label] = self._make(label)
            except torch.OutOfMemoryError:
                self._kept.clear()
                self._make_room()
                torch.cuda.empty_cache()
                self._kept[label] = self._make(label)
        return self._kept[label]

    def _make(self, label: str) -> GraphStep:
        model = self._models.get(label)
        if model is None:
            links = [Link(s.name, s.n, s.k, s.dtype.torch, s.calls) for s in self._sites]
            return ChainStep(links, MAX_M, self._l2_bytes)
        made = in_model.model_step(model.config, model.projections, model.tp, self._l2_bytes)
        return made or ChainStep(_links(model, self._sites), MAX_M, self._l2_bytes)


def _links(model: Model, sites: tuple[Site, ...]) -> list[Link]:
    calls = {p.name: p.calls for p in model.projections}
    return [
        Link(site.name, site.n, site.k, site.dtype.torch, sum(calls[name] for name in names))
        for site in sites
        if (names := site.projections(model))
    ]
