"""The `skinny` command. Each sub-command is a thin function: it parses, calls the module of its name, prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from skinny_core.errors import SkinnyError
from skinny_lab import output

HELP = """
Measured kernels for dense projections at 1 to 16 tokens: see what runs, why, and how fast.

`doctor`, `explain`, `plans`, `capture`, `report` and `demo` work on a laptop without a GPU. `bench` measures on the GPU
of this machine, `tune` makes a plan for it, `replay` whether a plan still holds there.

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
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Check and compare plan files, renew their digest, print their schema.",
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
def replay(
    plan: Annotated[str, typer.Argument(help="A model package that ships a plan (`qwen3`) or the path of a plan.")],
    cell: Annotated[
        list[str] | None, typer.Option("--cell", metavar="ID", help="Only this cell; may repeat; `qwen3-8b/*` works.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write a CSV, renewed every two seconds.")] = None,
    peer_folder: Annotated[Path | None, typer.Option(help="Folder with vLLM's skinny_gemm.py.")] = None,
    require: Annotated[float, typer.Option(min=0, max=100, help="Percent to be confirmed for exit status 0.")] = 95.0,
    any_device: Annotated[bool, typer.Option("--any-device", help="Also on another device than the plan's.")] = False,
) -> None:
    """Measure a plan's cells again and say for each whether its verdict is confirmed. Needs a GPU.

    The tuner's race, with the cell's config: wrong results are never timed. A `win` is confirmed while the spread of
    its speed-up reaches the keep rule, cold and hot; a `refused` while it misses it. Exits with 1 below `--require`.
    Ctrl-C keeps what was measured.

    Example: `skinny replay qwen3 --cell 'qwen3-8b/*' --out replay.csv`
    """
    from skinny_lab.replay import command

    status = command.run(
        plan, cells=cell or [], out=out, peer_folder=peer_folder, require=require, any_device=any_device
    )
    raise typer.Exit(status)


@app.command()
def tune(
    model: Annotated[str | None, typer.Argument(help="A packaged config (`qwen3-8b`) or a `config.json`.")] = None,
    shapes: Annotated[Path | None, typer.Option(help="Instead: CSV or JSON with n, k and perhaps name.")] = None,
    capture: Annotated[Path | None, typer.Option(help="Instead: a file of `skinny capture`.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel size; shapes are per rank.")] = None,
    rows: Annotated[str, typer.Option("-M", help="`1-16` or `1,2,4`. Default: all, or those of the capture.")] = "",
    time_budget: Annotated[float, typer.Option(help="Seconds after which nothing new is begun.")] = 120.0,
    out: Annotated[Path | None, typer.Option(help="Plan to write. Default: a name in the user plan folder.")] = None,
    kernels: Annotated[
        list[str] | None, typer.Option(help="Kernel that races, `bf16_simt:1-4`; may repeat. Default: all.")
    ] = None,
    peer_folder: Annotated[Path | None, typer.Option(help="Folder with vLLM's skinny_gemm.py.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run ended.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Begin anew and overwrite.")] = False,
) -> None:
    """Measure which kernel is fastest for each shape and M on this GPU, and write a plan. Needs a GPU.

    cuBLAS and the peers race in every round, cold and hot; wrong results are never timed. Every cell is on disk at
    once. Exits with 0 when all cells are decided, 3 when the time budget ended first, 1 when one failed or on Ctrl-C.

    Example: `skinny tune qwen3-8b -M 1,2,4`
    """
    from skinny_lab.tune import command, request

    target = request.find(model, shapes, capture, tp)
    chosen = command.Options(rows, time_budget, out, kernels or (), peer_folder, resume, force)
    raise typer.Exit(command.run(target, chosen))


@app.command()
def report(
    plan: Annotated[
        list[str] | None, typer.Argument(help="Model packages (`qwen3`) or plan files. Default: all shipped plans.")
    ] = None,
    limit: Annotated[
        list[Path] | None, typer.Option("--limit", help="CSV of the race to the memory's limit; may repeat.")
    ] = None,
    tpot: Annotated[list[Path] | None, typer.Option("--tpot", help="CSV of time per output token; may repeat.")] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Only this model (`qwen3-8b`); may repeat. Default: all.")
    ] = None,
    tp: Annotated[
        list[int] | None, typer.Option("--tp", min=1, help="Only this tensor-parallel size; may repeat. Default: all.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for `index.html` and the SVG files.")] = Path("skinny-report"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 where a file differs.")] = False,
) -> None:
    """Draw plans and committed rows: one HTML page and its SVG files. Measures nothing, needs no GPU.

    Refused cells and null results are shown. The same input gives the same bytes with one version of matplotlib, which
    the extra `skinny-lab[report]` brings.

    Example: `skinny report qwen3 --tpot benchmarks/results/h200/tpot-qwen3-8b.csv --out report`
    """
    from skinny_lab.report import command, content

    only = content.Only(tuple(model or ()), tuple(tp or ()))
    raise typer.Exit(command.run(plan or [], limit=limit or [], tpot=tpot or [], out=out, check=check, only=only))


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


capture = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Record the dense projections that a running model really issues: N, K, M, dtypes, layers, calls.",
)
app.add_typer(capture, name="capture")
Prompt = Annotated[str, typer.Option(help="Text of each sequence. Default: 13 token ids, no tokenizer is needed.")]
NewTokens = Annotated[int, typer.Option(min=2, max=4096, help="Tokens that each sequence gets.")]
Batch = Annotated[str, typer.Option(help="Sequences per run: `1` or `1,3,8`. They are M of a decode step.")]
Random = Annotated[bool, typer.Option("--random", help="Draw random weights; only the config is read.")]
Out = Annotated[Path | None, typer.Option(help="File to write.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite that file.")]


@capture.command("transformers")
def capture_transformers(
    model: Annotated[str, typer.Argument(help="Model folder, hub name, `.gguf` file, or `smollm2-135m`.")],
    prompt: Prompt = "",
    new_tokens: NewTokens = 8,
    batch: Batch = "1",
    random: Random = False,
    device: Annotated[str, typer.Option(help="`auto`, `cpu`, `cuda` or `cuda:1`.")] = "auto",
    out: Out = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Generate a few tokens with Transformers and record every product with a weight, as torch issues it.

    Example: `skinny capture transformers ./my-model --batch 1,3 --out my-model.json`
    """
    from skinny_lab.capture import command, request

    asked = request.Request(
        model=model, prompt=prompt, new_tokens=new_tokens, batches=request.find_batches(batch), random=random,
        device=device, command=request.command_line(),
    )  # fmt: skip
    command.transformers(asked, out, force=force, as_json=json)


@capture.command("vllm")
def capture_vllm(
    model: Annotated[str, typer.Argument(help="Model folder or hub name.")],
    prompt: Prompt = "",
    new_tokens: NewTokens = 8,
    batch: Batch = "1",
    random: Random = False,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size; shapes are per rank.")] = 1,
    out: Out = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Generate a few tokens with vLLM, eagerly and in a process of its own, and record the calls of its layers.

    Example: `skinny capture vllm Qwen/Qwen3-8B --random --batch 1,3 --out qwen3-8b.json`
    """
    from skinny_lab.capture import command, request

    asked = request.Request(
        model=model, prompt=prompt, new_tokens=new_tokens, batches=request.find_batches(batch), random=random, tp=tp,
        command=request.command_line(),
    )  # fmt: skip
    command.vllm(asked, out, force=force, as_json=json)


@plans.command()
def check(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Plan files. Default: those of every installed model.")
    ] = None,
    json: Json = False,
) -> None:
    """Check plan files: schema, kernel predicates, duplicate cells, digest, and that no `win` is slower than one of the
    same shape at a larger M, beyond the spreads. Exits with 1 when a file is broken."""
    from skinny_lab import plans as plan_commands

    raise typer.Exit(plan_commands.check(files or [], as_json=json))


@plans.command()
def diff(
    old: Annotated[str, typer.Argument(help="A plan file, or a model package that ships one.")],
    new: Annotated[str, typer.Argument(help="What to compare with it.")],
    json: Json = False,
) -> None:
    """Show cells added, removed, of another status or config, or whose speed-up moved by more than the spreads.

    Exits with 0 where nothing differs, 1 where something does, 2 where a plan cannot be read.
    """
    from skinny_lab import plan_diff

    raise typer.Exit(plan_diff.run(old, new, as_json=json))


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
