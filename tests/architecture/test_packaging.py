import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_listed_packages_are_those_on_disk() -> None:
    folders = PROJECT["tool"]["setuptools"]["package-dir"]
    found = set()
    for package, folder in folders.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join([package, *inner]))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_torch_is_needed_by_two_extras_alone() -> None:
    extras = {"": PROJECT["project"]["dependencies"], **PROJECT["project"]["optional-dependencies"]}
    heavy = ("torch", "transformers", "optimum")
    assert [name for name, needed in extras.items() if any(line.startswith(heavy) for line in needed)] == [
        "optimum",
        "train",
    ]


@pytest.mark.model  # builds in an environment of its own, which needs the package index
def test_wheel_holds_every_module_and_the_type_marker(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "edgespec").rglob("*.py")}
    modules |= {
        f"edgespec/{path.relative_to(ROOT)}"
        for room in ("export", "runtimes")
        for path in (ROOT / room).rglob("*.py")
    }
    data = {f"edgespec/{name}" for name in ("py.typed", "evaluation/prompts.jsonl", "evaluation/page.html")}
    data.add("edgespec/server/page.html")
    names = (
        "setup/catalog.toml",
        "setup/known_drafters.toml",
        "simulation/machines.toml",
        "training/prompts.jsonl",
    )
    data |= {f"edgespec/{name}" for name in names}
    assert modules | data | {"edgespec/simulation/qwen_smollm2.jsonl"} == {
        name for name in held if name.startswith("edgespec/")
    }


def test_a_program_beside_a_checkout_finds_all_packages(tmp_path: Path) -> None:
    """Though its folder comes before the installed package, and no finder maps runtimes/ and export/."""
    for name in ("edgespec", "runtimes", "export"):
        (tmp_path / name).symlink_to(ROOT / name)
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in repr(each)]\n"
        "from edgespec import load\n"
        "from edgespec import export, runtimes\n"
        "print(export.__file__, runtimes.__file__)\n"
    )
    ran = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert ran.stderr == ""
    assert ran.stdout.split() == [str(tmp_path / name / "__init__.py") for name in ("export", "runtimes")]
