"""Every developer command. `nox -l` lists them; `bin/test` runs those tagged `check` in one environment (--no-venv).

A GPU machine without nox runs the same gate with `python3 -m tests.gpu.run --arch sm90`.
"""

from __future__ import annotations

import os
from pathlib import Path

import nox

ROOT = Path(__file__).parent
MEMBERS = sorted(
    p.parent for pattern in ("core", "models/*", "packages/*") for p in ROOT.glob(f"{pattern}/pyproject.toml")
)
REQUIREMENTS = ROOT / "tests" / "requirements"

nox.needs_version = ">=2024.4"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.tags = ["check"]


def everything(session: nox.Session) -> None:
    """Install test requirements and the workspace, unless the session runs in a ready environment (`--no-venv`)."""
    if session.venv_backend == "none":
        return
    # uv does not read pip's variable, and pip's folder may hold the CPU build of torch.
    session.env["UV_FIND_LINKS"] = os.environ.get("PIP_FIND_LINKS", "")
    editable = [arg for member in MEMBERS for arg in ("-e", str(member))]
    session.install("-r", str(REQUIREMENTS / "test.txt"), *editable)
    session.install("--no-deps", "-r", str(REQUIREMENTS / "test-nodeps.txt"))


def tools(session: nox.Session, *names: str) -> None:
    """Install only these tools, unless the session runs in a ready environment."""
    if session.venv_backend != "none":
        session.install(*names)


@nox.session(tags=["check"])
def lint(session: nox.Session) -> None:
    """Ruff: rules and formatting. `-- --fix` repairs what can be repaired."""
    tools(session, "ruff")
    if "--fix" in session.posargs:
        session.run("ruff", "check", "--fix", ".")
        session.run("ruff", "format", ".")
        return
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(tags=["check"])
def types(session: nox.Session) -> None:
    """Mypy, strict, on the core."""
    everything(session)
    session.run("mypy", *session.posargs)


@nox.session(tags=["check"])
def size(session: nox.Session) -> None:
    """File sizes (cap 500 lines, median 150), environment variables read, file names that say nothing."""
    session.run("python", "-m", "tests.architecture.sizes")


@nox.session(tags=["check"])
def test(session: nox.Session) -> None:
    """Everything that needs no GPU: core, models, packages, real host classes on the CPU. Two processes."""
    everything(session)
    session.env["OMP_NUM_THREADS"] = "1"
    split = ["-n", "2", "--dist", "loadfile"] if not session.posargs else []
    folders = ["--ignore=tests/packaging", "--ignore=tests/docs"] if not session.posargs else []
    markers = "not sm90 and not sm100"
    session.run("python", "-m", "pytest", "-m", markers, "--timeout=600", *split, *folders, *session.posargs)


@nox.session(name="plans-check", tags=["check", "data"])
def plans_check(session: nox.Session) -> None:
    """Every shipped plan: schema, kernel predicates, duplicates, digest."""
    everything(session)
    session.run("skinny", "plans", "check", *session.posargs)


@nox.session(name="plans-write", tags=["data"])
def plans_write(session: nox.Session) -> None:
    """Write the measured plans of all packages from the one committed measurement, and the tables made of them."""
    everything(session)
    measured = "benchmarks/results/h200/measurements.jsonl.xz"
    session.run("python", "benchmarks/measure_plan.py", "--from", measured, "--ship")
    session.run("python", "benchmarks/seed_cells.py")
    session.run("python", "benchmarks/report.py")


@nox.session(name="plans-schema", tags=["data"])
def plans_schema(session: nox.Session) -> None:
    """Write core's plan.schema.json anew from the types; a test fails while it differs."""
    everything(session)
    session.run("python", "-m", "skinny_core.plan")


@nox.session(tags=["check", "ship"])
def smoke(session: nox.Session) -> None:
    """Build each wheel, install it into clean environments, check the import contract and the contents."""
    everything(session)
    session.run("python", "-m", "pytest", "--timeout=600", "tests/packaging", *session.posargs)


@nox.session(tags=["check"])
def docs(session: nox.Session) -> None:
    """Run every command that README and docs/ mark as runnable; check links between documents."""
    everything(session)
    session.run("python", "-m", "pytest", "--timeout=600", "tests/docs", *session.posargs)


@nox.session(name="test-sm90", tags=["gpu"])
def test_sm90(session: nox.Session) -> None:
    """Every shipped cell on an SM90 GPU. Red without one or when no GPU test ran; `-- --allow-skip` compiles only."""
    everything(session)
    session.run("python", "-m", "tests.gpu.run", "--arch", "sm90", *session.posargs)


@nox.session(name="test-sm100", tags=["gpu"])
def test_sm100(session: nox.Session) -> None:
    """Every shipped cell on an SM100 GPU. Red without one or when no GPU test ran; `-- --allow-skip` compiles only."""
    everything(session)
    session.run("python", "-m", "tests.gpu.run", "--arch", "sm100", *session.posargs)


@nox.session(tags=["gpu"])
def bench(session: nox.Session) -> None:
    """`skinny bench`: cells against cuBLAS, cold and hot L2. Arguments go to the command."""
    everything(session)
    session.run("skinny", "bench", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """`skinny demo`: a real language model, stock and with skinny."""
    everything(session)
    session.run("skinny", "demo", *session.posargs)


@nox.session(tags=["ship"])
def build(session: nox.Session) -> None:
    """Build every wheel and source archive into dist/."""
    tools(session, "hatchling")
    for member in MEMBERS:
        session.chdir(member)
        session.run("python", "-m", "hatchling", "build", "-d", str(ROOT / "dist"))
