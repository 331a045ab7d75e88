"""The models that an export makes, by the options of the command: their form, precision and what they take."""

import argparse
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import edgespec
from edgespec import EdgeSpecError, UsageError, in_flags
from edgespec.cli.arguments import attribute_name, is_given, model_home, print_result
from edgespec.system.console import info, warn
from edgespec.system.units import format_bytes

if TYPE_CHECKING:
    from edgespec.export.options import ExportOptions, Trimming
    from edgespec.export.plan import ExportCost

TARGET, DRAFTER = "target", "drafter"
MTP = "mtp"  # in the place of a drafter: the model's own layers for multi-token prediction
# Options that only the export of a single model takes, and those that only the native exporter takes.
_SINGLE = ("block-size", "context-length", "keep-layers", "skip-layers", "hidden-states")
_NATIVE = ("form", "device", "calibration", "vocab-subset", "vocab-corpus", "adapter", *_SINGLE)
# Options that only a pair has.
_PAIRED = ("drafter-precision", "drafter-form", "drafter-device", "add-to")


def require_compatible(options: argparse.Namespace) -> None:
    """Refuse options before anything is read.

    Raises:
        DeviceUnavailable: A device has no such name, or no process can use both.
        UsageError: Options contradict each other.
    """
    from edgespec.export.options import require_context

    is_pair = options.drafter is not None
    for name in ("source", "drafter"):
        if getattr(options, name) == "":
            raise UsageError(f"the {name} is empty; give a .gguf file, a folder with safetensors or a hub id")
    if options.drafter == "none" and not Path("none").exists():
        what = "leave --drafter out" if options.add_to is None else "name the source of the pair's drafter"
        raise UsageError(f"--drafter none is not a pair; {what}")
    trimming(options).require_valid()  # before anything is downloaded
    require_context(options.context_length)
    other = f"--exporter {options.exporter}" if options.exporter != "native" else "--drafter" if is_pair else None
    names = (*_NATIVE, "drafter") if options.exporter != "native" else _SINGLE
    given = [f"--{name}" for name in names if is_given(options, name)]
    if other and given:
        raise UsageError(f"{', '.join(given)} cannot be combined with {other}; leave one of them out")
    paired = [f"--{name}" for name in _PAIRED if is_given(options, name)]
    if not is_pair and paired:
        raise UsageError(f"{paired[0]} is for a pair; give --drafter too")
    form = _form(options)
    if is_pair:
        _form(options, "drafter-")
        if options.add_to is None:
            edgespec.require_names_together(options.device, options.drafter_device)
    if is_given(options, "block-size") and (chosen := _choice_without_blocks(options, form)) is not None:
        raise UsageError(f"--block-size is for --precision int4 and int8, not {chosen}; leave it out")
    precisions = [options.precision or "source", options.drafter_precision or "source"]
    if options.calibration is not None and "w8a16" not in precisions:
        raise UsageError(f"--calibration is for --precision w8a16, not {precisions[0]}; leave it out")
    if options.dry_run and options.exporter != "native":
        raise UsageError("--dry-run estimates the native exporter only; leave out --dry-run or --exporter")
    if options.add_to is not None and not _named_parts(options):
        raise UsageError(
            "--add-to adds forms to a pair; give --device, --form, --drafter-device or --drafter-form"
        )


def _form(options: argparse.Namespace, prefix: str = "") -> str:
    """The form of the target, or of the drafter: the one that is named, or what its device needs.

    Raises:
        DeviceUnavailable: The device has no such name.
        UsageError: The device that was named needs another form than the one that was named.
    """
    device, form = (getattr(options, attribute_name(prefix + name)) for name in ("device", "form"))
    needed = edgespec.form_of(device)
    if form is None:
        return needed
    if form != needed and is_given(options, f"{prefix}device"):
        raise UsageError(
            f"--{prefix}form {form} contradicts --{prefix}device {device}, which needs the {needed} form; leave "
            "one of them out"
        )
    return str(form)


def _device(options: argparse.Namespace, prefix: str = "") -> str:
    """The device that the target or the drafter is exported for; without a name, any of the kind of its form."""
    form, device = _form(options, prefix), getattr(options, attribute_name(f"{prefix}device"))
    return str(device) if device != "auto" and edgespec.form_of(device) == form else form


def _named_parts(options: argparse.Namespace) -> list[str]:
    """The prefixes of the options of those halves of a pair whose device or form was named."""
    return [
        prefix
        for prefix in ("", "drafter-")
        if getattr(options, attribute_name(f"{prefix}form")) or is_given(options, f"{prefix}device")
    ]


def _choice_without_blocks(options: argparse.Namespace, form: str) -> str | None:
    """The precision or form under which no weights are quantised in blocks; None where some are."""
    if options.precision not in ("auto", "int8", "int4"):
        return options.precision or "source"
    return "--form npu" if form == "npu" else None


class ExportPart(NamedTuple):
    """A model to export: the only one, or half of a pair.

    precision: source where none was named, but for a drafting head, which has its own usual one then.
    is_mtp: It is the layers for multi-token prediction of the model that source is.
    """

    name: str
    source: str
    revision: str | None
    form: str
    device: str
    precision: str
    is_named: bool = False  # the precision
    is_mtp: bool = False


def export_parts(options: argparse.Namespace) -> list[ExportPart]:
    """The models to export: of a pair to which forms are added those that it does not have."""
    found = []
    is_mtp = options.drafter == MTP and not Path(MTP).exists()
    drafter = (options.source, options.revision) if is_mtp else (options.drafter, None)
    sources = ((TARGET, "", options.source, options.revision), (DRAFTER, "drafter-", *drafter))
    named = _named_parts(options) if options.add_to else ["", "drafter-"]
    for name, prefix, source, revision in sources:
        if source is not None and prefix in named:
            form, own = _form(options, prefix), "source"
            if options.add_to is not None:
                if (added := edgespec.usual_added_precision(options.add_to, name, form)) is None:
                    continue
                own = added
            if (precision := getattr(options, attribute_name(f"{prefix}precision"))) is None:
                usual = _usual_precision(form, getattr(options, attribute_name(f"{prefix}device")))
                precision = own if usual == "source" else usual
            is_named = getattr(options, attribute_name(f"{prefix}precision")) is not None or precision != "source"
            device, is_own = _device(options, prefix), is_mtp and name == DRAFTER
            found.append(ExportPart(name, source, revision, form, device, precision, is_named, is_own))
    return found


def _usual_precision(form: str, device: str) -> str:
    """The precision for a device where none was named: source, or fp32 on a GPU here without half floats."""
    if form == "gpu" and device != "auto" and edgespec.is_known_to_lack_half_floats(device):
        info(f"'{device}' has no half floats: the export for it is in fp32")
        return "fp32"
    return "source"


def named_devices(options: argparse.Namespace) -> str:
    """The options that name the devices of an export again, where they were named."""
    names = {"": options.device, "drafter-": options.drafter_device}
    return "".join(f" --{prefix}device {name}" for prefix, name in names.items() if name != "auto")


def trimming(options: argparse.Namespace) -> "Trimming":
    """The drafter to make of the model's own layers and head."""
    from edgespec.export.options import Trimming

    return Trimming(
        keep=options.keep_layers,
        skip=options.skip_layers,
        num_tokens=options.vocab_subset,
        corpus=options.vocab_corpus,
    )


def pair_half(options: argparse.Namespace, part: ExportPart, home: "edgespec.ModelHome") -> "edgespec.PairHalf":
    """The half of a pair that a part is, from its source, which is fetched if it is on the hub."""
    from edgespec.export.options import Trimming

    return edgespec.PairHalf(
        part=part.name,
        source=home.locate(part.source, part.revision, partial(judge, options, part)),
        form=part.form,
        device=part.device,
        precision=part.precision if part.is_named else None,
        is_mtp=part.is_mtp,
        trimming=trimming(options) if part.name == DRAFTER else Trimming(),
        adapter=options.adapter if part.name == TARGET else None,
    )


def print_plan(options: argparse.Namespace, *, is_checked: bool) -> int:
    """Print what an export would take; the exit code says whether it is possible."""
    from edgespec.export.output import require_writable

    home = model_home(offline=options.offline)
    parts = export_parts(options)
    forms = [part.form for part in parts]
    with ExitStack() as stack:
        views = [stack.enter_context(home.preview(part.source, part.revision)) for part in parts]
        if options.drafter and len(parts) == 2 and all(view and not view.sizes for view in views):
            target, drafter = (pair_half(options, part, home) for part in parts)
            plans = [*edgespec.plan_pair(target, drafter, is_checked=is_checked).plans]
        else:
            first = own = views[0] if views else None
            if own and _is_head(parts[0], own):  # alone, as a further form of it; its target is read for it
                first = stack.enter_context(home.preview(options.source, options.revision))
            plans = [
                _plan_alone(options, part, view, first, is_checked=is_checked)
                for part, view in zip(parts, views, strict=True)
            ]
            if first and first is not own:
                plans = [replace(plan, fetch_bytes=plan.fetch_bytes + first.fetch_bytes) for plan in plans]
        plans = [
            replace(plan, source=(view and view.name) or plan.source)
            for plan, view in zip(plans, views, strict=True)
        ]
    code = 0
    try:
        require_writable(_new_folder(options), sum(plan.write_bytes for plan in plans))
    except EdgeSpecError as error:
        plans = [replace(plan, problem=in_flags(str(error))) for plan in plans]
        code = error.exit_code
        warn(f"this export is not possible: {error}")
    lines = [_describe_plan(plan, form, is_checked) for plan, form in zip(plans, forms, strict=True)]
    document = [{**asdict(plan), "form": form} for plan, form in zip(plans, forms, strict=True)]
    print_result(options, document, *(lines or ["nothing to add: the pair has these forms"]))
    return code


def _plan_alone(
    options: argparse.Namespace,
    part: ExportPart,
    view: "edgespec.Preview | None",
    target: "edgespec.Preview | None",
    *,
    is_checked: bool,
) -> "ExportCost":
    """The plan of a model, or of half of a pair where the other one is not at hand.

    view: None for a file of the catalogue that is still to fetch. target: Of the model that a head is for.
    """
    from edgespec.export.heads.mtp import read_mtp
    from edgespec.export.plan import estimate, foresee_cost, plan_model
    from edgespec.export.sources import read_source

    if view is None:
        entry = edgespec.CATALOG[part.source]
        num_weights, size = entry.num_parameters, entry.fetch_bytes
        settings: dict[str, Any] = {"is_blocks": True, "fetch_bytes": size, "is_checked": is_checked}
        return estimate(part.source, part.precision, num_weights, size, form=part.form, **settings)
    if _is_head(part, view):
        size = sum(view.sizes.values())
        if size and part.is_mtp:
            size = read_mtp(view.path, view.sizes).weights_bytes
        if not size:
            half = pair_half(options, part, model_home(offline=options.offline))
            if target is not None:
                return half.plan_head(read_source(target.path, sizes=target.sizes)).cost
            size = half.read_head().weights_bytes
        fetch_bytes = 0 if part.is_mtp else view.fetch_bytes
        settings = {"is_blocks": False, "fetch_bytes": fetch_bytes, "is_checked": is_checked}
        return estimate(part.source, part.precision, size // 2, size, form=part.form, **settings)
    wanted = export_options(options, part)
    if view.sizes:
        cost = foresee_cost(view.path, wanted, view.sizes, is_checked=is_checked)
        return replace(cost, source=part.source, fetch_bytes=view.fetch_bytes)
    return plan_model(view.path, wanted, is_checked=is_checked).cost


def _is_head(part: ExportPart, view: "edgespec.Preview") -> bool:
    from edgespec.export.heads.dialects import is_head

    return part.is_mtp or (part.name == DRAFTER and is_head(view.path))


def judge(options: argparse.Namespace, part: ExportPart, view: "edgespec.Preview") -> None:
    """Raises what speaks against fetching the weights of a part: its family, its tensors, the disks."""
    from edgespec.export.output import require_writable
    from edgespec.export.plan import foresee_cost

    if options.exporter == "native" and not _is_head(part, view):
        cost = foresee_cost(view.path, export_options(options, part), view.sizes)
        require_writable(_new_folder(options), cost.write_bytes)


def _new_folder(options: argparse.Namespace) -> Path:
    """A folder that the export would make; in the model home where a dry run names none."""
    return Path(options.output or (options.add_to or model_home().models) / "new")


def export_options(options: argparse.Namespace, part: ExportPart) -> "ExportOptions":
    """The options of the export of a model, the whole or half of a pair."""
    from edgespec.export.options import ExportOptions

    if options.drafter is not None:
        adapter = options.adapter if part.name == TARGET else None
        return ExportOptions(precision=part.precision, form=part.form, adapter=adapter)
    return ExportOptions(
        precision=part.precision,
        form=part.form,
        block_size=options.block_size,
        trimming=trimming(options),
        hidden_layers=tuple(sorted(options.hidden_states or ())),
        context_length=options.context_length,
        adapter=options.adapter,
    )


def _describe_plan(plan: "ExportCost", form: str, is_checked: bool) -> str:
    reason = f" ({plan.reason})" if plan.reason else ""
    return (
        f"{plan.source}, {form} form, {plan.precision}{reason}: download {format_bytes(plan.fetch_bytes)}, write "
        f"{format_bytes(plan.write_bytes)}, peak memory about {format_bytes(plan.peak_bytes)}, about "
        f"{plan.seconds:.0f} s without the download{', check included' if is_checked else ''}"
    )
