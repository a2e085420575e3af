"""The one exception that ends a command with one line and exit code 2."""


class UserError(Exception):
    """Something the user can mend.

    The message is one line that says what is wrong, where (file, key or row) and what to do about it.
    Anything else that escapes is a bug of this project and keeps its traceback.
    """
