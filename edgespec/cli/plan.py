"""The command that chooses devices, threads, drafter and schedule for a model, and predicts the speed."""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.cli.arguments import add_option, add_options, attribute_name, model_home, print_result
from edgespec.config.options import OPTIONS
from edgespec.errors import UsageError
from edgespec.system.command_line import join_words
from edgespec.system.console import info

if TYPE_CHECKING:
    from edgespec.config.drafter_names import DrafterNames
    from edgespec.loading.device_choice import Placement
    from edgespec.loading.open_model import ModelFolder
    from edgespec.planning.drafter_ranking import Ranking
    from edgespec.planning.plan_models import Planned
    from edgespec.planning.plan_option import Plan


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("model", metavar="MODEL", help="the target: a model, as for chat")
    add_option(parser, "drafter")
    parser.add_argument("--measure", action="store_true", help="repeat all measurements, also on separate cores")
    add_options(parser)
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> None:
    from edgespec.planning.plan_words import in_words

    document = plan_document(options)
    print_result(options, document, in_words(document))


def plan_document(options: argparse.Namespace) -> dict[str, Any]:
    """The plan for a command's model, drafter, devices, threads and memory; measure repeats all measurements.

    Raises EdgeSpecError: A model is missing, invalid or too large, or the drafter is a cascade.
    """
    from edgespec.engine.request import require_writer
    from edgespec.engine.resolve import compare_devices, resolve
    from edgespec.engine.wish import Wish
    from edgespec.planning.plan_models import plan_for

    wish = Wish(
        model=options.model,
        drafter=options.drafter,
        device=options.device,
        drafter_device=options.drafter_device,
        num_threads=options.threads,
        memory_limit=options.memory,
        offline=options.offline,
        report=info,
    )
    _require_no_cascade(wish.names)
    compared = compare_devices(wish, remeasure=options.measure)
    if compared is not None:
        planned = compared.options.planned(compared.plan)
        placement = compared.options.place(compared.decision.where)
        models = PlannedModels(compared.target, compared.drafters, placement)
        return _document(options, planned, models, _device_flags(planned.plan))
    resolved = resolve(wish)
    require_writer(resolved.target.manifest)
    drafters = [each.models[0] for each in resolved.drafters]
    for line in resolved.downgrades:
        info(line)
    planned = plan_for(
        resolved.target,
        drafters,
        resolved.names.simple,
        resolved.placement,
        remeasure=options.measure,
        memory_limit=wish.limit_bytes,
        report=info,
    )
    flags = {flag: getattr(options, attribute_name(flag)) for flag in ("device", "drafter-device")}
    named = {flag: value for flag, value in flags.items() if value != OPTIONS[flag].default}
    return _document(options, planned, PlannedModels(resolved.target, drafters, resolved.placement), named)


class PlannedModels(NamedTuple):
    """The models of a plan, and where they run."""

    target: "ModelFolder"
    drafters: "Sequence[ModelFolder]"
    placement: "Placement"


def _document(
    options: argparse.Namespace, planned: "Planned", models: PlannedModels, device_flags: Mapping[str, str]
) -> dict[str, Any]:
    from edgespec.config.drafter_names import parse
    from edgespec.planning.plan_words import document_of

    if any(planned.took):
        opening_s, measuring_s = planned.took
        info(f"measured in {opening_s + measuring_s:.1f} s, of which opening models took {opening_s:.1f} s")
    asked = parse(options.drafter)
    return document_of(
        planned.plan,
        planned.layouts,
        planned.learned_stats.chances,
        planned.took,
        model=models.target.manifest.name,
        drafters=[drafter.manifest.name for drafter in models.drafters],
        command=_chat_command(
            planned.plan, options, _drafter_argument(planned.plan, asked, models.drafters), device_flags
        ),
        ranked_drafters=_rank_drafters(options, asked, models).drafters,
    )


def _rank_drafters(options: argparse.Namespace, asked: "DrafterNames", models: PlannedModels) -> "Ranking":
    """What else could draft for the target of a plan; of the drafters the named ones come first."""
    from edgespec.config.byte_size import parse_bytes
    from edgespec.config.drafter_names import SELF
    from edgespec.engine.drafter_choice import rank_for_placement

    words = [cascade.models[0] for cascade in asked.cascades]
    return rank_for_placement(
        model_home(offline=True),
        options.model,
        models.target,
        models.placement,
        devices={"device": options.device, "drafter-device": options.drafter_device},
        named={word: each for word, each in zip(words, models.drafters, strict=False) if word != SELF},
        memory_limit=None if options.memory is None else parse_bytes(options.memory),
    )


def _device_flags(plan: "Plan") -> dict[str, str]:
    """The options by which chat takes the devices of a plan."""
    chosen = plan.chosen
    drafter = {"drafter-device": chosen.drafter_place.device} if chosen.drafter_place else {}
    return {"device": chosen.target.device, **drafter}


def _require_no_cascade(names: "DrafterNames") -> None:
    # How long a cascade drafts depends on how many inner drafts are kept, which no measurement here predicts.
    for models, text in names.cascades:
        if len(models) > 1 or text is not None:
            parts = (*models, *([text] if text else []))
            raise UsageError(
                f"'{','.join(parts)}' is a cascade, and a plan compares drafters of the target only; plan "
                f"'{'+'.join(parts)}', or measure the cascade on your prompts with edgespec bench"
            )


def _drafter_argument(plan: "Plan", asked: "DrafterNames", drafters: "Sequence[ModelFolder]") -> str:
    """The --drafter that makes chat follow a plan; auto includes the drafter of a pair folder."""
    if plan.chosen.drafter is None:
        return "+".join(plan.drafters if drafters else sorted(asked.simple)) or "none"
    named = [
        each.models[0]
        for drafter, each in zip(drafters, asked.cascades, strict=False)
        if drafter.manifest.name == plan.chosen.drafter
    ]
    return "+".join([*sorted(asked.simple), *named])


def _chat_command(plan: "Plan", options: argparse.Namespace, drafter: str, device_flags: Mapping[str, str]) -> str:
    chosen = plan.chosen
    words = ["edgespec", "chat", options.model, "--drafter", drafter, "--threads", str(chosen.target.num_threads)]
    if chosen.drafter_place is not None:
        words += ["--drafter-threads", str(chosen.drafter_place.num_threads), "--schedule", chosen.schedule]
    memory = {"memory": options.memory} if options.memory is not None else {}
    for flag, value in {**device_flags, **memory}.items():
        words += [f"--{flag}", value]
    return join_words(words)
