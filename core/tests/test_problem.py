"""The nouns: frozen, hashable, one line each, and no dtype by accident."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from skinny_core.device import DeviceKey
from skinny_core.problem import DType, Epilogue, KernelConfig, Problem, WeightScheme


def test_dtypes_map_both_ways() -> None:
    assert {d: DType.of(d.torch) for d in DType} == {d: d for d in DType}
    assert [d.bytes for d in DType] == [d.torch.itemsize for d in DType]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_a_dtype_without_a_name_is_none(dtype: torch.dtype) -> None:
    assert DType.of(dtype) is None


def test_every_weight_scheme_so_far_has_an_activation_of_its_name() -> None:
    assert {s.value for s in WeightScheme} == {DType.BF16.value, DType.FP16.value}


def test_problem_is_frozen_hashable_and_one_line() -> None:
    key = DeviceKey((9, 0), 132, 60 << 20, "141gb")
    p = Problem(n=4096, k=12288, output=DType.FP32, epilogue=Epilogue.RESIDUAL, device=key)
    assert str(p) == "(4096,12288) bf16xbf16->fp32+residual on sm90-132sm-60mib-141gb"
    assert str(Problem(n=1, k=8)) == "(1,8) bf16xbf16->bf16"
    assert hash(p) == hash(dataclasses.replace(p))
    assert p.weight_bytes == 2 * 4096 * 12288
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.n = 1  # type: ignore[misc]


def test_equal_configs_are_equal_whatever_the_order() -> None:
    a = KernelConfig.of("bf16_simt", {"threads": 128, "rows": 2})
    b = KernelConfig.of("bf16_simt", {"rows": 2, "threads": 128})
    assert (a, hash(a)) == (b, hash(b))
    assert str(a) == "bf16_simt(rows=2, threads=128)"
    assert a != KernelConfig.of("bf16_stream", {"threads": 128, "rows": 2})
