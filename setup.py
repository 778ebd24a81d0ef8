"""Packages, the plugin directory and a clean build; everything else stands in pyproject.toml."""

import shutil

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class CleanBuild(build_py):
    """Build without the modules of an earlier build, which pip leaves in the checkout."""

    def run(self) -> None:
        """Remove what is there, and build."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(
    packages=[*find_packages(include=["tawebeval", "tawebeval.*"]), "twisted.plugins"],
    # Without this an editable install hides the plugin: Twisted looks for
    # plugins in `twisted/plugins` of every directory on sys.path, and no other.
    package_dir={"": "."},
    cmdclass={"build_py": CleanBuild},
)
