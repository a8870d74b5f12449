"""One environment variable. Shipped code reads `SKINNY` in one file and nothing else by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.sources import environment_uses, wheels
from tests.checkout import ROOT

THE_FILE = "core/src/skinny_core/env.py"
HOST_OWNED = {"TRITON_INTERPRET": "Triton's own switch; under its interpreter a kernel takes CPU tensors"}
"""Names that belong to a host or a DSL, and why we must look at them. Keep it short."""


def violations(files: list[Path]) -> list[str]:
    """Accesses by name outside `env.py` that no host owns. Copying the whole mapping for a child is allowed."""
    uses = (use for file in files for use in environment_uses(file))
    return [
        f"{use.path}:{use.line}: {'writes' if use.writes else 'reads'} {use.name}"
        for use in uses
        if use.name is not None and use.name not in HOST_OWNED and use.path != ROOT / THE_FILE
    ]


def test_shipped_code_reads_one_variable() -> None:
    assert violations([file for wheel in wheels() for file in wheel.files()]) == []


def test_the_one_file_reads_it_once() -> None:
    uses = environment_uses(ROOT / THE_FILE)
    assert [(use.name, use.writes) for use in uses] == [("SKINNY", False)]


@pytest.mark.parametrize(
    "code",
    [
        "import os\nx = os.environ['A']",
        "import os\nx = os.environ.get('A')",
        "import os\nx = os.getenv('A', '')",
        "from os import environ\nx = 'A' in environ",
        "import os\nos.environ['A'] = '1'",
        "import os\nos.environ.setdefault('A', '1')",
        "import os\nNAME = 'A'\nx = os.environ[NAME]",
        "import os\nx = os.environ[name]",
        "import os\nos.environ.update(values)",
    ],
)
def test_an_access_by_name_is_seen(tmp_path: Path, code: str) -> None:
    file = tmp_path / "reads.py"
    file.write_text(code)
    assert len(violations([file])) == 1


@pytest.mark.parametrize("code", ["import os\nx = {**os.environ, 'A': '1'}", "import os\nx = os.environ.copy()"])
def test_a_copy_for_a_child_process_is_allowed(tmp_path: Path, code: str) -> None:
    file = tmp_path / "copies.py"
    file.write_text(code)
    assert violations([file]) == []
