"""Everything edgespec raises on purpose, with the exit code that the command line gives it.

EdgeSpecError                 1  anything else that went wrong
├── DiskFull                  1  no room for what is to be written
├── UsageError                2  an argument that cannot be meant
├── ModelError                3  model missing or invalid
│   ├── SourceError           3  a file to export from is broken, foreign or unsupported
│   ├── ExportMismatch        3  an export that does not say what its source says
│   ├── ManifestError         3  a model folder that is incomplete or of another schema
│   └── VocabularyMismatch    3  drafter and target share too few tokens
├── DrafterFault              1  a drafter failed; answers go on without it
├── Cancelled                 1  work was given up; nobody waits for what it would have made
├── UnknownMemory             1  no driver tells what is free of a device; nothing is checked there
├── DeviceUnavailable         4  no execution provider, or not the one asked for
├── MemoryExhausted           5  weights, cache or workspace do not fit
├── IntegrityError            6  bytes differ from their recorded hash
└── ContextOverflow           7  more tokens than the context length

A message says what was found, what was wanted and what to do.
"""


class EdgeSpecError(Exception):
    """Anything that edgespec raises on purpose."""

    exit_code = 1


class DiskFull(EdgeSpecError):
    """needed_bytes in all were to be written to folder, which has free_bytes; reserve_bytes are to stay free."""

    def __init__(
        self, folder: object, needed_bytes: int, free_bytes: int, reason: str = "", reserve_bytes: int = 0
    ) -> None:
        needed, free, reserve = (f"{count / 2**20:.1f} MiB" for count in (needed_bytes, free_bytes, reserve_bytes))
        because = f" ({reason})" if reason else ""
        besides = f", {reserve} more are to stay free," if reserve_bytes else ""
        super().__init__(
            f"no room in {folder}: about {needed} are needed{besides} and {free} are free{because}; "
            "free some space or choose another place"
        )
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class UsageError(EdgeSpecError):
    """An argument that cannot be meant."""

    exit_code = 2


class ModelError(EdgeSpecError):
    """A model is missing or invalid."""

    exit_code = 3


class SourceError(ModelError):
    """A file to export from is broken, foreign or unsupported."""


class ExportMismatch(ModelError):
    """An export does not say what its source says."""


class ManifestError(ModelError):
    """A model folder is incomplete, of another schema, or not what its manifest says."""


class VocabularyMismatch(ModelError):
    """Drafter and target share too few tokens."""


class DrafterFault(EdgeSpecError):
    """A drafter failed; answers go on without it."""


class Cancelled(EdgeSpecError):
    pass


class UnknownMemory(EdgeSpecError):
    pass


class DeviceUnavailable(EdgeSpecError):
    """No execution provider, or not the one that was asked for.

    device: The name that would serve elsewhere and does not here; None where no other device would help either.
    """

    exit_code = 4

    def __init__(self, message: str, *, device: str | None = None) -> None:
        super().__init__(message)
        self.device = device


class MemoryExhausted(EdgeSpecError):
    """needed_bytes were wanted and free_bytes were there, where that is known."""

    exit_code = 5

    def __init__(self, message: str, *, needed_bytes: int | None = None, free_bytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class IntegrityError(EdgeSpecError):
    """Bytes differ from their recorded hash."""

    exit_code = 6


class ContextOverflow(EdgeSpecError):
    """num_tokens were asked of a context of context_length.

    whole_length: Of the model, where there is no memory for all of it.
    is_all: Whether all tokens were counted, and not so many that the rest does not matter.
    """

    exit_code = 7

    def __init__(
        self, num_tokens: int, context_length: int, whole_length: int | None = None, *, is_all: bool = True
    ) -> None:
        cure = "shorten the prompt or choose a model with a longer context"
        if whole_length is not None and whole_length > context_length:
            cure = (
                f"for more of the model's {whole_length} there was no memory when it was loaded: shorten the "
                "prompt, raise the limit (--memory) or close other programs and load it again"
            )
        more = "" if is_all else " or more"
        super().__init__(f"{num_tokens}{more} tokens do not fit the context of {context_length}; {cure}")
        self.num_tokens = num_tokens
        self.context_length = context_length
