"""The command line: every command of ``fedaudit --help``. Heavy imports happen inside the commands."""

from __future__ import annotations

import io
import os
import sys
import traceback
import warnings
from enum import StrEnum
from typing import Annotated, NoReturn

import typer

from fedaudit.cli.audit import attack, audit, simulate
from fedaudit.cli.ceiling import ceiling
from fedaudit.cli.check_data import check_data
from fedaudit.cli.check_model import check_model
from fedaudit.cli.commands import add_commands, check_listed
from fedaudit.cli.compare import compare
from fedaudit.cli.convert import convert
from fedaudit.cli.explain import explain
from fedaudit.cli.init import init
from fedaudit.cli.join import join
from fedaudit.cli.ledger import ledger
from fedaudit.cli.options import (
    DataDir,
    Json,
    Seed,
    Settings,
    Workers,
    check_data_dir,
    check_folder,
    in_flags,
    number_of_workers,
    print_json,
)
from fedaudit.cli.share import share
from fedaudit.cli.statement import statement
from fedaudit.cli.verify import verify
from fedaudit.utils.bounds import shown
from fedaudit.utils.errors import OWN_MODEL, FedAuditError
from fedaudit.utils.machine import own_process
from fedaudit.utils.renamed import of_arguments
from fedaudit.utils.version import __version__

# Beside ``app`` and ``main``: what commands of other packages share with ours.
__all__ = [
    "DataDir",
    "Json",
    "Kind",
    "Seed",
    "Settings",
    "Workers",
    "app",
    "check_data_dir",
    "check_folder",
    "list_command",
    "main",
    "number_of_workers",
    "print_json",
]

INTERRUPTED = 130
_COMPLETION = "_FEDAUDIT_COMPLETE"  # set by a shell that asks what could follow
HUNG_UP = 141  # what a shell reports of a program whose reader went away

app = typer.Typer(
    name="fedaudit",
    help="What does a federation leak, to whom, and what does each defence cost?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_FIRST, _MORE, _ABOUT = "Commands for every day", "Parts of an audit, and what surrounds it", "What there is"
for panel, group in (
    (_FIRST, (init, audit, attack, compare, explain)),
    (_MORE, (share, join, statement, simulate, convert, verify)),
):
    for command in group:
        app.command(rich_help_panel=panel)(command)
app.command("check-data", rich_help_panel=_MORE)(check_data)
app.command("check-model", rich_help_panel=_MORE)(check_model)
app.command("ceiling", rich_help_panel=_MORE)(ceiling)
app.command("ledger", rich_help_panel=_MORE)(ledger)


class Kind(StrEnum):
    """What can be listed."""

    attacks = "attacks"
    defences = "defences"
    behaviours = "behaviours"
    models = "models"
    datasets = "datasets"
    studies = "studies"


@app.command("list", rich_help_panel=_ABOUT)
def list_command(
    kind: Annotated[Kind | None, typer.Argument(help="List only this kind.")] = None,
    long: Annotated[bool, typer.Option("--long", help="Also say what each one is, and what an attack needs.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON, one array per kind.")] = False,
) -> None:
    """List the available attacks, defences, malicious behaviours, models, data sets and studies."""
    from fedaudit.cli.catalogue import catalogue, print_catalogue, print_lines, print_names

    if kind:
        check_listed(kind.value)
    shown = catalogue([kind.value] if kind else [k.value for k in Kind])
    if json_output:
        print_json(shown)
    elif long:
        print_catalogue(shown)
    elif kind:
        print_lines(shown[kind.value])
    else:
        print_names(shown)
        print("'fedaudit list KIND' describes each in a line, --long in detail")


@app.command(rich_help_panel=_ABOUT)
def doctor(
    data_dir: DataDir = None,
    build: Annotated[
        bool, typer.Option("--build", help="Build the native code for this processor, and nothing else.")
    ] = False,
) -> None:
    """Show versions, threads, GPU, native code, and the data sets and weights found here."""
    from fedaudit.cli.doctor import build_native_code, examine

    if build:
        build_native_code()
    else:
        examine(data_dir)


add_commands(app)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; whatever ends it, foreseen or not, is one line and exit code 2, never a limit's 1."""
    try:
        _run()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        _unforeseen(error)


def _run() -> None:
    own_process()
    if sys.argv[1:] == ["--version"]:  # at once: to make all commands takes longer
        print(__version__)
        sys.exit(0)
    if not sys.warnoptions:  # a library's warning isn't an answer to the user; -W shows them
        warnings.simplefilter("ignore")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a letter must not end an audit
    try:
        code = app(of_arguments(sys.argv[1:]), standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except FedAuditError as error:
        _fail(in_flags(str(error)))
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        _hang_up()
    except SystemExit as error:  # from the command-line library
        if isinstance(error.__context__, BrokenPipeError):
            _hang_up()
        if _COMPLETION in os.environ:
            raise
        _fail(f"a program that was loaded for this ended itself (sys.exit, code {error.code!r}); nothing was tested")
    except OSError as error:
        if error.filename is not None:
            _fail(f"can't use '{shown(os.fsdecode(error.filename))}': {error.strerror or error}")
        _fail(f"can't write the output: {error.strerror or error}")
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.exit(2)  # the help has been printed
        if hasattr(error, "format_message"):  # a wrong flag or argument, from the command-line library
            own = f"; {OWN_MODEL}" if getattr(error, "option_name", None) == "--model" else ""
            _fail(" ".join(error.format_message().replace("Value error, ", "").split()) + own)
        if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
            _fail("there isn't enough memory; use a smaller model, batch_size or image_size, or fewer --workers")
        _unforeseen(error)
    if code == INTERRUPTED:
        exec("")  # else Python, interrupted within some library's exec("..."), ends itself by the signal
        _fail("interrupted; findings that were finished are kept, and the same command goes on from there", code)
    sys.exit(code if isinstance(code, int) else 0)


def _hang_up() -> NoReturn:
    """End quietly: the reader of our output has gone, as in ``fedaudit list | head -1``."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(HUNG_UP)


def _unforeseen(error: BaseException) -> NoReturn:
    """End with a line on what nobody foresaw, and how to see where it came from."""
    if os.environ.get("FEDAUDIT_DEBUG"):
        traceback.print_exception(error)
    try:
        said = f": {error}"
    except Exception:  # an exception of somebody's that can't be printed
        said = ""
    _fail(
        f"unforeseen {type(error).__name__}{said}; FEDAUDIT_DEBUG=1 shows where; please report it, for this is a bug "
        "in fedaudit or in a plug-in"
    )


def _fail(message: str, code: int = 2) -> NoReturn:
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in message[:1000])
    print(f"fedaudit: error: {shown}", file=sys.stderr)
    sys.exit(code)
