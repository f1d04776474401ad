"""``ferry_ep.deep_ep`` under the name that engines import: the same module, with the same classes."""

import importlib
import importlib.metadata
import sys
import warnings

from ferry_ep import deep_ep as _ferry
from ferry_ep.deep_ep import *  # noqa: F403
from ferry_ep.deep_ep import __all__ as __all__

_DISTRIBUTION = "ferry-ep-deep-ep"


def _warn_of_other_owners() -> None:
    """Warns of distributions that installed the same name: removing either breaks the other."""
    owners = importlib.metadata.packages_distributions().get("deep_ep", [])
    others = sorted(set(owners) - {_DISTRIBUTION})
    if others:
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in others)
        warnings.warn(
            f"deep_ep is Ferry's ({_ferry.__path__[0]}), but {versions} installed this name, too; uninstall "
            f"both, then install {_DISTRIBUTION} or the other one",
            RuntimeWarning,
            stacklevel=3,
        )


for _name in ("utils", "utils.envs", "utils.math", "utils.testing"):
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"{_ferry.__name__}.{_name}")
utils = _ferry.utils
_warn_of_other_owners()
