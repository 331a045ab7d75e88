"""The prompt of a chat and the schema of its answer, as a command line, a pipe and files have them."""

import argparse
import json
import os
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import edgespec
from edgespec import UsageError
from edgespec.cli.arguments import decode_argument, model_home
from edgespec.system.command_line import quote
from edgespec.system.console import info
from edgespec.system.printable import one_line
from edgespec.system.text_files import explain_unreadable, read_stdin, read_text

_OF_NAMES = re.compile(r"[\w.+/\\:~@-]*", re.ASCII)
_LARGEST_SCHEMA = 4 << 20  # bytes of a file


def tell_model_from_prompt(options: argparse.Namespace) -> None:
    """Take MODEL for the prompt if it has a space and is no file, or if --model names another one.

    Raises UsageError: There are two prompts, or two models.
    """
    default = options.parser.get_default("model")
    is_text = options.model is not default and " " in options.model.strip() and not os.path.exists(options.model)
    if is_text or (options.named_model and options.model is not default):
        if options.words is not None:
            model = one_line(options.model, 40)
            found = f"there is no model '{model}'"
            if not is_text:
                found = f"two models are given, '{model}' and --model '{one_line(options.named_model, 40)}'"
            raise UsageError(f"{found}; give a model and then one prompt, in quotes")
        options.words, options.model = options.model, default
    options.model = options.named_model or options.model
    if options.words is not None:
        options.prompt = [options.words, *(options.prompt or [])]


def may_be_prompt(word: str) -> bool:
    """True if one word, as a sentence of Chinese is one, is letters alone or has a character that names lack."""
    return word.isalpha() or not _OF_NAMES.fullmatch(word)


def read_prompt(options: argparse.Namespace) -> str | None:
    """The prompt to answer once; None for a conversation."""
    parts = options.prompt or ([] if sys.stdin.isatty() else ["-"])
    if parts.count("-") > 1:
        raise UsageError("--prompt - is given twice; stdin can be read once")
    if not parts and options.json:
        raise UsageError("--json answers one prompt; give it with --prompt or on stdin")
    if not parts:
        return None
    prompt = "\n\n".join(_read_pipe(options) if part == "-" else decode_argument(part) for part in parts)
    if not prompt.strip():
        info("the prompt is empty, so the answer is to nothing")
    return prompt


def _read_pipe(options: argparse.Namespace) -> str:
    """The text on stdin, without its last line end as in the shell's $(...). Raises UsageError: It is empty."""
    text = read_stdin()
    if not text.strip():
        word, home = options.model, model_home()
        known = (*edgespec.CATALOG, *home.names(), *home.presets.names())
        is_prompt = may_be_prompt(word) and not options.named_model and not os.path.exists(word)
        is_prompt = is_prompt and not any(each.startswith(word) for each in known)
        advice = f"; if '{word}' is your prompt: edgespec chat -p {quote(word)}" if is_prompt else ""
        came = "only white space came on stdin" if text else "nothing came on stdin"
        if _is_stdin_a_pipe():
            came += ". The command before the pipe wrote nothing, or failed"
        elif not word.strip():
            came, advice = f"the prompt is only white space, and {came}", ""
        else:
            came += "; give one with --prompt, or run it in a terminal for a chat"
        raise UsageError(f"the prompt is empty: {came}{advice}")
    return text.removesuffix("\n")


def _is_stdin_a_pipe() -> bool:
    with suppress(AttributeError, OSError, ValueError):  # it is closed
        return stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode)
    return False


def read_schema(path: Path) -> dict[str, Any]:
    """The response_format of a file with a JSON schema. Raises UsageError: it cannot be read or used."""
    with explain_unreadable(path, "a JSON schema"):
        schema = json.loads(read_text(path, _LARGEST_SCHEMA))
        if not isinstance(schema, (dict, bool)):
            raise ValueError('one is an object, such as {"type": "object"}')
    stated = {"type": "json_schema", "schema": schema}
    try:
        edgespec.require_format(stated)  # what is wrong in itself is said before a model is loaded
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return stated
