"""The one exception that a program turns into one line and exit status 2."""


class UserError(ValueError):
    """Something the user can put right: the message says what was got and what is legal."""
