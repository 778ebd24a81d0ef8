"""Packages and the plugin directory; everything else stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["tawebeval", "tawebeval.*"]), "twisted.plugins"],
    # Without this an editable install hides the plugin: Twisted looks for
    # plugins in `twisted/plugins` of every directory on sys.path, and no other.
    package_dir={"": "."},
)
