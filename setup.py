"""What pyproject.toml cannot say: files from outside of the package, kernels, the wheel's tag, its description.

JAXSERVE_BUILD_KERNELS says what becomes of the native CPU kernels. `auto`, the default, compiles them if there is a C++
compiler; `required` fails if they cannot be compiled; `no` leaves them out. A wheel with kernels is for one kind of
machine, one without for any: there they are compiled at the first start.
"""

import os
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from shutil import copyfile

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NATIVE = Path("jaxserve/kernels/native")


def compile_kernels(folder: Path) -> Path | None:
    """The library; none if it is not wanted, or there is no compiler and it is not required."""
    wanted = os.environ.get("JAXSERVE_BUILD_KERNELS", "auto")
    if wanted not in ("auto", "required", "no"):
        raise SystemExit(f"JAXSERVE_BUILD_KERNELS is {wanted!r}: choose from auto, required, no")
    if wanted == "no":
        return None
    spec = spec_from_file_location("build", ROOT / NATIVE / "build.py")
    module = module_from_spec(spec)  # jaxserve itself would import JAX
    spec.loader.exec_module(module)
    return module.build(folder) if wanted == "required" else module.build_or_report(folder)


def description() -> str:
    """The README without pictures and without links into the repository, which lead nowhere on a package index."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", (ROOT / "README.md").read_text(encoding="utf-8"))
    return re.sub(r"\[([^\]]+)\]\((?!https?://)[^)]*\)", r"\1", text)


class BuildPy(build_py):
    """Adds `checkpoints/<model>/` as `jaxserve/_bundled/<model>/`, `configs/` as `jaxserve/configs/`, and the kernels.

    An editable install reads checkpoints/ and configs/ themselves, and has its kernels beside their sources.
    """

    library: Path | None = None

    def run(self) -> None:
        super().run()
        self.library = compile_kernels((ROOT if self.editable_mode else Path(self.build_lib).resolve()) / NATIVE)
        self.distribution.has_kernels = self.library is not None
        if not self.editable_mode:
            for target, source in self._added().items():
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        added = [] if self.editable_mode else list(self._added())
        if self.library is not None and not self.editable_mode:
            added.append(str(Path(self.build_lib) / NATIVE / self.library.name))
        return super().get_outputs(include_bytecode) + added

    def _added(self) -> dict[str, Path]:
        """Return the source of each file that is copied into the package, by its target."""
        package = Path(self.build_lib) / "jaxserve"
        folders = {config.parent: "_bundled" for config in sorted((ROOT / "checkpoints").glob("*/config.json"))}
        folders |= {folder: "configs" for folder in sorted((ROOT / "configs").iterdir()) if folder.is_dir()}
        return {
            str(package / target / folder.name / file.name): file
            for folder, target in folders.items()
            for file in sorted(folder.iterdir())
            if file.is_file()
        }


class KernelDistribution(Distribution):
    """A distribution that is for one kind of machine if it contains compiled kernels."""

    has_kernels = True  # until BuildPy knows

    def has_ext_modules(self) -> bool:
        return self.has_kernels


class Wheel(bdist_wheel):
    """A wheel for any Python, of which the kernels know nothing, and for any machine unless it contains kernels."""

    def run(self) -> None:
        self.run_command("build")
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    distclass=KernelDistribution,
    cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel},
    long_description=description(),
    long_description_content_type="text/markdown",
)
