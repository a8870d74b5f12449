"""Replaces and restores the method objects of one model, and readies its cells before the first forward pass."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform

import skinny_core.op  # noqa: F401  registers the op that compiled graphs call
from skinny_core import device, dispatch, family, warmup
from skinny_core.problem import DType
from skinny_core.rules import Reason
from skinny_vllm import compile_key, eligibility, host_call, plugin, sites
from skinny_vllm.methods import SkinnyEmbeddingMethod, SkinnyLinearMethod
from skinny_vllm.report import ModelStatus

log = logging.getLogger("vllm.skinny")
_OURS = (SkinnyLinearMethod, SkinnyEmbeddingMethod)


@dataclass(eq=False)
class Installation:
    """What was done to one model. `emitting`: (path, N, K, dtype) by layer id, for layers that call the op."""

    architecture: str
    package: family.ModelPackage
    key: device.DeviceKey | None
    configs: list[Any]
    eligibility: str
    paths: dict[int, str] = field(default_factory=dict)
    emitting: dict[int, tuple[str, int, int, str]] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    skipped: Counter[str] = field(default_factory=Counter)
    ready: bool = False

    def settle(self, layer: Any, method: Any) -> None:
        """The host has processed this layer's weight: decide whether its `method` calls the op. The last layer makes
        the model ready. Never raises: this runs inside the host's loading."""
        plugin.guarded(self._decide_again, layer, method)
        self.waiting.discard(id(layer))
        if not self.waiting and not self.ready:
            self.ready = True
            plugin.guarded(self.make_ready)

    def _decide_again(self, layer: Any, method: Any) -> None:
        try:
            self.decide(layer, method)
        finally:
            self.publish()

    def decide(self, layer: Any, method: Any) -> None:
        """Read what the host would run now; on the CPU platform that is open until the weight is processed. Anything
        but a dense matrix of a known dtype keeps the original call."""
        method.emits = False
        self.emitting.pop(id(layer), None)
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or weight.layout is not torch.strided:
            return
        dtype = DType.of(weight.dtype)
        if dtype is None or not host_call.is_plain_linear(method.original, layer):
            return
        rows, columns = weight.shape
        self.emitting[id(layer)] = (self.paths[id(layer)], rows, columns, dtype.value)
        method.emits = True

    def publish(self) -> None:
        """Write the compile key into every configuration that this model's compiled parts hash."""
        value = compile_key.digest(self.eligibility, self.emitting.values())
        for config in self.configs:
            compile_key.write(config, value)

    def problems(self) -> list[tuple[int, int, DType]]:
        """Distinct (N, K, dtype) of the layers that call the op."""
        return sorted({(n, k, DType(dtype)) for _, n, k, dtype in self.emitting.values()})

    def make_ready(self) -> None:
        """Compile or load what these layers need, before anything is captured, and say so in one line."""
        compiled: list[str] = []
        if self.key is not None:
            compiled = warmup.warm(self.package.name, self.problems())
        log.info("%s", self.summary(len(compiled)))

    def status(self) -> ModelStatus:
        """Layers that call the op, and those that do not by reason; the CPU platform decides after loading."""
        packed = Counter({Reason.HOST_BACKEND.value: len(self.paths) - len(self.emitting)})
        return ModelStatus(self.architecture, self.package.name, len(self.emitting), dict(+(self.skipped + packed)))

    def summary(self, compiled: int = 0) -> str:
        """Package, device, number of active cells, how to switch it off."""
        wanted = {(n, k) for n, k, _ in self.problems()}
        cells = [p for _, p, _ in dispatch.ready(self.package.name) if (p.n, p.k) in wanted]
        where = str(self.key) if self.key else f"{current_platform.device_type} (no kernels here)"
        built = f", {compiled} kernels compiled now" if compiled else ""
        return (
            f"skinny-{self.package.name} {self.package.version}: {len(cells)} active cells for"
            f" {len(self.emitting)} layers on {where}{built}; switch off with SKINNY=off"
        )


_live: weakref.WeakSet[Installation] = weakref.WeakSet()


def on_constructed(model: torch.nn.Module) -> None:
    """The seam's callback, inside vLLM's `initialize_model`."""
    install(model, get_current_vllm_config())


def install(model: torch.nn.Module, config: Any) -> Installation | None:
    """Replace what can be replaced. None: declined, and why is in `status()`. Installing twice is once."""
    found = _of(model)
    if found is not None:
        _carry_key(found, model, config)
        return found
    architecture = type(model).__name__
    package = claimed_by(model)
    if package is None:
        return None
    verdict = eligibility.judge(config, current_platform, bool(envs.VLLM_BATCH_INVARIANT))
    chosen, skipped = sites.survey(model) if verdict.ok else ([], Counter[str]())
    reason, detail = verdict.reason, verdict.detail
    if verdict.ok and not chosen:
        reason, detail = Reason.HOST_BACKEND, f"no layer of an eligible class ({dict(skipped)})"
    if reason is not None:
        declined = ModelStatus(architecture, package.name, 0, dict(skipped), reason, detail)
        plugin.note_model(model, lambda _: declined)
        log.info("skinny leaves %s alone: %s", architecture, detail or reason.meaning)
        return None
    installation = _prepare(model, config, package)
    installation.skipped = skipped
    try:
        _replace(installation, chosen)
    except Exception:
        uninstall(model)
        raise
    plugin.note_model(installation, Installation.status)
    return installation


def claimed_by(model: torch.nn.Module) -> family.ModelPackage | None:
    """Package for the architectures that the model's own config states; where it states none, for its class or a class
    it derives from.

    A stated one that nobody claims ends the search: vLLM's Mistral and Phi-3 derive from its Llama class, and a package
    for Llama has not been tested on them.
    """
    stated: Iterable[str] = getattr(getattr(model, "config", None), "architectures", None) or ()
    names = tuple(stated) or tuple(kind.__name__ for kind in type(model).__mro__)
    packages = family.discover().packages
    return next((p for name in names for p in packages if name in p.architectures), None)


def _prepare(model: torch.nn.Module, config: Any, package: family.ModelPackage) -> Installation:
    key = device.current_key() if current_platform.is_cuda() else None
    # Sound because offloading is refused: within a step, captured or not, no vLLM kernel writes a weight (README).
    dispatch.activate(package, key=key, static_weights=True)
    eligible = dispatch.eligibility_digest(package)
    installation = Installation(type(model).__name__, package, key, compile_key.holders(model, config), eligible)
    _live.add(installation)
    return installation


def _replace(installation: Installation, chosen: list[sites.Site]) -> None:
    for site in chosen:
        original = site.layer.quant_method
        kind = SkinnyLinearMethod if isinstance(original, sites.UnquantizedLinearMethod) else SkinnyEmbeddingMethod
        installation.paths[id(site.layer)] = site.path
        installation.waiting.add(id(site.layer))
        method = kind(original, installation=installation, siblings=site.parent._modules, leaf=site.leaf)
        site.layer.quant_method = method
        installation.decide(site.layer, method)
    installation.publish()


def _methods(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """(layer, our method object) of `model`."""
    pairs = ((module, getattr(module, "quant_method", None)) for module in model.modules())
    return [(module, method) for module, method in pairs if isinstance(method, _OURS)]


def _of(model: torch.nn.Module) -> Installation | None:
    found: Installation | None = next((method.installation for _, method in _methods(model)), None)
    return found


def _carry_key(installation: Installation, model: torch.nn.Module, config: Any) -> None:
    """An outer model contains one that was installed already: its configuration object gets the entry too."""
    known = {id(item) for item in installation.configs}
    installation.configs += [c for c in compile_key.holders(model, config) if id(c) not in known]
    installation.publish()


def uninstall(model: torch.nn.Module) -> int:
    """Restore every original object and configuration entry; compiled graphs fall back. Returns how many layers."""
    pairs = _methods(model)
    for layer, method in pairs:
        layer.quant_method = method.original
    for installation in {id(method.installation): method.installation for _, method in pairs}.values():
        _retire(installation)
    return len(pairs)


def _retire(installation: Installation) -> None:
    _live.discard(installation)
    name = installation.package.name
    if not any(other.package.name == name for other in _live):
        dispatch.deactivate(name)
    for config in installation.configs:
        compile_key.write(config, None)
