"""Models as users name them, by the device that is to run them."""

import json
import shutil
from pathlib import Path

import pytest

from edgespec.errors import ModelError, UsageError
from edgespec.export.convert import export_model
from edgespec.runtimes.devices import Device, find_device
from edgespec.setup.auto_devices import forms_of, forms_of_self
from edgespec.setup.home import ModelHome
from edgespec.setup.pair import DRAFTER, TARGET, write_pair

CPU = find_device("cpu")
GPU = Device("cuda", "CUDAExecutionProvider", "cuda", kind="gpu")
NPU = Device("qnn", "QNNExecutionProvider", kind="npu")


@pytest.fixture
def home(tmp_path: Path) -> ModelHome:
    return ModelHome(tmp_path / "home", offline=True)


def test_source_is_prepared_for_each_kind_of_device_once(home: ModelHome, tiny_gguf: Path) -> None:
    forms = forms_of(home, f"{tiny_gguf}:fp32", TARGET)
    assert [forms.find(device) for device in (CPU, GPU, NPU)] == [None, None, None]
    assert all(forms.can_have(device) for device in (CPU, GPU, NPU))
    assert not home.models.exists()
    made = {device.name: forms.get(device) for device in (CPU, GPU)}
    assert {name: model.manifest.form for name, model in made.items()} == {"cpu": "cpu", "cuda": "gpu"}
    assert forms.find(CPU) == forms.get(CPU) == made["cpu"]
    assert forms.find(NPU) is None
    assert forms_of(home, f"{tiny_gguf}:fp32", TARGET).find(GPU) == made["cuda"]


def test_size_of_another_form_is_foreseen_from_the_one_that_is_prepared(home: ModelHome, tiny_gguf: Path) -> None:
    forms = forms_of(home, f"{tiny_gguf}:fp32", TARGET)
    source = forms.size(GPU, [CPU, GPU])
    here = forms.get(CPU)
    assert forms.size(CPU).manifest == here.manifest
    assert forms.size(GPU, [CPU, GPU]).manifest.kv_cache.dtype == "float16"
    assert 0.5 < forms.size(GPU, [CPU, GPU]).file_bytes / source.file_bytes < 2


def test_folder_runs_on_the_cpu_and_on_the_kind_that_it_was_made_for(
    home: ModelHome, tiny_model: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    export_model(tiny_gguf, tmp_path / "gpu", precision="fp32", form="gpu")
    for folder, expected in ((tiny_model, [True, False, False]), (tmp_path / "gpu", [True, True, False])):
        forms = forms_of(home, str(folder), TARGET)
        assert [forms.can_have(device) for device in (CPU, GPU, NPU)] == expected
        assert forms.get(CPU).folder == folder


def test_pair_has_each_half_in_the_forms_that_it_holds(
    home: ModelHome, tiny_model: Path, tiny_drafter: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "pair" / "target")
    shutil.copytree(tiny_drafter, tmp_path / "pair" / "drafter")
    export_model(tiny_gguf, tmp_path / "pair" / "target-gpu", precision="fp32", form="gpu")
    write_pair(tmp_path / "pair")
    target, drafter = (forms_of(home, str(tmp_path / "pair"), part) for part in (TARGET, DRAFTER))
    assert [target.can_have(device) for device in (CPU, GPU, NPU)] == [True, True, False]
    assert [drafter.can_have(device) for device in (CPU, GPU, NPU)] == [True, False, False]
    assert target.get(GPU).folder == tmp_path / "pair" / "target-gpu"
    assert drafter.get(CPU).folder == tmp_path / "pair" / "drafter"


def test_drafter_of_own_layers_lies_in_the_targets_folder(
    home: ModelHome, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="no drafter of its own layers"):
        forms_of_self(forms_of(home, str(tiny_model), TARGET)).find(CPU)
    folder = Path(shutil.copytree(tiny_model, tmp_path / "own"))
    stated = json.loads((folder / "edgespec.json").read_text())
    own = {"graph": "model_tree.onnx", "layers": [0], "vocab_subset": None}
    (folder / "edgespec.json").write_text(json.dumps(stated | {"self_drafter": own}))
    found = forms_of_self(forms_of(home, str(folder), TARGET)).find(CPU)
    assert found is not None
    assert (found.folder, found.manifest.kv_cache.num_layers) == (folder, 1)


@pytest.mark.parametrize("name", ["nothing-known", "", "~nobody/x", "a\0b", "x" * 5000])
def test_name_of_no_model_is_an_error(home: ModelHome, name: str) -> None:
    with pytest.raises(ModelError):
        forms_of(home, name, TARGET).find(CPU)
