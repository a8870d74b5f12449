"""Where a call is intercepted: the class of the layer object is swapped for `Linear`, a subclass of `nn.Linear` of
the same name.

Why the class and not a `forward` on the instance: no reference cycle, so `del model` still frees its memory; shallow
copies (and the replicas of `DataParallel`) call with their own weight rather than the original's; a compiled graph is
guarded on the type, so it notices both directions; regional compilation shares one graph between layers. Accelerate
replaces `forward` on the instance and calls the one it found: ours if it came second, and the one that `attach` puts
there if it came first. A deep copy stays installed. A pickle is one of a stock `nn.Linear` and loads where skinny is
absent: installation belongs to a process, not to a file.

Nothing is remembered about the layer but its place in the model. A PEFT adapter takes that place and keeps the layer
inside; a look at the place at call time therefore tells attached adapters from removed ones.
"""

from __future__ import annotations

import contextlib
import copy
import types
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._device import DeviceContext

from skinny_core import dispatch, op
from skinny_core.rules import Reason

SITE = "_skinny_site"
_SLOTS = ("forward", "_old_forward")  # the second is where accelerate keeps the forward that it wraps
_PLAIN = (Tensor, nn.Parameter)
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_function_modes = torch._C._len_torch_function_stack
_functorch_level = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)


class Site:
    """Where an installed layer belongs: `parent._modules[name]`. `parent` is weak; None for a layer that is the whole
    model."""

    __slots__ = ("family", "name", "parent")

    def __init__(self, family: str, parent: nn.Module | None, name: str) -> None:
        self.family = family
        self.name = name
        self.parent = weakref.ref(parent) if parent is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Site | None:
        """The copy belongs to the copy of the parent. A layer copied out of its model belongs nowhere: not
        installed."""
        if self.parent is None:
            return Site(self.family, None, self.name)
        copied = memo.get(id(self.parent()))
        return Site(self.family, copied, self.name) if isinstance(copied, nn.Module) else None

    def __reduce__(self) -> Any:
        """A pickle of a class swapped on top of ours carries None: a place belongs to a process."""
        return type(None), ()


class Linear(nn.Linear):
    """`nn.Linear` that offers its calls to skinny and otherwise runs `nn.Linear.forward`. Only ever made by
    `attach`."""

    def forward(self, input: Tensor) -> Tensor:
        """`input[..., K]` -> `[..., N]`, with the dtype and device rules and the errors of `nn.Linear`."""
        site = self.__dict__.get(SITE)
        if site is None or torch.jit.is_tracing() or not isinstance(input, Tensor):
            return nn.Linear.forward(self, input)
        # First of all: a function mode would see every look at a tensor.
        reason = Reason.HOOKED if _is_overridden() else standing(self, site) or passing(self, input)
        if torch.compiler.is_compiling():
            # M is a symbol here and must stay one: the op looks at it when the graph runs. An exported program must
            # load where skinny is absent, so it gets no op.
            if reason is None and not torch.compiler.is_exporting():
                return op.linear(input, self._parameters["weight"], site.family)
            return nn.Linear.forward(self, input)
        if reason is None and not _is_recorded():
            return dispatch.linear(input, self._parameters["weight"], site.family)
        _count(self, site, input, reason or Reason.HOOKED)
        return nn.Linear.forward(self, input)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is not Linear:  # a class swapped on top of ours (a parametrisation) has its own say
            return super().__reduce_ex__(protocol)
        state = {key: value for key, value in self.__dict__.items() if key != SITE}
        for slot in _SLOTS:
            if is_ours(state.get(slot)):
                del state[slot]
        return object.__new__, (nn.Linear,), state

    def __deepcopy__(self, memo: dict[int, Any]) -> Linear:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        return made


def standing(layer: nn.Linear, site: Site) -> Reason | None:
    """What about the layer rules a kernel out at this moment, whatever the call; None where nothing does.

    Read anew at every call, and traced by Dynamo, which guards on what is read here.
    """
    reason = displaced(layer, site)
    if reason is not None:
        return reason
    state, parameters = layer.__dict__, layer._parameters
    weight = parameters.get("weight")  # a third of the cost of `layer.weight`, which searches for it
    if weight is None or "weight" in state or "bias" in state:  # a plain attribute hides the parameter of that name
        return Reason.HOOKED
    if type(weight) not in _PLAIN:
        return Reason.SUBCLASSED_WEIGHT
    if not weight.dtype.is_floating_point:
        return Reason.QUANTISED
    # A bias that is no registered parameter any more can be anything.
    if parameters.get("bias", weight) is not None:
        return Reason.BIAS
    return placement(weight)


def placement(tensor: Tensor) -> Reason | None:
    """What about the memory of a plain weight or activation rules a kernel out."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return Reason.LAYOUT
    if tensor.is_cuda or tensor.is_cpu:
        return None
    return Reason.OFFLOADED if tensor.is_meta else Reason.NOT_CUDA


def passing(layer: nn.Linear, x: Tensor) -> Reason | None:
    """What about this call and its surroundings rules a kernel out, as far as the tensors' shapes do not decide it.
    Asked of a layer that `standing` has nothing against."""
    if type(x) not in _PLAIN:
        return Reason.SUBCLASSED_WEIGHT
    if torch.is_grad_enabled() and (layer._parameters["weight"].requires_grad or x.requires_grad):
        return Reason.GRADIENT
    reason = placement(x)
    if reason is not None:
        return reason
    # Only of these two: the question raises for devices that have no autocast.
    return Reason.AUTOCAST if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu") else None


def displaced(layer: nn.Linear, site: Site) -> Reason | None:
    """LORA where an adapter has taken the layer's place, HOOKED where something else has; None where it is where it
    was."""
    if type(layer) is not Linear:
        return Reason.HOOKED
    if site.parent is None:
        return None
    parent = site.parent()
    occupant = parent._modules.get(site.name) if parent is not None else None
    if occupant is layer:
        return None
    if occupant is not None and occupant._modules.get("_orig_mod") is layer:  # torch.compile(layer) in its place
        return None
    return Reason.LORA if occupant is not None and "base_layer" in occupant._modules else Reason.HOOKED


def is_foreign(layer: nn.Module) -> bool:
    """Whether somebody else replaced the `forward` of a stock layer, so that `attach` must keep away."""
    forward = None if isinstance(layer, Linear) else layer.__dict__.get("forward")
    return forward is not None and not _is_stock(forward) and not _is_accelerate(layer)


def attach(layer: nn.Linear, family: str, parent: nn.Module | None, name: str) -> None:
    """Swap the class of a layer of exactly `nn.Linear` that is not foreign, or renew its place."""
    if not isinstance(layer, Linear):
        for slot in _SLOTS:
            if _is_stock(layer.__dict__.get(slot)):
                layer.__dict__[slot] = types.MethodType(Linear.forward, layer)
        layer.__class__ = Linear
    layer.__dict__[SITE] = Site(family, parent, name)


def detach(layer: nn.Module) -> bool:
    """Undo `attach`; whether there was anything to undo. A class swapped on top of ours stays, and runs
    `nn.Linear.forward`."""
    if not isinstance(layer, Linear):
        return False
    layer.__dict__.pop(SITE, None)
    for slot in _SLOTS:
        if is_ours(layer.__dict__.get(slot)):
            layer.__dict__[slot] = types.MethodType(nn.Linear.forward, layer)
    if type(layer) is Linear:
        layer.__class__ = nn.Linear
    return True


def is_ours(forward: Any) -> bool:
    """Whether a value found under `forward` is the bound method of `Linear`."""
    return getattr(forward, "__func__", None) is Linear.forward


def _is_stock(forward: Any) -> bool:
    return getattr(forward, "__func__", None) is nn.Linear.forward


def _is_accelerate(layer: nn.Module) -> bool:
    return "_hf_hook" in layer.__dict__ and "_old_forward" in layer.__dict__


def _is_recorded() -> bool:
    """Whether somebody looks at every operation (make_fx, vmap, a flop counter): a kernel launch would be invisible
    to them."""
    return _dispatch_modes() > 0 or _functorch_level() is not None


def _is_overridden() -> bool:
    """Whether a function mode is active that could answer or look at the call; the default device is one that does
    not."""
    depth = _function_modes()
    return depth > 0 and any(type(torch._C._get_function_stack_at(at)) is not DeviceContext for at in range(depth))


def _count(layer: nn.Linear, site: Site, x: Tensor, reason: Reason) -> None:
    """One call that did not reach the dispatcher. Subclasses and modes do not see it, and it cannot fail a call: a
    foreign tensor or layer answers as it likes."""
    with contextlib.suppress(Exception), torch._C.DisableTorchFunction():
        n, k, elements = layer.out_features, layer.in_features, x.numel()
        if k and type(elements) is int:  # a symbol belongs to a fake tensor, and nothing is called
            dispatch.declined(site.family, n, k, elements // k, reason)
