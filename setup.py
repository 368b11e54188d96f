"""What pyproject.toml cannot say: the bundled model lives in checkpoints/ and ships inside the package."""

from pathlib import Path
from shutil import copyfile

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildPy(build_py):
    """Adds `checkpoints/<model>/` as `jaxserve/_bundled/<model>/`; an editable install reads checkpoints/ itself."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for target, source in self._bundled().items():
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        bundled = [] if self.editable_mode else list(self._bundled())
        return super().get_outputs(include_bytecode) + bundled

    def _bundled(self) -> dict[str, Path]:
        target = Path(self.build_lib) / "jaxserve" / "_bundled"
        return {
            str(target / config.parent.name / file.name): file
            for config in sorted((ROOT / "checkpoints").glob("*/config.json"))
            for file in sorted(config.parent.iterdir())
            if file.is_file()
        }


setup(cmdclass={"build_py": BuildPy})
