"""The families of decoders that are read (families.toml), and what some others need (unread_families.toml)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from edgespec.errors import SourceError
from edgespec.system.tables import read_table

NAMES = read_table(__file__, "tensor_names.toml")
NUMBERED_EXPERTS: Mapping[str, tuple[str, ...]] = NAMES["experts"]["numbered"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """The differences of a family from llama."""

    norms: tuple[str, ...] = ("input_norm", "mlp_norm")
    norms_whole_projections: bool = False  # q_norm and k_norm are over all heads at once
    gain_addend: float = 0.0  # a checkpoint, though not a GGUF file, stores gains less this
    # Which files store the rows of queries and keys in pairs that are rotated together: "gguf", "huggingface".
    paired_in: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # tensors that a file must have though other families do without
    may_lack: tuple[str, ...] = ()  # those that its smaller models do without
    fused: tuple[str, ...] = ()  # what one matrix holds: "qkv", query, key and value; "gate_up", gate and up
    gguf_names: tuple[str, ...] = ()  # in GGUF files, where they are not those of transformers
    names: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # as in roles.py, where others differ
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: NUMBERED_EXPERTS)
    activation: str = "silu"
    scales_embedding: bool = False  # by √hidden_size
    # One of so many layers sees all tokens, the others a window; 0: all see a window, None: none does.
    full_attention_every: int | None = None
    is_local_plain: bool = False  # layers that see a window rotate by the plain base, without scaling
    rotates_local_alone: bool = False  # where some layers see a window, the others have no positions
    defaults: Mapping[str, Any] = field(default_factory=dict)  # settings that transformers assumes
    is_mixture: bool = False  # its layers have experts
    normalizes_routing: bool = True  # unless norm_topk_prob says otherwise
    routes_by_sigmoid: bool = False  # unless a GGUF file says otherwise
    has_rounded_yarn: bool = True  # borders of YaRN are whole pairs of values, unless truncate says otherwise
    norms_rotated: bool = False  # q_norm and k_norm are of rotated values
    has_convolutions: bool = False  # some layers have a short convolution in the place of attention
    has_layer_sizes: bool = False  # layers differ in their heads and widths, and may share keys and values
    has_mamba: bool = False  # some have a Mamba-2 layer in the place of attention
    has_both: bool = False  # all have a Mamba-2 layer beside attention
    has_delta: bool = False  # some have a Gated DeltaNet, and attention has a gate of its output


def _read_families() -> dict[str, Family]:
    found: dict[str, Family] = {}
    for name, stated in read_table(__file__, "families.toml").items():
        found[name] = replace(found.get(stated.pop("like", ""), Family()), **stated)
    return found


FAMILIES = _read_families()


def with_defaults(architecture: str, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config.json, and those that transformers assumes where that has none."""
    assumed: dict[str, Any] = {"rms_norm_eps": 1e-6}
    if architecture.startswith("granite"):
        assumed["attention_multiplier"] = 1.0
    assumed |= FAMILIES[architecture].defaults if architecture in FAMILIES else {}
    rotary = stated.get("rope_scaling") or stated.get("rope_parameters") or assumed.get("rope_parameters")
    return {**assumed, **stated, "rope_parameters": rotary}


_HYBRID_WITH_EXPERTS = "granitemoehybrid_moe"  # whose files have the name of those without
_NEAR = 0.7  # from 0 to 1, of names of families
THROUGH_PYTORCH = "edgespec export SOURCE --exporter transformers"


class Lacking(NamedTuple):
    """A part of models that is not read: what ONNX Runtime has of it, and the nearest model that is read."""

    part: str
    runtime: str
    nearest: str
    starts: tuple[str, ...] = ()  # of the names of families that need it

    def __str__(self) -> str:
        return f"{self.part}: {self.runtime}. The nearest that is read is {self.nearest}"


GATED_EXPERTS = Lacking(
    "experts whose gates are GELUs",
    "ONNX Runtime computes them from 1.32 on for CUDA alone, and edgespec does not write them",
    "a Gemma 4 without experts, as 12B or E4B",
)
_UNREAD = read_table(__file__, "unread_families.toml")
_LACKING = [Lacking(**stated) for stated in _UNREAD["lacking"]]


def family_of(path: object, architecture: str, advice: str = "", taken: str = "") -> Family:
    """The differences of a family of models, which take what is named beside text.

    Raises SourceError: It is not read, with what it needs where that is known.
    """
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    if found := next((kind for kind in _UNREAD["others"] if architecture.startswith(kind["starts"])), None):
        raise SourceError(f"{path} is {found['what'].format(read=_UNREAD['read'])}")
    needs = next((need for need in _LACKING if f"{architecture} ".startswith(need.starts)), None)
    need = f"needs {needs}" if needs else f"takes {taken}" if taken else ""
    lacking, advice = (f", which {need}", "") if need else ("", advice)
    known = [name for name in FAMILIES if name != _HYBRID_WITH_EXPERTS]
    near = get_close_matches(architecture, known, cutoff=_NEAR) if not needs else []
    newer = f"; near it by name are {', '.join(near)}, and a newer edgespec may read it" if near else ""
    raise SourceError(
        f"{path} is of the family '{architecture}'{lacking}{newer}; known are {', '.join(known)}{advice}"
    )


def family_of_huggingface(path: object, settings: Mapping[str, Any]) -> tuple[str, Family]:
    """The name of a family and its differences. Raises SourceError: It is not read."""
    if not settings.get("model_type"):
        raise SourceError(
            f"the config.json of {path} states no model_type, which names its family; fetch it again"
        )
    architecture = str(settings["model_type"]).removesuffix("_text")
    if architecture == "granitemoehybrid" and settings.get("num_local_experts"):
        architecture = _HYBRID_WITH_EXPERTS
    advice = f". Others may go through PyTorch, in fp32: {THROUGH_PYTORCH}"
    parts = {"vision_config": "pictures", "audio_config": "sound"}
    taken = " and ".join(word for key, word in parts.items() if settings.get(key))
    return architecture, family_of(path, architecture, advice, taken)
