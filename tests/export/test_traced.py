"""Exports through transformers or optimum-onnx, each in an environment of its own: make test-transformers."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import growing
import numpy as np
import pytest
import tiny
from calls import decoder, random_calls
from double import Double

from edgespec.cli.main import main
from edgespec.decoding.decoder import Decoder
from edgespec.engine.load import load
from edgespec.errors import ContextOverflow, EdgeSpecError, ExportMismatch, SourceError, UsageError
from edgespec.export.convert import export_model
from edgespec.export.traced import Exporter, import_model
from edgespec.manifest import Manifest, read_manifest
from edgespec.setup.open_model import open_decoder
from edgespec.system.file_hashes import verify_files

CONTEXT = 160
EXPORTER: Exporter = "optimum" if importlib.util.find_spec("optimum") else "transformers"  # of this environment
needs_exporter = [
    pytest.mark.traced,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="needs transformers: make test-transformers"
    ),
]

# Rotary positions on a part of each head; learned positions; none, but a bias by distance. The spread of the
# weights is that of trained ones, so that a wrong position or mask shows.
_COMMON = {"vocab_size": tiny.VOCAB, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
_COUNTS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_neox": {"intermediate_size": 64, "max_position_embeddings": CONTEXT, **_COUNTS},
    "opt": {
        "ffn_dim": 64,
        "max_position_embeddings": CONTEXT,
        "word_embed_proj_dim": 32,
        "init_std": 0.2,
        **_COUNTS,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": CONTEXT},
}


def write_source(folder: Path, family: str) -> Path:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **_COMMON, **CONFIGS[family])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    growing.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module", params=CONFIGS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    source = write_source(place / "source", request.param)
    import_model(source, place / "model", EXPORTER, open_decoder=open_decoder)
    return place / "model"


class TestWithExporter:
    pytestmark = needs_exporter

    def test_export_says_what_pytorch_says(self, exported: Path) -> None:
        manifest = read_manifest(exported)
        verify_files(exported, manifest.files)
        assert manifest.check is not None
        assert manifest.check.largest_difference < 1e-4
        assert manifest.check.agreement == 1
        assert manifest.check.reference_nll > 5.8  # far from the logits of an even guess, which show no mistakes
        assert (manifest.precision, manifest.kv_cache.form) == ("fp32", "growing")
        assert manifest.signature.attention_mask is not None
        assert {path.name for path in exported.iterdir()} == {*manifest.files, "edgespec.json"}

    def test_cached_equals_uncached(self, exported: Path) -> None:
        cached, fresh = decoder(exported), decoder(exported)
        for tokens, num_last in random_calls(seed=7, count=150, longest=CONTEXT):
            fresh._held = np.zeros(0, np.int32)
            assert np.abs(cached.logits(tokens, num_last) - fresh.logits(tokens, num_last)).max() < 1e-4

    def test_context_ends_where_its_positions_end(self, exported: Path) -> None:
        assert read_manifest(exported).context_length == CONTEXT
        tokens = np.arange(CONTEXT, dtype=np.int32)
        stepped = decoder(exported)
        stepped.logits(tokens[:-1], 1)
        last = stepped.logits(tokens, 1)
        assert np.abs(last - decoder(exported).logits(tokens, 1)).max() < 1e-4
        with pytest.raises(ContextOverflow):
            stepped.logits(np.append(tokens, np.int32(0)), 1)

    def test_speculation_gives_the_tokens_of_plain_decoding(self, exported: Path) -> None:
        answers = []
        for drafter, length in (("none", 0), ("ngram", 3), (str(exported), 4)):
            with load(exported, drafter=drafter, draft_length=length, deterministic=True) as engine:
                answers.append(engine.generate("the in the an", max_tokens=60).token_ids)
        assert len(answers[0]) > 5
        assert answers == [answers[0]] * 3

    def test_command_exports_checks_and_chats(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
        source, output = write_source(tmp_path / "source", "opt"), tmp_path / "out"
        capsys.readouterr()
        arguments = ["export", str(source), "--exporter", EXPORTER, "--output", str(output), "--check", "--json"]
        assert main(arguments) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["architecture"] == "opt"
        assert all(line.startswith("edgespec: ") for line in captured.err.splitlines())
        assert main(["chat", str(output), "--prompt", "the", "--max-tokens", "3", "--json"]) == 0

    def test_export_that_differs_from_pytorch_is_not_installed(self, tmp_path: Path) -> None:
        source = write_source(tmp_path / "source", "opt")

        def wrong(folder: Path, manifest: Manifest) -> Decoder:
            rows = open_decoder(folder, manifest).logits

            class Shifted(Double):
                def logits(self, tokens: np.ndarray, num_last: int) -> np.ndarray:
                    return np.roll(rows(tokens, num_last), 1, axis=1)

            return Shifted()  # type: ignore[return-value]

        with pytest.raises(ExportMismatch):
            import_model(source, tmp_path / "out", EXPORTER, open_decoder=wrong)
        assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {"source"}

    def test_code_of_the_repository_is_never_run(self, tmp_path: Path) -> None:
        source, canary = write_source(tmp_path / "source", "opt"), tmp_path / "canary"
        code = f"open({str(canary)!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
        (source / "modeling_canary.py").write_text(code)
        config = json.loads((source / "config.json").read_text())
        places = {"AutoConfig": "modeling_canary.Config", "AutoModelForCausalLM": "modeling_canary.Model"}
        (source / "config.json").write_text(json.dumps(config | {"auto_map": places}))
        import_model(source, tmp_path / "out", EXPORTER)
        (source / "config.json").write_text(json.dumps({"model_type": "canary", "auto_map": places}))
        with pytest.raises(SourceError, match="transformers cannot load"):
            import_model(source, tmp_path / "other", EXPORTER)
        assert not canary.exists()

    def test_architecture_without_keys_and_values_is_refused_by_name(self, tmp_path: Path) -> None:
        import transformers

        config = transformers.RwkvConfig(vocab_size=tiny.VOCAB, hidden_size=32, num_hidden_layers=2)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
        growing.write_tokenizer(tmp_path / "source")
        with pytest.raises(SourceError, match="rwkv"):
            import_model(tmp_path / "source", tmp_path / "out", EXPORTER)
        assert not (tmp_path / "out").exists()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What a folder of an architecture without a builder looks like from the outside."""
    tiny.write_huggingface(tmp_path / "source", tiny.random_weights())
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(config | {"model_type": "gpt_neox"}))
    return tmp_path / "source"


@pytest.mark.parametrize("exporter", ["transformers", "optimum"])
def test_without_it_the_message_says_what_to_install(
    exporter: Exporter, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, exporter, None)
    with pytest.raises(EdgeSpecError) as raised:
        import_model(source, tmp_path / "out", exporter)
    assert f'pip install "edgespec[{exporter}]"' in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_native_refusal_names_the_other_exporter(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="--exporter transformers"):
        export_model(source, tmp_path / "out")


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_other_precisions_are_refused(source: Path, tmp_path: Path, precision: str) -> None:
    with pytest.raises(UsageError, match="writes fp32"):
        import_model(source, tmp_path / "out", EXPORTER, precision=precision)


def test_pickled_weights_are_refused(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(SourceError, match="loading them runs code"):
        import_model(source, tmp_path / "out", EXPORTER)


def test_files_and_places_that_cannot_be_meant_are_refused(source: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is not a folder"):
        import_model(tiny_gguf, tmp_path / "out", EXPORTER)
    with pytest.raises(UsageError, match="already exists"):
        import_model(source, source, EXPORTER)
    (source / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match=r"tokenizer\.json"):
        import_model(source, tmp_path / "out", EXPORTER)
