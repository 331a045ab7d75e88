"""Which precisions and options a form supports, and which models it can be made of."""

from edgespec.errors import DeviceUnavailable, SourceError, UsageError
from edgespec.export.drafting import Drafting, require_head_size, require_layers
from edgespec.export.families import DecoderConfig
from edgespec.export.precision import FORMS
from edgespec.export.sources import LoadedSource

# Families whose residual streams exceed 65504, the largest half float.
_LARGE_ACTIVATIONS = ("gemma2", "gemma3")
# What GroupQueryAttention's heads must be a multiple of, with rotary positions in some layer and in none.
_ROTATED_UNIT, _PLAIN_UNIT = 16, 8
_THROUGH_PYTORCH = (
    "a folder with its safetensors may go through PyTorch: edgespec export SOURCE --exporter optimum"
)


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
    """Refuse what a model does not support.

    Raises:
        DeviceUnavailable: Devices of this form cannot run the model.
        SourceError: No kernel of the form runs the model's attention.
        UsageError: It does not support the precision or the options.
    """
    config = loaded.config
    _require_heads(loaded.source.name, config, form)
    drafting.layers(config.num_layers)
    if drafting.num_tokens:
        require_head_size(drafting.num_tokens, loaded.vocabulary.eos_token_ids, loaded.head.rows)
    require_layers(hidden_layers, config.num_layers + 1)  # the last is the state after the final norm
    if loaded.pooling and form == "npu":
        raise DeviceUnavailable(
            f"{loaded.source.name} gives vectors of texts, which are made of hidden states, and the npu form "
            "gives none; use --device cpu or gpu"
        )
    if config.routing is not None and form != "cpu":
        raise DeviceUnavailable(
            f"{config.architecture} has a mixture of experts, which is exported for the CPU only; use --device "
            "cpu, or --drafter-device cpu for a drafter"
        )
    is_half = form != "cpu" and precision != "fp32"  # in w8a16 within norms
    if is_half and config.architecture in _LARGE_ACTIVATIONS:
        raise DeviceUnavailable(
            f"activations of {config.architecture} exceed what fp16 holds; run it on the CPU (--device cpu, or "
            "--drafter-device cpu for a drafter), or export it with --precision fp32 for a device other than "
            "cuda, which has attention in half floats only"
        )


def _require_heads(name: str, config: DecoderConfig, form: str) -> None:
    """Raises SourceError: No kernel of the form runs heads of the model's number or size."""
    if config.num_heads % config.num_kv_heads:
        raise SourceError(
            f"{name} has {config.num_heads} attention heads and {config.num_kv_heads} heads of keys and values, "
            "wanted a number that divides the first; its settings are damaged"
        )
    rotates = any(layer.rotary is not None for layer in config.layers)
    unit = (_ROTATED_UNIT if rotates else _PLAIN_UNIT) if form != "npu" else 2
    if config.head_dim % unit:
        raise SourceError(
            f"{name} has attention heads of {config.head_dim} values, ONNX Runtime's kernels take multiples of "
            f"{unit}; {_THROUGH_PYTORCH}"
        )
