"""A source and all that decides what its model folder will hold."""

from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.errors import SourceError, UsageError
from edgespec.export.drafting import Drafting
from edgespec.export.heads.dialects import is_head
from edgespec.export.layout import rule_of
from edgespec.export.plan import Plan, plan_export
from edgespec.export.precision import BLOCK_SIZES, PRECISIONS, Rule
from edgespec.export.sources import LoadedSource, read_source
from edgespec.export.supported import require_supported, resolve_precision
from edgespec.system.command_line import quote


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A source as read, the rule for its weights, what to make of it, and what that costs."""

    loaded: LoadedSource
    rule: Rule
    form: str
    drafting: Drafting
    hidden_layers: tuple[int, ...]
    cost: Plan

    def with_origin(self, repository: str | None, revision: str | None, license: str | None) -> "PlannedModel":
        """This plan with where its source was fetched from; license is for a source that states none."""
        source = self.loaded.source
        origin = replace(source, repository=repository, revision=revision, license=source.license or license)
        return replace(self, loaded=replace(self.loaded, source=origin))


def plan_model(
    source: Path,
    precision: str,
    form: str = "cpu",
    drafting: Drafting = Drafting(),  # noqa: B008  frozen
    hidden_layers: tuple[int, ...] = (),
    *,
    block_size: int = BLOCK_SIZES[0],
    context_length: int | None = None,
    is_checked: bool = False,
) -> PlannedModel:
    """Read a source and plan its export; arguments and errors as in export_model."""
    if precision not in PRECISIONS:
        raise UsageError(f"unknown precision '{precision}'; choose one of {', '.join(PRECISIONS)}")
    drafting.require_valid()
    precision = resolve_precision(form, precision, drafting, hidden_layers)
    loaded = _read_model(source, context_length)
    hidden_layers = tuple(sorted({*hidden_layers, *loaded.pooled_layers}))
    require_supported(loaded, form, precision, drafting, hidden_layers)
    cost = plan_export(
        loaded,
        precision,
        form=form,
        block_size=block_size,
        drafting=drafting,
        hidden_layers=hidden_layers,
        is_checked=is_checked,
    )
    return PlannedModel(
        loaded=loaded,
        rule=rule_of(loaded, cost.precision, block_size, form),
        form=form,
        drafting=drafting,
        hidden_layers=hidden_layers,
        cost=cost,
    )


def _read_model(source: Path, context_length: int | None) -> LoadedSource:
    """Raises as read_source does, in other words where the source is a drafting head."""
    try:
        return read_source(source, context_length)
    except SourceError:
        if source.is_dir() and is_head(source):
            raise SourceError(
                f"{source} is a drafting head, which runs beside its target alone; export both, and use the pair: "
                f"edgespec export TARGET --drafter {quote(source)} --output PAIR"
            ) from None
        raise
