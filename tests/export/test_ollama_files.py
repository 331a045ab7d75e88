"""GGUF files of ollama's own converter are read as those of llama.cpp with the same weights.

Both are made here; what the former have under other names is that of ollama's llama/compat and convert.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from families import TOKENS, write_source

from edgespec.errors import SourceError
from edgespec.export.reference import reference_logits
from edgespec.export.sources import read_source


@dataclass(frozen=True)
class Layout:
    """Changes to a file: keys of its family or tokenizer, None to take one away; ends of names of tensors."""

    keys: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    architecture: str = ""


def relabelled(source: Path, name: str, layout: Layout) -> Path:
    """A copy of a GGUF file beside it in another layout."""
    reader, target = gguf.GGUFReader(source), source.with_name(f"{name}.gguf")
    values = {each.name: each.contents() for each in reader.fields.values() if not each.name.startswith("GGUF.")}
    stored = values.pop("general.architecture")
    architecture = layout.architecture or stored
    writer = gguf.GGUFWriter(target, architecture)
    values = {key.replace(f"{stored}.", f"{architecture}."): value for key, value in values.items()}
    for key, value in layout.keys.items():
        values[key if key.startswith("tokenizer.") else f"{architecture}.{key}"] = value
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add = {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
            }
            add[type(value)](key, value)
    for tensor in reader.tensors:
        stays = [(end, other) for end, other in layout.names.items() if tensor.name.endswith(end)]
        own = tensor.name.removesuffix(stays[0][0]) + stays[0][1] if stays else tensor.name
        writer.add_tensor(own, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for own in layout.more:
        writer.add_tensor(own, np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


SEEING = ("v.blk.0.attn_q.weight", "mm.input_projection.weight")
# By family: what both files state beside what the tiny one of tests/support does, and ollama's layout.
LAYOUTS = {
    "llama": (
        Layout({"attention.key_length": 16}),
        Layout({"attention.key_length": None, "attention.head_dim": 16}),
    ),
    "gemma3": (
        Layout({"context_length": 131072, "attention.layer_norm_rms_epsilon": 1e-6}),
        Layout(
            {
                "attention.layer_norm_rms_epsilon": None,
                "rope.freq_base": None,
                "rope.global.freq_base": 1e6,
                "rope.local.freq_base": 1e4,
                "rope.scaling.type": None,
                "rope.scaling.factor": None,
                "vision.block_count": 27,
                "vision.attention.head_count": 16,
            },
            more=SEEING,
        ),
    ),
    "gemma4": (Layout(), Layout({"tokenizer.ggml.model": "llama"}, more=("a.blk.0.attn_q.weight", *SEEING))),
    "ministral3": (
        Layout({"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}),
        Layout(
            {
                "rope.scaling.yarn_beta_fast": None,
                "rope.scaling.yarn_beta_slow": None,
                "rope.scaling.yarn_log_multiplier": None,
                "attention.temperature_scale": None,
                "rope.scaling.beta_fast": 16.0,
                "rope.scaling.beta_slow": 2.0,
                "rope.scaling.mscale": 1.0,
                "rope.scaling.mscale_all_dim": 1.0,
                "rope.scaling_beta": 0.1,
                "tokenizer.ggml.pre": "default",
                "tokenizer.ggml.add_bos_token": False,
            },
            more=SEEING,
        ),
    ),
    "lfm2": (
        Layout({"tokenizer.ggml.add_bos_token": True}),
        Layout(
            {"feed_forward_length": 12288, "tokenizer.ggml.add_bos_token": False},
            {"token_embd_norm.weight": "output_norm.weight"},
        ),
    ),
    "qwen3_5": (
        Layout(),
        Layout(
            {
                "rope.mrope_section": [4, 2, 2],
                "rope.mrope_interleaved": True,
                "ssm.v_head_reordered": True,
                "attention.head_count_kv": [0, 2, 0, 2, 0],
            },
            {".ssm_dt.bias": ".ssm_dt"},
            more=(*SEEING, "mtp.fc.weight"),
        ),
    ),
    "qwen3_next": (
        Layout(),
        Layout({"attention.head_count_kv": [0, 2, 0]}, {".ssm_dt.bias": ".ssm_dt"}),
    ),
    "qwen3_moe": (
        Layout(architecture="qwen3vlmoe"),
        Layout({"rope.mrope_section": [24, 20, 20]}, more=(*SEEING, "v.deepstack_merger.0.norm.weight")),
    ),
    "lfm2_moe": (
        Layout({"tokenizer.ggml.add_bos_token": True}),
        Layout(names={"token_embd_norm.weight": "output_norm.weight"}),
    ),
    "gpt_oss": (
        Layout(),
        Layout(
            {"tokenizer.ggml.pre": "default", "rope.scaling.type": None},
            {
                ".attn_output.weight": ".attn_out.weight",
                ".attn_output.bias": ".attn_out.bias",
                ".attn_sinks.weight": ".attn_sinks",
                ".post_attention_norm.weight": ".ffn_norm.weight",
            },
            architecture="gptoss",
        ),
    ),
    "qwen2": (
        Layout(architecture="qwen2vl"),
        Layout({"rope.mrope_section": [16, 24, 24]}, more=SEEING, architecture="qwen25vl"),
    ),
}


@pytest.mark.parametrize("family", LAYOUTS)
def test_files_of_both_converters_give_the_same_logits(tmp_path: Path, family: str) -> None:
    beside, layout = LAYOUTS[family]
    usual = relabelled(write_source(tmp_path, family, "gguf"), "usual", beside)
    wanted, found = read_source(usual), read_source(relabelled(usual, "ollama", layout))
    assert found.vocabulary == wanted.vocabulary
    assert found.num_left_out == len(layout.more)
    assert found.config.context_length == wanted.config.context_length
    tokens = TOKENS[:20]
    logits = [reference_logits(each.config, each.tensors, tokens) for each in (found, wanted)]
    assert np.array_equal(*logits)


def test_end_tokens_that_ollama_lists_end_an_answer(tmp_path: Path) -> None:
    source = write_source(tmp_path, "llama", "gguf")
    listed = relabelled(source, "ollama", Layout({"tokenizer.ggml.eos_token_ids": [2, 7]}))
    assert {2, 7} <= {*read_source(listed).vocabulary.eos_token_ids}


@pytest.mark.parametrize(
    ("layout", "found"),
    [
        (Layout({"rope.scaling_alpha": 2.0}, more=SEEING), r"states mistral3\.rope\.scaling_alpha = 2\.0"),
        (Layout({"rope.scaling.mscale": 2.0, "rope.scaling.mscale_all_dim": 1.0}), r"scaling\.mscale = 2\.0"),
        (Layout(more=(*SEEING, "blk.0.odd.weight")), r"has tensor blk\.0\.odd\.weight"),
    ],
)
def test_what_is_not_read_names_the_converter_and_what_to_take(tmp_path: Path, layout: Layout, found: str) -> None:
    source = relabelled(write_source(tmp_path, "ministral3", "gguf"), "ollama", layout)
    with pytest.raises(
        SourceError, match=f"{found}.*ollama's own converter wrote this file; take one of llama.cpp"
    ):
        read_source(source)


def test_a_model_that_is_not_read_in_either_layout_is_not_sent_for(tmp_path: Path) -> None:
    source = relabelled(
        write_source(tmp_path, "gemma4", "gguf"), "ollama", Layout({"expert_count": 8}, more=SEEING)
    )
    with pytest.raises(SourceError, match="gates are GELUs") as raised:
        read_source(source)
    unknown = relabelled(source, "unknown", Layout({"rope.odd": 1.0}, architecture="gemma3n"))
    with pytest.raises(SourceError, match="of the family 'gemma3n'") as other:
        read_source(unknown)
    assert not any("converter" in str(each.value) for each in (raised, other))


def test_a_small_mistral_whose_scaling_is_stated_as_nothing_has_none(tmp_path: Path) -> None:
    plain = {"rope.scaling.type": None, "rope.scaling.factor": None, "rope.scaling.yarn_log_multiplier": None}
    nothing = {"rope.scaling.type": "", "rope.scaling.factor": 0.0}
    nothing |= {"rope.scaling.beta_fast": 0.0, "rope.scaling.beta_slow": 0.0}
    usual = relabelled(write_source(tmp_path, "ministral3", "gguf"), "usual", Layout(plain))
    both = [read_source(source) for source in (usual, relabelled(usual, "ollama", Layout(nothing, more=SEEING)))]
    assert np.array_equal(*(reference_logits(each.config, each.tensors, TOKENS[:20]) for each in both))
