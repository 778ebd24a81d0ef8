"""Reader of the YAML of problem packages: PyYAML, as problemtools and CMS use it.

The copy in the directory `judge` is that of the daemon's own Python: an evaluator's Python need not
have PyYAML, and a package means the same on all machines.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from tawebeval.sandbox.tools.lib import segi_judge
else:
    import segi_judge

_MERGE_TAG = "tag:yaml.org,2002:merge"
# What PyYAML raises without a line for values that are wrong for their type, such as a 13th month.
_VALUE_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, ValueError)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A loader whose keys are text as it stands, and are not repeated.

    Its attribute `line`, from 0 on, is also that of the value that it makes.
    """

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Return the value of a node."""
        self.line = node.start_mark.line
        return super().construct_object(node, deep)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Return the value of a mapping. Raises: ConstructorError."""
        if isinstance(node, yaml.MappingNode):
            found = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE_TAG:
                    if key.value in found:
                        why = f"the key {key.value!r} is repeated"
                        raise yaml.constructor.ConstructorError(None, None, why, key.start_mark)
                    found.add(key.value)
            self.flatten_mapping(node)  # a merged key may be set again
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    key.tag = self.DEFAULT_SCALAR_TAG
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """Return the value of the document in a file. Raises: PackageError, OSError."""
    # What is not UTF-8 becomes characters that YAML does not allow.
    text = path.read_text("utf-8", "surrogateescape")
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        line, why = error.problem_mark.line, f"{error.context or ''} {error.problem}".strip()
    except yaml.reader.ReaderError as error:
        line, why = text.count("\n", 0, error.position), error.reason
    except _VALUE_ERRORS as error:
        line, why = loader.line, f"a value is wrong for its type: {error}"
    raise segi_judge.PackageError(f"{path.name}: line {line + 1}: {why}")
