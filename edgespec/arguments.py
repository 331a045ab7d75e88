"""Arguments that several commands take, and the engine that they ask for."""

import argparse
import os
from typing import TYPE_CHECKING

from edgespec.catalog import CATALOG
from edgespec.drafter_names import WORDS
from edgespec.talk import say_stage

if TYPE_CHECKING:
    from edgespec.engine import Engine


def add_model(parser: argparse.ArgumentParser, *, default: str | None = None, is_optional: bool = False) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if default or is_optional else None,
        default=default,
        help="a model folder, a .gguf file, a safetensors folder, a hub id (org/name), or a name: "
        f"{', '.join(CATALOG)}" + (f" (default {default})" if default else ""),
    )
    parser.add_argument("--offline", action="store_true", help="never connect to anything")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of the target (default: all cores)")


def add_speculation(parser: argparse.ArgumentParser) -> None:
    speculation = parser.add_argument_group(
        "speculation (the same text for any drafter under --deterministic, but for --acceptance rejection)"
    )
    speculation.add_argument(
        "--drafter",
        default="auto",
        metavar="D",
        help=f"auto, none, {WORDS}",
    )
    speculation.add_argument("--draft-length", default="auto", metavar="N", help="auto, or tokens a draft")
    speculation.add_argument("--schedule", default="auto", choices=["auto", "serial", "pipelined", "hedged"])
    speculation.add_argument("--acceptance", default="equality", choices=["equality", "rejection"])
    speculation.add_argument("--device", default="auto", metavar="NAME", help="where the target runs: auto, cpu")
    speculation.add_argument("--drafter-device", default="auto", metavar="NAME", help="where a model drafter runs")
    parser.add_argument(
        "--memory",
        metavar="BYTES",
        help="hold no more than this in all, such as 2G or 512M, and draft accordingly",
    )
    speculation.add_argument(
        "--deterministic", action="store_true", help="the same bytes whatever drafts, about a fifth slower"
    )


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
        deterministic=options.deterministic,
        offline=options.offline,
        memory=memory,
        memory_limit=options.memory,
        report=say_stage,
    )
