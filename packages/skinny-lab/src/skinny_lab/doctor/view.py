"""`skinny doctor` for people: short tables, problems last, each with what to do."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from skinny_lab.doctor.report import PlanFile, Report
from skinny_lab.output import facts

MIB = 1 << 20


def show(report: Report, console: Console) -> None:
    """Print a report."""
    for block in blocks(report):
        console.print(block)
        console.print()


def blocks(report: Report) -> Iterator[RenderableType]:
    """The sections of the report, in reading order."""
    machine = {"python": report.python, "platform": report.platform, "driver": report.driver or "none found"}
    machine |= {f"cuda:{d.index}": f"{d.name}, {d.product or 'no known product'} ({d.key})" for d in report.devices}
    if not report.devices:
        machine["devices"] = "torch sees no CUDA device: every call takes the host's own path"
    yield facts("Machine", machine)
    yield facts("Versions", {name: version or "not installed" for name, version in report.versions.items()})
    yield facts("SKINNY", {name: _setting(value) for name, value in report.settings.items()})
    yield facts("Kernels", {k.stem: _ok("ready") if k.available else _bad(k.error) for k in report.kernels})
    models = {name: f"skinny-{name} {version}" for name, version in report.models.items()}
    models |= {name: _bad(error) for name, error in report.broken_models.items()}
    yield facts("Model packages", models or {"none": "install one, for example skinny-qwen3"})
    yield facts("Plans", {f"{p.origin} {p.path.rpartition('/')[2]}": _plan(p) for p in report.plans} or {"none": ""})
    yield facts("Cache", {"folder": report.cache.path, "content": _cache(report)})
    yield facts("Hosts", {h.name: h.text for h in report.hosts} or {"none": "no host adapter is installed"})
    yield _problems(report)


def _setting(value: object) -> str:
    return {True: "on", False: "off", None: "default", (): "none"}.get(value, str(value))  # type: ignore[call-overload,no-any-return]


def _ok(text: str) -> Text:
    return Text(text, "green")


def _bad(text: str) -> Text:
    return Text(text, "red")


def _plan(file: PlanFile) -> Text:
    if file.error:
        line = f"line {file.error['line']}: " if file.error["line"] else ""
        return _bad(f"ignored: {line}{file.error['what']}")
    cells = ", ".join(f"{count} {status}" for status, count in sorted(file.cells.items())) or "no cells"
    return Text(f"{file.family} on {file.product}: {cells}, digest {file.digest[:12]}")


def _cache(report: Report) -> str:
    cache = report.cache
    state = f"{cache.entries} files, {cache.bytes / MIB:.1f} MiB" if cache.exists else "does not exist yet"
    return f"{state}, {'writable' if cache.writable else 'NOT writable'}"


def _problems(report: Report) -> Text:
    if not report.problems:
        return _ok("No problems found.")
    text = Text(f"{len(report.problems)} problem{'s' if len(report.problems) > 1 else ''}", "bold red")
    for what, fix in report.problems:
        text.append(f"\n- {what}", "default").append(f"\n  fix: {fix}", "green")
    return text
