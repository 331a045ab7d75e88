"""What an export is to make: which models, in which form and precision, by the options of the command."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edgespec.cli.arguments import attribute_name
from edgespec.errors import UsageError
from edgespec.system.console import info

if TYPE_CHECKING:
    from edgespec.engine.pair_export import PairHalf
    from edgespec.export.options import Trimming
    from edgespec.models.home import ModelHome

TARGET, DRAFTER = "target", "drafter"
MTP = "mtp"  # in the place of a drafter: the model's own layers for multi-token prediction
# Options that only the export of a single model takes, and those that only the native exporter takes.
_SINGLE = ("block-size", "context-length", "keep-layers", "skip-layers", "hidden-states")
_NATIVE = ("form", "device", "calibration", "vocab-subset", "vocab-corpus", *_SINGLE)
# The proof of deterministic mode compares stretches of 20 tokens.
_LEAST_CONTEXT = 64
# Options that only a pair has.
_PAIRED = ("drafter-precision", "drafter-form", "drafter-device", "add-to")


def require_compatible(options: argparse.Namespace) -> None:
    """Refuse options before anything is read.

    Raises:
        DeviceUnavailable: A device has no such name, or no process can use both.
        UsageError: Options contradict each other.
    """
    is_pair = options.drafter is not None
    for name in ("source", "drafter"):
        if getattr(options, name) == "":
            raise UsageError(f"the {name} is empty; give a .gguf file, a folder with safetensors or a hub id")
    if options.drafter == "none" and not Path("none").exists():
        what = "leave --drafter out" if options.add_to is None else "name the source of the pair's drafter"
        raise UsageError(f"--drafter none is no pair; {what}")
    trimming(options).require_valid()  # before anything is downloaded
    if options.context_length is not None and options.context_length < _LEAST_CONTEXT:
        raise UsageError(
            f"--context-length is {options.context_length}, wanted {_LEAST_CONTEXT} or more tokens: a prompt in a "
            "chat template takes some 30 alone"
        )
    other = f"--exporter {options.exporter}" if options.exporter != "native" else "--drafter" if is_pair else None
    names = (*_NATIVE, "drafter") if options.exporter != "native" else _SINGLE
    given = [f"--{name}" for name in names if _is_given(options, name)]
    if other and given:
        raise UsageError(f"{', '.join(given)} cannot be combined with {other}; leave one of them out")
    paired = [f"--{name}" for name in _PAIRED if _is_given(options, name)]
    if not is_pair and paired:
        raise UsageError(f"{paired[0]} is for a pair; give --drafter too")
    form = _form(options)
    if is_pair:
        _form(options, "drafter-")
        if options.add_to is None:
            _require_together(options)
    if _is_given(options, "block-size") and (chosen := _choice_without_blocks(options, form)) is not None:
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


def _require_together(options: argparse.Namespace) -> None:
    from edgespec.loading.device_choice import require_names_together

    require_names_together(options.device, options.drafter_device)


def _form(options: argparse.Namespace, prefix: str = "") -> str:
    """The form of the target, or of the drafter: the one that is named, or what its device needs.

    Raises:
        DeviceUnavailable: The device has no such name.
        UsageError: The device that was named needs another form than the one that was named.
    """
    from edgespec.runtimes.device_names import form_of

    device, form = (getattr(options, attribute_name(prefix + name)) for name in ("device", "form"))
    needed = form_of(device)
    if form is None:
        return needed
    if form != needed and _is_given(options, f"{prefix}device"):
        raise UsageError(
            f"--{prefix}form {form} contradicts --{prefix}device {device}, which needs the {needed} form; leave "
            "one of them out"
        )
    return str(form)


def _device(options: argparse.Namespace, prefix: str = "") -> str:
    """The device that the target or the drafter is exported for; without a name, any of the kind of its form."""
    form, device = _form(options, prefix), getattr(options, attribute_name(f"{prefix}device"))
    from edgespec.runtimes.device_names import form_of

    return str(device) if device != "auto" and form_of(device) == form else form


def _named_parts(options: argparse.Namespace) -> list[str]:
    """The prefixes of the options of those halves of a pair whose device or form was named."""
    return [
        prefix
        for prefix in ("", "drafter-")
        if getattr(options, attribute_name(f"{prefix}form")) or _is_given(options, f"{prefix}device")
    ]


def _is_given(options: argparse.Namespace, name: str) -> bool:
    name = attribute_name(name)
    return bool(getattr(options, name) != options.parser.get_default(name))


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
    """What is to be exported: of a pair to which forms are added those that it does not have."""
    from edgespec.engine.pair_export import usual_added_precision

    found = []
    is_mtp = options.drafter == MTP and not Path(MTP).exists()
    drafter = (options.source, options.revision) if is_mtp else (options.drafter, None)
    sources = ((TARGET, "", options.source, options.revision), (DRAFTER, "drafter-", *drafter))
    named = _named_parts(options) if options.add_to else ["", "drafter-"]
    for name, prefix, source, revision in sources:
        if source is not None and prefix in named:
            form, own = _form(options, prefix), "source"
            if options.add_to is not None:
                if (added := usual_added_precision(options.add_to, name, form)) is None:
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
    from edgespec.runtimes.half_floats import is_known_to_lack_half_floats

    if form == "gpu" and device != "auto" and is_known_to_lack_half_floats(device):
        info(f"'{device}' has no half floats: the export for it is in fp32")
        return "fp32"
    return "source"


def named_devices(options: argparse.Namespace) -> str:
    """The options that name the devices of an export again, where they were named."""
    names = {"": options.device, "drafter-": options.drafter_device}
    return "".join(f" --{prefix}device {name}" for prefix, name in names.items() if name != "auto")


def trimming(options: argparse.Namespace) -> "Trimming":
    """What is to be made of the model's own layers and head as a drafter."""
    from edgespec.export.options import Trimming

    return Trimming(
        keep=options.keep_layers,
        skip=options.skip_layers,
        num_tokens=options.vocab_subset,
        corpus=options.vocab_corpus,
    )


def pair_half(options: argparse.Namespace, part: ExportPart, home: "ModelHome") -> "PairHalf":
    """The half of a pair that a part is, from its source, which is fetched if it is on the hub."""
    from edgespec.engine.pair_export import PairHalf
    from edgespec.export.options import Trimming

    return PairHalf(
        part=part.name,
        source=home.locate(part.source, part.revision),
        form=part.form,
        device=part.device,
        precision=part.precision if part.is_named else None,
        is_mtp=part.is_mtp,
        trimming=trimming(options) if part.name == DRAFTER else Trimming(),
    )
