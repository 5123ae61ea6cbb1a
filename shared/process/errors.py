"""What a user is told: errors that end a run in one line with a stated exit code."""

import re

from shared.process.redaction import redact


def shown(text: str) -> str:
    """`text` from outside (a name, a record, a label) as one line.

    Characters that move the cursor, begin a line or turn the direction of what follows are written
    out as escapes.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


# Not \udc80 and further: bytes of a file's name.
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udbff]"
)


class CleanExit(Exception):
    """An end that a user can act on: one line on the console, no traceback, and a stated exit code.

    A line, whatever of the input it quotes: secrets are masked, and control characters are written
    out. Where more lines are needed, each is an argument.
    """

    exit_code = 1
    alone = False  # this process ends by itself, for what all of them have not agreed on

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(shown(redact(line)) for line in lines))


class ConfigError(CleanExit):
    """Wrong input or configuration: what, where, and what to do."""

    exit_code = 2


class NotNow(CleanExit):
    """Nobody's input is wrong: a server, a machine or another run stands in the way, and the same
    command may work later.
    """


def is_of_the_network(error: BaseException | None) -> bool:
    """Whether an error, or one that it follows from, is a connection's or a server's, and not the
    user's.

    By names, since the libraries that raise these types need not be there.
    """
    names: set[str] = set()
    is_refused = False
    while error is not None:
        names |= {kind.__name__ for kind in type(error).__mro__}
        code = getattr(getattr(error, "response", None), "status_code", 0)
        is_refused |= code in (408, 429) or code >= 500
        error = error.__cause__ or error.__context__
    # which `datasets` turns into a ConnectionError
    return "OfflineModeIsEnabled" not in names and (is_refused or bool(names & _OF_THE_NETWORK))


# of Python, httpx, requests and aiohttp
_OF_THE_NETWORK = {
    *("ConnectionError", "TimeoutError", "gaierror", "TransportError", "Timeout"),
    *("ClientConnectionError", "ClientPayloadError", "ChunkedEncodingError"),
}


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its type if it says nothing."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip()


def reason_of(error: BaseException) -> str:
    """What failed, in one line, for those who try whether something works. An error of memory is
    raised again: it is no answer.
    """
    if is_out_of_memory(error):
        raise error
    return first_line(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's memory does not suffice: cuBLAS, cuDNN and NCCL say so in plain
    RuntimeErrors.
    """
    words = (  # the first is the name of PyTorch's own
        r"^OutOfMemoryError|(CUBLAS|CUDNN)_STATUS_\w*ALLOC\w*_FAILED"
        r"|(CUDA error|Cuda failure).*out of memory"
    )
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, RuntimeError) and bool(re.search(words, text))
