"""The rule for the weights of a model folder, and its manifest, by source and options."""

from dataclasses import replace

from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.options import ExportOptions
from edgespec.export.precision import Rule
from edgespec.export.sources import LoadedSource
from edgespec.manifest import Manifest, Parallel, SelfDrafter, Signature
from edgespec.manifest.caches import KVCache

VOCAB_SUBSET = "vocab_subset.npy"
# Each position of a static form costs time in every pass.
_STATIC_CONTEXT, _STATIC_PREFILL = 1024, 64
_CACHE_DTYPES = {"w8a16": "uint16"}
# Tokens that a parallel drafter drafts in a pass: those that AMD's are trained for (An et al., arXiv:2504.18583).
_PARALLEL_TOKENS = 8


def num_weights(loaded: LoadedSource) -> int:
    """How many weights the tensors of a source have together."""
    return sum(tensor.rows * tensor.columns for tensor in loaded.tensors.values())


def rule_of(loaded: LoadedSource, options: ExportOptions) -> Rule:
    """The forms of a source's tensors in a precision, which is not auto, for a kind of device."""
    precision, form = options.precision, options.form
    is_half = (form == "gpu" and precision != "fp32") or (form == "npu" and precision == "fp16")
    return Rule(precision, options.block_size, is_half, num_weights(loaded), has_fused_products=form == "cpu")


def lay_out(
    name: str, loaded: LoadedSource, rule: Rule, options: ExportOptions, vocab_sha256: str = ""
) -> Manifest:
    """The manifest of a folder, without the hashes of its files."""
    form, trimming = options.form, options.trimming
    config, vocabulary = loaded.config, loaded.vocabulary
    kept_layers = trimming.layers(config.num_layers)
    subset = VOCAB_SUBSET if trimming.num_tokens else None
    is_drafter = subset is not None and kept_layers is None
    windows = {layer.sliding_window for layer in config.layers if layer.sliding_window}
    manifest = Manifest(
        name=name,
        architecture=config.architecture,
        precision=rule.precision,
        form=form,
        context_length=config.context_length,
        kv_cache=KVCache(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=_CACHE_DTYPES.get(rule.precision, "float16" if rule.is_half else "float32"),
            convolutions=config.convolutions,
            recurrence=config.recurrence,
            other_heads=config.other_heads,
            sharing_layers=config.sharing_layers,
        ),
        vocab_size=config.vocab_size,
        vocab_sha256=vocab_sha256,
        **vocabulary.special_tokens,
        source=loaded.source,
        # Rows of a drafter are read whole: their probabilities decide the length of a draft.
        signature=Signature(best="best" if form == "gpu" and not is_drafter else None),
        chat_template="chat_template.jinja" if vocabulary.chat_template and not loaded.pooling else None,
        sampling=loaded.sampling,
        # Layers without attention read the rows before, which in a tree are not those of a branch.
        tree_graph=None if is_drafter or loaded.pooling or config.is_mixed else "model_tree.onnx",
        sliding_window=min(windows, default=None),
        hidden_layers=options.hidden_layers,
        pooling=loaded.pooling,
        gathered_bytes=_gathered_bytes(loaded, rule),
        half_bytes=_half_bytes(loaded, rule),
        self_drafter=SelfDrafter(graph="model_draft.onnx", layers=kept_layers, vocab_subset=subset)
        if kept_layers
        else None,
        vocab_subset=subset if is_drafter else None,
        # A static graph runs token by token.
        parallel=Parallel(mask_token_id=loaded.mask_token_id, num_tokens=_PARALLEL_TOKENS)
        if loaded.mask_token_id is not None and form != "npu"
        else None,
    )
    return _make_static(manifest, config) if form == "npu" else manifest


def _gathered_bytes(loaded: LoadedSource, rule: Rule) -> int:
    """The bytes of embeddings that layers have of their own, which are no vocabulary head."""
    if (table := loaded.tensors.get("layer_embedding")) is None:
        return 0
    form = rule.embedding_form(table)
    scale = 4 / form.block_size if form.bits else 0.0
    weight = form.bits / 8 if form.bits else {"F32": 4.0}.get(form.storage, 2.0)
    return int(table.rows * table.columns * (weight + scale))


def _half_bytes(loaded: LoadedSource, rule: Rule) -> int:
    """The bytes of matrices that are written as half floats, without those that gathered_bytes has."""
    if rule.precision == "w8a16":  # its forms are those of the source, and the static graph has whole numbers
        return 0
    own = (tensor for role, tensor in loaded.tensors.items() if role != "layer_embedding")
    matrices = (tensor for tensor in own if tensor.rows > 1)
    forms = ((tensor, rule.form(tensor)) for tensor in matrices)
    halves = (tensor for tensor, form in forms if form.bits is None and form.storage != "F32")
    return sum(2 * tensor.rows * tensor.columns for tensor in halves)


def _make_static(manifest: Manifest, config: DecoderConfig) -> Manifest:
    context_length = min(config.context_length, _STATIC_CONTEXT)
    return replace(
        manifest,
        context_length=context_length,
        kv_cache=replace(manifest.kv_cache, form="static"),
        tree_graph=None,
        prefill_graph="model_prefill.onnx",
        prefill_tokens=min(_STATIC_PREFILL, context_length),
    )
