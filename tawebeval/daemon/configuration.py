"""The configuration file, the files that it names, and the directories of the environment."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from tawebeval.config import Configuration, add_problem_settings, parse_configuration
from tawebeval.errors import ConfigurationError
from tawebeval.linux.filetree import KERNEL_DIRECTORIES
from tawebeval.linux.privileges import get_home, parse_text_file
from tawebeval.sandbox.environments import find_environment_root_problem, locate_environment_store


def read_configuration(path: Path | None, listen: Sequence[str] = ()) -> Configuration:
    """Read the configuration at `path`; without a path return the defaults. Blocks.

    `listen` replaces its endpoints unless it is empty. The file of `evaluations.problems` adds
    problems. Raises: ConfigurationError.
    """
    configuration = Configuration() if path is None else parse_text_file(path, parse_configuration)
    if configuration.evaluations.problems:
        problems = Path(configuration.evaluations.problems)
        configuration = parse_text_file(problems, partial(add_problem_settings, configuration))
    return msgspec.structs.replace(configuration, listen=tuple(listen)) if listen else configuration


def check_configuration(path: Path | None) -> None:
    """Check the configuration at `path`, as a start would. Blocks. Raises: ConfigurationError.

    Not the secret files that it names: systemd closes those of LoadCredential= to a reload.
    """
    check_sandbox_paths(read_configuration(path), path, os.environ)


def check_sandbox_paths(
    configuration: Configuration, file: str | Path | None, environment: Mapping[str, str]
) -> None:
    """Check that evaluators can run in all environments and see no private path. Blocks.

    `file` is the configuration file, `environment` that of the daemon. Without a sandbox nothing is
    checked. Raises: ConfigurationError, for a path of `sandbox.readable` or a root that equals,
    contains or is inside a path of the daemon or the kernel.
    """
    sandbox = configuration.sandbox
    if sandbox.kind == "none":
        return
    private = _list_private_places(configuration, file, environment)
    for index, path in enumerate(sandbox.readable):
        remedy = "list only what evaluators need"
        _check_place(f"sandbox.readable[{index}]", path, private, remedy)
    stores = _list_spellings(locate_environment_store(locate_directories(environment)[0]))
    remedy = "name the root that `tawebeval environment import` made, or one with nothing else"
    for name, settings in configuration.environments.items():
        setting = f"environments.{name}.root"
        _check_place(setting, settings.root, private, remedy, stores)
        problem = find_environment_root_problem(Path(settings.root), sandbox.readable)
        if problem is not None:
            raise ConfigurationError(f"{setting}: {problem[0]}", problem.remedy)


def _check_place(
    setting: str,
    path: str,
    private: Sequence[tuple[str, Path]],
    remedy: str,
    stores: Collection[Path] = (),
) -> None:
    """Raise ConfigurationError if `path` equals, contains or is inside a private place.

    A directory of one of `stores` may be inside.
    """
    for place in _list_spellings(path):
        for what, other in private:
            is_inside = place.is_relative_to(other) and place.parent not in stores
            if is_inside or other.is_relative_to(place):
                said = f"{setting}: {path} would show evaluators {what} ({other})"
                raise ConfigurationError(said, remedy)


def _list_private_places(
    configuration: Configuration, file: str | Path | None, environment: Mapping[str, str]
) -> Sequence[tuple[str, Path]]:
    """Return a description and the path of each private file or directory."""
    state, cache = locate_directories(environment)
    handed_over = environment.get("CREDENTIALS_DIRECTORY", "")
    paths = (
        ("the state directory", state),
        ("the cache directory", cache),
        ("the configuration", file),
        ("the tokens", configuration.callers.tokens),
        ("the metrics' tokens", configuration.metrics.tokens),
        ("the secrets of callbacks", configuration.callbacks.secrets),
        ("systemd's credentials", handed_over),
        *(
            ("a credential", name and Path(handed_over, name))
            for entry in configuration.repositories.credentials
            for name in (entry.password_file, entry.key_file)
        ),
        *(("the kernel's files of processes and devices", path) for path in KERNEL_DIRECTORIES),
    )
    return [(what, place) for what, path in paths if path for place in _list_spellings(path)]


def _list_spellings(path: str | Path) -> set[Path]:
    """Return the absolute path as written, and the path with symbolic links resolved."""
    return {Path(os.path.abspath(path)), Path(os.path.realpath(path))}


def locate_directories(environment: Mapping[str, str]) -> tuple[Path, Path]:
    """Return the paths of the state and the cache directory."""
    return (
        _locate_directory(environment, "STATE_DIRECTORY", "XDG_STATE_HOME", ".local/state"),
        _locate_directory(environment, "CACHE_DIRECTORY", "XDG_CACHE_HOME", ".cache"),
    )


def _locate_directory(environment: Mapping[str, str], given: str, xdg: str, default: str) -> Path:
    if environment.get(given):
        # systemd may name several; the first belongs to the service.
        return Path(environment[given].split(":")[0])
    base = environment.get(xdg) or os.path.join(
        environment.get("HOME") or get_home(os.geteuid()), default
    )
    return Path(base, "tawebeval")
