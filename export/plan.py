"""The time, memory and disk that an export will take."""

from dataclasses import dataclass, replace

from edgespec.export.drafting import Drafting
from edgespec.export.folder_size import folder_bytes
from edgespec.export.layout import lay_out, num_weights, rule_of
from edgespec.export.precision import BLOCK_SIZES, FEW_WEIGHTS, choose_precision
from edgespec.export.sources import LoadedSource
from edgespec.memory.estimate import BYTES_PER_WEIGHT, SOURCE_GROWTH
from edgespec.memory.free_memory import free_memory
from edgespec.types import Report

# Measured on SmolLM2-135M and Qwen2.5-Coder-1.5B with two cores of a desktop (docs/log/export-precision.md).
_BYTES_PER_S = 200e6
_FITTED_PER_S = 45e6  # weights a second whose int4 blocks are fitted
_BASE_BYTES, _SHARE = 135e6, 0.1
# The check: weights a second of the reference and the passes (14 million on Gemma 3 270M, 21 on SmolLM2-135M), and
# of the passes of one token of the npu form.
_CHECKED_PER_S, _STEPPED_PER_S = 16e6, 7e6
_CHECKED_TOKENS, _USUAL_VOCABULARY = 240, 150_000


@dataclass(frozen=True, kw_only=True)
class Plan:
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


def plan_export(
    loaded: LoadedSource,
    precision: str,
    *,
    form: str = "cpu",
    block_size: int = BLOCK_SIZES[0],
    drafting: Drafting = Drafting(),  # noqa: B008  frozen
    hidden_layers: tuple[int, ...] = (),
    is_checked: bool = False,
) -> Plan:
    """The plan for a source on this machine; auto is resolved."""
    is_blocks, reason = any(tensor.is_blocks for tensor in loaded.tensors.values()), None
    if precision == "auto":
        precision, reason = choose_precision(
            num_weights(loaded), is_blocks=is_blocks, hidden_size=loaded.config.hidden_size
        )
    rule = rule_of(loaded, precision, block_size, form)
    manifest = lay_out("", loaded, rule, form, drafting, hidden_layers)
    plan = estimate(
        loaded.source.name,
        precision,
        num_weights(loaded),
        sum(tensor.num_bytes for tensor in loaded.tensors.values()),
        is_blocks=is_blocks,
        vocab_size=loaded.config.vocab_size,
        form=form,
        is_checked=is_checked,
        write_bytes=folder_bytes(loaded, rule, manifest, drafting.num_tokens),
    )
    return replace(plan, reason=reason)


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
) -> Plan:
    """The plan for a source, by its number of weights and bytes.

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
        own_bytes = {"fp32": write_bytes // 2, "fp16": 4 * num_weights}.get(precision, write_bytes)
        peak_bytes += write_bytes + own_bytes + _CHECKED_TOKENS * vocab_size * 4
        seconds += num_weights / _CHECKED_PER_S
        if is_checked and form == "npu":
            seconds += num_weights / _STEPPED_PER_S
    return Plan(
        source=source,
        precision=precision,
        reason=reason,
        fetch_bytes=fetch_bytes,
        source_bytes=source_bytes,
        write_bytes=write_bytes,
        peak_bytes=int(peak_bytes),
        seconds=seconds + fitting_s,
    )


def can_be_checked(plan: Plan, report: Report) -> bool:
    """Whether there is memory to check a first use; loading says itself where a model does not fit."""
    free_bytes = free_memory().free_bytes
    if plan.peak_bytes <= free_bytes:
        return True
    report(
        f"not compared with its source: that takes about {plan.peak_bytes / 2**30:.1f} GiB, and "
        f"{free_bytes / 2**30:.1f} GiB are free"
    )
    return False
