"""``ferry_ep.deep_ep`` under the name that engines import: the same module, with the same classes."""

import importlib
import sys
import warnings

from ferry_ep import deep_ep as _ferry
from ferry_ep.check import owners_of_deep_ep as _owners
from ferry_ep.deep_ep import *  # noqa: F403
from ferry_ep.deep_ep import __all__ as __all__

for _name in ("utils", "utils.envs", "utils.math", "utils.testing"):
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"{_ferry.__name__}.{_name}")
utils = _ferry.utils

# Removing one of several owners breaks the others.
_others = [owner for owner in _owners() if not owner.startswith("ferry-ep-deep-ep ")]
if _others:
    warnings.warn(
        f"deep_ep is Ferry's ({_ferry.__path__[0]}), but {', '.join(_others)} installed this name, too; "
        "uninstall all of them, then install one",
        RuntimeWarning,
        stacklevel=2,
    )
