"""A source as read, all that decides what its model folder will hold, and what its export takes."""

from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.errors import DeviceUnavailable, MemoryExhausted, SourceError, UsageError
from edgespec.export.adapters import merge_adapter, say_left_out_adapters
from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.families import THROUGH_PYTORCH
from edgespec.export.folder_size import folder_bytes
from edgespec.export.heads.dialects import is_recognized
from edgespec.export.layout import lay_out, num_weights, rule_of
from edgespec.export.options import ExportOptions, require_head_size, require_layers
from edgespec.export.precision import FEW_WEIGHTS, Rule, choose_precision
from edgespec.export.safetensors import read_tensors, weight_files
from edgespec.export.sources import LoadedSource, is_quantized, read_source
from edgespec.export.tensors import NO_SIZES, Sizes
from edgespec.memory.estimate import BYTES_PER_WEIGHT, SOURCE_GROWTH
from edgespec.memory.free_memory import free_memory
from edgespec.system.command_line import quote
from edgespec.system.units import format_bytes
from edgespec.types import Report

# Measured on SmolLM2-135M and Qwen2.5-Coder-1.5B with two cores of a desktop (docs/log/export-precision.md).
_BYTES_PER_S = 200e6
_FITTED_PER_S = 45e6  # weights a second whose int4 blocks are fitted
_BASE_BYTES, _SHARE = 135e6, 0.1
# The check: weights a second of the reference and the passes (14 million on Gemma 3 270M, 21 on SmolLM2-135M), and
# of the passes of one token of the npu form.
_CHECKED_PER_S, _STEPPED_PER_S = 16e6, 7e6
_CHECKED_TOKENS, _USUAL_VOCABULARY = 240, 150_000
# Families whose residual streams exceed 65504, the largest half float.
_LARGE_ACTIVATIONS = {"gemma2": 0, "gemma3": 0, "gpt_oss": 36}  # and from how many layers on
# What GroupQueryAttention's heads must be a multiple of, with rotary positions in some layer and in none.
_ROTATED_UNIT, _PLAIN_UNIT = 16, 8
_THROUGH_PYTORCH = f"a folder with its safetensors may go through PyTorch: {THROUGH_PYTORCH}"


@dataclass(frozen=True, kw_only=True)
class ExportCost:
    """The cost of an export without fetching; write_bytes is the size of the folder; the others are estimates."""

    source: str
    precision: str
    reason: str | None
    fetch_bytes: int
    source_bytes: int
    write_bytes: int
    peak_bytes: int
    seconds: float
    problem: str | None = None  # why the export is impossible


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A source as read, what to make of it, the rule for its weights, and what that costs."""

    loaded: LoadedSource
    options: ExportOptions
    rule: Rule
    cost: ExportCost


def plan_model(
    source: Path, options: ExportOptions, *, is_checked: bool = False, sizes: Sizes = NO_SIZES
) -> PlannedModel:
    """Read a source and plan its export.

    Args:
        is_checked: The folder is compared with its source, which takes time and memory.
        sizes: Of files of which only the header is here.

    Raises:
        UsageError: An option is unknown, or the form or the model does not support it.
        SourceError: The source is missing, damaged or unsupported.
        DeviceUnavailable: Devices of the form cannot run the model.
    """
    options = options.resolved()
    loaded = _read_model(source, options.context_length, sizes)
    loaded = replace(loaded, notes=(*loaded.notes, *say_left_out_adapters(source, options.adapter)))
    if options.adapter is not None:
        loaded = merge_adapter(loaded, options.adapter)
    pooled = [loaded.config.num_layers] if loaded.pooling else []  # the states behind the final norm
    options = replace(options, hidden_layers=tuple(sorted({*options.hidden_layers, *pooled})))
    _require_supported(loaded, options)
    is_blocks, reason = any(tensor.is_blocks for tensor in loaded.tensors.values()), None
    if options.precision == "auto":
        keeps_blocks = is_blocks and options.adapter is None  # merged weights are floats
        precision, reason = choose_precision(
            num_weights(loaded), is_blocks=keeps_blocks, hidden_size=loaded.config.hidden_size
        )
        options = replace(options, precision=precision)
    rule = rule_of(loaded, options)
    cost = estimate(
        loaded.source.name,
        options.precision,
        num_weights(loaded),
        sum(tensor.num_bytes for tensor in loaded.tensors.values()),
        is_blocks=is_blocks,
        vocab_size=loaded.config.vocab_size,
        form=options.form,
        is_checked=is_checked,
        write_bytes=folder_bytes(loaded, rule, lay_out("", loaded, rule, options), options.trimming.num_tokens),
    )
    return PlannedModel(loaded=loaded, options=options, rule=rule, cost=replace(cost, reason=reason))


def _read_model(source: Path, context_length: int | None, sizes: Sizes) -> LoadedSource:
    """Raises as read_source does, in other words where the source is a drafting head."""
    try:
        return read_source(source, context_length, sizes)
    except SourceError:
        if is_recognized(source):
            raise SourceError(
                f"{source} is a drafting head, which runs beside its target alone; export both, and use the pair: "
                f"edgespec export TARGET --drafter {quote(source)} --output PAIR"
            ) from None
        raise


def foresee_cost(source: Path, options: ExportOptions, sizes: Sizes, *, is_checked: bool = False) -> ExportCost:
    """The cost of an export whose source is still to fetch, by its settings and headers.

    sizes: Of the files of weights. Raises as plan_model does.
    """
    if not is_quantized(source):
        return plan_model(source, options, is_checked=is_checked, sizes=sizes).cost
    options, source_bytes = options.resolved(), sum(sizes.values())
    floats, integers = read_tensors(weight_files(source), sizes)
    # Matrices in floats of 8 bits, and of 4 bits, two in a byte, become wider floats: no kernel takes them.
    widened = {name: each for name, each in integers.items() if name.endswith((".weight", ".weight_packed"))}
    widened = {name: each for name, each in widened.items() if each.storage in ("U8", "F8_E4M3", "F8_E5M2")}
    num_widened = sum(each.count * (1 + (each.storage == "U8")) for each in widened.values())
    blocks = [each for name, each in integers.items() if name not in widened]
    num_blocks = sum(each.num_bytes * (1 + (each.storage != "I8")) for each in blocks)  # of 4 bits, as most have
    write_bytes = int(SOURCE_GROWTH * (source_bytes - sum(each.num_bytes for each in widened.values())))
    write_bytes += num_widened * (4 if options.form == "cpu" else 2)
    return estimate(
        source.name,
        options.precision,
        sum(each.rows * each.columns for each in floats.values()) + num_widened + num_blocks,
        source_bytes,
        is_blocks=not widened,
        form=options.form,
        is_checked=is_checked,
        write_bytes=write_bytes if options.precision == "source" else None,
    )


def _require_supported(loaded: LoadedSource, options: ExportOptions) -> None:
    """Refuse what a model does not support.

    Raises:
        DeviceUnavailable: Devices of this form cannot run the model.
        SourceError: No kernel of the form runs the model's attention.
        UsageError: It does not support the precision or the options.
    """
    config, form, trimming = loaded.config, options.form, options.trimming
    _require_heads(loaded.source.name, config, form)
    kept = trimming.layers(config.num_layers)
    if trimming.num_tokens:
        require_head_size(trimming.num_tokens, loaded.vocabulary.eos_token_ids, loaded.head.rows)
    require_layers(options.hidden_layers, config.num_layers + 1)  # the last is the state after the final norm
    if loaded.pooling and form == "npu":
        raise DeviceUnavailable(
            f"{loaded.source.name} is an embedding model, which needs hidden states, and the npu form has none; "
            "use --device cpu or gpu"
        )
    _require_layers(loaded.source.name, config, form)
    for i in kept or ():
        if (source := config.layers[i].keys_of) is not None and source not in (kept or ()):
            raise UsageError(f"layer {i} reads the keys and values of layer {source}; keep that one too")
    if kept and not any(config.layers[i].attends for i in kept):
        raise UsageError(f"none of the layers {kept} has attention, which a drafter needs; keep another one")
    is_half = form != "cpu" and options.precision != "fp32"  # in w8a16 within norms
    if is_half and config.num_layers >= _LARGE_ACTIVATIONS.get(config.architecture, config.num_layers + 1):
        raise DeviceUnavailable(
            f"activations of {config.architecture} exceed what fp16 holds; run it on the CPU (--device cpu, or "
            "--drafter-device cpu for a drafter), or export it with --precision fp32 for a device other than "
            "cuda, which has attention in half floats only"
        )


def _require_layers(name: str, config: DecoderConfig, form: str) -> None:
    """Raises DeviceUnavailable: Devices of the form do not run its layers; SourceError: None has attention."""
    if not any(layer.attends for layer in config.layers):
        raise SourceError(
            f"{name} has no layer with attention, which is not supported; its settings may be damaged"
        )
    found = {
        "experts": config.routing is not None,
        "layers of different heads": config.sharing_layers or config.other_heads or config.layer_input_size,
        "layers of another kind than attention": config.is_mixed,
    }
    named = next((what for what, is_there in found.items() if is_there), None)
    if named and form == "npu":
        raise DeviceUnavailable(
            f"{config.architecture} has {named}, which are not exported for NPUs; use --device cpu or gpu, or "
            "--drafter-device cpu for a drafter"
        )


def _require_heads(name: str, config: DecoderConfig, form: str) -> None:
    """Raises SourceError: No kernel of the form runs heads of the model's number or size."""
    pairs = {(config.kv_heads(i), config.head_size(i)) for i in range(config.num_layers)}
    num_kv_heads = next((num for num, _ in pairs if config.num_heads % num), None)
    if num_kv_heads is not None:
        raise SourceError(
            f"{name} has {config.num_heads} attention heads and {num_kv_heads} heads of keys and values, "
            "wanted a number that divides the first; its settings are damaged"
        )
    rotates = any(layer.rotary is not None for layer in config.layers)
    unit = (_ROTATED_UNIT if rotates else _PLAIN_UNIT) if form != "npu" else 2
    head_dim = next((size for _, size in pairs if size % unit), None)
    if head_dim is not None:
        raise SourceError(
            f"{name} has attention heads of {head_dim} values, ONNX Runtime's kernels take multiples of "
            f"{unit}; {_THROUGH_PYTORCH}"
        )


def estimate(
    source: str,
    precision: str,
    num_weights: int,
    source_bytes: int,
    *,
    is_blocks: bool,
    fetch_bytes: int = 0,
    vocab_size: int = _USUAL_VOCABULARY,
    form: str = "cpu",
    is_checked: bool = False,
    write_bytes: int | None = None,
) -> ExportCost:
    """The cost of exporting a source, by its number of weights and bytes.

    is_blocks: The weights are quantised. write_bytes: The size of the folder, where it is known.
    """
    reason = None
    if precision == "auto":
        precision, reason = choose_precision(num_weights, is_blocks=is_blocks)
    per_weight = BYTES_PER_WEIGHT.get(precision)
    if form == "gpu" and precision == "int4" and num_weights < FEW_WEIGHTS:
        per_weight = BYTES_PER_WEIGHT["int8"]
    if write_bytes is None:
        write_bytes = int(SOURCE_GROWTH * source_bytes if per_weight is None else per_weight * num_weights)
    fitting_s = num_weights / _FITTED_PER_S if precision == "int4" else 0.0
    peak_bytes, seconds = _BASE_BYTES + _SHARE * source_bytes, (source_bytes + write_bytes) / _BYTES_PER_S
    if is_checked or precision == "w8a16":  # w8a16 runs the model to measure ranges
        # Weights are mapped, and packed or widened to fp32 by the session; the check adds rows of logits.
        is_kept = precision == "source" and not is_blocks  # in four bytes a weight or in two
        stored = ("fp32" if write_bytes > 3 * num_weights else "fp16") if is_kept else precision
        own_bytes = {"fp32": write_bytes // 2, "fp16": 4 * num_weights}.get(stored, write_bytes)
        peak_bytes += write_bytes + own_bytes + _CHECKED_TOKENS * vocab_size * 4
        seconds += num_weights / _CHECKED_PER_S
        if is_checked and form == "npu":
            seconds += num_weights / _STEPPED_PER_S
    return ExportCost(
        source=source,
        precision=precision,
        reason=reason,
        fetch_bytes=fetch_bytes,
        source_bytes=source_bytes,
        write_bytes=write_bytes,
        peak_bytes=int(peak_bytes),
        seconds=seconds + fitting_s,
    )


def require_memory(cost: ExportCost, most_bytes: int) -> None:
    """Raises MemoryExhausted: The weights alone take more than this machine has."""
    if cost.write_bytes > most_bytes:
        raise MemoryExhausted(
            f"{cost.source} in {cost.precision} precision takes {format_bytes(cost.write_bytes)}, and this "
            f"machine has {format_bytes(most_bytes)} of memory; choose a smaller model, or put :int4 behind the "
            "name for about a quarter of fp16; for another machine: edgespec export SOURCE --output DIR",
            needed_bytes=cost.write_bytes,
            free_bytes=most_bytes,
        )


def can_be_checked(cost: ExportCost, report: Report) -> bool:
    """True if there is memory to check a first use; loading says itself where a model does not fit."""
    free_bytes = free_memory().free_bytes
    if cost.peak_bytes <= free_bytes:
        return True
    report(
        f"not compared with its source: that takes about {format_bytes(cost.peak_bytes)}, and "
        f"{format_bytes(free_bytes)} are free"
    )
    return False
