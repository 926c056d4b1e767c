"""What a user did wrong, in one sentence that names the thing and the remedy."""


class UserError(Exception):
    """Bad input. Its text is one clear sentence; the command line prints it without a traceback."""


class ModelError(UserError):
    """A checkpoint that cannot be loaded: missing, truncated, of an unknown architecture, of the wrong shape."""


class RequestError(UserError):
    """A request that cannot be served: too long, or with impossible parameters."""
