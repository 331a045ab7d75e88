"""Models, profiles and layouts made up for plans: only figures, no device and no file."""

from dataclasses import replace

from edgespec.draft.acceptance_rates import Key
from edgespec.manifest import Manifest, Source
from edgespec.manifest.caches import KVCache
from edgespec.memory.estimate import MemoryNeeds
from edgespec.setup.planner import Layout
from edgespec.setup.profile import DrafterProfile, Place, Profile, drafter_key

SERIAL_BRANCHES = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
FREE_BRANCHES = {1: 1.0, 8: 1.0, 64: 1.0}


def manifest(name: str, context_length: int = 8192) -> Manifest:
    return Manifest(
        name=name,
        architecture="llama",
        precision="int4",
        context_length=context_length,
        kv_cache=KVCache(num_layers=2, num_kv_heads=2, head_dim=16),
        vocab_size=100,
        vocab_sha256="",
        bos_token_id=None,
        eos_token_ids=(),
        add_bos=False,
        source=Source(name=name, format="gguf", sha256=""),
    )


TARGET, DRAFTER = manifest("target"), replace(manifest("drafter"), tree_graph="model_tree.onnx")
PLENTY = MemoryNeeds(lambda model, context, device: {device: 1000 + context}, {"gpu": 10**6, "cpu": 10**6})


def layout(
    target: Place,
    place: Place,
    *,
    step_ms: float = 20.0,
    row: float = 0.03,
    draft: float = 0.2,
    slowed: tuple[float, float] = (1.0, 1.0),
    branches: dict[int, float] = SERIAL_BRANCHES,
) -> Layout:
    """Passes of step_ms and a share row of it more for each token; drafts that take a share of a step."""
    step_s = step_ms / 1e3
    drafter = DrafterProfile(step_s=draft * step_s, row_s=0.0, branches=branches, slowed=slowed)
    passes_s = {64: {width: step_s * (1 + row * (width - 1)) for width in (1, 2, 32)}}
    profile = Profile(passes_s=passes_s, prefill_s=0.001, drafters={drafter_key("drafter", place): drafter})
    return Layout(target, profile, "drafter", place)


def kept(share: float) -> dict[Key, tuple[float, float]]:
    return {("drafter", evidence): (share * 1e6, 1e6) for evidence in range(-1, 16)}
