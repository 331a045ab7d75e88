"""Drafting heads run by the code of those who made their formats: the rows of a draft whose tokens are given.

Each reference is built from a head's own files, with the classes of an installed package, and given a text, the
hidden states of all its tokens but the newest, and the tokens that were drafted. Imported by heads_table.py, in an
environment with PyTorch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Tensor = Any
Reference = Callable[[Tensor, Tensor, list[int]], tuple[Tensor, Tensor]]
"""From a text, [1, n], the states of all tokens but the last, [1, n - 1, size], and drafted tokens: their logits,
[num_tokens, num_columns], and the chances that the head states for them, or none."""


def open_reference(package: str, folder: Path, layers: Mapping[str, Any], lent: Path) -> Reference:
    """The reference for a head's files, which takes what these lack from those that a target lends.

    layers: The settings of its layers. Raises ImportError: The package is not installed.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    known = {"speculators": _of_speculators, "dflash": _of_zlab, "deepspec": _of_deepspec}
    return (known | {"transformers": _of_gemma})[package](folder, dict(layers), lent)


@contextmanager
def in_doubles(is_double: bool = True) -> Iterator[None]:
    """References opened and run within it compute in double precision, also what they ask for in single."""
    import torch

    module, before = vars(torch), (torch.float32, torch.Tensor.float, torch.get_default_dtype())
    single = torch.from_numpy(np.zeros(1, np.float32)).dtype  # whatever torch.float32 is meanwhile
    dtype, cast = (torch.float64, torch.Tensor.double) if is_double else (single, torch._C.TensorBase.float)
    module["float32"], module["float"], torch.Tensor.float = dtype, dtype, cast
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        module["float32"], module["float"], torch.Tensor.float = before[0], *before[:2]
        torch.set_default_dtype(before[2])


def _read(kind: Any, folder: Path) -> Any:
    """A model of a package from its folder, which files in single precision are read for."""
    import torch

    with in_doubles(False):
        model = kind.from_pretrained(folder, dtype=torch.float32)
    return model.to(torch.get_default_dtype())


def _exact(model: Any, layers: Mapping[str, Any]) -> Any:
    """The model, whose frequencies of rotation are rounded once, from double precision, as those of edgespec are.

    transformers takes powers in single precision. What that differs by in the last digit is 5e-4 of a logit behind
    4,000 tokens.
    """
    rope = layers.get("rope_parameters") or {}
    if rope.get("rope_type", "default") == "default":
        import torch

        theta = {**layers, **rope}["rope_theta"]
        size = 2 * len(model.rotary_emb.inv_freq)
        shares = torch.arange(0, size, 2, dtype=torch.float64) / size
        model.rotary_emb.inv_freq = (theta**-shares).float()
    return model.eval()


def _weights(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    with in_doubles(False):
        found = load_file(path)
    return {name: each.float() if each.is_floating_point() else each for name, each in found.items()}


def _settings(folder: Path) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


def _of_zlab(folder: Path, layers: dict[str, Any], lent: Path) -> Reference:
    """DFlash and DFlash 2 of their authors."""
    import torch
    from dflash import model as zlab

    is_second = "conv_kernel_size" in {**layers, **layers.get("dflash_config", {})}
    kind = zlab.DFlash2DraftModel if is_second else zlab.DFlashDraftModel
    model = _exact(_read(kind, folder), layers)
    for layer in model.layers:  # newer releases of transformers leave the setting out of a configuration
        layer.self_attn.is_causal = layers.get("is_causal", layer.self_attn.is_causal)
    matrix = _weights(lent)["embedding"]
    zlab._sampling_probs = lambda scores, temperature: scores
    zlab._sample_probs = lambda scores: scores.argmax(-1)  # the likeliest, as was drafted

    def head(hidden: Tensor) -> Tensor:
        return hidden @ matrix.T

    def rows(text: Tensor, states: Tensor, drafted: list[int]) -> tuple[Tensor, Tensor]:
        block = torch.full((1, model.block_size), model.mask_token_id)
        block[:, 0] = text[:, -1]
        hidden = model(
            position_ids=torch.arange(states.shape[1] + model.block_size)[None],
            noise_embedding=torch.nn.functional.embedding(block, matrix),
            target_hidden=states,
        )[:, 1 : len(drafted) + 1]
        if not is_second:
            return model.compute_logits(hidden, head)[0], torch.zeros(0)
        tokens, candidates, scores = model.propose(hidden, text[:, -1], head, 1.0)
        assert tokens[0].tolist() == drafted
        found = torch.full((len(drafted), len(matrix)), -30000.0)
        return found.scatter_(1, candidates[0], scores[0]), torch.zeros(0)

    return rows


def _of_deepspec(folder: Path, layers: dict[str, Any], lent: Path) -> Reference:
    """DSpark and DFlash of DeepSeek."""
    import torch
    from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel
    from transformers import Qwen3Config

    stated = _settings(folder)
    defaults = {"num_anchors": 1, "markov_rank": 0, "enable_confidence_head": False}
    config = Qwen3Config(**{**defaults, **stated})
    config._attn_implementation = "eager"
    model = _exact(Qwen3DSparkModel(config), layers)
    _fill(model, _weights(folder / "model.safetensors"))

    def rows(text: Tensor, states: Tensor, drafted: list[int]) -> tuple[Tensor, Tensor]:
        block = torch.full((1, model.block_size), model.mask_token_id)
        block[:, 0] = text[:, -1]
        hidden = model._forward_backbone(
            position_ids=torch.arange(states.shape[1] + model.block_size)[None],
            noise_embedding=model.embed_tokens(block),
            target_hidden_states=states,
            is_causal=False,
        )
        hidden = hidden[:, : len(drafted)]
        logits = model.compute_logits(hidden)
        if not model.markov_head:
            return logits[0], torch.zeros(0)
        before = torch.tensor([[int(text[0, -1]), *drafted[:-1]]])
        logits = model.markov_head.apply_block_logits(logits, token_ids=before, hidden_states=hidden)
        return logits[0], model.predict_confidence_step(hidden, before).sigmoid().reshape(-1)

    return rows


def _of_gemma(folder: Path, layers: dict[str, Any], lent: Path) -> Reference:
    """An assistant of Gemma 4, and the two layers of its target whose keys it reads."""
    import torch
    from transformers import Gemma4AssistantForCausalLM, Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer, Gemma4TextRotaryEmbedding

    model = _read(Gemma4AssistantForCausalLM, folder).eval()
    kinds, weights = ("sliding_attention", "full_attention"), _weights(lent)
    numbers = sorted({int(role.partition(".")[0]) for role in weights if "." in role})
    scale = (wide := weights["embedding"].shape[1]) ** 0.5
    config = Gemma4TextConfig(
        hidden_size=wide, num_hidden_layers=2, layer_types=[*kinds], num_attention_heads=8, head_dim=256,
        global_head_dim=512, num_key_value_heads=layers["num_key_value_heads"], num_kv_shared_layers=0,
        hidden_size_per_layer_input=0, vocab_size=8, intermediate_size=8, rms_norm_eps=layers["rms_norm_eps"],
    )  # fmt: skip
    config._attn_implementation = "eager"
    turn, parts = Gemma4TextRotaryEmbedding(config), {"k": "k_proj", "v": "v_proj", "k_norm": "k_norm"}
    shares = torch.arange(256, dtype=torch.float64) / 256
    for rotary in (turn, model.model.rotary_emb):  # rounded once, as by _exact
        rotary.sliding_attention_inv_freq = (1e4 ** -shares[::2]).float()
        rotary.full_attention_inv_freq = torch.where(shares < 0.25, 1e6**-shares, 0).float()
    sources = [Gemma4TextDecoderLayer(config, i).eval() for i in range(2)]
    for number, source in zip(numbers, sources, strict=True):
        found = {f"self_attn.{name}.weight": weights[f"{number}.{part}"] for part, name in parts.items()}
        found["input_layernorm.weight"] = weights[f"{number}.input_norm"]
        source.load_state_dict(found, strict=False)

    def rows(text: Tensor, states: Tensor, drafted: list[int]) -> tuple[Tensor, Tensor]:
        *inputs, final = states.chunk(3, dim=-1)
        held: dict[str, Tensor] = {}
        count = states.shape[1]
        for kind, source, given in zip(kinds, sources, inputs, strict=True):
            positions = turn(given, torch.arange(count)[None], kind)
            source.self_attn(
                source.input_layernorm(given),
                position_embeddings=positions,
                attention_mask=None,
                shared_kv_states=held,
            )
        state, found = final[:, -1:], []
        for token in (int(text[0, -1]), *drafted[:-1]):
            embedded = (weights["embedding"][token] * scale)[None, None]
            made = model(
                inputs_embeds=torch.cat([embedded, state], dim=-1),
                attention_mask=torch.ones(1, count, dtype=torch.long),
                position_ids=torch.tensor([[count]]),
                shared_kv_states=held,
            )
            state, logits = made.last_hidden_state, made.logits[0, -1]
            chosen = logits > logits.min() if model.masked_embedding else torch.ones_like(logits, dtype=torch.bool)
            found.append(torch.where(chosen, logits, -30000.0))
        return torch.stack(found), torch.zeros(0)

    return rows


def _fill(model: Any, weights: Mapping[str, Tensor], may_lack: tuple[str, ...] = ()) -> None:
    """Put a head's weights into a model, of which each has to find its place."""
    missing, left = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if not name.startswith(may_lack)]
    assert not missing, f"no weights for {missing[:3]}"
    assert not left, f"no place for {left[:3]}"


_OF_VERIFIER = ("verifier_", "d2t", "t2d")


def _of_speculators(folder: Path, layers: dict[str, Any], lent: Path) -> Reference:
    """Heads of vLLM's speculators, and those that others wrote whose arithmetic is the same."""
    stated = _settings(folder)
    weights = _weights(folder / "model.safetensors")
    weights.setdefault("embed_tokens.weight", _weights(lent)["embedding"])
    weights.setdefault("lm_head.weight", weights["embed_tokens.weight"])
    own = {**stated.get("dflash_config", {}), **stated}
    if any(name.startswith("mtp.") for name in weights):
        return _mtp(weights, layers)
    if "fc.weight" in weights and "hidden_norm.weight" in weights:
        return _block(own, weights, layers)
    return _eagle3(own, weights, layers)


def _config(kind: str, layers: Mapping[str, Any], num_rows: int, **stated: Any) -> tuple[Any, Any]:
    """The module of a kind of heads in speculators, and a configuration of one."""
    from speculators import SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import AutoConfig

    module = import_module(f"speculators.models.{kind}.core")
    names = {"architectures", "dflash_config", "transformer_layer_config", "text_config", "model_type"}
    names |= {"speculators_config", "draft_vocab_size", "speculators_model_type"}
    inner = AutoConfig.for_model(layers["model_type"], **{key: layers[key] for key in layers if key not in names})
    inner._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=5)
    wanted = SpeculatorModelConfig.registry[kind]
    found = wanted(
        transformer_layer_config=inner,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **{key: stated[key] for key in stated if key in wanted.model_fields and key not in names},
        **({} if kind == "mtp" else {"draft_vocab_size": num_rows}),
    )
    return module, found


def _noting(module: Any) -> list[tuple[Any, ...]]:
    """What the function is called with that would make a loss of logits, in place of which nothing is made."""
    calls: list[tuple[Any, ...]] = []

    def note(*given: Any, **named: Any) -> tuple[int, dict[str, Any]]:
        calls.append((*given, named))
        return 0, {}

    module.compute_metrics = note
    return calls


def _block(stated: dict[str, Any], weights: dict[str, Tensor], layers: dict[str, Any]) -> Reference:
    """DFlash, DFlash 2 and DSpark, run as they are trained, with one block that begins at the newest token."""
    import torch

    has_markov = "markov_head.markov_w1.weight" in weights
    kind = "dspark" if has_markov else "dflash2" if stated.get("conv_kernel_size") else "dflash"
    if "target_layer_ids" in stated:
        stated["aux_hidden_state_layer_ids"] = stated["target_layer_ids"]
        stated["sample_from_anchor"] = has_markov
    stated.setdefault("sample_from_anchor", _proposed(stated) == stated["block_size"])
    if stated.get("rope_is_neox_style") is False:
        weights = {name: _halves(name, each, layers["head_dim"]) for name, each in weights.items()}
    module, config = _config(kind, layers, len(weights["lm_head.weight"]), **stated)
    names = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
    model = _exact(getattr(module, names[kind])(config), layers)
    _fill(model, weights, _OF_VERIFIER)
    calls, hidden, size = _noting(module), [], stated["block_size"]
    model.norm.register_forward_hook(lambda module, given, found: hidden.append(found))
    first = 0 if stated["sample_from_anchor"] else 1

    def rows(text: Tensor, states: Tensor, drafted: list[int]) -> tuple[Tensor, Tensor]:
        num_known, total = states.shape[1], states.shape[1] + 2 * size + 1
        tokens = torch.zeros((1, total), dtype=torch.long)
        tokens[:, : num_known + 1] = text
        tokens[0, num_known + 1 : num_known + 1 + len(drafted)] = torch.tensor(drafted)
        model(
            hidden_states=torch.nn.functional.pad(states, (0, 0, 0, total - num_known)),
            input_ids=tokens,
            loss_mask=(torch.arange(total) == num_known)[None],
            verifier_last_hidden_states=torch.zeros(1, total, layers["hidden_size"]),
            document_ids=torch.zeros((1, total), dtype=torch.long),
            max_anchors=1,
        )
        *_, given = call = calls.pop()
        wanted = slice(first, first + len(drafted))
        if kind == "dflash2":
            before = torch.tensor([[int(text[0, -1]), *drafted[:-1]]])
            logits = given["unary_logits"][:, wanted]
            ids, scores = model.candidate_selector.select(logits, hidden.pop()[:, wanted], before)
            found = torch.full(logits.shape[1:], -30000.0)
            return found.scatter_(1, ids[0], scores[0]), torch.zeros(0)
        hidden.clear()
        chances = call[2].sigmoid()[0, wanted] if kind == "dspark" else torch.zeros(0)
        return call[0][0, wanted], chances

    return rows


def _proposed(stated: Mapping[str, Any]) -> int | None:
    ways = stated.get("speculators_config", {}).get("proposal_methods") or [{}]
    number: int | None = ways[0].get("speculative_tokens")
    return number


def _halves(name: str, tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of queries and keys whose values are rotated in pairs, in the order of those rotated by halves."""
    part = name.rpartition("self_attn.")[2]
    if part not in ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight"):
        return tensor
    order = np.concatenate([np.arange(0, head_dim, 2), np.arange(1, head_dim, 2)])
    return tensor.reshape(-1, head_dim, *tensor.shape[1:])[:, order].reshape(tensor.shape)


def _eagle3(stated: dict[str, Any], weights: dict[str, Tensor], layers: dict[str, Any]) -> Reference:
    """EAGLE-3 and P-EAGLE, run as they are trained, of which the row of the newest token is looked at."""
    import torch

    kind = "peagle" if "mask_hidden" in weights else "eagle3"
    weights = {name.replace("midlayer.", "layers.0."): each for name, each in weights.items()}
    module, config = _config(kind, layers, len(weights["lm_head.weight"]), **stated)
    model = _exact(getattr(module, "PEagleDraftModel" if kind == "peagle" else "Eagle3DraftModel")(config), layers)
    _fill(model, weights, _OF_VERIFIER)
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, found: logits.append(found[0]))
    _noting(module)

    def rows(text: Tensor, states: Tensor, drafted: list[int]) -> tuple[Tensor, Tensor]:
        last, num_drafted = states.shape[1] - 1, len(drafted)
        following = torch.cat([text[:, 1:], torch.tensor([[*drafted, 0]])], dim=1)
        named = {
            "hidden_states": torch.nn.functional.pad(states, (0, 0, 0, num_drafted + 1)),
            "input_ids": following,
            "document_ids": torch.zeros_like(following),
        }
        logits.clear()
        if kind == "eagle3":
            model(**named, ttt_steps=num_drafted)
            return torch.stack([each[last] for each in logits]), torch.zeros(0)
        count = following.shape[1]
        depths = torch.cat([torch.zeros(count, dtype=torch.long), torch.arange(1, num_drafted)])
        anchors = torch.cat([torch.arange(count), torch.full((num_drafted - 1,), last)])
        module.generate_cod_sample_indices = lambda **_: (anchors, depths)
        model(**named, verifier_last_hidden_states=torch.zeros(1, count, layers["hidden_size"]))
        return torch.cat([logits[0][last : last + 1], logits[0][count:]]), torch.zeros(0)

    return rows


def _mtp(weights: dict[str, Tensor], layers: dict[str, Any]) -> Reference:
    """The layer of Qwen3.5 for multi-token prediction, over the text and the draft at once."""
    import torch
    from speculators.convert.mtp.converter import MTPConverter

    module, config = _config("mtp", layers, 0)
    model = _exact(module.MTPDraftModel(config), layers)
    _fill(model, {MTPConverter._remap_key(name): each for name, each in weights.items()}, _OF_VERIFIER)

    def rows(text: Tensor, states: Tensor, drafted: list[int]) -> tuple[Tensor, Tensor]:
        tokens, found = text[:, 1:], []
        for token in drafted:
            count = tokens.shape[1]
            places = torch.arange(count)[None]
            hidden = model.mtp_layers[0](
                hidden_states=states,
                token_embeddings=model.embed_tokens(tokens),
                attention_mask=torch.full((count, count), -torch.inf).triu(1)[None, None],
                position_ids=places,
                position_embeddings=model.rotary_emb(states, places[None].expand(3, -1, -1)),
            )
            found.append(model.lm_head(hidden[:, -1]))
            tokens, states = (
                torch.cat([tokens, torch.tensor([[token]])], 1),
                torch.cat([states, hidden[:, -1:]], 1),
            )
        return torch.cat(found), torch.zeros(0)

    return rows
