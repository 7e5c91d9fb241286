"""The one error that is meant for whoever called us: a message of one line, which names what is wrong and the fix."""


class UserError(ValueError):
    """What was asked for cannot be done. A command prints the message as one line and ends with status 2; on the way
    into a server the engine answers a request with 400."""
