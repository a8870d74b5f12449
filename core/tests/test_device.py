"""A device is told by what it is: no two boards we know of share a key, and none is taken for another."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skinny_core import device
from skinny_core.device import DeviceKey, key_from_properties, neighbours, product, product_name, products
from skinny_core.errors import UnknownDeviceError

GIB = 2**30
MIB = 2**20
# name, capability, SMs, L2 bytes, total memory bytes -> product, arch
BOARDS = {
    "NVIDIA H200": ((9, 0), 132, 62914560, 150109880320, "h200", "sm_90a"),
    "NVIDIA H200 NVL": ((9, 0), 132, 62914560, 150109880320, "h200-nvl", "sm_90a"),
    "NVIDIA H100 80GB HBM3": ((9, 0), 132, 52428800, 85520809984, "h100-sxm", "sm_90a"),
    "NVIDIA H100 PCIe": ((9, 0), 114, 52428800, 84974239744, "h100-pcie", "sm_90a"),
    "NVIDIA H100 NVL": ((9, 0), 132, 62914560, 99877060608, "h100-nvl", "sm_90a"),
    "NVIDIA GH200 480GB": ((9, 0), 132, 62914560, 102005473280, "gh200", "sm_90a"),
    "NVIDIA H20": ((9, 0), 78, 62914560, 102012354560, "h20", "sm_90a"),
    "NVIDIA B200": ((10, 0), 148, 132644864, 191514943488, "b200", "sm_100a"),
    "NVIDIA B300 SXM6 AC": ((10, 3), 148, 132644864, 288400343040, "b300", "sm_103a"),
    "NVIDIA GB200": ((10, 0), 148, 132644864, 191514943488, None, "sm_100a"),
    "NVIDIA GB300": ((10, 3), 148, 132644864, 288400343040, None, "sm_103a"),
    "NVIDIA GB10": ((12, 1), 48, 25165824, 128525963264, "gb10", "sm_121a"),
    "NVIDIA H200 MIG 1g.18gb": ((9, 0), 16, 7864320, int(16.25 * GIB), None, "sm_90a"),
    "NVIDIA H200 MIG 1g.35gb": ((9, 0), 26, 15728640, int(32.5 * GIB), None, "sm_90a"),
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": ((9, 0), 16, 6553600, int(9.62 * GIB), None, "sm_90a"),
    "NVIDIA H100 80GB HBM3 MIG 7g.80gb": ((9, 0), 132, 52428800, int(79.1 * GIB), None, "sm_90a"),
    "NVIDIA B200 MIG 1g.23gb": ((10, 0), 18, 16580608, int(21.9 * GIB), None, "sm_100a"),
    "NVIDIA H100 80GB HBM2e": ((9, 0), 114, 52428800, 84974239744, None, "sm_90a"),
    "NVIDIA H20-3e": ((9, 0), 78, 62914560, 150109880320, None, "sm_90a"),
    "NVIDIA H200 MIG 3g.71gb": ((9, 0), 60, 31457280, int(69.75 * GIB), None, "sm_90a"),
    "NVIDIA H200 MIG 7g.141gb": ((9, 0), 132, 62914560, int(139.5 * GIB), None, "sm_90a"),
    "NVIDIA H200 NVL MIG 7g.141gb": ((9, 0), 132, 62914560, int(139.5 * GIB), None, "sm_90a"),
    "NVIDIA L4": ((8, 9), 58, 50331648, int(22.03 * GIB), None, "sm_89"),
    "NVIDIA GeForce RTX 4090": ((8, 9), 128, 75497472, int(23.5 * GIB), None, "sm_89"),
    "NVIDIA A100-SXM4-80GB": ((8, 0), 108, 41943040, int(79.15 * GIB), None, "sm_80"),
    "NVIDIA RTX PRO 6000 Blackwell": ((12, 0), 188, 134217728, int(94.97 * GIB), None, "sm_120a"),
}


def _properties(name: str) -> SimpleNamespace:
    (major, minor), sms, l2, memory, *_ = BOARDS[name]
    return SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=sms, L2_cache_size=l2, total_memory=memory
    )


@pytest.mark.parametrize("name", BOARDS)
def test_decision_per_device(name: str) -> None:
    (capability, _, _, _, expected, arch) = BOARDS[name]
    key = key_from_properties(_properties(name))
    assert product_name(key) == expected
    assert key.arch == arch
    assert key.has_pdl is (capability >= (9, 0))
    assert str(key) == (f"{expected} ({key.slug})" if expected else key.slug)


def test_all_keys_differ() -> None:
    keys = {name: key_from_properties(_properties(name)) for name in BOARDS}
    for a, b in itertools.combinations(keys, 2):
        assert keys[a] != keys[b], f"{a} and {b} are both {keys[a].slug}"


@pytest.mark.parametrize(
    ("spelling", "board"),
    [
        ("NVIDIA H200 141GB HBM3e", "NVIDIA H200"),
        ("NVIDIA H200 SXM5", "NVIDIA H200"),
        ("H200", "NVIDIA H200"),
        ("nvidia h200 nvl", "NVIDIA H200 NVL"),
        ("NVIDIA H200-NVL-141GB", "NVIDIA H200 NVL"),
        ("NVIDIA H100 SXM5 80GB", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100-PCIE-80GB", "NVIDIA H100 PCIe"),
        ("NVIDIA H20 96GB HBM3", "NVIDIA H20"),
        ("NVIDIA B200 SXM6", "NVIDIA B200"),
        ("NVIDIA B300", "NVIDIA B300 SXM6 AC"),
        ("NVIDIA DGX Spark GB10", "NVIDIA GB10"),
        ("NVIDIA H200 MIG 1g.18gb+me", "NVIDIA H200 MIG 1g.18gb"),
    ],
)
def test_another_drivers_spelling_of_a_board_is_the_same_key(spelling: str, board: str) -> None:
    properties = _properties(board)
    properties.name = spelling
    assert key_from_properties(properties) == key_from_properties(_properties(board))


@pytest.mark.parametrize("name", [name for name in BOARDS if "MIG" in name])
def test_a_mig_slice_is_no_product_even_where_it_has_every_sm(name: str) -> None:
    key = key_from_properties(_properties(name))
    assert key.memory_class.endswith("-mig")
    assert product_name(key) is None
    assert product_name(key) not in neighbours(key)
    assert {"h200", "h100-sxm"} <= set(neighbours(key)) or key.capability != (9, 0)


@pytest.mark.parametrize("sms", [114, 78, 60])
def test_one_field_is_enough_to_be_another_device(sms: int) -> None:
    properties = _properties("NVIDIA H200")
    properties.multi_processor_count = sms
    assert product_name(key_from_properties(properties)) is None


def test_memory_as_the_driver_reports_it() -> None:
    assert key_from_properties(_properties("NVIDIA H200")) == DeviceKey((9, 0), 132, 62914560, "141gb")
    assert key_from_properties(_properties("NVIDIA H200 NVL")).memory_class == "141gb-nvl"
    assert key_from_properties(_properties("NVIDIA H200 NVL MIG 7g.141gb")).memory_class == "141gb-nvl-mig"


@given(st.integers(2 * MIB, 600 * GIB))
def test_any_memory_size_has_a_class(total: int) -> None:
    properties = _properties("NVIDIA H200")
    properties.total_memory = total
    size = int(key_from_properties(properties).memory_class.removesuffix("gb"))
    assert size >= int(total / GIB * (1 - 0.04))


def test_products_round_trip() -> None:
    keys = products()
    assert len(set(keys.values())) == len(keys), "two products with one key: the second could never be recognised"
    assert len({key.slug for key in keys.values()}) == len(keys)
    for name, key in keys.items():
        assert product(name) == key
        assert product(key.slug) == key
        assert product_name(key) == name
    assert set(keys) == {row[4] for row in BOARDS.values() if row[4]}


def test_names_in_the_table_lead_to_their_keys() -> None:
    for name, row in device._table().items():
        found = key_from_properties(
            SimpleNamespace(
                name=row["name"],
                major=row["capability"][0],
                minor=row["capability"][1],
                multi_processor_count=row["sm_count"],
                L2_cache_size=row["l2_bytes"],
                total_memory=int(int(row["memory_class"].partition("gb")[0]) * GIB * 0.97),
            )
        )
        assert found == product(name)


def test_unknown_product_names_the_known_ones() -> None:
    with pytest.raises(UnknownDeviceError, match=r"unknown device 'h900'") as caught:
        product("h900")
    assert "h200" in caught.value.fix
    assert not device.is_measured("h900")
    assert device.is_measured("h200")


@pytest.mark.parametrize("name", products())
def test_neighbours_share_the_capability_and_never_include_itself(name: str) -> None:
    key = product(name)
    near = neighbours(key)
    assert name not in near
    assert {product(n).capability for n in near} <= {key.capability}
    assert set(near) == {n for n, k in products().items() if k.capability == key.capability and n != name}


def test_no_cuda_device_is_none() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert device.current_key() is None
    assert device.current_key(0) is None


def test_slug_is_file_safe() -> None:
    for key in products().values():
        assert key.slug.replace("-", "").isalnum()
