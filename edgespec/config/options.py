"""Every option that the command line, the configuration file and the environment share, declared once.

Flags and their help, `edgespec config`, the arguments of `load` and the tables in docs/ follow from this table.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Literal

from edgespec.config.drafter_names import TEXT
from edgespec.errors import PARAMETERS

MAX_ANSWERS = 16  # that one model makes at once
DEFAULT_MODEL = "smollm2-135m"
Value = str | int | float | bool | None
Kind = Literal["text", "whole", "limit", "number", "switch", "size", "length"]

_SPECULATION = "speculation"
_SAMPLING = "sampling"
_DEVICES = "devices and memory"
_STORAGE = "conversation and stored data"
_SERVER = "server"
GROUPS = {
    _SAMPLING: "How the next token is chosen: by default as the files of MODEL suggest, and where they suggest "
    "nothing greedily, always the most likely one.",
    _SPECULATION: "A drafter guesses the next tokens; the target, which is MODEL, checks all of them in one pass "
    "and keeps those that it would have written itself.",
    _DEVICES: None,
    _STORAGE: None,
    _SERVER: None,
}

# Commands that load a model, and those that choose a drafter for it.
_SPECULATING = ("bench", "chat", "serve")
_LOADING = (*_SPECULATING, "plan", "score")
# Commands that export a model, or a pair, for devices.
_PREPARING = ("export", "models pull", "pair check")


@dataclass(frozen=True, slots=True)
class Option:
    """A key of the configuration file, and the flag of the same name.

    kind: text, whole (a count), limit (a count, or -1 for none), number, switch (true or false), size (bytes, or
        2G) or length (auto, or a count).
    commands: Commands that have the flag and obey the configuration.
    group: A key of GROUPS, under which help lists the flag.
    in_environment: Whether EDGESPEC_NAME sets it too. Options about the machine may be set so. Options that change
        what is sampled may not: a forgotten variable would change texts.
    is_secret: Whether its value is never shown.
    """

    kind: Kind
    help: str
    default: Value = None
    _: KW_ONLY
    commands: tuple[str, ...] = ()
    group: str | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    in_environment: bool = False
    is_secret: bool = False


_sampling = partial(Option, commands=("chat",), group=_SAMPLING)
_speculation = partial(Option, commands=_SPECULATING, group=_SPECULATION)
_devices = partial(Option, group=_DEVICES, in_environment=True)
_storage = partial(Option, commands=("chat",), group=_STORAGE)
_server = partial(Option, commands=("serve",), group=_SERVER, in_environment=True)

_OPTIONS: Mapping[str, Option] = {
    "model": Option(
        "text",
        "the model that chat uses when none is named",
        DEFAULT_MODEL,
        commands=("chat",),
        in_environment=True,
    ),
    "home": Option("text", "the folder for prepared models and downloads", in_environment=True),
    "system": Option("text", "system message: what the model reads first", commands=("chat",), metavar="TEXT"),
    "max-tokens": Option(
        "limit", "longest answer, in tokens (default: -1, no limit)", commands=("chat", "serve"), metavar="N"
    ),
    "offline": Option(
        "switch",
        "never use the network",
        False,
        commands=(*_LOADING, "doctor", "train", *_PREPARING),
        in_environment=True,
    ),
    "keep-download": Option(
        "switch",
        "keep what is downloaded for an export, also once the export was checked",
        False,
        commands=(*_LOADING, *(name for name in _PREPARING if name != "pair check")),
    ),
    "model-sampling": _sampling(
        "switch",
        "choose tokens as the files of MODEL suggest (their temperature, top-k, top-p, min-p and repetition "
        "penalty); other options of this group override single values. --no-model-sampling is greedy",
        True,
    ),
    "temperature": _sampling("number", "0 is greedy; higher values vary the text more", 0.0, metavar="T"),
    "top-k": _sampling("whole", "keep the K most likely tokens; 0 keeps all", 0, metavar="K"),
    "top-p": _sampling(
        "number", "nucleus sampling: keep the most likely tokens whose probabilities sum to P", 1.0, metavar="P"
    ),
    "min-p": _sampling(
        "number", "keep tokens whose probability is at least P times that of the most likely one", 0.0, metavar="P"
    ),
    "repetition-penalty": _sampling(
        "number", "above 1: tokens that occur in the prompt or the answer become less likely", 1.0, metavar="R"
    ),
    "presence-penalty": _sampling(
        "number", "subtract A from the logit of each token that occurs in the answer", 0.0, metavar="A"
    ),
    "frequency-penalty": _sampling(
        "number", "subtract A from a token's logit for each time that it occurs in the answer", 0.0, metavar="A"
    ),
    "seed": _sampling("whole", "random seed for sampling", 0, metavar="S"),
    "drafter": _speculation(
        "text",
        f"auto (whatever saves time), none, {' or '.join(TEXT)} (repeat earlier text), lookahead (the target "
        "guesses at several positions), self (fewer layers of the target), or a model. A+B uses both; with "
        "A,B the drafter B drafts for A",
        "auto",
        metavar="D",
        in_environment=True,
    ),
    "draft-length": _speculation("length", "tokens per draft, or auto: as many as save time", "auto", metavar="N"),
    "deterministic": _speculation(
        "switch",
        "the same text, to the byte, with any drafter and with none (default: wherever that is proved for MODEL "
        "on its device, which is checked once). --no-deterministic gives it up: passes without a draft are then "
        "about a tenth faster on the CPU, and rounding may then decide between two tokens that are about equally "
        "likely",
    ),
    "exact": _speculation(
        "switch",
        "where deterministic does not hold: decide such tokens as plain decoding does, in passes of one token. "
        "For greedy text; can cost more than drafting saves",
        False,
    ),
    "acceptance": _speculation(
        "text",
        "equality: a seed gives the same text with any drafter. rejection: keeps more tokens of a drafter "
        "model when temperature is above 0, but the text depends on the drafter",
        "equality",
        choices=("equality", "rejection"),
    ),
    "learn": Option(
        "text",
        "let the drafting head of MODEL learn from your answers while none is made, under NAME, which stands for "
        "a use such as mail or code. What it learned stays beside the head: see `edgespec models learned`",
        commands=("chat",),
        group=_SPECULATION,
        metavar="NAME",
    ),
    "schedule": _speculation(
        "text",
        "when a drafter model works. serial: while the target waits. pipelined: while the target checks the "
        "block before. hedged: pipelined, with drafts for other outcomes too. auto: the one measured to be "
        "fastest. pipelined and hedged draft ahead only while that pays, unless draft-length is fixed",
        "auto",
        choices=("auto", "serial", "pipelined", "hedged"),
    ),
    "device": _devices(
        "text",
        "where MODEL runs, which is prepared for it on first use: auto, gpu, npu, or a name that "
        "`edgespec devices` lists",
        "auto",
        commands=(*_LOADING, *_PREPARING),
        metavar="NAME",
    ),
    "drafter-device": _devices(
        "text", "where a drafter model runs", "auto", commands=(*_SPECULATING, "plan", *_PREPARING), metavar="NAME"
    ),
    "allow-fallback": _devices(
        "switch",
        "run on the CPU, with a message, what the named device cannot run",
        False,
        commands=(*_SPECULATING, "score"),
    ),
    "cuda-graph": _devices(
        "switch",
        "record passes on an NVIDIA GPU and replay them (CUDA graphs) where replays are found right, which is "
        "checked once; not in deterministic mode",
        True,
        commands=_LOADING,
    ),
    "threads": _devices(
        "whole",
        "CPU threads for MODEL (default: one per physical core)",
        commands=(*_LOADING, "doctor"),
        metavar="N",
    ),
    "drafter-threads": _devices(
        "whole",
        "CPU threads for a drafter model (default: as many as MODEL has)",
        commands=_SPECULATING,
        metavar="N",
    ),
    "memory": _devices(
        "size",
        "RAM that this process may use, such as 2G or 512M; drafters that do not fit are left out",
        commands=(*_SPECULATING, "plan"),
        metavar="BYTES",
    ),
    "context": _devices(
        "whole",
        "the most tokens of a conversation with its answer; a shorter context takes less memory (default: the "
        "context of MODEL)",
        commands=_SPECULATING,
        metavar="N",
    ),
    "overflow": _storage(
        "text",
        "when the conversation outgrows the context: refuse the message, or leave out the oldest messages",
        "error",
        choices=("error", "drop-oldest"),
    ),
    "loops": _storage(
        "text",
        "when an answer repeats one span of text over and over: stop it, or let it go on (default: stop, unless "
        "--max-tokens bounds it)",
        choices=("stop", "keep"),
    ),
    "keep-prefix": _storage(
        "switch",
        "when a chat is left, or the server closes a model, keep on the disk what the model has read, so that it "
        "need not be read again; takes some 50 kB a token with small models",
        False,
        commands=("chat", "serve"),
    ),
    "no-answer-cache": _storage(
        "switch", "do not store answers to draft from later, and do not draft from stored ones", False
    ),
    "no-history": _storage(
        "switch",
        "save nothing: neither your input nor the conversation; implies --no-answer-cache and --no-usage",
        False,
    ),
    "no-usage": _storage(
        "switch", "do not count tokens and saved time for `edgespec stats`", False, commands=("chat", "serve")
    ),
    "host": _server(
        "text",
        "the address of the server; any but this machine's own (127.0.0.1, localhost, ::1) needs a key",
        "127.0.0.1",
        commands=("serve", "models ps"),
        metavar="H",
    ),
    "port": _server(
        "whole",
        "the port of the server; for serve 0 is any free one",
        8080,
        commands=("serve", "models ps"),
        metavar="P",
    ),
    "api-key": _server(
        "text",
        "the key that clients must send. Other users of this machine can read a command line, so rather set the "
        "variable",
        commands=("serve", "models ps"),
        metavar="K",
        is_secret=True,
    ),
    "no-web": _server("switch", "serve no chat page at the address of the server", False),
    "allow-origin": _server(
        "text",
        "let the pages of a site ask, such as http://localhost:3000 or app://obsidian.md; several with commas",
        metavar="URL",
    ),
    "max-models": _server("whole", "how many models may be loaded at once", 1, metavar="N"),
    "max-parallel": _server(
        "whole",
        f"how many requests one model answers at once, 1 to {MAX_ANSWERS} (default: 4, or as many as there is "
        "memory for)",
        metavar="N",
    ),
    "idle-timeout": _server(
        "number", "close a model that nobody has used for S seconds; 0 keeps models", 900.0, metavar="S"
    ),
    "stats": Option(
        "switch",
        "while an answer is written, show its speed, who drafted, devices and memory in a line below it",
        False,
        commands=("chat",),
    ),
    "color": Option(
        "text",
        "colours of the chat in a terminal; the variable NO_COLOR switches them off too",
        "auto",
        choices=("auto", "never"),
        in_environment=True,
    ),
}
OPTIONS = {
    name: replace(each, commands=(*each.commands, "service install")) if "serve" in each.commands else each
    for name, each in _OPTIONS.items()
}
# Renamed options, whose old names a configuration file may still have.
OLD_NAMES = {"no-memory": "no-answer-cache"}
# The argument of `load` that takes an option's value.
LOAD_PARAMETERS = {
    name: PARAMETERS.get(name, name.replace("-", "_"))
    for name, option in OPTIONS.items()
    if option.group in (_SPECULATION, _DEVICES) or name in ("home", "offline", "keep-download", "max-parallel")
}
SAMPLING_OPTIONS = [
    name for name, option in OPTIONS.items() if option.group == _SAMPLING and name != "model-sampling"
]
# The options that a preset may have.
PRESET_OPTIONS = (
    *("system", "max-tokens", "context", *SAMPLING_OPTIONS),
    *(name for name, option in OPTIONS.items() if option.group == _SPECULATION),
)
