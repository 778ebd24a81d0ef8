"""Programs of `scripts/`, which have no ending, as modules."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any

from tests.run import ROOT


def load_script(name: str) -> Any:
    """Return a script as a module."""
    loader = SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = spec_from_loader(name, loader)
    assert spec is not None, name
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
