"""The options that a user may set once and for all, with their kinds and defaults. Data only.

The command line takes them from here, and so do the configuration file and the environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from edgespec.catalog import DEFAULT_MODEL
from edgespec.drafter_names import WORDS

Value = str | int | float | bool | None
Kind = Literal["text", "whole", "number", "switch", "size", "length"]

# Commands that load a model, and those among them that let the user say how to speculate.
_LOADING = ("bench", "chat", "plan", "score")
_SPECULATING = ("bench", "chat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A key of the configuration, and where it has commands the flag that is called the same.

    kind is text, whole (a count), number, switch (true or false), size (bytes, or 2G) or length (auto, or a
    count). commands are those that take it. in_environment says that EDGESPEC_NAME is heard too: what tells of a
    machine is, and how tokens are sampled is not, so that a text never hangs on what a shell was told.
    """

    kind: Kind
    help: str
    default: Value = None
    commands: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    in_environment: bool = False


OPTIONS: Mapping[str, Option] = {
    "model": Option(
        kind="text",
        default=DEFAULT_MODEL,
        commands=("chat",),
        in_environment=True,
        help="the model that chat takes where none is named",
    ),
    "home": Option(kind="text", in_environment=True, help="the folder of prepared models and downloads"),
    "offline": Option(
        kind="switch",
        default=False,
        commands=("bench", "chat", "doctor", "export", "models pull", "pair check", "plan", "score"),
        in_environment=True,
        help="never connect to anything",
    ),
    "threads": Option(
        kind="whole",
        commands=("bench", "chat", "doctor", "plan", "score"),
        metavar="N",
        in_environment=True,
        help="threads of the target (default: all cores)",
    ),
    "drafter-threads": Option(
        kind="whole",
        commands=("bench", "chat"),
        metavar="N",
        in_environment=True,
        help="threads of a model drafter (default: as many as the target has)",
    ),
    "device": Option(
        kind="text",
        default="auto",
        commands=_LOADING,
        metavar="NAME",
        in_environment=True,
        help="where the target runs: auto, or one of edgespec devices",
    ),
    "allow-fallback": Option(
        kind="switch",
        default=False,
        commands=("bench", "chat", "score"),
        in_environment=True,
        help="have the CPU run what a device that was named would not, and say so",
    ),
    "drafter-device": Option(
        kind="text",
        default="auto",
        commands=("bench", "chat", "plan"),
        metavar="NAME",
        in_environment=True,
        help="where a model drafter runs",
    ),
    "memory": Option(
        kind="size",
        commands=("bench", "chat", "plan"),
        metavar="BYTES",
        in_environment=True,
        help="hold no more than this in all, such as 2G or 512M, and draft accordingly",
    ),
    "drafter": Option(
        kind="text",
        default="auto",
        commands=_SPECULATING,
        metavar="D",
        in_environment=True,
        help=f"auto, none, {WORDS}",
    ),
    "draft-length": Option(
        kind="length",
        default="auto",
        commands=_SPECULATING,
        metavar="N",
        help="auto, or tokens a draft",
    ),
    "schedule": Option(
        kind="text",
        default="auto",
        commands=_SPECULATING,
        choices=("auto", "serial", "pipelined", "hedged"),
        help="whether a model drafts on while the target verifies",
    ),
    "acceptance": Option(
        kind="text",
        default="equality",
        commands=_SPECULATING,
        choices=("equality", "rejection"),
        help="which drafted tokens stay",
    ),
    "deterministic": Option(
        kind="switch",
        default=False,
        commands=_SPECULATING,
        help="the same bytes whatever drafts, about a fifth slower",
    ),
    "system": Option(kind="text", commands=("chat",), metavar="TEXT", help="a system message"),
    "max-tokens": Option(
        kind="whole",
        commands=("chat",),
        metavar="N",
        help="the most tokens of an answer (default: no limit)",
    ),
    "temperature": Option(kind="number", default=0.0, commands=("chat",), metavar="T", help="0 is greedy"),
    "top-k": Option(kind="whole", default=0, commands=("chat",), metavar="K", help="the likeliest K; 0 is all"),
    "top-p": Option(
        kind="number", default=1.0, commands=("chat",), metavar="P", help="the likeliest that have P in all"
    ),
    "min-p": Option(
        kind="number", default=0.0, commands=("chat",), metavar="P", help="those of P times the likeliest's chance"
    ),
    "repetition-penalty": Option(
        kind="number", default=1.0, commands=("chat",), metavar="R", help="divides logits of tokens in the text"
    ),
    "presence-penalty": Option(
        kind="number", default=0.0, commands=("chat",), metavar="A", help="taken off tokens of the answer"
    ),
    "frequency-penalty": Option(
        kind="number", default=0.0, commands=("chat",), metavar="A", help="the same, each time that they came"
    ),
    "seed": Option(kind="whole", default=0, commands=("chat",), metavar="S", help="of the noise that samples"),
    "no-memory": Option(
        kind="switch",
        default=False,
        commands=("chat",),
        help="keep no answers for later drafts, and use no earlier ones",
    ),
    "no-history": Option(
        kind="switch",
        default=False,
        commands=("chat",),
        help="keep nothing of what is said: neither what is typed nor the conversation; implies --no-memory",
    ),
    "overflow": Option(
        kind="text",
        default="error",
        commands=("chat",),
        choices=("error", "drop-oldest"),
        help="what to do with a conversation that outgrows the context: refuse, or let the oldest rounds go",
    ),
    "color": Option(
        kind="text",
        default="auto",
        choices=("auto", "never"),
        in_environment=True,
        help="of chat's output on a terminal; NO_COLOR is heard too",
    ),
}
