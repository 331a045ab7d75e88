"""The command that looks whether all is well: what is installed here, and whether speculation is exact."""

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec import __version__
from edgespec.arguments import add_option
from edgespec.drafter_names import WORDS
from edgespec.errors import DeviceUnavailable, EdgeSpecError, UsageError
from edgespec.talk import say_stage

if TYPE_CHECKING:
    from edgespec.engine import Engine
    from edgespec.exactness import Comparison
    from edgespec.scheduler import Gate
    from edgespec.types import TokenIds

_LENGTHS = (1, 4, 8)
_PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that counts the words of a text, then write the same function with type hints.",
    "List ten animals, one on each line, and say of each where it lives.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Think step by step.",
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "Write a short letter to a neighbour about a noisy dog.",
)


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--exactness", metavar="MODEL", help="compare its speculative text with its plain text")
    parser.add_argument("--drafter", default="auto", metavar="D", help=f"auto, {WORDS}")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="JSON Lines with prompt, or turns, of which the first is taken",
    )
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="tokens an answer (default 32)")
    add_option(parser, "threads")
    add_option(parser, "offline")
    parser.add_argument("--json", action="store_true", help="print one document")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    return _report(options) if options.exactness is None else _exactness(options)


def _report(options: argparse.Namespace) -> int:
    document = machine()
    runtime = document["onnxruntime"]
    if options.json:
        print(json.dumps(document))
    else:
        memory, home = document["memory"], document["home"]
        print(
            f"edgespec {document['edgespec']}, Python {document['python']}, numpy {document['numpy']}, "
            f"{document['platform']}\n"
            f"onnxruntime {runtime['version'] or ''}: {runtime['problem'] or ', '.join(runtime['providers'])}\n"
            f"{document['cores']} cores, {memory['available_bytes'] / 1e9:.1f} of "
            f"{memory['total_bytes'] / 1e9:.1f} GB of memory available\n"
            f"models in {home['path']}, {home['free_bytes'] / 1e9:.1f} GB free"
        )
    return DeviceUnavailable.exit_code if runtime["problem"] else 0


def machine() -> dict[str, Any]:
    """What is installed, and what there is room for."""
    import shutil

    import psutil

    from edgespec.home import default_home

    home = default_home()
    there = next(folder for folder in (home, *home.absolute().parents) if folder.is_dir())
    memory = psutil.virtual_memory()
    return {
        "edgespec": __version__,
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "platform": f"{platform.system()} {platform.machine()}",
        "onnxruntime": _runtime(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "memory": {"total_bytes": memory.total, "available_bytes": memory.available},
        "home": {"path": str(home), "free_bytes": shutil.disk_usage(there).free},
    }


def _runtime() -> dict[str, Any]:
    """What ONNX Runtime offers, or what is wrong with it."""
    from edgespec.opening import providers

    try:
        found = providers()
    except DeviceUnavailable as error:
        return {"version": None, "providers": [], "problem": str(error)}
    return {"version": sys.modules["onnxruntime"].__version__, "providers": found, "problem": None}


def _version(distribution: str) -> str:
    from importlib.metadata import version

    return version(distribution)


def _exactness(options: argparse.Namespace) -> int:
    from edgespec.prompts import read_prompts

    if options.drafter == "none":
        raise UsageError("without a drafter there is nothing to compare; leave out --drafter none")
    if options.max_tokens < 1:
        raise UsageError(f"--max-tokens is {options.max_tokens}; wanted at least 1")
    texts = [prompt.turns[0] for prompt in read_prompts(options.prompts, None)] if options.prompts else _PROMPTS
    document: dict[str, Any] = {"model": options.exactness}
    for mode in ("deterministic", "normal"):
        document |= _compared(options, texts, mode)
    document["is_exact"] = not any(
        difference["verdict"] == "defect"
        for mode in ("deterministic", "normal")
        for difference in document[mode]["differences"]
    )
    print(json.dumps(document) if options.json else _in_words(document))
    return 0 if document["is_exact"] else EdgeSpecError.exit_code


def _compared(options: argparse.Namespace, texts: Sequence[str], mode: str) -> dict[str, Any]:
    from edgespec.exactness import compare
    from edgespec.loading import load
    from edgespec.sampling import SamplingParams

    # Margins of logits say nothing of sampled tokens, which noise decides as well.
    samplings = [SamplingParams()] + [SamplingParams(temperature=0.8, seed=7)] * (mode == "deterministic")
    with load(
        options.exactness,
        drafter=options.drafter,
        deterministic=mode == "deterministic",
        num_threads=options.threads,
        offline=options.offline,
        report=say_stage,
    ) as engine:
        fitting = _fitting(engine, texts)
        if not fitting:
            raise UsageError("every prompt was left out; give some that fit the context of this model")
        found = compare(
            engine.target,
            list(fitting.values()),
            lambda: _gates(engine),
            samplings,
            max_tokens=options.max_tokens,
            ends=engine.manifest.eos_token_ids,
            report=lambda line: say_stage(f"{mode}: {line}"),
        )
        return {
            "prompts": len(fitting),
            "drafter": engine.speculation.name,
            mode: _described(found, engine, list(fitting), mode),
        }


def _fitting(engine: "Engine", texts: Sequence[str]) -> "dict[str, TokenIds]":
    """The tokens of each text that the context has room for, each once; the others are told."""
    encoded = {text: engine.encode(text) for text in texts}
    for text, tokens in encoded.items():
        if not 0 < len(tokens) <= engine.context_length:
            say_stage(
                f"left out {text[:40]!r}: {len(tokens)} tokens, and the context has room for 1 to "
                f"{engine.context_length}"
            )
    return {text: tokens for text, tokens in encoded.items() if 0 < len(tokens) <= engine.context_length}


def _gates(engine: "Engine") -> "Mapping[str, Gate]":
    """Drafts of several lengths, so that passes have many widths, and of what length pays."""
    from edgespec.gate import FixedGate

    fixed = {f"{length}": FixedGate(engine.speculation.drafters(), length) for length in _LENGTHS}
    return {**fixed, "auto": engine.speculation.gate()}


def _described(found: "Comparison", engine: "Engine", texts: Sequence[str], mode: str) -> dict[str, Any]:
    def token(number: int) -> dict[str, Any]:
        return {"id": number, "text": engine.tokenizer.decode([number])}

    return {
        "tokens": found.num_tokens,
        "differences": [
            {
                "prompt": texts[difference.prompt],
                "position": difference.position,
                "draft_length": difference.gate,
                "pass_tokens": difference.width,
                "plain": token(difference.plain_token),
                "speculative": token(difference.speculative_token),
                "margin_of_one": difference.narrow_margin,
                "margin_of_wide": difference.wide_margin,
                "width_difference": difference.width_difference,
                "verdict": "near-tie" if difference.is_near_tie and mode == "normal" else "defect",
            }
            for difference in found.differences
        ],
    }


def _in_words(document: Mapping[str, Any]) -> str:
    lines = [f"{document['model']} with drafter {document['drafter']}, {document['prompts']} prompts"]
    for mode in ("deterministic", "normal"):
        compared = document[mode]
        lines.append(f"{mode}: {compared['tokens']} tokens compared, {len(compared['differences'])} differ")
        lines += map(_line, compared["differences"])
    lines.append(
        "exact: what differs is tied within what the width of a pass changes"
        if document["is_exact"]
        else "NOT exact: please report this with the lines above"
    )
    return "\n".join(lines)


def _line(difference: Mapping[str, Any]) -> str:
    plain, other = difference["plain"], difference["speculative"]
    return (
        f"  {difference['verdict']}: token {difference['position']} of {difference['prompt'][:40]!r}: plainly "
        f"{plain['text']!r} ({plain['id']}), drafting {difference['draft_length']} {other['text']!r} "
        f"({other['id']}); logits {difference['margin_of_one']:+.4f} apart plainly, "
        f"{difference['margin_of_wide']:+.4f} in speculation's pass of {difference['pass_tokens']}, "
        f"and widths move them by {difference['width_difference']:.4f}"
    )
