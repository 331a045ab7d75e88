"""The command that trains a drafting head for a model. What is heavy is imported where it is used."""

import argparse
from dataclasses import asdict
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import edgespec
from edgespec import UsageError
from edgespec.cli.arguments import add_flags, add_model, add_options, load_engine, model_home, print_result
from edgespec.cli.parser import CommandParser
from edgespec.system.command_line import join_words, quote
from edgespec.system.console import info
from edgespec.system.tables import read_table
from edgespec.system.units import format_time, parse_bytes

if TYPE_CHECKING:
    from edgespec.training.objective import ExpectedGain, TrainingReport

_AT_ONCE = 8  # prompts that are answered at once; passes that are shared read the weights once
_LEAST_MINUTES, _MOST_MINUTES = 0.1, 100_000.0


def add_train(parser: CommandParser) -> None:
    table = read_table(__file__, "train.toml")
    add_model(parser)
    add_flags(parser, table["head"])
    add_flags(parser.add_mutually_exclusive_group(), table["prompts"])
    add_flags(parser, table["training"])
    add_options(parser)
    parser.show_first(*table["first"])
    parser.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> None:
    from edgespec.training.fit import Recipe
    from edgespec.training.prompts import own_prompts, read_corpus
    from edgespec.training.train import require_torch, train
    from edgespec.training.work_folder import TrainingOptions

    if not _LEAST_MINUTES <= options.minutes <= _MOST_MINUTES:
        raise UsageError(f"--minutes is {options.minutes:g}; wanted {_LEAST_MINUTES:g} to {_MOST_MINUTES:g}")
    disk_bytes = parse_bytes(options.disk, "--disk")
    if options.draft_vocab < 1:
        raise UsageError(f"--draft-vocab is {options.draft_vocab}; wanted a whole number from 1")
    is_given = options.corpus or options.from_answers
    own_share = (0.0 if is_given else 0.5) if options.written is None else options.written
    for name, share in (("--written", own_share), ("--variation", options.variation)):
        if not 0.0 <= share <= 1.0:
            raise UsageError(f"{name} is {share:g}; wanted 0 to 1")
    if not 0.0 <= options.epochs < inf:
        raise UsageError(f"--epochs is {options.epochs:g}; wanted 0, for as many as there is time for, or more")
    settings = TrainingOptions(
        own_share=own_share,
        held_out=tuple(read_corpus(options.held_out)) if options.held_out else (),
        recipe=Recipe(variation=options.variation, epochs=options.epochs),
        minutes=options.minutes,
        disk_bytes=disk_bytes,
        draft_vocab_size=options.draft_vocab,
        device=options.train_device,
    )
    require_torch()
    home = model_home(offline=options.offline)
    stored = _stored_answers(options.model, home) if options.from_answers else []
    prompts = [] if options.from_answers else read_corpus(options.corpus) if options.corpus else own_prompts()
    source, folder = home.source_of(options.model), home.fixed_folder(options.model)
    report = train(
        source,
        options.output,
        settings,
        prompts=prompts,
        stored=stored,
        open_engine=partial(load_engine, options, drafter="auto", answer_cache=False, max_parallel=_AT_ONCE),
        report=info,
        sha256="" if folder is None else edgespec.read_manifest(folder).source.sha256,
    )
    print_result(options, asdict(report), *_format(report))
    name, _ = home.split_name(options.model)
    target = name if name in edgespec.CATALOG else join_words(source.words)
    pays = report.gain is None or report.gain.draft_length > 0
    advice = "use it with" if pays else "the same command trains it further; to try it as it is"
    info(f"{advice}: edgespec export {target} --drafter {quote(options.output)} --output PAIR")


def _stored_answers(model: str, home: "edgespec.ModelHome") -> "list[tuple[edgespec.TokenIds, edgespec.TokenIds]]":
    """Raises UsageError: No answers of the model are stored."""
    answers: list[tuple[edgespec.TokenIds, edgespec.TokenIds]] = []
    if (folder := home.find(model)) is not None:
        manifest = edgespec.read_manifest(folder)
        cache = edgespec.AnswerCache(
            home.path / "memory", manifest.name, manifest.vocab_sha256, manifest.vocab_size, info
        )
        answers = cache.texts()
    if not answers:
        raise UsageError(f"no answers of {model} are stored; chat with it first, or leave out --from-answers")
    return answers


def _format(report: "TrainingReport") -> list[str]:
    rates = ", ".join(f"{rate:.1%}" for rate in report.agreement)
    return [
        f"agreement by position on {report.compared_drafts} drafts in {report.compared_texts} of "
        f"{report.held_out_texts} held-out texts: {rates}; {report.coverage:.1%} of the tokens of their answers "
        "can be drafted",
        _format_gain(report.gain),
        f"trained for {format_time(report.training_s)} on {report.texts} texts, {report.answer_tokens} tokens of "
        f"answers; each of {report.drafts} drafts was seen {report.trained_drafts / max(1, report.drafts):.1f} "
        "times, all runs together",
    ]


def _format_gain(gain: "ExpectedGain | None") -> str:
    if gain is None:
        return "expected gain here: not measured, since a GPU ran the target; edgespec export checks the pair"
    times = (
        f"expected gain here, by the head alone: {gain.times:.2f} times plain decoding with {gain.draft_length} "
        f"drafted tokens, {gain.tokens_per_pass:.2f} tokens a pass"
        if gain.draft_length
        else "expected gain here: none, plain decoding is faster; train longer or on more text"
    )
    return f"{times}; a drafted token costs {gain.draft_cost:.3f} of a pass"
