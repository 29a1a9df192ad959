"""How every program reads its options and reports what the user can put right."""

import sys
from collections.abc import Callable
from typing import Any

import tyro

from experiments.errors import UserError


def parse[T](kind: type[T], *, default: T | None = None, args: list[str], prog: str) -> T:
    """Reads options into the dataclass `kind`; an unknown option exits with 2 and the nearest."""
    missing = {} if default is None else {"default": default}
    return tyro.cli(kind, args=args, prog=prog, config=(tyro.conf.AvoidSubcommands,), **missing)


def exit_with(program: Callable[[], int | None], prog: str) -> None:
    """Runs `program` and exits with its status; a `UserError` is one line and status 2."""
    try:
        status = program()
    except UserError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(status or 0)


def run(function: Callable[[Any], int | None], kind: type, argv: list[str] | None = None) -> None:
    """The body of a program that takes one dataclass of options."""
    prog = f"python -m {function.__module__}"
    if function.__module__ == "__main__" and (spec := sys.modules["__main__"].__spec__):
        prog = f"python -m {spec.name}"
    options = parse(kind, args=sys.argv[1:] if argv is None else argv, prog=prog)
    exit_with(lambda: function(options), prog)
