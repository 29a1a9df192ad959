"""How every program reads its options and reports what the user can put right."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from experiments.errors import UserError
from jaxaccel import target


def parse[T](
    kind: type[T],
    *,
    default: T | None = None,
    args: list[str],
    prog: str,
    aliases: Mapping[str, str] = {},
) -> T:
    """Reads options into the dataclass `kind`; `aliases` are other words for some.

    Raises:
      UserError: an option is unknown (the message names the nearest) or its value is not legal.
    """
    args = [
        "=".join([aliases.get(option, option), *value])
        for option, *value in (arg.split("=", 1) for arg in args)
    ]
    import tyro  # not at the top: benchmarks are imported where it is not installed

    start = tyro.MISSING_NONPROP if default is None else default
    refusal = io.StringIO()
    try:
        with contextlib.redirect_stderr(refusal):
            return tyro.cli(
                kind, default=start, args=args, prog=prog, config=(tyro.conf.AvoidSubcommands,)
            )
    except SystemExit as stop:
        if stop.code:  # tyro draws a box of several lines: here it becomes one
            body = (line for line in refusal.getvalue().splitlines() if line[:1] == "│")
            lines = (line.strip("│─ ") for line in body)
            raise UserError(" ".join(line for line in lines if line)) from None
        raise


def use_compilation_cache() -> None:
    """Keeps compiled programs under the user's cache folder, for the next start."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(Path(base) / "jaxaccel" / "xla"))


def exit_with(program: Callable[[], int | None], prog: str) -> None:
    """Runs `program` and exits with its status; a `UserError` is one line and status 2.

    Ctrl-C is one line too, and the status a shell expects.
    """
    use_compilation_cache()
    target.quiet_cpu()
    try:
        status = program()
    except UserError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(status or 0)


def run(function: Callable[[Any], int | None], kind: type, argv: list[str] | None = None) -> None:
    """The body of a program that takes one dataclass of options."""
    prog = f"python -m {function.__module__}"
    if function.__module__ == "__main__" and (spec := sys.modules["__main__"].__spec__):
        prog = f"python -m {spec.name}"
    args = sys.argv[1:] if argv is None else argv
    exit_with(lambda: function(parse(kind, args=args, prog=prog)), prog)
