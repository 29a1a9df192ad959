"""The one exception that a program turns into one line and exit status 2."""

import contextlib
from collections.abc import Generator


class UserError(ValueError):
    """Something the user can put right: the message says what was got and what is legal."""


@contextlib.contextmanager
def user_errors() -> Generator[None]:
    """Turns a library's `ValueError` about what the user chose into a `UserError`."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error
