"""The distribution ``ferry-ep-deep-ep``, which installs the name ``deep_ep``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import ferry_ep
import pytest

requirements = pytest.importorskip("packaging.requirements")
version = pytest.importorskip("packaging.version")
pytest.importorskip("torch")
if importlib.util.find_spec("deep_ep") is None:
    pytest.skip("ferry-ep-deep-ep is not installed", allow_module_level=True)


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs a program in a process of its own, in which nothing is imported yet."""
    return subprocess.run(
        [sys.executable, "-W", "always::RuntimeWarning", "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_its_names_are_those_of_ferry():
    result = run(
        "from deep_ep.utils.envs import init_dist\n"
        "import deep_ep.utils.math, deep_ep.utils.testing, deep_ep.buffer\n"
        "from deep_ep.buffers import legacy\n"
        "from deep_ep.utils.event import EventHandle as Event, EventOverlap as Overlap\n"
        "from deep_ep import Buffer, Config, EventOverlap, topk_idx_t\n"
        "from deep_ep.utils import EventHandle\n"
        "import sys, ferry_ep.deep_ep as ferry\n"
        "assert deep_ep.Buffer is Buffer is ferry.Buffer and EventHandle is ferry.EventHandle\n"
        "assert deep_ep.buffer.Buffer is legacy.Buffer is Buffer and legacy.Config is Config\n"
        "assert Event is EventHandle and Overlap is EventOverlap\n"
        "for name in ('buffer', 'buffers.legacy', 'utils', 'utils.envs', 'utils.event', 'utils.testing'):\n"
        "    assert sys.modules['deep_ep.' + name] is sys.modules['ferry_ep.deep_ep.' + name], name\n"
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_its_version_is_that_of_ferry():
    assert importlib.metadata.version("ferry-ep-deep-ep") == ferry_ep.__version__
    (requires,) = importlib.metadata.requires("ferry-ep-deep-ep")
    needed = requirements.Requirement(requires)
    assert needed.name == "ferry-ep" and needed.extras == {"torch"}
    major, minor, patch = version.Version(ferry_ep.__version__).release
    for number, is_enough in (
        (ferry_ep.__version__, True),
        (f"{major}.{minor}.{patch + 1}", True),
        (f"{major}.{minor + 1}.0", False),
        (f"{major}.{minor - 1}.9", False),
    ):
        assert needed.specifier.contains(number) == is_enough, number


@pytest.mark.parametrize("name", ["ferry-ep", "ferry-ep-deep-ep"])
def test_wheels_have_their_licences(name):
    names = {file.name for file in importlib.metadata.files(name)}
    assert names >= {"LICENSE-APACHE", "LICENSE-MIT"}
    assert importlib.metadata.metadata(name)["License-Expression"] == "MIT OR Apache-2.0"


def test_engines_find_the_version_of_the_interface():
    result = run(
        "import deep_ep\n"
        "from importlib import metadata\n"
        "wanted = deep_ep.__version__\n"
        "assert wanted.startswith('1.2.1+ferry.'), wanted\n"
        "for name in ('deep_ep', 'deep-ep', 'Deep_EP'):\n"
        "    assert metadata.version(name) == metadata.metadata(name)['Version'] == wanted\n"
        "assert metadata.packages_distributions()['deep_ep'] == ['ferry-ep-deep-ep']\n"
        "try:\n"
        "    metadata.version('deep_gemm_')\n"
        "except metadata.PackageNotFoundError:\n"
        "    print('not found')\n"
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "not found\n", "")


def test_another_owner_of_the_name_is_named(tmp_path):
    other = tmp_path / "deep_ep-1.2.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: deep_ep\nVersion: 1.2.1\n")
    (other / "top_level.txt").write_text("deep_ep\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = run("import deep_ep", PYTHONPATH=path)
    assert result.returncode == 0
    assert "RuntimeWarning: deep_ep is Ferry's" in result.stderr
    assert "but deep_ep 1.2.1 installed this name, too" in result.stderr
