"""Heads as they were published: config.json as far as it is read, shapes of tensors, and the shape of the target.

By their pages, by the programs that load them, and by the libraries that wrote them. Written as files of the
published size that are empty but for their headers.
"""

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.export.decoder_config import Layer
from edgespec.export.rotary import Rotary, plain_rotary
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class PublishedHead:
    """A head and its target.

    target: Numbers of a state, tokens and layers.
    tokens: Rows of a trimmed vocabulary head.
    kinds: S and F for layers that see a window or all; of a head that drafts a block.
    refusal: A part of the message with which it is refused; empty where it is read.
    reads: Layers of the target, as its folder names them.
    num_drafted: Tokens that it drafts in a pass.
    num_weights: By its page, where that says it.
    """

    name: str
    config: dict[str, Any]
    shapes: Shapes
    target: tuple[int, int, int]
    tokens: int = 0
    refusal: str = ""
    kind: str = "recurrent"
    kinds: str = ""
    reads: tuple[int, ...] = ()
    num_drafted: int = 1
    num_weights: int | None = None

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        header: dict[str, Any] = {}
        end = 0
        lists: Shapes = {"d2t": (self.tokens,), "t2d": (self.target[1],)} if self.tokens else {}
        for name, shape in {**lists, **self.shapes}.items():
            kind = "d2t" if name.endswith("token_ordering") else name
            dtype, size = {"d2t": ("I64", 8), "t2d": ("BOOL", 1)}.get(kind, ("BF16", 2))
            start, end = end, end + size * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            first = file.tell()
            if self.tokens:  # its rows are those of the first tokens
                file.seek(self.tokens * 8, 1)
                file.write(np.ones(self.tokens, np.uint8).tobytes())
            file.truncate(first + end)
            if ordering := header.get("masked_embedding.token_ordering"):
                file.seek(first + ordering["data_offsets"][0])
                file.write(np.arange(ordering["shape"][0]).tobytes())
        return folder


def layers_of(head: PublishedHead) -> dict[str, Any]:
    """The settings of a head's layers."""
    inner = head.config.get("transformer_layer_config") or head.config.get("text_config")
    return {**head.config, **(inner or {})}


def shaped(target: LoadedSource, head: PublishedHead) -> LoadedSource:
    """The target with the sizes of a head's own, whose weights are not read."""
    hidden, vocab_size, num_layers = head.target
    layer, inner = target.config.layers[0], layers_of(head)
    sizes: dict[str, Any] = {"hidden_size": hidden, "vocab_size": vocab_size}
    if "backbone_hidden_size" in head.config:
        return _with_keys(target, head)
    if "text_config" in head.config:  # whose layers are like the target's
        rope, size = inner["rope_parameters"], inner["head_dim"]
        layer = Layer(rotary=plain_rotary(rope["rope_theta"], int(size * rope["partial_rotary_factor"])))
        sizes |= {"num_heads": inner["num_attention_heads"], "head_dim": size}
    embedding = StoredTensor("embedding", Path("none"), 0, vocab_size, hidden, "BF16")
    config = replace(target.config, layers=(layer,) * num_layers, **sizes)
    return replace(target, config=config, tensors={"embedding": embedding})


def _with_keys(target: LoadedSource, head: PublishedHead) -> LoadedSource:
    """The target of an assistant, which reads keys of two of its layers."""
    hidden, vocab_size, num_layers = head.target
    inner, shares = layers_of(head), np.arange(256) / 256
    turned = np.where(shares < 0.25, 1e6**-shares, 0).astype(np.float32)  # a quarter of a wide head
    rotaries = {512: plain_rotary(1e4, 256), None: Rotary(turned)}
    sources = dict(zip((512, None), (number + 1 for number in head.reads), strict=False))
    kv_heads, tensors = inner["num_key_value_heads"], {"embedding": (vocab_size, hidden)}
    each = {
        window: Layer(rotary=rotary, sliding_window=window, num_kv_heads=kv_heads, head_dim=256 if window else 512)
        for window, rotary in rotaries.items()
    }
    made = [each[None if i == sources[None] else 512] for i in range(max(sources.values()) + 1)]
    made += [replace(each[512], keys_of=sources[512])] * (num_layers - len(made))
    for window, i in sources.items():
        size = each[window].head_dim or 0
        tensors |= {f"{i}.{part}": (kv_heads * size, hidden) for part in "kv"}
        tensors |= {f"{i}.k_norm": (1, size), f"{i}.input_norm": (1, hidden)}
    sizes: dict[str, Any] = {"hidden_size": hidden, "vocab_size": vocab_size, "embedding_scale": hidden**0.5}
    config = replace(target.config, layers=tuple(made), num_heads=8, **sizes)
    stored = {name: StoredTensor(name, Path("none"), 0, *shape, "BF16") for name, shape in tensors.items()}
    return replace(target, config=config, tensors=stored)


def layers(
    hidden: int, inner: int, heads: int, kv_heads: int, dim: int, count: int
) -> tuple[dict[str, Any], Shapes]:
    """Settings and tensors of layers of Qwen3's kind."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": count, "head_dim": dim}
    config = {**sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "model_type": "qwen3"}
    config |= {"rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 40960, "rope_theta": 1e6}
    shapes: Shapes = {}
    for i in range(count):
        shapes |= {
            f"layers.{i}.{name}": shape for name, shape in layer(hidden, inner, heads, kv_heads, dim).items()
        }
        shapes |= {f"layers.{i}.self_attn.{part}_norm.weight": (dim,) for part in "qk"}
        shapes[f"layers.{i}.input_layernorm.weight"] = (hidden,)
    return config, shapes


def layer(hidden: int, inner: int, heads: int, kv_heads: int, dim: int, read: int = 0) -> Shapes:
    shapes: Shapes = {f"self_attn.{part}_proj.weight": (kv_heads * dim, read or hidden) for part in "kv"}
    shapes |= {
        "self_attn.q_proj.weight": (heads * dim, read or hidden),
        "self_attn.o_proj.weight": (hidden, heads * dim),
    }
    shapes |= {f"mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
    return shapes | {"mlp.down_proj.weight": (hidden, inner), "post_attention_layernorm.weight": (hidden,)}


def block(
    name: str,
    sizes: tuple[int, int, int, int, int, int],
    target: tuple[int, int],
    ids: tuple[int, ...],
    num_block: int,
    *,
    form: str = "zlab",
    window: int = 0,
    kinds: str = "",
    rank: int = 0,
    tokens: int = 0,
    has_vocabulary: bool = False,
    first_predicts: bool = False,
    settings: dict[str, Any] | None = None,
    change: Shapes | None = None,
    **more: Any,
) -> PublishedHead:
    """A head that drafts a block.

    sizes: As of layers. target: Tokens and layers. ids: As its settings state them.
    form: zlab, flat (its own settings on top of config.json), deepseek or speculators.
    """
    inner, shapes = layers(*sizes)
    hidden, (num_tokens, num_layers) = sizes[0], target
    inner |= {"vocab_size": num_tokens, "layer_types": ["full_attention"] * sizes[5]}
    if window:
        inner |= {"sliding_window": window, "use_sliding_window": True}
        inner["layer_types"] = [f"{'sliding' if kind == 'S' else 'full'}_attention" for kind in kinds]
    shapes |= {"fc.weight": (hidden, len(ids) * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    if has_vocabulary:
        shapes |= {"embed_tokens.weight": (num_tokens, hidden), "lm_head.weight": (tokens or num_tokens, hidden)}
    own: dict[str, Any] = {"block_size": num_block, "mask_token_id": num_tokens - 1}
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (num_tokens, rank), "confidence_head.proj.bias": (1,)}
        shapes |= {"markov_head.markov_w2.weight": (tokens or num_tokens, rank)}
        shapes |= {"confidence_head.proj.weight": (1, hidden + rank)}
        own |= {"markov_rank": rank, "markov_head_type": "vanilla", "enable_confidence_head": True}
    key = "aux_hidden_state_layer_ids" if form == "speculators" else "target_layer_ids"
    own |= {key: list(ids)} | (settings or {})
    if form == "speculators":
        config = {**own, "transformer_layer_config": inner, "draft_vocab_size": tokens or num_tokens}
    elif form == "zlab":
        top = {name: own.pop(name) for name in ("architectures", "is_causal") if name in own}
        config = {**inner, **top, "dflash_config": own, "num_target_layers": num_layers}
    else:
        config = {**inner, **own, "num_target_layers": num_layers}
    config = {key: value for key, value in config.items() if value is not None}
    shift = 1 if form == "speculators" else 0
    last = num_layers - 1 if form != "speculators" else -1
    return PublishedHead(
        name=name,
        config=config,
        shapes={**shapes, **(change or {})},
        target=(hidden, num_tokens, num_layers),
        tokens=tokens,
        kind="block",
        kinds=kinds or "F" * sizes[5],
        reads=tuple(num_layers if number - shift == last else number - shift for number in ids),
        num_drafted=num_block if first_predicts else num_block - 1,
        **more,
    )


def eagle3(
    name: str,
    sizes: tuple[int, int, int, int, int],
    target: tuple[int, int],
    *,
    tokens: int = 32000,
    first: str = "midlayer.",
    num_layers: int = 1,
    ids: tuple[int, ...] = (),
    settings: dict[str, Any] | None = None,
    change: Shapes | None = None,
    **more: Any,
) -> PublishedHead:
    """An EAGLE-3 head; sizes are hidden, inner, heads, kv_heads and dim, and ids what its folder reads."""
    hidden = sizes[0]
    reads = ids or (1, target[1] // 2 - 1, target[1] - 4)
    shapes = {f"{first}{part}": shape for part, shape in layer(*sizes, read=2 * hidden).items()}
    for i in range(1, num_layers):
        shapes |= {f"layers.{i}.{part}": shape for part, shape in layer(*sizes).items()}
        shapes[f"layers.{i}.input_layernorm.weight"] = (hidden,)
    shapes |= {f"{first}{norm}.weight": (hidden,) for norm in ("input_layernorm", "hidden_norm")}
    shapes |= {
        "fc.weight": (hidden, len(reads) * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (tokens, hidden),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": sizes[1], "num_attention_heads": sizes[2], "num_key_value_heads": sizes[3],
        "head_dim": sizes[4], "num_hidden_layers": num_layers, "draft_vocab_size": tokens, "rms_norm_eps": 1e-6,
        "vocab_size": target[0], "rope_theta": 1e6, "max_position_embeddings": 40960,
    } | (settings or {})  # fmt: skip
    return PublishedHead(
        name=name, config=config, shapes={**shapes, **(change or {})}, target=(hidden, *target),
        tokens=tokens if tokens < target[0] else 0, reads=reads, **more,
    )  # fmt: skip


def mtp(name: str, sizes: tuple[int, int, int, int], num_layers: int, **more: Any) -> PublishedHead:
    """The layer of a Qwen3.5 checkpoint for multi-token prediction, in a file of its own.

    sizes: hidden, inner, heads and kv_heads.
    """
    hidden, inner, heads, kv_heads = sizes
    shapes = {f"mtp.layers.0.{part}": shape for part, shape in layer(hidden, inner, heads, kv_heads, 256).items()}
    shapes["mtp.layers.0.self_attn.q_proj.weight"] = (2 * heads * 256, hidden)  # with gates
    shapes |= {f"mtp.layers.0.self_attn.{part}_norm.weight": (256,) for part in "qk"}
    names = ("layers.0.input_layernorm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    shapes |= {f"mtp.{norm}.weight": (hidden,) for norm in names}
    rope = {**COPIED["rope_parameters"], "partial_rotary_factor": 0.25}
    text = {
        "model_type": "qwen3_5_text", "hidden_size": hidden, "intermediate_size": inner, "head_dim": 256,
        "num_hidden_layers": num_layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": QWEN36, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "rope_parameters": rope,
    }  # fmt: skip
    return PublishedHead(
        name=name, config={"model_type": "qwen3_5", "text_config": text},
        shapes={**shapes, "mtp.fc.weight": (hidden, 2 * hidden)}, target=(hidden, QWEN36, num_layers),
        reads=(num_layers,), **more,
    )  # fmt: skip


def assistant(name: str, wide: int, num_layers: int, sources: tuple[int, int], kv_heads: int) -> PublishedHead:
    """An assistant of Gemma 4.

    wide: Numbers of the target's states. sources: Its last layers that make keys, with a window and without.
    """
    kinds, sizes, inner = ["sliding_attention"] * 3 + ["full_attention"], (256, 256, 256, 512), 2048
    text = {
        "model_type": "gemma4_text", "hidden_size": 256, "intermediate_size": inner, "num_hidden_layers": 4,
        "layer_types": kinds, "num_attention_heads": 4, "num_key_value_heads": kv_heads, "head_dim": 256,
        "global_head_dim": 512, "vocab_size": GEMMA, "sliding_window": 512, "rms_norm_eps": 1e-6,
        "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "text_config": text,
        "backbone_hidden_size": wide, "use_ordered_embeddings": True, "num_centroids": 2048,
    }  # fmt: skip
    shapes: Shapes = {"pre_projection.weight": (256, 2 * wide), "post_projection.weight": (wide, 256)}
    shapes |= {"model.embed_tokens.weight": (GEMMA, 256), "model.norm.weight": (256,)}
    shapes |= {"masked_embedding.centroids.weight": (2048, 256), "masked_embedding.token_ordering": (GEMMA,)}
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    for i, size in enumerate(sizes):
        own: Shapes = {"self_attn.q_proj.weight": (4 * size, 256), "self_attn.o_proj.weight": (256, 4 * size)}
        own |= {"self_attn.q_norm.weight": (size,), "layer_scalar": (1,), "mlp.down_proj.weight": (256, inner)}
        own |= {f"mlp.{part}_proj.weight": (inner, 256) for part in ("gate", "up")}
        own |= {f"{norm}_layernorm.weight": (256,) for norm in norms}
        shapes |= {f"model.layers.{i}.{part}": shape for part, shape in own.items()}
    reads = (*(source - 1 for source in sources), num_layers)
    return PublishedHead(name=name, config=config, shapes=shapes, target=(wide, GEMMA, num_layers), reads=reads)


QWEN3_4B, QWEN3_8B = (2560, 9728, 32, 8, 128, 5), (4096, 12288, 32, 8, 128, 5)
QWEN36_27B, QWEN36_35B = (5120, 17408, 32, 8, 128, 5), (2048, 6144, 32, 8, 128, 6)
LFM25 = (2048, 6144, 32, 8, 64, 5)
QWEN, QWEN36, GEMMA = 151936, 248320, 262144
FIVE, EIGHT = (1, 9, 17, 25, 33), (1, 6, 11, 16, 22, 27, 32, 37)
ZLAB: dict[str, Any] = {"architectures": ["DFlashDraftModel"]}
SECOND: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
LIQUID: dict[str, Any] = {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}
COPIED: dict[str, Any] = {  # from the target, and not meant
    "partial_rotary_factor": 0.25, "attn_output_gate": True, "full_attention_interval": 4,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25,
                        "mrope_section": [11, 11, 10], "mrope_interleaved": True},
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {"architectures": ["Qwen3DSparkModel"], "confidence_head_with_markov": True}


def second(
    name: str, sizes: tuple[int, ...], target: tuple[int, int], ids: tuple[int, ...], **more: Any
) -> PublishedHead:
    """DFlash 2."""
    hidden, vocab_size, count = sizes[0], target[0], sizes[5]
    change: Shapes = {
        f"layers.{i}.{part}_conv.{kind}": shape
        for i in range(count)
        for part in ("attention", "mlp")
        for kind, shape in (("base_kernel", (2, 2, hidden)), ("kernel_projection.weight", (hidden // 4, hidden)))
    }
    change |= {f"candidate_selector.{kind}_codebook": (vocab_size, 256) for kind in ("predecessor", "successor")}
    change |= {"candidate_selector.hidden_projection.weight": (256, hidden)}
    return block(name, sizes, target, ids, 8, window=2048, kinds="S" * count, change=change, **more)  # type: ignore[arg-type]


def speculators(kind: str, num_proposed: int = 0, **stated: Any) -> dict[str, Any]:
    ways = [{"proposal_type": "greedy", "speculative_tokens": num_proposed}] if num_proposed else []
    config = {"algorithm": kind, "proposal_methods": ways}
    return {"speculators_model_type": kind, "speculators_config": config, **stated}


def published() -> Iterator[PublishedHead]:
    """All of them; those whose part of a config.json is not known have that of the program that wrote them."""
    zlab, top = {**ZLAB}, {"is_causal": False, "architectures": ["DFlash2DraftModel"]}
    yield block("z-lab/Qwen3-4B-DFlash-b16", QWEN3_4B, (QWEN, 36), FIVE, 16, settings=zlab)
    yield block("z-lab/Qwen3-8B-DFlash-b16", QWEN3_8B, (QWEN, 36), FIVE, 16, settings=zlab)
    yield block(
        "z-lab/Qwen3.6-27B-DFlash", QWEN36_27B, (QWEN36, 64), (1, 16, 31, 46, 61), 16, window=2048, kinds="SSSSF"
    )
    yield block("z-lab/Qwen3.6-35B-A3B-DFlash", QWEN36_35B, (QWEN36, 40), EIGHT, 16, window=4096, kinds="SSSSSF")
    yield block(
        "ornith-ai/Ornith-1.5-9B-DFlash",
        (4096, 12288, 32, 8, 128, 6),
        (QWEN36, 32),
        (1, 5, 9, 13, 17, 21, 25, 29),
        16,
        window=4096,
        kinds="SSSSSF",
    )
    yield block(
        "ornith-ai/Ornith-1.5-35B-A3B-DFlash", QWEN36_35B, (QWEN36, 40), EIGHT, 16, window=4096, kinds="SSSSSF"
    )
    yield second(
        "incoai/Qwen3.8-27B-DFlash2", QWEN36_27B, (QWEN36, 64), (5, 19, 33, 47, 61), settings={**SECOND, **top}
    )
    yield second("incoai/Qwen3.6-35B-A3B-DFlash2", QWEN36_35B, (QWEN36, 40), EIGHT, settings={**SECOND, **top})
    flash = (2560, 8704, 20, 4, 128, 6)
    yield second(
        "a head of Flash-Next's shape, DFlash 2",
        flash,
        (QWEN36, 48),
        (1, 7, 13, 20, 26, 33, 39, 46),
        settings={**SECOND, **top},
    )
    yield second(
        "a DFlash 2 head of speculators for Qwen3-8B",
        QWEN3_8B,
        (QWEN, 36),
        (2, 10, 18, 26, 34),
        form="speculators",
        has_vocabulary=True,
        settings=SECOND | speculators("dflash2", 7, sliding_window_non_causal=True),
    )
    deepseek = {"form": "deepseek", "has_vocabulary": True, "first_predicts": True}
    yield block(
        "deepseek-ai/dspark_qwen3_4b_block7",
        QWEN3_4B,
        (QWEN, 36),
        FIVE,
        7,
        rank=256,
        settings=DEEPSEEK,
        **deepseek,
    )
    yield block(
        "deepseek-ai/dspark_qwen3_8b_block7",
        QWEN3_8B,
        (QWEN, 36),
        FIVE,
        7,
        rank=256,
        settings=DEEPSEEK,
        **deepseek,
    )
    yield block(
        "deepseek-ai/dflash_qwen3_4b_block7",
        QWEN3_4B,
        (QWEN, 36),
        FIVE,
        7,
        settings={"architectures": ["Qwen3DSparkModel"]},
        **deepseek,
    )
    yield block(
        "openbmb/MiniCPM5-2B-DSpark",
        (2048, 6144, 16, 2, 128, 5),
        (130560, 42),
        (1, 10, 20, 30, 39),
        7,
        rank=256,
        settings=DEEPSEEK | {"projector_type": "dspark", "attention_mode": "gqa"},
        **deepseek,
    )
    yield block(
        "satgeze/Qwen3.6-27B-DSpark",
        QWEN36_27B,
        (QWEN36, 64),
        (1, 16, 31, 46, 61),
        15,
        rank=256,
        settings=DEEPSEEK | COPIED,
        **deepseek,
    )
    yield block(
        "satgeze/Qwen3.5-0.8B-DSpark",
        (1024, 3584, 8, 2, 256, 5),
        (QWEN36, 24),
        (1, 6, 11, 16, 21),
        7,
        rank=256,
        settings=DEEPSEEK | COPIED,
        **deepseek,
    )
    yield block(
        "Koopah/Qwen3.6-35B-A3B-NVFP4-DSPARK",
        QWEN36_35B,
        (QWEN36, 40),
        EIGHT,
        8,
        rank=256,
        settings=DEEPSEEK,
        **deepseek,
    )
    yield block(
        "stanleyphoong/Ornith-1.0-9B-DSpark",
        (4096, 12288, 16, 4, 256, 5),
        (QWEN36, 32),
        (1, 8, 15, 22, 29),
        7,
        settings={"architectures": ["Qwen35DSparkModel"], "enable_qwen35_gated_q_proj": True},
        rank=256,
        change={f"layers.{i}.self_attn.q_proj.weight": (8192, 4096) for i in range(5)},
        refusal="gates beside its queries",
        **deepseek,
    )
    gemma = {"rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6}}}
    yield block(
        "deepseek-ai/dspark_gemma4_12b_block7",
        (3840, 15360, 16, 8, 256, 5),
        (262144, 48),
        (5, 17, 29, 41, 46),
        7,
        rank=256,
        settings={"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"} | gemma,
        refusal="proportional",
        **deepseek,
    )
    counts = (295_725_953, 327_707_521, 327_707_521)
    targets = (
        ((65536, 16), (2, 5, 8, 10, 12)),
        ((128000, 30), (2, 9, 17, 21, 27)),
        ((128000, 24), (2, 6, 10, 14, 18)),
    )
    for name, (target, ids), count in zip(("1.2B-Instruct", "2.6B", "8B-A1B"), targets, counts, strict=True):
        yield block(
            f"LiquidAI/LFM2.5-{name}-DSpark",
            LFM25,
            target,
            ids,
            9,
            rank=256,
            settings=LIQUID,
            first_predicts=True,
            num_weights=count,
        )
    yarn = {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e7,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 8192,
        }
    }
    yield block(
        "RadixArk/Qwen3.8-27B-DSpark",
        QWEN36_27B,
        (QWEN36, 64),
        (5, 19, 33, 47, 61),
        7,
        rank=256,
        settings={"architectures": ["DSparkDraftModel"], "projector_type": "dspark"} | yarn,
        first_predicts=True,
    )
    spec: dict[str, Any] = {"form": "speculators", "has_vocabulary": True, "rank": 256}
    yield block(
        "RedHatAI/Qwen3-4B-speculator.dspark",
        QWEN3_4B,
        (QWEN, 36),
        FIVE,
        7,
        window=2048,
        kinds="SSSSS",
        settings=speculators("dspark", 7, sample_from_anchor=True),
        first_predicts=True,
        **spec,
    )
    yield block(
        "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark",
        (2048, 6144, 16, 2, 256, 5),
        (QWEN36, 40),
        (2, 10, 20, 30, 37),
        8,
        window=2048,
        kinds="SSSSS",
        tokens=32000,
        settings=speculators("dspark", 8),
        first_predicts=True,
        **spec,
    )
    yield block(
        "rasyosef/Llama-3.2-1B-Instruct-DSpark",
        (2048, 8192, 32, 8, 64, 5),
        (128256, 16),
        (2, 5, 8, 11, 14),
        8,
        window=2048,
        kinds="SSSSS",
        tokens=32000,
        settings=speculators("dspark", 8, sample_from_anchor=True),
        first_predicts=True,
        **spec,
    )
    yield block(
        "makora-ai/gemma4-26b-a4b-dspark",
        (2816, 8448, 16, 8, 176, 5),
        (262144, 30),
        (2, 8, 14, 21, 27),
        7,
        tokens=32000,
        settings=speculators("dspark", 6),
        **spec,
    )
    yield block(
        "DaoCloud/Muse-Glimmer-30B-DSpark",
        QWEN36_27B,
        (201824, 48),
        (2, 12, 23, 34, 45),
        15,
        window=2048,
        kinds="SSSSS",
        form="speculators",
        rank=256,
        first_predicts=True,
        settings=speculators("dspark", 15, sample_from_anchor=True, sliding_window_non_causal=False),
    )
    llama = {"form": "speculators", "has_vocabulary": True, "tokens": 32000}
    yield block(
        "RedHatAI/Qwen3-8B-speculator.dflash",
        QWEN3_8B,
        (QWEN, 36),
        (2, 10, 18, 26, 34),
        8,
        settings=speculators("dflash", 7),
        **llama,
    )
    yield block(
        "XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash",
        (4096, 12288, 32, 8, 128, 5),
        (QWEN, 48),
        (1, 12, 23, 34, 45),
        8,
        settings=ZLAB | {"use_swa": True, "swa_window_size": 2048, "attention_sink_bias": True},
        change={f"layers.{i}.self_attn.attention_sink_bias": (32,) for i in range(5)},
        refusal="attention_sink_bias",
    )
    yield eagle3("AngelSlim/Qwen3-1.7B_eagle3", (2048, 6144, 16, 8, 128), (QWEN, 28))
    yield eagle3("AngelSlim/Qwen3-4B_eagle3", (2560, 9728, 32, 8, 128), (QWEN, 36))
    yield eagle3(
        "RedHatAI/Qwen3-8B-speculator.eagle3",
        (4096, 12288, 32, 8, 128),
        (QWEN, 36),
        first="layers.0.",
        settings={
            "transformer_layer_config": {
                "model_type": "llama",
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "rope_theta": 1e6,
            },
            "architectures": ["Eagle3Speculator"],
            "norm_before_residual": True,
        }
        | speculators("eagle3", 3),
        change={"embed_tokens.weight": (QWEN, 4096)},
    )
    yield eagle3(
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        (4096, 14336, 32, 8, 128),
        (128256, 32),
        settings={"architectures": ["LlamaForCausalLM"]},
    )
    yield eagle3(
        "nebius/EAGLE3-gpt-oss-20b",
        (2880, 17280, 64, 8, 64),
        (201088, 24),
        tokens=64000,
        settings={"architectures": ["LlamaForCausalLM"]},
    )
    norms: Shapes = {f"fc_norm.{at}.weight": (2048,) for at in range(3)}
    yield eagle3(
        "an EAGLE-3.1 head of SpecForge for Qwen3-30B-A3B",
        (2048, 12288, 32, 4, 128),
        (QWEN, 48),
        change=norms,
        settings={"fc_norm": True, "norm_output": True},
    )
    yield eagle3(
        "thyways/qwen3_8b_peagle_demo",
        (4096, 12288, 32, 8, 128),
        (QWEN, 36),
        first="layers.0.",
        num_layers=4,
        settings={"architectures": ["PEagleDraftModel"], "mask_token_id": 151669},
        num_drafted=8,
        change={"mask_hidden": (1, 1, 3 * 4096), "embed_tokens.weight": (QWEN, 4096)},
    )
    yield mtp("the MTP layer of Qwen/Qwen3.5-0.8B", (1024, 3584, 8, 2), 24)
    yield mtp("the MTP layer of Qwen/Qwen3.5-4B", (2560, 9216, 16, 4), 32)
    yield mtp("the MTP layer of Qwen/Qwen3.6-27B", (5120, 17408, 24, 4), 64)
    yield eagle3(
        "lightseekorg/kimi-k2.6-eagle3.1-mla",
        (7168, 18432, 64, 64, 128),
        (163840, 61),
        settings={"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 512},
        refusal="latent attention",
    )
    yield assistant("google/gemma-4-E2B-it-assistant", 1536, 35, (13, 14), 1)
    yield assistant("google/gemma-4-E4B-it-assistant", 2560, 42, (22, 23), 2)
