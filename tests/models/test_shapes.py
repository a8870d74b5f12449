"""Shapes of every named config, against tables written down independently of the code."""

from __future__ import annotations

import pytest

from tests.models.packages import NAMES, found, table

ROWS = [(name, row) for name in NAMES for row in table(name)]
each = pytest.mark.parametrize(("name", "row"), ROWS, ids=[f"{row['config']}-tp{row['tp']}" for _, row in ROWS])


@each
def test_fused_shapes(name: str, row: dict[str, str]) -> None:
    package = found(name)
    shapes = {p.name: f"{p.n}x{p.k}" for p in package.projections(package.configs[row["config"]], int(row["tp"]))}
    roles = [key for key in row if key not in ("config", "tp")]
    assert {role: shapes.get(role, "") for role in roles} == {role: row[role] for role in roles}


@each
def test_unfused_parts_add_up_to_the_fused_projection(name: str, row: dict[str, str]) -> None:
    package = found(name)
    every = package.projections(package.configs[row["config"]], int(row["tp"]))
    fused = {p.name: p for p in every if not p.part_of}
    parts = [p for p in every if p.part_of]
    assert every == (*fused.values(), *parts), "fused ones come first"
    for name_of_whole in {p.part_of for p in parts}:
        whole, own = fused[name_of_whole], [p for p in parts if p.part_of == name_of_whole]
        assert sum(p.n for p in own) == whole.n
        assert {(p.k, p.calls) for p in own} == {(whole.k, whole.calls)}


@pytest.mark.parametrize("name", NAMES)
def test_the_table_covers_every_named_config_up_to_eight_ranks(name: str) -> None:
    sizes = {
        config: {int(row["tp"]) for row in table(name) if row["config"] == config} for config in found(name).configs
    }
    assert {row["config"] for row in table(name)} == set(sizes)
    assert all({2, 4, 8} <= covered for covered in sizes.values()), sizes
