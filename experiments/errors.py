"""What a program turns into one line and an exit status: 2 for bad input, 1 for a run's end."""

import contextlib
from collections.abc import Generator


class UserError(ValueError):
    """Something the user can put right: the message says what was got and what is legal."""


class RunStopped(Exception):
    """The run cannot go on; what it has saved is intact."""


@contextlib.contextmanager
def user_errors(where: str = "") -> Generator[None]:
    """Turns a library's `ValueError` about what the user chose into a `UserError`.

    Args:
      where: what to put before the message.
    """
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{where}{error}") from error
