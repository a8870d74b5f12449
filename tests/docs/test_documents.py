"""Documents that are run: each marked command works, each link leads somewhere, the README's commands are CI's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.docs.fences import Fence, links, runnable

SKIPPED = {"node_modules", "dist"}
DOCUMENTS = sorted(
    f for f in ROOT.rglob("*.md") if not any(p.startswith(".") or p in SKIPPED for p in f.relative_to(ROOT).parts)
)
FENCES = [fence for document in DOCUMENTS for fence in runnable(document)]


def name(value: Path | Fence) -> str:
    path = value.file if isinstance(value, Fence) else value
    return f"{path.relative_to(ROOT)}" + (f":{value.line}" if isinstance(value, Fence) else "")


@pytest.mark.parametrize("fence", FENCES, ids=name)
def test_command_runs(fence: Fence, tmp_path: Path) -> None:
    starters = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "TMPDIR": str(tmp_path)}
    command = [*starters[fence.language], fence.body]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("document", ["README.md", "docs/explain.md"])
def test_the_main_documents_have_commands_that_are_run(document: str) -> None:
    assert runnable(ROOT / document)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere(document: Path) -> None:
    assert [target for target in links(document) if not (document.parent / target).exists()] == []


def test_ci_runs_the_readme_test_command() -> None:
    commands = re.findall(r"^bash (bin/\w+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands == ["bin/demo", "bin/test"]
    assert "exec bash bin/test\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize(("document", "limit"), [("AGENTS.md", 120), ("CONTRIBUTING.md", 80)])
def test_guides_stay_short(document: str, limit: int) -> None:
    assert len((ROOT / document).read_text().splitlines()) <= limit


def test_a_marked_block_is_found(tmp_path: Path) -> None:
    document = tmp_path / "x.md"
    document.write_text("```sh\nno\n```\n\n```sh run\nfalse\n```\n[a](b.md#c) [d](https://e.f)\n")
    assert [(f.line, f.language, f.body) for f in runnable(document)] == [(5, "sh", "false\n")]
    assert links(document) == ["b.md"]
