"""Helpers of ``ferry_ep.deep_ep.utils``, under the names that DeepEP's tests import."""

from __future__ import annotations

import re
from pathlib import Path

import ferry_ep as ferry
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
utils = pytest.importorskip("ferry_ep.deep_ep.utils")

PAGE = (Path(__file__).parent.parent.parent / "docs" / "deep_ep_seen.md").read_text()


@pytest.fixture
def device(request):
    gpu = request.config.getoption("--gpu")
    return "cpu" if gpu is None else f"cuda:{gpu}"


def random(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_modules_have_deepeps_names():
    from ferry_ep.deep_ep.utils.envs import init_dist
    from ferry_ep.deep_ep.utils.math import calc_diff
    from ferry_ep.deep_ep.utils.testing import bench

    assert (init_dist, calc_diff, bench) == (utils.init_dist, utils.calc_diff, utils.bench)


def test_difference(device):
    x = random(5, 7).to(device)
    assert utils.calc_diff(x, x) == pytest.approx(0, abs=1e-15)
    # One element of two, 1 + 1 and 1 + 3, against 1 + 1 and 1 + 1: 1 - 2 * (4 + 8) / (4 + 16 + 4 + 4).
    pair = torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]])
    assert utils.calc_diff(*pair) == pytest.approx(1 - 24 / 28)


@pytest.mark.parametrize("hidden", [128, 384, 200])
def test_fp8_rows(device, hidden):
    x = random(4, hidden).bfloat16().to(device)
    x[1] = 0
    rows, scales = utils.per_token_cast_to_fp8(x)
    groups = -(-hidden // 128)
    assert rows.dtype == torch.float8_e4m3fn and rows.shape == x.shape and rows.is_contiguous()
    assert scales.dtype == torch.float32 and scales.shape == (4, groups)
    for token in range(4):
        for group in range(groups):
            at = slice(128 * group, 128 * (group + 1))
            largest = max(float(x[token, at].abs().max()), 1e-4)
            assert float(scales[token, group]) == pytest.approx(largest / 448, rel=1e-6)
            exact = x[token, at].double() / scales[token, group].double()
            # Half of the last of 3 bits of mantissa, and half of the least number, 2^-9.
            bound = exact.abs() * 2**-4 + 2**-10
            assert ((rows[token, at].double() - exact).abs() <= bound * 1.001).all()
    back = utils.per_token_cast_back(rows, scales)
    assert back.dtype == torch.bfloat16 and back.shape == x.shape
    wanted = rows.float() * scales.repeat_interleave(128, dim=1)[:, :hidden]
    assert torch.equal(back, wanted.bfloat16())
    assert utils.per_token_cast_back(rows[:0], scales[:0]).shape == (0, hidden)
    rows, scales = utils.per_token_cast_to_fp8(x[:0])
    assert rows.shape == (0, hidden) and scales.shape == (0, groups)


def test_fp8_rows_with_packed_exponents(device):
    rows = random(3, 512).to(torch.float8_e4m3fn).to(device)
    exponents = torch.tensor([[120, 127, 130, 110]] * 3, dtype=torch.uint8, device=device)
    back = utils.per_token_cast_back(rows, exponents.view(torch.int32))
    factors = torch.tensor([2.0**-7, 1.0, 8.0, 2.0**-17], device=device).repeat_interleave(128)
    assert torch.equal(back, (rows.float() * factors).bfloat16())
    # As low-latency mode returns them: rows next to each other, which torch calls contiguous for one column.
    columns = exponents.view(torch.int32).as_strided((3, 1), (1, 3))
    assert torch.equal(utils.per_token_cast_back(rows, columns), back)


def test_unique_ranks(device):
    ids = torch.randint(-1, 4, (50, 6), generator=torch.Generator().manual_seed(3))
    given = ids.clone().to(device)
    utils.inplace_unique(given, 4)
    for before, after in zip(ids.tolist(), given.tolist(), strict=True):
        wanted = sorted({each for each in before if each >= 0}, reverse=True)
        assert after == wanted + [-1] * (6 - len(wanted))


def test_scores_of_groups(device):
    scores = random(3, 8).to(device)
    groups = torch.tensor([[0, 2], [1, 3], [2, 2]], device=device)
    given = utils.create_grouped_scores(scores, groups, 4)
    for token in range(3):
        for expert in range(8):
            is_chosen = expert // 2 in groups[token].tolist()
            assert given[token, expert] == (scores[token, expert] if is_chosen else 0)


def test_hashes(device):
    a = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=device)
    assert utils.hash_tensor(a.view(torch.bfloat16)) == utils.hash_tensor(a) == 10


def test_times(device, monkeypatch):
    runs = []
    mean, least, most = utils.bench(
        lambda: runs.append("run"), 2, 5, post_fn=lambda: runs.append("after"), flush_l2=False
    )
    assert runs == ["run"] * 2 + ["run", "after"] * 5 and 0 <= least <= mean <= most
    with pytest.raises(NotImplementedError, match="bench_kineto of dispatch"):
        utils.bench_kineto(lambda: None, "dispatch")
    monkeypatch.setenv("EP_USE_NVIDIA_TOOLS", "1")
    assert utils.bench_kineto(lambda: None, "dispatch") == 1
    assert utils.bench_kineto(lambda: None, ("dispatch", "combine"), num_tests=3) == (1, 1)
    halves = utils.bench_kineto(lambda: None, ("dispatch", "combine"), num_kernels_per_period=2)
    assert halves == ((1, 1), (1, 1))


def test_a_wait_calls_a_hook_once_and_may_drop_the_event():
    called = []
    event = utils.EventOverlap(utils.EventHandle(), (torch.zeros(1),))
    assert event.wait() is None
    event.register_hook_after_wait(lambda: called.append(1) or len(called))
    with pytest.raises(ferry.ArgumentError, match="hook_after_wait"):
        event.register_hook_after_wait(called.clear)
    assert event.current_stream_wait() == 1 and event.current_stream_wait() is None
    event.register_hook_after_wait(lambda: called.append(2))
    with event as same_one:
        assert same_one is event and called == [1]
    assert called == [1, 2] and event.event is not None
    with event(release_handle=True):
        assert event.event is not None
    assert event.event is None and event.extra_tensors is None and called == [1, 2]
    with event:
        pass
    with pytest.raises(ferry.ArgumentError, match="event is None"):
        event.current_stream_wait(release_handle=True)


def test_the_page_names_tests_that_are_there():
    here = Path(__file__).parent
    sources = "".join(path.read_text() for path in here.glob("test_deep_ep*.py"))
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert len(named) > 15
    for name in named:
        assert f"def {name}(" in sources, name
    for name in re.findall(r"`((?:test_deep_ep|_)\w*\.py)`", PAGE):
        assert (here / name).exists() or (here / f"test_deep_ep{name}").exists(), name
