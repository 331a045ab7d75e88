"""Arguments that several commands take, and the engine that they ask for."""

import argparse
import os
from typing import TYPE_CHECKING

from edgespec.catalog import CATALOG
from edgespec.options import OPTIONS
from edgespec.talk import say_stage

if TYPE_CHECKING:
    from edgespec.engine import Engine

_TYPES = {"whole": int, "number": float}
_SAMPLING = (
    "temperature",
    "top-k",
    "top-p",
    "min-p",
    "repetition-penalty",
    "presence-penalty",
    "frequency-penalty",
    "seed",
)


def add_option(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, name: str, help: str | None = None
) -> None:
    """The flag of an option that can be set for good too; what it is comes from the table of them."""
    option = OPTIONS[name]
    told = help or option.help
    if option.kind == "switch":
        action = "store_true" if name.startswith("no-") else argparse.BooleanOptionalAction
        parser.add_argument(f"--{name}", action=action, default=option.default, help=told)
        return
    shown = option.default not in (None, "auto") and "default" not in told
    parser.add_argument(
        f"--{name}",
        type=_TYPES.get(option.kind, str),
        default=option.default,
        choices=option.choices or None,
        metavar=option.metavar,
        help=f"{told} (default {option.default})" if shown else told,
    )


def add_talk(parser: argparse.ArgumentParser) -> None:
    """How much a command says beside its data."""
    talk = parser.add_mutually_exclusive_group()
    talk.add_argument("-q", "--quiet", action="store_true", help="say nothing but what went wrong")
    talk.add_argument("-v", "--verbose", action="store_true", help="say what is decided and why, on stderr")


def add_model(parser: argparse.ArgumentParser, *, default: str | None = None, is_optional: bool = False) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if default or is_optional else None,
        default=default,
        help="a model folder, a .gguf file, a safetensors folder, a hub id (org/name), or a name: "
        f"{', '.join(CATALOG)}" + (f" (default {default})" if default else ""),
    )
    add_option(parser, "offline")
    add_option(parser, "threads")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling (default: greedy)")
    for name in _SAMPLING:
        add_option(sampling, name)


def add_speculation(parser: argparse.ArgumentParser) -> None:
    speculation = parser.add_argument_group(
        "speculation (the same text for any drafter under --deterministic, but for --acceptance rejection)"
    )
    for name in ("drafter", "draft-length", "schedule", "acceptance", "deterministic"):
        add_option(speculation, name)
    places = parser.add_argument_group("devices and memory")
    for name in ("device", "drafter-device", "allow-fallback", "drafter-threads", "memory"):
        add_option(places, name)


def as_typed(argument: str) -> str:
    """UTF-8 from a command line whose locale is another: Python escapes the bytes that it does not know."""
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        return argument


def load_engine(options: argparse.Namespace, *, memory: bool = False) -> "Engine":
    from edgespec.loading import load

    return load(
        options.model,
        drafter=options.drafter,
        draft_length=options.draft_length,
        acceptance=options.acceptance,
        schedule=options.schedule,
        device=options.device,
        drafter_device=options.drafter_device,
        num_threads=options.threads,
        drafter_threads=options.drafter_threads,
        allow_fallback=options.allow_fallback,
        deterministic=options.deterministic,
        offline=options.offline,
        memory=memory,
        memory_limit=options.memory,
        report=say_stage,
    )
