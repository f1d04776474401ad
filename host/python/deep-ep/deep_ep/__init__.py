"""``ferry_ep.deep_ep`` under the name that engines import: the same module, with the same classes."""

import importlib
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from ferry_ep import deep_ep as _ferry
from ferry_ep.check import owners_of_deep_ep as _owners
from ferry_ep.deep_ep import *  # noqa: F403
from ferry_ep.deep_ep import __all__ as __all__
from ferry_ep.deep_ep import __version__ as __version__

for _name in (
    *("buffer", "buffers", "buffers.legacy"),
    *("utils", "utils.envs", "utils.event", "utils.math", "utils.testing"),
):
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"{_ferry.__name__}.{_name}")
buffer, buffers, utils = _ferry.buffer, _ferry.buffers, _ferry.utils


class _Metadata(metadata.Distribution):
    """What ``importlib.metadata`` finds under the name that engines ask for."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: deep_ep\nVersion: {__version__}\n"

    def locate_file(self, path: object) -> Path:
        return Path(__file__).parent.parent / str(path)


class _Finder(metadata.DistributionFinder):
    """Finds this module's metadata by its name alone, after all others."""

    def find_spec(self, *arguments: object) -> None:
        return None

    def find_distributions(
        self, context: metadata.DistributionFinder.Context | None = None
    ) -> Iterator[metadata.Distribution]:
        name = None if context is None else context.name
        if name is not None and name.lower().replace("-", "_") == "deep_ep":
            yield _Metadata()


sys.meta_path.append(_Finder())

# Removing one of several owners breaks the others.
_others = [owner for owner in _owners() if not owner.startswith("ferry-ep-deep-ep ")]
if _others:
    warnings.warn(
        f"deep_ep is Ferry's ({_ferry.__path__[0]}), but {', '.join(_others)} installed this name, too; "
        "uninstall all of them, then install one",
        RuntimeWarning,
        stacklevel=2,
    )
