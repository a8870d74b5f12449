"""The `skinny` command. Each sub-command is a thin function: it parses, calls the module of its name, prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from skinny_core.errors import SkinnyError
from skinny_lab import output

HELP = """
Measured kernels for dense projections at 1 to 16 tokens: see what runs, why, and how fast.

`doctor`, `explain`, `plans` and `demo` work on a laptop without a GPU. `bench` measures on the GPU of this machine.

The environment variable SKINNY switches the project itself: `SKINNY=off`, or `SKINNY=plan=mine.toml,neighbour=on`.
"""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


class Commands(typer.core.TyperGroup):
    """Shows an error of this project as two lines (what is wrong, what to do) and exits with 2; no traceback."""

    def invoke(self, ctx: typer.Context) -> Any:
        """Run the sub-command."""
        try:
            return super().invoke(ctx)
        except SkinnyError as error:
            output.print_error(error)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Commands,
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)
plans = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", help="Check plan files, renew their digest, print their schema."
)
app.add_typer(plans, name="plans")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"skinny-lab {version('skinny-lab')}, skinny-core {version('skinny-core')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Versions.")
    ] = False,
) -> None:
    """Options of `skinny` itself."""


@app.command()
def doctor(json: Json = False) -> None:
    """Say what is installed here and what is wrong with it.

    Devices, driver, library versions, import errors of kernel DSLs, the kernel cache, every plan file (a broken one
    with file, line and fix), what `SKINNY` says, and the state of host plug-ins. Please paste it into a bug report.
    """
    from skinny_lab.doctor import collect, view

    report = collect.collect()
    if json:
        output.print_json(report.to_json())
    else:
        view.show(report, output.console())


@app.command()
def explain(
    model: Annotated[str, typer.Argument(help="A packaged config name (`qwen3-8b`) or the path of a `config.json`.")],
    device: Annotated[
        str | None, typer.Option(help="A product such as `h200`. Default: the GPU of this machine.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size; shapes are per rank.")] = 1,
    rows: Annotated[str, typer.Option("-M", "--rows", help="Rows of the activation: `1`, `1-16`, `1,2,4`.")] = "1-16",
    cells: Annotated[bool, typer.Option("--cells", help="Also list each cell with its launch parameters.")] = False,
    json: Json = False,
) -> None:
    """Show for each projection and M which kernel runs or why none does, with evidence and time saved per token.

    Needs no GPU: name the device.

    Example: `skinny explain qwen3-8b --device h200 -M 1,2,4`
    """
    from skinny_lab.explain import command

    command.run(model, device=device, tp=tp, rows=rows, cells=cells, as_json=json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(ctx: typer.Context) -> None:
    """Time planned cells against the call they replace: cold and hot L2, CUDA-graph replay. Needs a GPU.

    `skinny bench --help` lists its options.
    """
    from skinny_lab.bench import cli as bench_cli

    raise typer.Exit(bench_cli.main(list(ctx.args)))


@app.command()
def demo(
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens that are generated.")] = 40,
    device: Annotated[str, typer.Option(help="`auto`, `cpu`, `cuda` or `cuda:1`.")] = "auto",
) -> None:
    """Generate text with a real language model, stock and with skinny, and show what ran.

    Without a GPU the kernels fall back to the host's own call, one projection runs in Triton's interpreter, and the
    plan measured on an H200 is shown. With a GPU the kernels run for real and tokens per second are printed. Exits with
    1 when a text differs or a result is not exact enough.
    """
    from skinny_lab.demo import run_demo

    raise typer.Exit(run_demo(tokens=tokens, device=device))


@plans.command()
def check(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Plan files. Default: those of every installed model.")
    ] = None,
    json: Json = False,
) -> None:
    """Check plan files: schema, kernel predicates, duplicate cells, digest. Exits with 1 when a file is broken."""
    from skinny_lab import plans as plan_commands

    raise typer.Exit(plan_commands.check(files or [], as_json=json))


@plans.command()
def seal(files: Annotated[list[Path], typer.Argument(help="Plan files to rewrite.")]) -> None:
    """Renew the digest of plan files that were edited by hand. Everything else is checked first."""
    from skinny_lab import plans as plan_commands

    plan_commands.seal(files)


@plans.command()
def schema() -> None:
    """Print the JSON schema of a plan file, for editors and other tools."""
    from skinny_core.plan import json_schema

    output.print_json(json_schema())


def main() -> None:
    """Entry point of the console script."""
    app()
