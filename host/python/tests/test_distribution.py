"""What the wheel carries beside the package; skipped where it is not installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import ferry_ep as ferry
import pytest


@pytest.fixture(scope="module")
def wheel():
    try:
        return importlib.metadata.distribution("ferry-ep")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the wheel is not installed")


def test_the_wheel_carries_licences(wheel):
    names = {"LICENSE-MIT": "Permission is hereby granted", "LICENSE-APACHE": "Apache License"}
    assert wheel.metadata["License-Expression"] == "MIT OR Apache-2.0"
    assert set(wheel.metadata.get_all("License-File")) == names.keys()
    for name, words in names.items():
        (file,) = [file for file in wheel.files if file.name == name]
        assert words in file.read_text()


def test_the_wheel_carries_a_readme(wheel):
    assert wheel.version == ferry.__version__
    assert wheel.metadata["Description-Content-Type"].startswith("text/markdown")
    text = wheel.metadata.get_payload() or wheel.metadata["Description"]
    assert text.lstrip().startswith("# ferry-ep") and "ferry.Group.simulated(2)" in text


@pytest.mark.parametrize("name", ["LICENSE-MIT", "LICENSE-APACHE"])
def test_both_wheels_have_the_same_licences(name):
    """The wheel of ``deep_ep`` takes no links to files outside its folder, and so has copies."""
    package = Path(__file__).parent.parent
    assert (package / "deep-ep" / name).read_text() == (package / name).read_text()
