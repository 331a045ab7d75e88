"""All errors that edgespec raises on purpose, with the exit code of the command line for each.

EdgeSpecError                 1  anything else that went wrong
├── DiskFull                  1  no room for what is to be written
├── UsageError                2  an argument that makes no sense
│   ├── ConversationError     2  messages that the chat template of the model refuses
│   ├── FormatError           2  a response_format that is wrong, or that no answer of the length allowed can match
│   └── ToolError             2  a tool that is wrong, or whose schema no grammar can ensure
├── ModelError                3  model missing or invalid
│   ├── UnsuitedModel         3  a model that was not trained for what it is asked for: text, or vectors of texts
│   ├── NotOnHub              3  the hub says that it has no such repository, revision or file
│   ├── SourceError           3  a file to export from is broken, foreign or unsupported
│   ├── ExportMismatch        3  an export whose output differs from its source's
│   │   └── PrecisionLoss     3  an export that is right, in a precision that loses too much
│   ├── ManifestError         3  a model folder that is incomplete or of another schema
│   └── VocabularyMismatch    3  drafter and target share too few tokens
├── DrafterFault              1  a drafter failed; answers continue without it
├── Cancelled                 1  work was cancelled, its result is not needed any more
├── UnknownMemory             1  no driver reports a device's free memory; it is not checked
├── DeviceUnavailable         4  no execution provider, or not the requested one
├── MemoryExhausted           5  weights, cache or workspace do not fit
├── IntegrityError            6  bytes differ from their recorded hash
└── ContextOverflow           7  more tokens than the context length

A message says what was found, what was wanted and what to do. It names an option by its flag of the command line;
str() of the error says it in the words of Python, and a command turns it back (in_flags).
"""

import re

# Options that functions of Python take too; what differs in more than its hyphens.
_SWITCHES = ("allow-fallback", "check", "cuda-graph", "deterministic", "exact", "keep-download", "offline")
_OPTIONS = (
    "acceptance", "adapter", "calibration", "context", "context-length", "device", "draft-length", "drafter",
    "drafter-device", "drafter-threads", "home", "learn", "max-parallel", "memory", "output", "precision",
    "revision", "schedule", "threads",
)  # fmt: skip
_RENAMED = {"threads": "num_threads", "memory": "memory_limit"}
PARAMETERS = {name: _RENAMED.get(name, name.replace("-", "_")) for name in (*_SWITCHES, *_OPTIONS)}
_FLAGS = {parameter: name for name, parameter in PARAMETERS.items()}
# Patterns are compiled where a message is worded, since few starts word one: 5 ms.
# To be typed in a shell.
_COMMAND = r"(\b(?:edgespec [a-z]|pip |python -m )(?:'[^']*'|[^;,()\n])*)"
_VALUES = (
    "auto|none|ngram|suffix|lookahead|self|mtp|cpu|gpu|npu|cuda|webgpu|openvino|qnn|coreml|directml|tensorrt-rtx|"
    "source|fp32|fp16|int8|int4|w8a16|serial|pipelined|hedged|equality|rejection"
)
# A value is a placeholder, a number, in quotes, one of these, a path, or the last word before a stop.
_FLAG = (
    rf"--(no-(?={'|'.join(_SWITCHES)}))?({'|'.join(sorted(PARAMETERS, key=len, reverse=True))})(?![\w-])"
    rf"(?: (?:([A-Z]{{2,}}\b|[0-9][\w.]*)|'([^']*)'|((?:{_VALUES})(?::\w+)*\b|[^\s;,()']*[/\\][^\s;,()']*|"
    r"(?!out\b|instead\b|too\b)[\w.:+-]*\w(?=\.?$|[;,)]))))?"
)
_PARAMETER = (
    rf"(?<![\w.'\"`=/-])({'|'.join(sorted(_FLAGS, key=len, reverse=True))})="
    r"(?:'([^']*)'|(True|False)\b|([0-9][\w.]*|[A-Z]{2,}\b)|(?![\w'\"=]))"
)


# Commands that are functions of Python too, and what is given to one.
_CALLS = {
    **{
        f"models {name}": f"models.{name}"
        for name in ("list", "pull", "prune", "remove", "rename", "show", "verify")
    },
    "export": "models.export",
}
_CALL = rf"(?s)edgespec ({'|'.join(_CALLS)})(?![\w-])((?: (?:'[^']*'|[^\s'])+?)*?)( has the names.*)?(\.?)"
# Any other option, which these functions do not take.
_FOREIGN = r"--(?!(?:adapter|device|output|precision|revision) )"
_CALLED = rf"(?<![\w.])({'|'.join(_CALLS.values())})\(((?:'[^']*'|[^()'])*)\)"


def in_python(message: str) -> str:
    """A message in the words of Python: --memory 2G is memory_limit='2G', edgespec models list is models.list().

    Commands that no function of Python does stay as they are.
    """
    parts = re.split(_COMMAND, message)
    return "".join(_as_call(part) if i % 2 else re.sub(_FLAG, _as_argument, part) for i, part in enumerate(parts))


def _as_call(command: str) -> str:
    found = re.fullmatch(_CALL, command)
    if not found or re.search(_FOREIGN, found[2]):
        return command
    pieces = re.findall(r"(?:'[^']*'|[^\s'])+", re.sub(_FLAG, _as_argument, found[2]))
    plain = [piece for piece in pieces if "=" not in piece]
    if len(plain) > 1 + (found[1] == "models rename"):
        return command
    given = [piece if "=" in piece or piece[0] == "'" or piece.isupper() else f"'{piece}'" for piece in pieces]
    shown = given if plain or not given else ["…", *given]
    return f"{_CALLS[found[1]]}({', '.join(shown)}){found[3] or ''}{found[4]}"


def _as_command(found: re.Match[str]) -> str:
    name = next(command for command, function in _CALLS.items() if function == found[1])
    pieces = [piece.strip() for piece in re.findall(r"(?:'[^']*'|[^,'])+", found[2])]
    given = [in_flags(piece) if "=" in piece else _in_shell(piece.strip("'")) for piece in pieces if piece != "…"]
    return " ".join(["edgespec", name, *given])


def _as_argument(found: re.Match[str]) -> str:
    no, name, plain, quoted, word = found.groups()
    if name in _SWITCHES:
        return f"{PARAMETERS[name]}={not no}{found[0].partition(name)[2]}"
    is_plain = plain and (plain.isdecimal() or (plain.isupper() and plain.isalpha()))  # no size, such as 512M
    texts = [each for each in (quoted, word, None if is_plain else plain) if each is not None]
    return f"{PARAMETERS[name]}={repr(texts[0]) if texts else plain or ''}"


def in_flags(message: str) -> str:
    """A message with arguments of Python as options of the command line, and calls as commands."""
    return re.sub(_PARAMETER, _as_flag, re.sub(_CALLED, _as_command, message))


def _as_flag(found: re.Match[str]) -> str:
    parameter, quoted, switch, bare = found.groups()
    flag = f"--{'no-' if switch == 'False' else ''}{_FLAGS[parameter]}"
    value = bare if quoted is None else _in_shell(quoted)
    return flag if value is None else f"{flag} {value}"


def _in_shell(text: str) -> str:
    return text if re.fullmatch(r"[\w.:+/\\-]+", text) else f"'{text}'"


class EdgeSpecError(Exception):
    """Anything that edgespec raises on purpose."""

    exit_code = 1

    def __str__(self) -> str:
        # Half of a surrogate pair in a name could not be printed.
        return in_python(super().__str__()).encode("utf-8", "backslashreplace").decode()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        # Without __init__, which may take more than the message: another process can be sent any error.
        return Exception.__new__, (type(self), *self.args), vars(self)


class DiskFull(EdgeSpecError):
    """A folder lacks room for needed_bytes."""

    def __init__(self, message: str, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class UsageError(EdgeSpecError):
    """An argument makes no sense."""

    exit_code = 2


class ConversationError(UsageError):
    """The chat template of the model refuses the messages, such as a system message or roles in a wrong order."""


class FormatError(UsageError):
    """A response_format is wrong or too much work, or no answer of the length allowed can match it."""


class ToolError(UsageError):
    """A tool is wrong, or no grammar can ensure its schema.

    field: What is wrong, such as "tools[2].function.parameters".
    """

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class ModelError(EdgeSpecError):
    """A model is missing or invalid."""

    exit_code = 3


class UnsuitedModel(ModelError):
    """A model is asked for what it was not trained for: text, or vectors of texts."""


class NotOnHub(ModelError):
    """The hub says that it has no such repository, revision or file."""


class SourceError(ModelError):
    """A file to export from is broken, foreign or unsupported."""


class ExportMismatch(ModelError):
    """The output of an export differs from its source's."""


class PrecisionLoss(ExportMismatch):
    """An export is right, but its precision loses more of the source than it should."""

    def __init__(self, message: str, precision: str = "") -> None:
        super().__init__(message)
        self.precision = precision


class ManifestError(ModelError):
    """A model folder is incomplete, of another schema, or not what its manifest says."""


class VocabularyMismatch(ModelError):
    """Drafter and target share too few tokens."""


class DrafterFault(EdgeSpecError):
    """A drafter failed; answers continue without it."""


class Cancelled(EdgeSpecError):
    """Work was ended before its result, because nobody wants it any more."""


class UnknownMemory(EdgeSpecError):
    """Nothing tells how much memory a device has free."""


class DeviceUnavailable(EdgeSpecError):
    """No execution provider, or not the requested one.

    device: The device that is not available; None where no other device would help either.
    """

    exit_code = 4

    def __init__(self, message: str, *, device: str | None = None) -> None:
        super().__init__(message)
        self.device = device


class MemoryExhausted(EdgeSpecError):
    """Weights, cache or workspace do not fit; needed_bytes and free_bytes are None where unknown."""

    exit_code = 5

    def __init__(self, message: str, *, needed_bytes: int | None = None, free_bytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class IntegrityError(EdgeSpecError):
    """Bytes differ from their recorded hash."""

    exit_code = 6


class ContextOverflow(EdgeSpecError):
    """More tokens than the context length.

    whole_length: The model's own context length, where memory limits it to context_length.
    is_all: Whether num_tokens counts all tokens; counting may stop at the first one too many.
    """

    exit_code = 7

    def __init__(
        self, num_tokens: int, context_length: int, whole_length: int | None = None, *, is_all: bool = True
    ) -> None:
        advice = "shorten the prompt, raise --context if you gave one, or choose a model with a longer context"
        if whole_length is not None and whole_length > context_length:
            advice = (
                f"memory was too short for the model's {whole_length} when it was loaded: shorten the prompt, "
                "raise the limit (--memory), or close other programs and load the model again"
            )
        more = "" if is_all else " or more"
        super().__init__(f"{num_tokens}{more} tokens do not fit the context of {context_length}; {advice}")
        self.num_tokens = num_tokens
        self.context_length = context_length


def require_context(num_tokens: int, context_length: int) -> None:
    """Raises ContextOverflow: A text of num_tokens tokens is longer than the context."""
    if num_tokens > context_length:
        raise ContextOverflow(num_tokens, context_length)
