"""The base of every error that jaxkv raises on purpose.

Contract: `str(error)` is one line that says what was wrong, with the numbers, and what to do about it. Callers that
face a person (the command line, the HTTP server) print that line as it is and show no traceback, so an error that
derives from `JaxkvError` promises to be readable without one. It is a `ValueError` so that library users who catch
that keep working.
"""


class JaxkvError(ValueError):
    """What was wrong, the numbers, and the remedy, in one line."""
