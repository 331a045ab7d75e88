"""The plan for what a user asks for: devices, threads, drafter and schedule, with the speed to expect.

The models are measured on the first use, and after that only if the user wants it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from edgespec.config.config_file import default_home
from edgespec.config.drafter_names import SELF, DrafterNames
from edgespec.engine.drafter_choice import rank_for_placement
from edgespec.engine.request import require_writer
from edgespec.errors import UsageError
from edgespec.setup.device_choice import Placement
from edgespec.setup.drafter_ranking import Ranking
from edgespec.setup.home import ModelHome
from edgespec.setup.open_model import ModelFolder
from edgespec.setup.plan_models import Planned, weigh_models
from edgespec.setup.plan_option import Plan
from edgespec.setup.plan_words import document_of
from edgespec.setup.planner import decide
from edgespec.setup.resolve import compare_devices, resolve
from edgespec.setup.wish import Wish
from edgespec.system.command_line import join_words


class _PlannedModels(NamedTuple):
    """The models of a plan, and where they run."""

    target: ModelFolder
    drafters: Sequence[ModelFolder]
    placement: Placement


def plan_document(wish: Wish, *, remeasure: bool) -> dict[str, Any]:
    """The plan for the model, drafter, devices, threads and memory of a wish; remeasure repeats all measurements.

    Raises EdgeSpecError: A model is missing, invalid or too large, or the drafter is a cascade.
    """
    _require_no_cascade(wish.names)
    compared = compare_devices(wish, remeasure=remeasure)
    if compared is not None:
        planned = compared.options.planned(compared.plan)
        placement = compared.options.place(compared.decision.where)
        models = _PlannedModels(compared.target, compared.drafters, placement)
        return _document(wish, planned, models, _device_flags(planned.plan))
    resolved = resolve(wish)
    require_writer(resolved.target.manifest)
    drafters = [each.models[0] for each in resolved.drafters]
    for line in resolved.devices.downgrades:
        wish.report(line)
    found = weigh_models(
        resolved.target,
        drafters,
        resolved.names.simple,
        resolved.placement,
        remeasure=remeasure,
        free=resolved.free,
        report=wish.report,
    )
    plan = decide(found.weighed, found.text_drafters)
    planned = Planned(plan, found.layouts, found.learned_stats, found.took)
    named = {flag: name for flag, name in _named_devices(wish).items() if name != "auto"}
    return _document(wish, planned, _PlannedModels(resolved.target, drafters, resolved.placement), named)


def _document(
    wish: Wish, planned: Planned, models: _PlannedModels, device_flags: Mapping[str, str]
) -> dict[str, Any]:
    if any(planned.took):
        opening_s, measuring_s = planned.took
        wish.report(f"measured in {opening_s + measuring_s:.1f} s, of which opening models took {opening_s:.1f} s")
    return document_of(
        planned.plan,
        planned.layouts,
        planned.learned_stats.chances,
        planned.took,
        model=models.target.manifest.name,
        drafters=[drafter.manifest.name for drafter in models.drafters],
        command=_chat_command(planned.plan, wish, models.drafters, device_flags),
        ranked_drafters=_rank_drafters(wish, models).drafters,
    )


def _rank_drafters(wish: Wish, models: _PlannedModels) -> Ranking:
    """Rank other drafters for the target of a plan; of the drafters the named ones come first."""
    words = [cascade.models[0] for cascade in wish.names.cascades]
    return rank_for_placement(
        ModelHome(default_home(), True, wish.report),
        str(wish.model),
        models.target,
        models.placement,
        devices=_named_devices(wish),
        named={word: each for word, each in zip(words, models.drafters, strict=False) if word != SELF},
        memory_limit=wish.limit_bytes,
    )


def _named_devices(wish: Wish) -> dict[str, str]:
    return {"device": wish.device, "drafter-device": wish.drafter_device}


def _device_flags(plan: Plan) -> dict[str, str]:
    """The options by which chat takes the devices of a plan."""
    chosen = plan.chosen
    drafter = {"drafter-device": chosen.drafter_place.device} if chosen.drafter_place else {}
    return {"device": chosen.target.device, **drafter}


def _require_no_cascade(names: DrafterNames) -> None:
    # How long a cascade drafts depends on how many inner drafts are kept, which no measurement here predicts.
    for models, text in names.cascades:
        if len(models) > 1 or text is not None:
            parts = (*models, *([text] if text else []))
            raise UsageError(
                f"'{','.join(parts)}' is a cascade, and a plan compares drafters of the target only; plan "
                f"'{'+'.join(parts)}', or measure the cascade on your prompts with edgespec bench"
            )


def _drafter_argument(plan: Plan, asked: DrafterNames, drafters: Sequence[ModelFolder]) -> str:
    """The --drafter that makes chat follow a plan; auto includes the drafter of a pair folder."""
    if plan.chosen.drafter is None:
        return "+".join(plan.drafters if drafters else sorted(asked.simple)) or "none"
    named = [
        each.models[0]
        for drafter, each in zip(drafters, asked.cascades, strict=False)
        if drafter.manifest.name == plan.chosen.drafter
    ]
    return "+".join([*sorted(asked.simple), *named])


def _chat_command(plan: Plan, wish: Wish, drafters: Sequence[ModelFolder], device_flags: Mapping[str, str]) -> str:
    chosen, drafter = plan.chosen, _drafter_argument(plan, wish.names, drafters)
    words = ["edgespec", "chat", str(wish.model), "--drafter", drafter]
    words += ["--threads", str(chosen.target.num_threads)]
    if chosen.drafter_place is not None:
        words += ["--drafter-threads", str(chosen.drafter_place.num_threads), "--schedule", chosen.schedule]
    memory = {} if wish.memory_limit is None else {"memory": str(wish.memory_limit)}
    for flag, value in {**device_flags, **memory}.items():
        words += [f"--{flag}", value]
    return join_words(words)
