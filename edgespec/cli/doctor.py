"""The commands that check the installation, or that speculation leaves the text unchanged, and list devices."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import edgespec
from edgespec import ContextOverflow, DeviceUnavailable, EdgeSpecError, ModelError, UsageError, in_flags
from edgespec.cli.arguments import (
    add_flags,
    add_option,
    add_options,
    is_given,
    load_engine,
    model_home,
    print_result,
    require_positive,
    stated_flags,
)
from edgespec.config.config_file import read_settings
from edgespec.config.options import DEFAULT_MODEL
from edgespec.system.command_line import quote
from edgespec.system.console import info, show_progress
from edgespec.system.tables import read_table
from edgespec.system.units import format_bytes, format_speed

if TYPE_CHECKING:
    from edgespec.evaluation.exactness import Difference

_MODES = {"deterministic": "in deterministic mode", "normal": "without deterministic mode"}
_PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that counts the words of a text, then write the same function with type hints.",
    "List ten animals, one on each line, and say of each where it lives.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Think step by step.",
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "Write a short letter to a neighbour about a noisy dog.",
)


def add_doctor(parser: argparse.ArgumentParser) -> None:
    table = read_table(__file__, "doctor.toml")
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a prepared model for the self-test (default: that of chat)"
    )
    add_flags(parser, table["test"])
    exactness = parser.add_argument_group("exactness")
    add_flags(exactness, table["exactness"])
    add_option(exactness, "drafter")
    add_flags(exactness, table["texts"])
    add_options(parser)
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.exactness is not None:
        return _check_exactness(options)
    if others := [f"--{name}" for name in ("drafter", "prompts", "max-tokens") if is_given(options, name)]:
        raise UsageError(f"{others[0]} is for --exactness MODEL; give that too, or leave {others[0]} out")
    from edgespec.cli.diagnosis import machine_document

    document = machine_document()
    problem = document["onnxruntime"]["problem"]
    found = edgespec.Discovery((), ()) if problem else edgespec.discover()
    document |= found.document()
    document["self_test"], code = _run_self_test(options) if not problem and document["home"] else (None, 0)
    if problem:
        code = DeviceUnavailable.exit_code
    elif not document["home"]:
        code = UsageError.exit_code
    devices = [f"device {line}" for line in found.lines()]
    tested = document["self_test"]
    said = _format_self_test(tested) if tested else f"self-test: skipped; {_why_skipped(options, document)}"
    print_result(options, document, *_machine_lines(document), *devices, said)
    return code


def _machine_lines(document: Mapping[str, Any]) -> list[str]:
    runtime, memory, home, config = (document[part] for part in ("onnxruntime", "memory", "home", "config"))
    cores = document["cores"]
    kinds = f", {cores['performance']} fast and {cores['efficiency']} efficient" if cores["performance"] else ""
    downloads = format_bytes(home["download_bytes"]) if home and home["download_bytes"] else None
    spent = f"; {downloads} of downloads, which edgespec models prune deletes" if downloads else ""
    return [
        f"edgespec {document['edgespec']}, Python {document['python']}, numpy {document['numpy']}, "
        f"{document['platform']}",
        f"onnxruntime {runtime['version'] or ''}: {runtime['problem'] or ', '.join(runtime['providers'])}",
        f"{cores['physical']} cores ({cores['logical']} logical{kinds}), {memory['available_bytes'] / 1e9:.1f} of "
        f"{memory['total_bytes'] / 1e9:.1f} GB of memory available",
        format_memory(memory),
        f"models in {home['path']}, {home['free_bytes'] / 1e9:.1f} GB free{spent}" if home else "models: unknown",
        f"configuration: {config['problem'] or ', '.join(config['set']) or 'nothing set'} ({config['path']})",
    ]


def format_memory(memory: Mapping[str, Any]) -> str:
    """The memory that edgespec may take, and whether drafter models would be open now."""
    free, reserve = (format_bytes(memory[name]) for name in ("free_bytes", "reserve_bytes"))
    sign = f" ({memory['pressure_sign']})" if memory["pressure_sign"] else ""
    effect = {
        "none": "",
        "some": "; no drafter model is opened until it ends",
        "high": "; drafter models are closed until it ends",
    }[memory["pressure"]]
    return (
        f"edgespec may take {free} within {memory['bound']}; {reserve} are kept free beside drafter models; "
        f"memory pressure: {memory['pressure']}{sign}{effect}"
    )


def _tested_model(options: argparse.Namespace) -> str:
    """The model that is named, or the one that chat opens where none is."""
    if options.model is not None:
        return str(options.model)
    try:
        chosen = read_settings().get("model")
    except UsageError:  # which has a line of its own
        chosen = None
    return str(chosen.value) if chosen else DEFAULT_MODEL


def _run_self_test(options: argparse.Namespace) -> tuple[dict[str, Any] | None, int]:
    """The document of the self-test, None where no model is prepared (none is downloaded), and its exit code."""
    from edgespec.cli.diagnosis import self_test

    if options.no_self_test:
        return None, 0
    home, model = model_home(), _tested_model(options)
    try:
        folder = edgespec.Inventory(home).find(model)
    except ModelError:
        if options.model is not None:
            raise
        try:
            home.presets.find(model)
        except ModelError as error:  # it cannot be read
            return {"model": model, "problem": in_flags(str(error))}, error.exit_code
        return None, 0
    try:
        found = self_test(folder, options.threads)
    except EdgeSpecError as error:
        return {"model": str(folder), "problem": in_flags(str(error))}, error.exit_code
    problem = "drafting CHANGES the text" if found["num_defects"] else None
    return {**found, "problem": problem}, EdgeSpecError.exit_code if problem else 0


def _why_skipped(options: argparse.Namespace, document: Mapping[str, Any]) -> str:
    if options.no_self_test:
        return "--no-self-test was given"
    if document["onnxruntime"]["problem"]:
        return "no model runs without ONNX Runtime"
    if not document["home"]:
        return "the configuration is invalid; correct what its line above names"
    model = _tested_model(options)
    preset = model_home().presets.find(model)
    model = preset.model if preset else model
    return (
        f"{model} is not prepared (edgespec models pull {quote(model)}, or name another model: edgespec doctor "
        "MODEL)"
    )


def _format_self_test(found: Mapping[str, Any]) -> str:
    if "num_tokens" not in found:
        return f"self-test of {found['model']}: {found['problem']}"
    plain, drafted = (format_speed(found[name], 0) for name in ("plain_tokens_per_second", "tokens_per_second"))
    return (
        f"self-test of {found['model']}: {found['problem'] or _format_promise(found)}, {found['num_tokens']} "
        f"tokens compared; {plain} tokens/s without drafting, {drafted} with "
        f"{found['drafter']} (one short answer each; edgespec bench measures it properly)"
    )


def _format_promise(found: Mapping[str, Any]) -> str:
    if found["deterministic"]:
        return "exact: on this machine its text is the same with any drafter"
    return (
        f"its text can depend on the drafter where two tokens are nearly tied ({found['num_differences']} tokens "
        "here); --exact rules that out for greedy text"
    )


def _check_exactness(options: argparse.Namespace) -> int:
    from edgespec.evaluation.prompts import read_prompts

    if options.drafter == "none":
        raise UsageError("without a drafter there is nothing to compare; leave out --drafter none")
    require_positive(options, "max-tokens")
    texts = [prompt.turns[0] for prompt in read_prompts(options.prompts, None)] if options.prompts else _PROMPTS
    document: dict[str, Any] = {"model": options.exactness}
    for mode in _MODES:
        document |= _compare(options, texts, mode)
    document["is_exact"] = not any(
        difference["verdict"] == "defect" for mode in _MODES for difference in document[mode]["differences"]
    )
    print_result(options, document, *_exactness_lines(document))
    return 0 if document["is_exact"] else EdgeSpecError.exit_code


def _compare(options: argparse.Namespace, texts: Sequence[str], mode: str) -> dict[str, Any]:
    from edgespec.evaluation.exactness import compare

    is_deterministic = mode == "deterministic"
    settings: dict[str, Any] = {"deterministic": None if is_deterministic else False, "exact": False}
    if "drafter" in stated_flags(options):
        settings["drafter"] = options.drafter
    # Noise decides sampled tokens as well, so the margins of logits explain no difference between them.
    samplings = [edgespec.SamplingParams()] + [edgespec.SamplingParams(temperature=0.8, seed=7)] * is_deterministic
    with load_engine(options, model=options.exactness, **settings) as engine, engine.speculation.hold():
        if is_deterministic and not engine.is_deterministic:
            return {mode: {"holds": False, "tokens": 0, "differences": []}}
        fitting = _encode_fitting(engine, texts)
        if not fitting:
            raise UsageError("every prompt was skipped; give prompts that fit the context of this model")
        prompts = f"{len(fitting)} prompt{'s' * (len(fitting) != 1)}"
        info(f"{_MODES[mode]}: comparing the text of {prompts} with and without drafts")
        found = compare(
            engine.target,
            list(fitting.values()),
            # Fixed lengths for passes of many widths, and the policy that measures what pays.
            lambda: {
                **{str(length): engine.speculation.fixed(length) for length in (1, 4, 8)},
                "auto": engine.speculation.policy(),
            },
            samplings,
            max_tokens=options.max_tokens,
            ends=engine.manifest.eos_token_ids,
            report=lambda line: info(f"{_MODES[mode]}: {line}"),
        )
        show_progress("")
        differences = [_difference_document(each, engine, list(fitting), mode) for each in found.differences]
        return {
            "prompts": len(fitting),
            "drafter": engine.speculation.name,
            mode: {"holds": engine.is_deterministic, "tokens": found.num_tokens, "differences": differences},
        }


def _encode_fitting(engine: "edgespec.Engine", texts: Sequence[str]) -> dict[str, Sequence[int]]:
    """Tokens of each distinct text that fits the context; texts that do not are reported and skipped."""
    fitting: dict[str, Sequence[int]] = {}
    for text in dict.fromkeys(texts):
        try:
            tokens = engine.encode(text)
            num_tokens = len(tokens)
        except ContextOverflow as error:  # a very long text is not even encoded
            num_tokens = error.num_tokens
        if 0 < num_tokens <= engine.context_length:
            fitting[text] = tokens
        else:
            info(
                f"skipped {text[:40]!r}: it has {num_tokens} tokens, and the context holds 1 to "
                f"{engine.context_length}"
            )
    return fitting


def _difference_document(
    found: "Difference", engine: "edgespec.Engine", texts: Sequence[str], mode: str
) -> dict[str, Any]:
    def token(number: int) -> dict[str, Any]:
        return {"id": number, "text": engine.tokenizer.decode([number])}

    figures = asdict(found)
    return {
        "prompt": texts[figures.pop("prompt")],
        "plain": token(figures.pop("plain_token")),
        "speculative": token(figures.pop("speculative_token")),
        **figures,
        "verdict": "near-tie" if found.is_near_tie and mode == "normal" else "defect",
    }


def _exactness_lines(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"{document['model']} with drafter {document['drafter']}, {document['prompts']} prompts"
    for mode in _MODES:
        compared = document[mode]
        if mode == "deterministic" and not compared["holds"]:
            yield f"{_MODES[mode]}: off by default for this model on this device: it does not hold, or is slow"
            continue
        yield f"{_MODES[mode]}: {compared['tokens']} tokens compared, {len(compared['differences'])} differ"
        yield from map(_format_difference, compared["differences"])
    if not document["is_exact"]:
        yield "NOT exact: please report this with the lines above"
    elif any(document[mode]["differences"] for mode in _MODES):
        yield "exact: tokens differ only where two are as good as tied: by less than the cut into passes changes"
    else:
        yield "exact: drafts did not change the text"


def _format_difference(difference: Mapping[str, Any]) -> str:
    plain, other = difference["plain"], difference["speculative"]
    return (
        f"  {difference['verdict']}: token {difference['position']} of {difference['prompt'][:40]!r}: without "
        f"drafting {plain['text']!r} ({plain['id']}), with drafts of {difference['draft_length']} "
        f"{other['text']!r} ({other['id']}); their logits are {difference['margin_of_one']:+.4f} apart in a pass "
        f"of 1 token, {difference['margin_of_wide']:+.4f} in a pass of {difference['pass_tokens']}; other cuts of "
        f"the text into passes change this by up to {difference['width_difference']:.4f}"
    )


def add_devices(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_devices)


def _devices(options: argparse.Namespace) -> None:
    found = edgespec.discover()
    print_result(options, found.document(), *found.lines())
