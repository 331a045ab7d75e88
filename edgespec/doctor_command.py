"""The command that looks whether all is well: what is installed here, and whether speculation is exact."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.arguments import add_option
from edgespec.catalog import DEFAULT_MODEL
from edgespec.devices_command import lines_of
from edgespec.drafter_names import WORDS
from edgespec.errors import ContextOverflow, DeviceUnavailable, EdgeSpecError, ModelError, UsageError
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
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help=f"a prepared model for the self-test (default {DEFAULT_MODEL})"
    )
    parser.add_argument("--no-self-test", action="store_true", help="run no model")
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
    from edgespec.diagnosis import devices, machine, stated

    document = machine()
    problem = document["onnxruntime"]["problem"]
    found = None if problem else devices()
    document |= stated(found) if found else {"devices": [], "unused": []}
    document["self_test"], code = _self_test(options) if not problem and document["home"] else (None, 0)
    code = DeviceUnavailable.exit_code if problem else UsageError.exit_code if not document["home"] else code
    if options.json:
        print(json.dumps(document))
    else:
        print("\n".join([*_facts(document), *(f"device {line}" for line in (lines_of(found) if found else []))]))
        print(_tested(document["self_test"], options.model))
    return code


def _facts(document: Mapping[str, Any]) -> list[str]:
    runtime, memory, home, config = (document[part] for part in ("onnxruntime", "memory", "home", "config"))
    cores = document["cores"]
    kinds = f", {cores['performance']} P and {cores['efficiency']} E" if cores["performance"] else ""
    return [
        f"edgespec {document['edgespec']}, Python {document['python']}, numpy {document['numpy']}, "
        f"{document['platform']}",
        f"onnxruntime {runtime['version'] or ''}: {runtime['problem'] or ', '.join(runtime['providers'])}",
        f"{cores['physical']} cores ({cores['logical']} logical{kinds}), {memory['available_bytes'] / 1e9:.1f} of "
        f"{memory['total_bytes'] / 1e9:.1f} GB of memory available",
        f"models in {home['path']}, {home['free_bytes'] / 1e9:.1f} GB free" if home else "models: unknown",
        f"configuration: {config['problem'] or ', '.join(config['set']) or 'nothing set'} ({config['path']})",
    ]


def _self_test(options: argparse.Namespace) -> tuple[dict[str, Any] | None, int]:
    """What a short test of a model shows, and its exit code; None where none is prepared, as nothing is fetched.

    Raises:
        ModelError: A model was named, and it is not prepared.
    """
    from edgespec.diagnosis import self_test
    from edgespec.home import ModelHome, default_home
    from edgespec.models import located

    if options.no_self_test:
        return None, 0
    try:
        folder = located(ModelHome(default_home(), offline=True), options.model or DEFAULT_MODEL)
    except ModelError:
        if options.model is None:
            return None, 0
        raise
    try:
        found = asdict(self_test(folder, options.threads))
    except EdgeSpecError as error:
        return {"model": str(folder), "problem": str(error)}, error.exit_code
    problem = "drafted text is NOT the plain text" if found["num_defects"] else None
    return {**found, "problem": problem}, EdgeSpecError.exit_code if problem else 0


def _tested(found: Mapping[str, Any] | None, asked: str | None) -> str:
    if found is None:
        return f"self-test: left out; it wants a prepared model (edgespec models pull {asked or DEFAULT_MODEL})"
    if "num_tokens" not in found:
        return f"self-test of {found['model']}: {found['problem']}"
    return (
        f"self-test of {found['model']}: {found['problem'] or 'exact'}, {found['num_tokens']} tokens compared; "
        f"{found['plain_tokens_per_second']:.0f} tokens/s plain, {found['tokens_per_second']:.0f} with "
        f"{found['drafter']} (one short answer each; edgespec bench compares)"
    )


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
    fitting: dict[str, TokenIds] = {}
    for text in dict.fromkeys(texts):
        try:
            tokens = engine.encode(text)
            num_tokens = len(tokens)
        except ContextOverflow as error:  # of one so long that it is not even counted
            num_tokens = error.num_tokens
        if 0 < num_tokens <= engine.context_length:
            fitting[text] = tokens
        else:
            say_stage(
                f"left out {text[:40]!r}: {num_tokens} tokens, and the context has room for 1 to "
                f"{engine.context_length}"
            )
    return fitting


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
