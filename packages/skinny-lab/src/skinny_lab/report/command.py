"""`skinny report`: reads plans and rows, writes or compares the files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from rich.text import Text

from skinny_lab import output
from skinny_lab.bench.rows import write_text
from skinny_lab.explain.target import RequestError
from skinny_lab.report import content, markup, results, sections, svg
from skinny_lab.report.content import Only, Shape, Source

PAGE = "index.html"
INTRODUCTION = (
    "At 1 to 16 rows a dense projection streams its weight; skinny replaces the call where a kernel was measured to be"
    " faster, and leaves every other call alone. This page shows the measurements of the plans below: cells that lost"
    " are listed as refused with their numbers, and nothing is shown that was not measured, except what is labelled"
    " “predicted from cells”."
)


def run(
    texts: Sequence[str], *, limit: Sequence[Path], tpot: Sequence[Path], out: Path, check: bool, only: Only
) -> int:
    """Write the report of these plans (packages or files; all shipped ones without any) and rows into `out`.

    Returns 0; with `check`, which writes nothing, 1 where a file is missing or differs. Raises `SkinnyError` where
    matplotlib is missing, a plan, rows or the folder cannot be used, or `only` leaves nothing.
    """
    svg.require()
    texts_of_files = generated(
        only,
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
    only: Only, sources: Sequence[Source], limits: Sequence[results.File], engines: Sequence[results.File]
) -> dict[str, str]:
    """File name -> text: the page, and each of its pictures alone."""
    by_model = {
        source.slug: {label: shapes for label, shapes in content.models(source.plan).items() if only.takes(label)}
        for source in sources
    }
    if only != Only() and not any(by_model.values()):
        labels = dict.fromkeys(label for source in sources for label in content.models(source.plan))
        raise RequestError("no model of the plans is of that name and size", f"choose from: {', '.join(labels)}")
    if only != Only():
        sources = [source for source in sources if by_model[source.slug]]
    pieces = list(_pieces(sources, by_model, limits, engines, only))
    pictures = [piece for piece in pieces if isinstance(piece, svg.Picture)]
    css = (files("skinny_lab.report") / "page.css").read_text(encoding="utf-8") + svg.THEME
    made = {PAGE: markup.page("skinny: measured cells", css, sections.render(pieces))}
    return made | {f"{picture.name}.svg": picture.file for picture in pictures}


def _pieces(
    sources: Sequence[Source],
    by_model: Mapping[str, Mapping[str, list[Shape]]],
    limits: Sequence[results.File],
    engines: Sequence[results.File],
    only: Only,
) -> Iterator[sections.Piece]:
    unfolded = sum(map(len, by_model.values())) < sections.FOLDED_FROM
    yield markup.tag("h1", "skinny: measured cells")
    yield markup.tag("p", INTRODUCTION)
    yield _contents(sources, by_model, limits)
    told: set[tuple[str, str]] = set()
    for source in sources:
        title = f"{source.plan.family} on {source.plan.environment.gpu or source.plan.product}"
        yield markup.tag("h2", title, id=source.slug)
        yield from sections.overview(source)
        yield from sections.means(source, by_model[source.slug])
        for name, shapes in by_model[source.slug].items():
            engine = next((file for file in engines if _fits(file, source, name)), None)
            if engine is not None:
                told.add((engine.digest, name))
            yield from sections.model(source, name, shapes, engine, unfolded=unfolded)
    rest = [
        (file, model)
        for file in engines
        for model in dict.fromkeys(row.what for row in file.rows)
        if (file.digest, model) not in told and only.takes(model)
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
    sources: Sequence[Source], by_model: Mapping[str, Mapping[str, list[Shape]]], limits: Sequence[results.File]
) -> markup.Html:
    entries = []
    for source in sources:
        sizes: dict[str, list[markup.Html]] = {}
        for label in by_model[source.slug]:
            model, tp = content.split(label)
            said = model if model not in sizes and tp == 1 else f"TP {tp}" if model in sizes else f"{model}, TP {tp}"
            link = markup.tag("a", said, href=f"#{source.slug}-{content.slug(label)}")
            sizes.setdefault(model, []).append(link)
        link = markup.tag("a", f"{source.plan.family} on {source.plan.product}", href=f"#{source.slug}")
        models = markup.tag("ul", *(markup.tag("li", markup.join(links, ", ")) for links in sizes.values()))
        entries.append(markup.tag("li", link, models if sizes else ""))
    if limits:
        entries.append(markup.tag("li", markup.tag("a", "Race to the memory's limit", href="#limit")))
    entries.append(markup.tag("li", markup.tag("a", "Evidence: device, software, commit, command", href="#evidence")))
    return markup.tag("nav", markup.tag("ul", *entries), aria_label="Contents")


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
