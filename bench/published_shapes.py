"""Models of published shapes with random weights and few layers: exported, checked and decoded in each precision.

    python bench/published_shapes.py FOLDER [--models NAME,…] [--precisions source,fp32,int8,int4] [--layers N]
                                     [--tokens N] [--transformers PYTHON] [--rounds N]

Each line is an export: its check; rows that differ between cuts of a text; whether N tokens are one text for each
drafter; and, with the path of a Python that has torch and transformers, the largest difference of a logit to
theirs, with the standard deviation of the logits. The exit code is 1 if something differs. A line takes up to 5 GB
of memory and a few minutes. With --rounds, lines behind it have what passes of 1 to 16 rows take, in passes of one
row: medians over rounds in which all widths run in turn, with another token in each row and with one in all rows.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from command_line import command_line
from random_checkpoint import write_source

from edgespec import SamplingParams, load
from edgespec.errors import EdgeSpecError
from edgespec.export.convert import export_model
from edgespec.manifest import Manifest, read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.setup.open_model import open_decoder

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import tiny
from real_shapes import count_differing, walks

DRAFTERS = ("none", "suffix", "lookahead")
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
NUM_COMPARED = 48  # tokens that transformers is given
LINE = "{:22} {:>9} {:>6} {:>11} {:>9} {:>10} {:>8} {:>15} {:>8}"
TITLES = ("model", "precision", "MB", "structure", "allowed", "divergence", "rows", "one text", "reference")


class Published(NamedTuple):
    """A config.json as it was published, but for num_hidden_layers.

    context_length: The length to export for, if not the model's own.
    num_before: Tokens before those whose logits are compared with those of transformers.
    drafters: Those whose text is compared.
    least_layers: How many it takes to have layers of each kind.
    """

    config: dict[str, Any]
    context_length: int | None = None
    num_before: int = 0
    drafters: Sequence[str] = DRAFTERS
    least_layers: int = 1


def _longrope(pairs: int) -> dict[str, Any]:
    """Factors of the form of the published ones, which differ."""
    long = [float(factor) for factor in np.geomspace(1, 60, pairs)]
    return {"type": "longrope", "short_factor": [1.0] * pairs, "long_factor": long}


_PHI_4_MINI: dict[str, Any] = {
    "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
    "num_key_value_heads": 8, "vocab_size": 200064, "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_scaling": _longrope(48), "sliding_window": 262144, "tie_word_embeddings": True,
    "pad_token_id": 199999,
}  # fmt: skip
MODELS = {
    "granite-3.1-1b-a400m": Published(
        {
            "model_type": "granitemoe", "hidden_size": 1024, "intermediate_size": 512, "num_attention_heads": 16,
            "num_key_value_heads": 8, "vocab_size": 49155, "num_local_experts": 32, "num_experts_per_tok": 8,
            "embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22,
            "logits_scaling": 6.0, "rope_theta": 1.5e6, "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        }
    ),
    "Qwen2.5-1.5B-YaRN": Published(
        {
            "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
            "num_key_value_heads": 2, "vocab_size": 151936, "rope_theta": 1e6, "max_position_embeddings": 32768,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            "tie_word_embeddings": True,
        }
    ),
    "LFM2-1.2B": Published(
        {
            "model_type": "lfm2", "hidden_size": 2048, "block_ff_dim": 12288, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 65536, "rope_theta": 1e6, "max_position_embeddings": 128000,
            "block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
            "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "norm_eps": 1e-5, "tie_embedding": True,
            "intermediate_size": 8192, "tie_word_embeddings": True, "block_dim": 2048, "conv_bias": False,
        },
        drafters=("none", "suffix", "ngram"),
        least_layers=3,
    ),
    "LFM2-8B-A1B": Published(
        {
            "model_type": "lfm2_moe", "hidden_size": 2048, "intermediate_size": 7168, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 65536, "rope_theta": 1e6, "max_position_embeddings": 128000,
            "conv_L_cache": 3, "layer_types": ["conv", "full_attention"], "full_attn_idxs": [1], "norm_eps": 1e-5,
            "moe_intermediate_size": 1792, "num_dense_layers": 1, "num_experts": 32, "num_experts_per_tok": 4,
            "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
            "tie_word_embeddings": True, "conv_bias": False,
        },
        drafters=("none", "suffix", "ngram"),
    ),
    "granite-4.0-h-tiny": Published(
        {
            "model_type": "granitemoehybrid", "hidden_size": 1536, "intermediate_size": 512,
            "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 100352, "num_local_experts": 64,
            "num_experts_per_tok": 6, "shared_intermediate_size": 1024, "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4,
            "mamba_expand": 2, "position_embedding_type": "nope", "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0078125, "residual_multiplier": 0.22, "logits_scaling": 6.0,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        },
        drafters=("none", "suffix", "ngram"),
    ),
    "Qwen3.5-0.8B": Published(
        {
            "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "max_position_embeddings": 262144,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
            "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
            "tie_word_embeddings": True,
        },
        drafters=("none", "suffix", "ngram"),
        least_layers=4,
    ),
    "Falcon-H1-7B": Published(
        {
            "model_type": "falcon_h1", "hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 12,
            "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 130049, "max_position_embeddings": 8192,
            "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256,
            "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
            "rms_norm_eps": 1e-5, "rope_theta": 1e11, "embedding_multiplier": 5.656854249492381,
            "key_multiplier": 0.030690398488999456, "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 0.10416666666666667, "ssm_in_multiplier": 0.4166666666666667,
            "ssm_out_multiplier": 0.11785113019775793, "lm_head_multiplier": 0.013020833333333334,
            "ssm_multipliers": [0.3535533905932738, 0.25, 0.1767766952966369, 0.5, 0.3535533905932738],
            "mlp_multipliers": [0.2946278254943948, 0.032552083333333336],
        },
        drafters=("none", "suffix", "ngram"),
    ),
    "Gemma-4-E2B": Published(  # a layer of each kind, and one of each that reads its keys and values
        {
            "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_attention_heads": 8,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "vocab_size": 262144,
            "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True, "sliding_window": 512, "final_logit_softcapping": 30.0,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": True,
            "max_position_embeddings": 131072, "attention_k_eq_v": False,
        },
        context_length=8192,
        num_before=600,
        least_layers=4,
    ),
    "OLMoE-1B-7B": Published(
        {
            "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16,
            "num_key_value_heads": 16, "vocab_size": 50304, "num_experts": 64, "num_experts_per_tok": 8,
            "norm_topk_prob": False, "rope_theta": 10000.0, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        }
    ),
    "Phi-4-mini": Published(_PHI_4_MINI),
    # transformers takes the long factors for texts of more than 4,096 tokens
    "Phi-4-mini-long": Published(_PHI_4_MINI, context_length=8192, num_before=4096),
    "Qwen3-30B-A3B": Published(
        {
            "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "moe_intermediate_size": 768,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "rope_theta": 1e6,
            "max_position_embeddings": 40960, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }
    ),
    "gpt-oss-20b": Published(
        {
            "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "num_local_experts": 32,
            "num_experts_per_tok": 4, "sliding_window": 128, "rope_theta": 150000, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072, "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        num_before=200,  # more than the window
    ),
}  # fmt: skip
REFERENCE = """
import sys, numpy, torch, transformers
torch.set_num_threads(2)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
tokens = torch.from_numpy(numpy.load(sys.argv[2]).astype(numpy.int64))[None]
with torch.no_grad():
    rows = model(tokens, use_cache=False, logits_to_keep=int(sys.argv[4])).logits
numpy.save(sys.argv[3], rows[0].numpy())
"""


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", type=_words, default=list(MODELS))
    parser.add_argument("--precisions", type=_words, default=["source", "fp32", "int8", "int4"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--transformers", type=Path)
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()
    print(LINE.format(*TITLES), flush=True)
    is_right = True
    for name in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            source = Path(folder) / "source"
            model = MODELS[name]
            write_source(source, model.config, max(options.layers, model.least_layers))
            compared = _tokens(model.num_before + NUM_COMPARED)
            reference = _reference(Path(folder), options.transformers, compared) if options.transformers else None
            for precision in options.precisions:
                is_right &= _show(name, precision, Path(folder), compared, reference, options.tokens)
                if options.rounds:
                    _show_widths(Path(folder) / f"made-{precision}", options.rounds)
    return int(not is_right)


def _reference(folder: Path, python: Path, compared: np.ndarray) -> np.ndarray:
    """The last rows of logits of transformers, [NUM_COMPARED, vocab_size]."""
    tokens, logits = folder / "tokens.npy", folder / "logits.npy"
    np.save(tokens, compared)
    command: list[str | Path] = [python, "-c", REFERENCE, folder / "source", tokens, logits, str(NUM_COMPARED)]
    subprocess.run(command, check=True, capture_output=True)
    found: np.ndarray = np.load(logits)
    return found


def _tokens(count: int) -> np.ndarray:
    return np.random.default_rng(8).integers(0, tiny.VOCAB - 1, count).astype(np.int32)


def _show(
    name: str, precision: str, folder: Path, tokens: np.ndarray, reference: np.ndarray | None, num_tokens: int
) -> bool:
    """Print the line of an export; whether all is right."""
    made = folder / f"made-{precision}"
    try:
        manifest = export_model(
            folder / "source",
            made,
            precision=precision,
            context_length=MODELS[name].context_length,
            open_decoder=open_decoder,
        )
    except EdgeSpecError as error:
        print(f"{name} {precision}: {type(error).__name__}: {error}", flush=True)
        return False
    size = sum(file.stat().st_size for file in made.iterdir()) / 1e6
    compared, differing, theirs = _rows(made, tokens, reference)
    texts = {drafter: _text(made, drafter, num_tokens) for drafter in MODELS[name].drafters}
    drafted = "/".join(f"{count}" for drafter, (_, count) in texts.items() if drafter != "none")
    is_one = len({text for text, _ in texts.values()}) == 1
    line = (name, precision, f"{size:.0f}", *_numbers(manifest), f"{differing}/{compared}")
    print(LINE.format(*line, f"{'yes' if is_one else 'NO'}, {drafted}", theirs), flush=True)
    return is_one and not differing


def _numbers(manifest: Manifest) -> tuple[str, str, str]:
    check = manifest.check
    assert check is not None
    assert check.structure is not None
    return f"{check.structure.difference:.1e}", f"{check.structure.allowed:.1e}", f"{check.divergence:.2g}"


def _rows(made: Path, given: np.ndarray, reference: np.ndarray | None) -> tuple[int, int, str]:
    """Rows of logits compared over cuts, those that differ, and the largest difference to the reference."""
    decoder = OnnxDecoder(made, read_manifest(made), find_device("cpu"), deterministic=True)
    tokens = _tokens(120)
    compared, differing = count_differing(decoder, tokens, walks(len(tokens), 3, seed=1))
    if reference is None:
        return int(compared), int(differing), "-"
    rows = decoder.logits(given, len(reference))
    return int(compared), int(differing), f"{np.abs(rows - reference).max():.1e} of {reference.std():.1f}"


def _text(made: Path, drafter: str, num_tokens: int) -> tuple[tuple[int, ...], int]:
    """The tokens of a greedy answer, and how many of them were drafted."""
    prompt = "a b c d a b c d a b c d a b " * 3
    settings: dict[str, Any] = {} if drafter == "none" else {"draft_length": 4}
    with load(made, drafter=drafter, device="cpu", deterministic=True, **settings) as engine:
        answer = engine.generate(prompt, sampling=SamplingParams(temperature=0.0), max_tokens=num_tokens)
    return tuple(answer.token_ids), answer.stats.num_drafted


def _show_widths(made: Path, num_rounds: int) -> None:
    """Print the cost of passes by their rows."""
    decoder = OnnxDecoder(made, read_manifest(made), find_device("cpu"))
    rng, text, taken_s = np.random.default_rng(9), _tokens(100), dict[tuple[int, bool], list[float]]()
    decoder.logits(text, 1)
    for number, is_one, width in product(range(num_rounds + 1), (False, True), WIDTHS):
        new = rng.integers(0, tiny.VOCAB - 1, 1 if is_one else width)
        tokens = np.concatenate([text, np.resize(new, width)]).astype(np.int32)
        started = perf_counter()
        decoder.logits(tokens, width)
        if number:  # the first round warms up
            taken_s.setdefault((width, is_one), []).append(perf_counter() - started)
    for is_one in (False, True):
        ones = np.array(taken_s[1, is_one])
        ratios = [f"{width}: {np.median(np.array(taken_s[width, is_one]) / ones):.2f}" for width in WIDTHS]
        print(f"  passes, {'one token' if is_one else 'other tokens'}  {'  '.join(ratios)}", flush=True)


def _words(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    raise SystemExit(main())
