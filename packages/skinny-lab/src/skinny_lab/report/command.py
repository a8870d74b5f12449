"""`skinny report`: reads plans and rows, writes or compares the files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from rich.text import Text

from skinny_lab import output
from skinny_lab.bench.rows import write_text
from skinny_lab.report import content, markup, results, sections, svg
from skinny_lab.report.content import Shape, Source

PAGE = "index.html"
INTRODUCTION = (
    "At 1 to 16 rows a dense projection streams its weight; skinny replaces the call where a kernel was measured to be"
    " faster, and leaves every other call alone. This page shows the measurements of the plans below: cells that lost"
    " are listed as refused with their numbers, and nothing is shown that was not measured, except what is labelled"
    " “predicted from cells”."
)


def run(texts: Sequence[str], *, limit: Sequence[Path], tpot: Sequence[Path], out: Path, check: bool) -> int:
    """Write the report of these plans (packages or files; all shipped ones without any) and rows into `out`.

    Returns 0; with `check`, which writes nothing, 1 where a file is missing or differs. Raises `SkinnyError` where
    matplotlib is missing, or a plan, rows or the folder cannot be used.
    """
    svg.require()
    texts_of_files = generated(
        content.open_sources(texts),
        [results.read(path, "limit") for path in limit],
        [results.read(path, "tpot") for path in tpot],
    )
    stale = [out / name for name, text in texts_of_files.items() if _text(out / name) != text]
    if not check:
        try:
            for path in stale:
                write_text(path, texts_of_files[path.name])
        except OSError as error:
            raise svg.as_error(error, out) from None
    console = output.console()
    for path in stale:
        console.print(Text(f"{'stale' if check else 'written'}: {path}"), soft_wrap=True)
    same = len(texts_of_files) - len(stale)
    console.print(f"{len(texts_of_files)} files, {same} unchanged; open {out / PAGE}", soft_wrap=True, markup=False)
    return 1 if check and stale else 0


def generated(
    sources: Sequence[Source], limits: Sequence[results.File], engines: Sequence[results.File]
) -> dict[str, str]:
    """File name -> text: the page, and each of its pictures alone."""
    pieces = list(_pieces(sources, limits, engines))
    pictures = [piece for piece in pieces if isinstance(piece, svg.Picture)]
    css = (files("skinny_lab.report") / "page.css").read_text(encoding="utf-8") + svg.THEME
    made = {PAGE: markup.page("skinny: measured cells", css, sections.render(pieces))}
    return made | {f"{picture.name}.svg": picture.file for picture in pictures}


def _pieces(
    sources: Sequence[Source], limits: Sequence[results.File], engines: Sequence[results.File]
) -> Iterator[sections.Piece]:
    by_model = {source.slug: content.models(source.plan) for source in sources}
    yield markup.tag("h1", "skinny: measured cells")
    yield markup.tag("p", INTRODUCTION)
    yield _contents(sources, by_model, limits)
    told: set[tuple[str, str]] = set()
    for source in sources:
        title = f"{source.plan.family} on {source.plan.environment.gpu or source.plan.product}"
        yield markup.tag("h2", title, id=source.slug)
        yield from sections.overview(source)
        for name, shapes in by_model[source.slug].items():
            engine = next((file for file in engines if _fits(file, source, name)), None)
            if engine is not None:
                told.add((engine.digest, name))
            yield from sections.model(source, name, shapes, engine)
    rest = [
        (file, model)
        for file in engines
        for model in dict.fromkeys(row.what for row in file.rows)
        if (file.digest, model) not in told
    ]
    if rest:
        yield markup.tag("h2", "Time per output token, without a plan above")
        said = "These rows are of a model that no plan above has, or of another device than its plan's."
        yield markup.tag("p", said, kind="note")
    for number, (file, model) in enumerate(rest):
        yield markup.tag("h3", f"{model} ({file.label})")
        yield from sections.tokens(f"tpot-{number}-{content.slug(model)}", model, file.rows)
    for number, file in enumerate(limits, 1):
        yield from sections.limit(file, "limit" if number == 1 else f"limit-{number}")
    files_given = [("limit", file) for file in limits] + [("tpot", file) for file in engines]
    yield from sections.evidence(sources, files_given)


def _fits(file: results.File, source: Source, model: str) -> bool:
    """Whether the file has rows of this model, all measured on the plan's device."""
    devices = {row.device for row in file.rows if row.what == model}
    return devices == {source.plan.environment.gpu}


def _contents(
    sources: Sequence[Source], by_model: dict[str, dict[str, list[Shape]]], limits: Sequence[results.File]
) -> markup.Html:
    entries = []
    for source in sources:
        names = [markup.tag("a", name, href=f"#{source.slug}-{content.slug(name)}") for name in by_model[source.slug]]
        link = markup.tag("a", f"{source.plan.family} on {source.plan.product}", href=f"#{source.slug}")
        entries.append(markup.tag("li", link, ": ", markup.join(names, ", ")))
    if limits:
        entries.append(markup.tag("li", markup.tag("a", "Race to the memory's limit", href="#limit")))
    entries.append(markup.tag("li", markup.tag("a", "Evidence: device, software, commit, command", href="#evidence")))
    return markup.tag("nav", markup.tag("ul", *entries), aria_label="Contents")


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
