"""The entry in the host's configuration, for every shape `additional_config` can have."""

from __future__ import annotations

import types
from typing import Any

import pytest

from skinny_vllm import compile_key


class Extra(dict):  # type: ignore[type-arg]
    """Somebody's dict with behaviour."""


def config(extra: Any) -> Any:
    return types.SimpleNamespace(additional_config=extra)


@pytest.mark.parametrize("extra", [{}, {"mine": 1}, None, Extra(mine=1)])
def test_an_entry_is_added_without_changing_what_was_given(extra: Any) -> None:
    before = None if extra is None else dict(extra)
    holder = config(extra)
    compile_key.write(holder, "d")
    assert holder.additional_config == {**(before or {}), "skinny": "d"}
    assert isinstance(holder.additional_config, type(extra) if extra is not None else dict)
    assert extra == before
    compile_key.write(holder, None)
    assert holder.additional_config == (before or {})


def test_the_same_entry_twice_changes_nothing() -> None:
    holder = config({})
    compile_key.write(holder, "d")
    kept = holder.additional_config
    compile_key.write(holder, "d")
    assert holder.additional_config is kept


def test_an_opaque_object_is_refused() -> None:
    with pytest.raises(TypeError, match="SimpleNamespace, not a dict"):
        compile_key.write(config(types.SimpleNamespace()), "d")


def test_the_digest_depends_on_eligibility_and_layers_but_not_on_their_order() -> None:
    a, b = ("x.o_proj", 256, 256, "bf16"), ("lm_head", 1024, 256, "bf16")
    assert compile_key.digest("e", [a, b]) == compile_key.digest("e", [b, a])
    variants = {compile_key.digest(*args) for args in (("e", [a, b]), ("f", [a, b]), ("e", [a]), ("e", []))}
    assert len(variants) == 4


def test_configurations_that_compiled_modules_keep_are_found() -> None:
    outer, inner = config({}), config({})

    def module(**attributes: Any) -> Any:
        return types.SimpleNamespace(**attributes)

    modules = [
        module(vllm_config=outer),
        module(vllm_config=inner),
        module(vllm_config=object()),
        module(vllm_config=None),
    ]
    model = types.SimpleNamespace(modules=lambda: modules)
    assert compile_key.holders(model, outer) == [outer, inner]
