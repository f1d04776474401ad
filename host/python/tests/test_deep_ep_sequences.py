"""Some random sequences of calls of DeepEP's ``Buffer`` over Ferry."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("ferry_ep.deep_ep")
sequences = pytest.importorskip("deep_ep_sequences")


@pytest.mark.filterwarnings("ignore:ferry_ep.deep_ep. a .*combine had")
@pytest.mark.parametrize("seed", range(40))
def test_a_random_sequence(seed, request):
    sequences.Sequence(seed, request.config.getoption("--gpu")).run()
