"""Does a model give the same results with skinny as without? Per projection against float64, and as greedy tokens.

A model package makes one `Parity` of its declaration and the host package that installs (`skinny_transformers`):

parity = Parity(PACKAGE, skinny_transformers)
parity.check_model(model)        # any Transformers model of the family, on the CPU (fallback) or a GPU (kernels)
parity.check_config("qwen3-8b")  # random weights of that model's shapes, one projection at a time
parity.main(["qwen3-8b"])        # the latter as a command; returns 1 if anything differs
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from skinny_core import dispatch
from skinny_core.family import ModelPackage
from skinny_core.testing.numerics import TOLERANCE, one_hot_columns_exact
from skinny_core.testing.parity_report import Report, Row, Tokens

MS = (1, 2, 3, 4, 8, 16)
_PROBES = 64  # one-hot positions per projection: every K slice that a kernel could lose holds some of them
_OUTPUTS = 4096  # output elements per comparison: with fewer, chance moves the error by more than the gate's margin
_CHUNK = 1 << 26  # elements of a weight turned into float64 at a time (512 MB)


class Status(Protocol):
    """What is read of a host's report: the layers that are installed, and under which family."""

    @property
    def installed(self) -> Any:
        """True, or not empty, where a layer is."""

    @property
    def family(self) -> str:
        """Family name, "" where nothing is installed."""


class Host(Protocol):
    """The host package that installs into a `torch.nn` model; the module `skinny_transformers` is one."""

    def install(self, model: nn.Module, *, package: ModelPackage | str | None = None, family: str | None = None) -> Any:
        """Offer the model's linear layers to skinny."""

    def uninstall(self, model: nn.Module) -> Any:
        """Take them back."""

    def status(self, model: nn.Module) -> Status:
        """What is installed now."""


def check_pair(
    name: str,
    candidate: Callable[[Tensor], Tensor],
    stock: Callable[[Tensor], Tensor],
    weight: Tensor,
    *,
    m: int,
    seed: int = 0,
) -> Row:
    """Compare two implementations of `y[M, N] = x[M, K] @ weight[N, K].T` on seeded Gaussian rows and on one-hot rows.

    candidate, stock: callables `x[M, K] -> y[M, N]` in the weight's dtype. m: rows. Errors are relative RMSE to the
    float64 product of the exact inputs, held against `skinny_core.testing.numerics.TOLERANCE` (which says why each
    limit is what it is); one-hot rows must return columns of the weight unchanged."""
    n, k = weight.shape
    draw = torch.Generator().manual_seed(seed)  # on the CPU: the same numbers on every device
    before = dispatch.counters()
    errors = torch.zeros(3, dtype=torch.float64)
    for _ in range(max(1, _OUTPUTS // (n * m))):
        x = torch.randn(m, k, generator=draw, dtype=torch.float32).to(weight.device, weight.dtype)
        exact = _product(x, weight)
        parts = [(candidate(x).double() - exact), (stock(x).double() - exact), exact]
        errors += torch.stack([part.pow(2).sum() for part in parts]).cpu()
    rmse = (errors[:2] / errors[2]).sqrt().tolist()
    return Row(
        name=name,
        n=n,
        k=k,
        m=m,
        dtype=str(weight.dtype).removeprefix("torch."),
        path=_path(before, n, k, m),
        rel_rmse=rmse[0],
        stock_rel_rmse=rmse[1],
        gate=TOLERANCE[weight.dtype],
        one_hot_exact=_one_hot_exact(candidate, weight, m, draw),
    )


@dataclass(frozen=True, slots=True)
class Parity:
    """The checks of one model package. host: what installs; its layers are `nn.Linear`s, or subclasses of it."""

    package: ModelPackage
    host: Host

    @torch.no_grad()
    def check_model(
        self,
        model: nn.Module,
        *,
        ms: Sequence[int] = MS,
        prompt: Tensor | None = None,
        new_tokens: int = 16,
        seed: int = 0,
    ) -> Report:
        """Compare a model with itself: stock, and installed. Left as it was found, installed or not.

        One layer of each projection is compared at every M of `ms`; a layer with a bias stays with the host and is
        left out. prompt: token ids `[1, T]` for greedy generation (default: seeded ones); new_tokens: how many to
        generate, 0 for none. Raises `ValueError` for a model without a projection of this family."""
        layers = dict(self._projection_layers(model))
        if not layers:
            name, classes = self.package.name, " or ".join(self.package.architectures)
            raise ValueError(f"no layer of this model is a {name} projection without bias; is it a {classes}?")
        with self._installed(model, True):
            rows = []
            for name, layer in layers.items():
                weight = layer.weight.detach()
                if weight.is_meta:
                    raise ValueError("the model is offloaded; check it before cpu_offload or disk_offload")
                rows += [check_pair(name, layer, _stock(weight), weight, m=m, seed=seed) for m in ms]
            candidate = _generate(model, prompt, new_tokens, seed)
        with self._installed(model, False):
            stock_run = _generate(model, prompt, new_tokens, seed)
        return Report(tuple(rows), _compare(stock_run, candidate))

    @torch.no_grad()
    def check_config(
        self,
        config: str | Mapping[str, Any],
        *,
        tp: int = 1,
        ms: Sequence[int] = MS,
        only: Sequence[str] = (),
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> Report:
        """Compare every projection of a config on random weights, one at a time; memory for the largest is needed.

        config: a name in the package's `configs` or an HF-style mapping. only: names of projections (default: all).
        Raises `KeyError` for an unknown name and `ModelConfigError` for a config that does not split over `tp`.
        """
        table = self.package.configs[config] if isinstance(config, str) else config
        rows = []
        for projection in self.package.projections(table, tp):
            if only and projection.name not in only:
                continue
            layer = nn.Linear(projection.k, projection.n, bias=False, device=device, dtype=dtype)
            draw = torch.Generator(device).manual_seed(seed)
            layer.weight.normal_(0, projection.k**-0.5, generator=draw)
            self.host.install(layer, package=self.package)
            weight = layer.weight.detach()
            rows += [check_pair(projection.name, layer, _stock(weight), weight, m=m, seed=seed) for m in ms]
        return Report(tuple(rows), None)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """`python -m skinny_<family>.parity CONFIG [--tp N] [--only NAME] [--device cuda]`; 0 if all passed, else 1."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.package.parity}")
        parser.add_argument("config", choices=sorted(self.package.configs))
        parser.add_argument("--tp", type=int, default=1)
        parser.add_argument("--only", action="append", default=[], help="a projection name; may be repeated")
        parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        asked = parser.parse_args(argv)
        report = self.check_config(asked.config, tp=asked.tp, only=asked.only, device=asked.device)
        print(report.text())
        return 0 if report.passed else 1

    def _projection_layers(self, model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
        """The first layer of every projection, by the patterns of the named configs, which are those of any config."""
        every = (p for config in self.package.configs.values() for p in self.package.projections(config, 1))
        wanted = {projection.name: projection for projection in every}
        for path, layer in model.named_modules():
            if not isinstance(layer, nn.Linear) or layer.bias is not None:
                continue
            name = next((name for name, projection in wanted.items() if projection.matches(path)), None)
            if name is not None:
                del wanted[name]
                yield name, layer

    @contextmanager
    def _installed(self, model: nn.Module, wanted: bool) -> Iterator[None]:
        """The model with or without skinny; afterwards as it was, under the family that it had."""
        before = self.host.status(model)
        self._set(model, wanted, self.package.name)
        try:
            yield
        finally:
            self._set(model, bool(before.installed), before.family or self.package.name)

    def _set(self, model: nn.Module, installed: bool, family: str) -> None:
        if installed:
            self.host.install(model, package=self.package, family=family)
        else:
            self.host.uninstall(model)


def _stock(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: nn.functional.linear(x, weight)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Float64 product `[M, N]`, the weight converted a slice of rows at a time."""
    step = max(1, _CHUNK // weight.shape[1])
    wide = x.double()
    return torch.cat([wide @ rows.double().T for rows in weight.split(step)], dim=1)


def _one_hot_exact(candidate: Callable[[Tensor], Tensor], weight: Tensor, m: int, draw: torch.Generator) -> bool:
    k = weight.shape[1]
    count = min(_PROBES, k)
    # one position in each of `count` equal slices of K, and both ends
    inside = torch.randint(0, k // count, (count,), generator=draw)
    columns = [0, *(torch.arange(count) * (k // count) + inside).tolist(), k - 1]
    try:
        one_hot_columns_exact(lambda x, _: candidate(x), weight, columns=columns, rows=m)
    except AssertionError:
        return False
    return True


def _path(before: Mapping[Any, int], n: int, k: int, m: int) -> str:
    """Outcomes that the counters gained for this shape: "kernel:..." or "fallback:..."; "" where no call was seen."""
    gained = {
        key[-1] for key, count in dispatch.counters().items() if count > before.get(key, 0) and key[1:4] == (n, k, m)
    }
    return "+".join(sorted(gained))


def _generate(model: Any, prompt: Tensor | None, new_tokens: int, seed: int) -> tuple[list[int], list[float]] | None:
    """Greedy token ids and, per token, the logit margin to the second best. None where nothing can or shall be
    generated."""
    if new_tokens < 1 or not hasattr(model, "generate"):
        return None
    if prompt is None:
        vocab = model.config.vocab_size
        prompt = torch.randint(0, vocab, (1, 8), generator=torch.Generator().manual_seed(seed))
    out = model.generate(
        prompt.to(model.device),
        attention_mask=torch.ones_like(prompt).to(model.device),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    best = [logits[0].float().topk(2).values for logits in out.logits]
    return out.sequences[0, prompt.shape[1] :].tolist(), [float(b[0] - b[1]) for b in best]


def _compare(
    stock: tuple[list[int], list[float]] | None, candidate: tuple[list[int], list[float]] | None
) -> Tokens | None:
    if stock is None or candidate is None:
        return None
    differs = [i for i, (a, b) in enumerate(zip(stock[0], candidate[0], strict=True)) if a != b]
    first = differs[0] if differs else None
    return Tokens(tuple(stock[0]), tuple(candidate[0]), first, stock[1][first] if first is not None else None)
