"""The command that says who is to run where, in which schedule, how fast that will be, and what was refused."""

import argparse
import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgespec.arguments import add_option
from edgespec.errors import UsageError
from edgespec.talk import say_stage

if TYPE_CHECKING:
    from edgespec.drafter_names import DrafterNames
    from edgespec.opening import ModelFolder
    from edgespec.planner import Plan


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model, as for chat")
    parser.add_argument(
        "--drafter", default="auto", metavar="D", help="auto, none, self or a model; a+b weighs both"
    )
    add_option(parser, "device")
    add_option(parser, "drafter-device")
    add_option(parser, "threads", "threads for both (default: all cores)")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure all of it anew, and target and drafter on cores of their own",
    )
    add_option(parser, "memory", "plan for no more than this in all, such as 2G or 512M")
    add_option(parser, "offline")
    parser.add_argument("--json", action="store_true", help="print one document")
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    from edgespec.plan_words import in_words

    document = plan_document(options)
    print(json.dumps(document) if options.json else in_words(document))
    return 0


def plan_document(options: argparse.Namespace) -> dict[str, Any]:
    """What the planner says of model, drafter, device, drafter_device, threads and memory; measure for anew.

    Raises:
        EdgeSpecError: A model is missing, invalid or too large, or there is nothing to plan.
    """
    from edgespec.device_choice import DeviceChoice
    from edgespec.drafter_names import parse
    from edgespec.headroom import parse_bytes
    from edgespec.home import ModelHome, default_home
    from edgespec.loading import expect_distinct, expect_threads, find_models, model_drafting
    from edgespec.plan_document import document_of
    from edgespec.planning import plan_for

    expect_threads(options.threads)
    limit = None if options.memory is None else parse_bytes(options.memory)
    choice = DeviceChoice(options.device, options.drafter_device, say_stage)
    setting = choice.setting(options.threads, None, deterministic=False)
    models = ModelHome(default_home(), options.offline, say_stage)
    asked = parse(options.drafter)
    target, names = find_models(models, options.model, asked)
    _expect_no_cascade(names)
    drafters = [model_drafting(models, target, each.models[0]) for each in names.cascades]
    expect_distinct([drafter.manifest.name for drafter in drafters])
    setting = choice.settled(setting, target.manifest, [drafter.manifest for drafter in drafters])
    for line in choice.news:
        say_stage(line)
    planned = plan_for(
        target,
        drafters,
        names.simple,
        setting,
        measures_anew=options.measure,
        memory_limit=limit,
        report=say_stage,
    )
    if any(planned.took):
        opening_s, measuring_s = planned.took
        say_stage(f"measured in {opening_s + measuring_s:.1f} s, of which opening models took {opening_s:.1f} s")
    return document_of(
        planned.plan,
        planned.layouts,
        planned.experience.chances,
        planned.took,
        model=target.manifest.name,
        drafters=[drafter.manifest.name for drafter in drafters],
        command=_command_of(planned.plan, options, _named(planned.plan, asked, drafters)),
    )


def _expect_no_cascade(names: "DrafterNames") -> None:
    """What its drafts take hangs on how many of its inner ones are kept, which nothing measured here foretells."""
    for models, text in names.cascades:
        if len(models) > 1 or text is not None:
            parts = (*models, *([text] if text else []))
            raise UsageError(
                f"'{','.join(parts)}' is a cascade, and a plan weighs what drafts for the target itself; plan "
                f"'{'+'.join(parts)}', or run the cascade on your prompts with edgespec bench"
            )


def _named(plan: "Plan", asked: "DrafterNames", drafters: "Sequence[ModelFolder]") -> str:
    """What chat is to be told of drafters; auto hears a pair's own without its name."""
    if plan.chosen.drafter is None:
        return "+".join(plan.drafters if drafters else sorted(asked.simple)) or "none"
    called = {
        drafter.manifest.name: each.models[0] for drafter, each in zip(drafters, asked.cascades, strict=False)
    }
    return "+".join([*sorted(asked.simple), *(name for key, name in called.items() if key == plan.chosen.drafter)])


def _command_of(plan: "Plan", options: argparse.Namespace, drafter: str) -> str:
    """What does as the plan says."""
    chosen = plan.chosen
    words = ["edgespec", "chat", options.model, "--drafter", drafter, "--threads", str(chosen.target.num_threads)]
    if chosen.drafter_place is not None:
        words += ["--drafter-threads", str(chosen.drafter_place.num_threads), "--schedule", chosen.schedule]
    for flag in ("device", "drafter_device", "memory"):
        if (value := getattr(options, flag)) not in (None, "auto"):
            words += [f"--{flag.replace('_', '-')}", value]
    return shlex.join(words)
