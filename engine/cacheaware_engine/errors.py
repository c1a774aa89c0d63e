"""What can go wrong in the engine, as one tree.

EngineError
├── ModelError              the model named by --model cannot be served; the process ends with code 1 and the message
│   ├── ModelNotFound       nothing is there, or it could not be fetched
│   ├── ModelUnreadable     something is there, but it is damaged or incomplete
│   └── ModelUnsupported    it is intact, and needs something this engine does not compute
├── ContextTooLong          --max-model-len asks for more positions than the model has
├── NotEnoughMemory         weights and KV cache do not fit, with the arithmetic
├── NoNativeAttention       the native library cannot be built or loaded; asked for by name, that ends the process
├── InvalidSampling         a sampling parameter of a request is out of range (also a ValueError)
├── BrokenLogits            the network produced values that are not numbers
└── RequestError            one request cannot be answered; carries the HTTP status and OpenAI's error fields
    ├── BadRequest          400: a field is wrong; the message names it and says what was expected
    ├── NotServed           404: no such model or path here
    ├── EngineBroke         500: a step failed, and the process is about to end
    └── Unavailable         503: loading or draining; another try later, or elsewhere, may do
"""

from __future__ import annotations

from collections.abc import Sequence


class EngineError(Exception):
    """Root of all errors raised on purpose by the engine."""


class ModelError(EngineError):
    """The model cannot be served."""


class ModelNotFound(ModelError):
    """There is no model where the source points."""


class ModelUnreadable(ModelError):
    """The model's files are damaged, incomplete or contradict each other."""


class ModelUnsupported(ModelError):
    """The model needs something that this engine does not compute; `reason` names it."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"this model cannot be served by the Torch engine: {reason}")
        self.reason = reason


class ContextTooLong(EngineError):
    """More positions were asked for than the model was made for."""

    def __init__(self, asked: int, available: int) -> None:
        super().__init__(
            f"--max-model-len {asked} is longer than the model's context of {available} tokens; "
            f"ask for at most {available}"
        )
        self.asked = asked
        self.available = available


class NotEnoughMemory(EngineError):
    """Weights and KV cache together exceed what the machine has free."""


class NoNativeAttention(EngineError):
    """There is no native library of attention for this machine. The message says why, and what would help."""


class NativeAttentionUnsupported(NoNativeAttention):
    """The machine lacks what it takes: a compiler, or a torch with the threads of GNU's OpenMP. Nothing is broken."""


class InvalidSampling(EngineError, ValueError):
    """A sampling parameter is out of range; `field` is its name in the request."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class BrokenLogits(EngineError):
    """The logits of some rows hold NaN or infinity; `rows` are their indices in the batch."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(
            f"the model's output is not a number for {len(rows)} sequence(s) of this step (rows {list(rows)}); "
            "check the weights and the compute dtype (--dtype float32 has the widest range)"
        )
        self.rows = tuple(rows)


class RequestError(EngineError):
    """One request cannot be answered. `param` is the field at fault, `code` OpenAI's machine-readable reason."""

    status = 500
    type = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class BadRequest(RequestError):
    """What was asked for is wrong, and stays wrong until the caller changes it."""

    status = 400
    type = "invalid_request_error"


class NotServed(RequestError):
    """There is nothing of that name here."""

    status = 404
    type = "invalid_request_error"


class EngineBroke(RequestError):
    """A step failed. Every live request ends with this, and the process with it."""


class Unavailable(RequestError):
    """Not now: the model loads, or the process drains."""

    status = 503
    type = "service_unavailable"
