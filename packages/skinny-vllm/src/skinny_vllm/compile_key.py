"""Keeps compiled graphs with and without the op apart, by one entry in the host's configuration.

`VllmConfig.compute_hash` hashes `additional_config` as sorted JSON, and that hash is part of the key of both compile
caches (AOT and JIT). It is computed at the first forward pass, so an entry made while the model is constructed or
loaded counts. The entry says which layers call the op and what decides eligibility; no plan data, so editing a plan
costs no compilation.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable
from typing import Any

ENTRY = "skinny"


def digest(eligibility: str, layers: Iterable[tuple[str, int, int, str]]) -> str:
    """Hex digest of the core's eligibility digest and of (path, N, K, dtype) of each layer that calls the op."""
    text = json.dumps([eligibility, sorted(layers)])
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def write(config: Any, value: str | None) -> None:
    """Set the entry, or remove it for None. Others' entries stay; a dict that the user passed in is never changed.

    A dict subclass keeps its class. Raises `TypeError` for an `additional_config` that is not a dict.
    """
    extra = config.additional_config
    if extra is None:
        extra = {}
    if not isinstance(extra, dict):
        raise TypeError(f"additional_config is a {type(extra).__name__}, not a dict")
    if extra.get(ENTRY) == value:
        return
    changed = copy.copy(extra)
    if value is None:
        changed.pop(ENTRY, None)
    else:
        changed[ENTRY] = value
    config.additional_config = changed


def holders(model: Any, config: Any) -> list[Any]:
    """`config` and every other configuration object that a module of `model` keeps: compiled modules hash their own."""
    found = {id(config): config}
    for module in model.modules():
        own = module.__dict__.get("vllm_config")
        if own is not None and hasattr(own, "additional_config"):
            found.setdefault(id(own), own)
    return list(found.values())
