"""Which precisions and options a form supports, and which models it can be made of."""

from edgespec.errors import UsageError
from edgespec.export.drafting import Drafting, require_head_size, require_layers
from edgespec.export.precision import FORMS
from edgespec.export.sources import LoadedSource

# Families whose residual streams exceed 65504, the largest half float.
_LARGE_ACTIVATIONS = ("gemma2", "gemma3")


def resolve_precision(form: str, precision: str, drafting: Drafting, hidden_layers: tuple[int, ...]) -> str:
    """The precision that is written where one is asked for in a form.

    Raises UsageError: The form is unknown, or does not support the precision or the options.
    """
    if form not in FORMS:
        raise UsageError(f"unknown form '{form}'; choose one of {', '.join(FORMS)}")
    if form != "npu":
        if precision == "w8a16":
            raise UsageError(
                "w8a16 is a precision of the npu form; name an NPU (--device npu, or --drafter-device npu for a "
                "drafter), or choose --precision int8"
            )
        return precision
    if drafting != Drafting() or hidden_layers:
        raise UsageError("the npu form has no drafters and no hidden states; leave these options out")
    if precision not in ("auto", "source", "fp16", "fp32", "w8a16"):
        raise UsageError(f"the npu form supports fp16, fp32 or w8a16, not {precision}; choose one of these")
    return precision if precision in ("fp32", "w8a16") else "fp16"


def require_supported(
    loaded: LoadedSource, form: str, precision: str, drafting: Drafting, hidden_layers: tuple[int, ...]
) -> None:
    """Raises UsageError: the model does not support the form, the precision or the options."""
    config = loaded.config
    drafting.layers(config.num_layers)
    if drafting.num_tokens:
        require_head_size(drafting.num_tokens, loaded.vocabulary.eos_token_ids, loaded.head.rows)
    require_layers(hidden_layers, config.num_layers + 1)  # the last is the state behind the final norm
    if config.routing is not None and form != "cpu":
        raise UsageError(
            f"{config.architecture} has a mixture of experts, which is exported for the CPU only; leave out "
            "--device and --form"
        )
    is_half = form != "cpu" and precision != "fp32"  # in w8a16 within norms
    if is_half and config.architecture in _LARGE_ACTIVATIONS:
        raise UsageError(
            f"activations of {config.architecture} exceed what fp16 holds; run it on the CPU (--device cpu, or "
            "--drafter-device cpu for a drafter), or export it with --precision fp32 for a device other than "
            "cuda, which has attention in half floats only"
        )
