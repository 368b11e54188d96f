"""What pyproject.toml cannot say: which files from outside of the package ship in it.

These are the bundled model, the configurations of configs/, and the native CPU kernels, compiled at installation.
"""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from shutil import copyfile

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NATIVE = Path("jaxserve/kernels/native")


def compile_kernels(folder: Path) -> Path | None:
    """The library; without a compiler none, and a line that says so."""
    spec = spec_from_file_location("build", ROOT / NATIVE / "build.py")
    module = module_from_spec(spec)  # jaxserve itself would import JAX
    spec.loader.exec_module(module)
    return module.build_or_report(folder)


class BuildPy(build_py):
    """Adds `checkpoints/<model>/` as `jaxserve/_bundled/<model>/`, `configs/` as `jaxserve/configs/`, and the kernels.

    An editable install reads checkpoints/ and configs/ themselves, and has its kernels beside their sources.
    """

    library: Path | None = None

    def run(self) -> None:
        super().run()
        self.library = compile_kernels((ROOT if self.editable_mode else Path(self.build_lib).resolve()) / NATIVE)
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


class BinaryDistribution(Distribution):
    """A distribution for one kind of machine, because it contains compiled kernels."""

    def has_ext_modules(self) -> bool:
        return True


class AnyPython(bdist_wheel):
    """The kernels know nothing of Python, so any version may use them."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=BinaryDistribution, cmdclass={"build_py": BuildPy, "bdist_wheel": AnyPython})
