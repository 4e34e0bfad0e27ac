"""The commands, each as its pipeline. How things look is decided in ``show`` and ``report``."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markdown import Markdown

import onnx_inplace
from onnx_inplace import compiler, page
from onnx_inplace.cli import (
    adopted,
    doctor,
    page_list,
    planned,
    profiled,
    report,
    results,
    show,
    values,
    warmup,
)
from onnx_inplace.compiler import declarations, errors, loader, recovery, schema
from onnx_inplace.page import page_facts, page_map

app = typer.Typer(
    name="onnx-inplace",
    help="Write, check, show and run ONNX models whose caches are updated in place.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ModelPath = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="An annotated model.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="The file to write.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"onnx-inplace {importlib.metadata.version('onnx-inplace')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Write, check, show and run ONNX models whose caches are updated in place."""


# -- compile, check, restore


@app.command("compile")
@report.reported
def compile_(
    source: Annotated[
        str, typer.Argument(metavar="FILE.py:NAME", help="A Python file and a @model in it.")
    ],
    output: Output = None,
    json_: Json = False,
) -> None:
    """Compile a @model of a Python file to an annotated .onnx file."""
    path, _, name = source.rpartition(":")
    if not path or not name:
        raise typer.BadParameter(f"{source!r} is not FILE.py:NAME", param_hint="FILE.py:NAME")
    program = _find(_execute(Path(path)), name, path)
    target = output if output is not None else Path(f"{name.rpartition('.')[2]}.onnx")
    program.save(target)
    loaded = compiler.load(target)
    _summary(loaded, target, json_)


def _execute(path: Path) -> Any:
    """The module of a file of the user's, as if it were imported."""
    if not path.is_file():
        raise typer.BadParameter(f"{path}: no such file", param_hint="FILE.py:NAME")
    name = f"compiled_{path.stem}"  # not its own: a file may be called like a library
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise typer.BadParameter(f"{path} is no Python file", param_hint="FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.absolute()))
    sys.modules[name] = module
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for what was asked
            spec.loader.exec_module(module)
    except errors.InplaceError:
        raise
    except (Exception, SystemExit) as error:
        raise report.UserCodeError(path, error) from None
    finally:
        sys.path.pop(0)
    return module


def _find(module: Any, name: str, path: str) -> compiler.Program:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, compiler.Program):
        return found
    models = [n for n, value in vars(module).items() if isinstance(value, compiler.Program)]
    what = "not there" if found is None else f"a {type(found).__name__}"
    known = f"models in it: {', '.join(models)}" if models else "there is no @model in it"
    raise typer.BadParameter(f"{path}: {name} is {what}; {known}", param_hint="FILE.py:NAME")


@app.command()
@report.reported
def check(model: ModelPath, json_: Json = False) -> None:
    """Derive the contract of a file again, and compare it with what the file says."""
    _summary(compiler.load(model), model, json_)


def _summary(loaded: compiler.Loaded, path: Path, json_: bool) -> None:
    declared = declarations.of_model(loaded.program.proto, ())
    if json_:
        content = {"ok": True, "file": str(path), "model": loaded.name, "problems": []}
        contract = {"inputs": dict(declared.inputs), "outputs": dict(declared.outputs)}
        report.print_json({**content, **contract})
        return
    roots = ", ".join(f"{output} is {root}" for output, root in declared.outputs.items())
    print(f"{path}: ok: {roots or 'a model without state'}")


@app.command()
@report.reported
def restore(
    source: ModelPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    json_: Json = False,
) -> None:
    """Rebuild what a tool has dropped, from the JSON contract, where it can be proven."""
    recovery.restore(source, output)
    _summary(compiler.load(output), output, json_)


@app.command()
@report.reported
def annotate(
    source: Annotated[
        Path, typer.Argument(metavar="MODEL.onnx", help="A model that somebody exported.")
    ],
    output: Output = None,
    aliases: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="OUT=IN", help="OUT is the next content of IN."),
    ] = None,
    skips: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="OUT", help="OUT is a new value, whatever it is called."),
    ] = None,
    json_: Json = False,
) -> None:
    """Find the states of a model that has no contract, write one, and prove it.

    Without --output nothing is written.
    """
    requested: dict[str, str | None] = dict.fromkeys(skips or [])
    requested.update(values.pairs(aliases or [], "--alias", "OUT=IN"))
    adoption = compiler.annotate(source, output, requested)
    if json_:
        written = None if output is None else str(output)
        content = {"ok": True, "file": written, "problems": [], **adopted.to_json(adoption)}
        report.print_json(content)
        return
    adopted.render(adoption)
    if output is not None:
        print(f"{output}: ok")


@app.command("doctor")
@report.reported
def doctor_(model: ModelPath, json_: Json = False) -> None:
    """Run a model through common tools; print what each keeps, and what restore brings back."""
    verdicts = doctor.examine(compiler.load(model).program)
    if json_:
        report.print_json({"ok": True, "problems": [], "tools": doctor.to_json(verdicts)})
    else:
        doctor.render(verdicts)


# -- show, explain, schema


@app.command("show")
@report.reported
def show_(model: ModelPath, json_: Json = False) -> None:
    """Print the graph with the root and version of every value that shares storage."""
    program = loader.open_program(model)
    listing = show.Listing.of(program)
    if json_:
        report.print_json(listing.to_json())
    else:
        show.render(listing, str(model))


def _check_folder(html: Path | None) -> None:
    """Refuse a page that could not be written, before the work that fills it."""
    if html is not None and not html.absolute().parent.is_dir():
        raise typer.BadParameter(f"{html} is in no folder that exists", param_hint="--html")


@app.command("plan")
@report.reported
def plan_(
    model: ModelPath,
    dims: Annotated[
        str | None,
        typer.Option("--dims", metavar="DIMS", help="batch:1,max_length:64: bytes, not formulas."),
    ] = None,
    threads: Annotated[
        int, typer.Option("--threads", min=1, help="How many threads a run may use.")
    ] = 1,
    fuse: values.FuseOption = values.Fusing.AUTO,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="SIZE", help="4GiB: fail if all of it does not fit."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page for a browser instead."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Run it, and print where the time goes instead.")
    ] = False,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="NAME=FILE.npy", help="For --profile; else zeros."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="For --profile: runs that count.")] = 20,
    json_: Json = False,
) -> None:
    """Print the steps of a run, its memory, what copies, what is proved and what a run checks."""
    sizes = {} if dims is None else values.sizes(dims, "--dims")
    if profile:
        feeds = values.pairs(inputs or [], "--input", "NAME=FILE.npy").items()
        given = {name: values.feed(text, name) for name, text in feeds}
        profiled.profile(model, sizes, given, threads, fuse, runs, json_=json_)
        return
    limit = None if budget is None else values.amount(budget, "--budget")
    _check_folder(html)
    plan = compiler.plan(model)
    if limit is not None:
        plan.memory(threads, fuse.value, **sizes).require(limit)
    if html is not None:
        html.write_text(page.render(plan, str(model), sizes), encoding="utf-8")
    if json_:
        report.print_json(planned.to_json(plan, sizes, threads, fuse))
    elif html is not None:
        print(f"{html}: ok")
    else:
        planned.render(plan, str(model), sizes, threads, fuse)


@app.command()
@report.reported
def pages(
    state: Annotated[Path, typer.Argument(metavar="FILE", help="A saved paged cache.")],
    error: Annotated[
        Path | None,
        typer.Option("--error", metavar="FILE", help="The same caches in floats, to compare."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page for a browser instead."),
    ] = None,
    json_: Json = False,
) -> None:
    """Print the pages of a saved state: format, tokens, owners, bytes, and what they have lost."""
    _check_folder(html)
    caches = page_facts.read(state, error)
    if html is not None:
        html.write_text(page_map.render(caches, str(state)), encoding="utf-8")
    if json_:
        report.print_json({"ok": True, "problems": [], "caches": page_list.to_json(caches)})
    elif html is not None:
        print(f"{html}: ok")
    else:
        page_list.render(caches, str(state))


@app.command()
def explain(
    code: Annotated[str | None, typer.Argument(metavar="CODE", help="Such as E104.")] = None,
    json_: Json = False,
) -> None:
    """Explain a rule: what it demands, a program that breaks it, and the repair."""
    if code is None:
        rules = {known: errors.explain(known).title for known in errors.RULES}
        if json_:
            report.print_json(rules)
            return
        for known, title in rules.items():
            print(f"{known}  {title}")
        return
    if code.upper() not in errors.RULES:
        known = ", ".join(errors.RULES)
        raise typer.BadParameter(f"{code} is no rule; there are {known}", param_hint="CODE")
    page = errors.explain(code.upper())
    if json_:
        report.print_json(dataclasses.asdict(page))
    elif sys.stdout.isatty():
        Console().print(Markdown(page.text))
    else:
        print(page.text, end="")


@app.command("schema")
def schema_() -> None:
    """Print what is added to onnx.proto, as a .proto fragment."""
    print(schema.proto_fragment(), end="")


# -- warmup, run


app.command("warmup")(report.reported(warmup.warmup))


@app.command()
@report.reported
def run(
    model: ModelPath,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="NAME=FILE.npy", help="Or NAME=NUMBER, NAME=[1,2]."),
    ] = None,
    caches: Annotated[
        list[str] | None,
        typer.Option(
            "--cache",
            metavar="NAME=DIMS",
            help="batch:1,max_length:64 for zeros, FILE.npy, updated in place, or FILE.pages.",
        ),
    ] = None,
    saves: Annotated[
        list[str] | None,
        typer.Option("--save", metavar="NAME=FILE.npy", help="Write a result or a cache (.pages)."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of onnxruntime and of kernels.")] = 1,
    json_: Json = False,
) -> None:
    """Run a model once, in place."""
    feeds = values.pairs(inputs or [], "--input", "NAME=FILE.npy").items()
    given = {name: values.feed(text, name) for name, text in feeds}
    stored = values.pairs(caches or [], "--cache", "NAME=DIMS").items()
    arguments = {name: values.cache(text, name) for name, text in stored}
    targets = values.pairs(saves or [], "--save", "NAME=FILE.npy")
    session = onnx_inplace.Session(model, threads=threads)
    for port in session.inputs:
        if isinstance(given.get(port.name), np.ndarray):
            given[port.name] = values.typed(given[port.name], port.dtype)
    storage = {
        port.name: values.storage(session, port, arguments.pop(port.name, None))
        for port in session.mutable_inputs
    }
    if arguments:
        message = f"{', '.join(arguments)}: no mutable input of {model}"
        raise typer.BadParameter(message, param_hint="--cache")
    roots = {name: root for name, _, root in session.results if root is not None}
    results.check_targets(targets, results.ports(session))
    outputs = session.run(given, writable=storage)
    for array in storage.values():
        if isinstance(array, np.memmap):
            array.flush()
    results.save({**storage, **dict(outputs.items())}, targets)
    if json_:
        report.print_json({"ok": True, "results": results.to_json(outputs, roots)})
        return
    for name, array in outputs.items():
        alias = f"  (is {roots[name]})" if name in roots else ""
        print(f"{name}{alias}  {values.describe(array)}")
