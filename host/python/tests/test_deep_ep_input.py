"""DeepEP's ``Buffer`` over Ferry: wrong arguments, and what is not there. Nothing is sent."""

from __future__ import annotations

import warnings

import ferry_ep as ferry
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
deep_ep = pytest.importorskip("ferry_ep.deep_ep")
rig = pytest.importorskip("deep_ep_rig")
from deep_ep_rig import Tokens, check_received, dispatch, same  # noqa: E402
from ferry_ep.deep_ep import runtime, settings  # noqa: E402


def member(ranks=2):
    return rig.Member(0, ranks)


def never(config, group):
    raise AssertionError("a communicator was asked for")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_rdma_bytes": 128}, r"num_rdma_bytes=128 .*ranks are of one node"),
        ({"enable_shrink": True}, r"enable_shrink=True .*PeerTimeout"),
        ({"comm": object()}, r"comm \(mpi4py\) .*give group"),
    ],
)
def test_a_buffer_names_what_is_not_there(options, match):
    with pytest.raises(NotImplementedError, match=match):
        deep_ep.Buffer(member(), 1 << 20, connect=never, **options)


@pytest.mark.parametrize(
    "name",
    [
        "low_latency_update_mask_buffer",
        "low_latency_query_mask_buffer",
        "low_latency_clean_mask_buffer",
        "get_local_buffer_tensor",
        "internode_dispatch",
        "internode_combine",
    ],
)
def test_calls_that_are_not_there_say_what_to_do(name):
    buffer = deep_ep.Buffer(member(), 1 << 20, connect=never)
    arguments = [1] if "mask" in name else [1, 2, 3]
    arguments = [] if name == "low_latency_clean_mask_buffer" else arguments
    with pytest.raises(NotImplementedError, match=f"{name} is not in ferry_ep.deep_ep: .+"):
        getattr(buffer, name)(*arguments)


def test_wrong_arguments_of_a_buffer(monkeypatch):
    with pytest.raises(ferry.ArgumentError, match="group is None"):
        deep_ep.Buffer(None, 1 << 20)
    with pytest.raises(ferry.ArgumentError, match="num_nvl_bytes is -1"):
        deep_ep.Buffer(member(), -1, connect=never)
    for name in ("num_nvl_bytes", "num_rdma_bytes"):
        for value in (None, "5", 2.5):
            options = {"num_nvl_bytes": 1 << 20, "low_latency_mode": True} | {name: value}
            with pytest.raises(ferry.ArgumentError, match=f"{name} is {value!r}"):
                deep_ep.Buffer(member(), connect=never, **options)
    with pytest.raises(ferry.ArgumentError, match=r"new_num_sms is 2\.0"):
        deep_ep.Buffer.set_num_sms(2.0)
    with pytest.raises(ferry.ArgumentError, match=r"num_experts is 4\.0"):
        deep_ep.Buffer(member(), 0, connect=never).get_dispatch_layout(good()["topk_idx"], 4.0)
    with pytest.raises(ferry.ArgumentError, match="new_num_sms is 7"):
        deep_ep.Buffer.set_num_sms(7)
    if not torch.cuda.is_available():
        with pytest.raises(NotImplementedError, match="get_comm_stream"):
            deep_ep.Buffer(member(), 1 << 20, connect=never).get_comm_stream()
    settings._said.clear()
    for name in ("allow_mnnvl", "use_fabric"):
        with pytest.warns(UserWarning, match=f"{name} has no effect"):
            deep_ep.Buffer(member(), 1 << 20, connect=never, **{name: True})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            deep_ep.Buffer(member(), 1 << 20, connect=never, **{name: True})
    for name, value in (
        ("FERRY_DEEP_EP_EXACT", "1"),
        ("FERRY_DEEP_EP_EXACT", "yes"),
        ("FERRY_DEEP_EP_STRICT", "2"),
        ("FERRY_DEEP_EP_MAX_TOKENS", "0"),
        ("FERRY_DEEP_EP_MAX_TOKENS", "1.5"),
        ("FERRY_DEEP_EP_DEADLINE", "-1"),
        ("FERRY_DEEP_EP_MAX_TOKENS", "inf"),
        ("FERRY_DEEP_EP_MAX_TOKENS", "1e400"),
        ("FERRY_DEEP_EP_MAX_TOKENS", "nan"),
        ("FERRY_DEEP_EP_DEADLINE", "inf"),
        ("FERRY_DEEP_EP_DEADLINE", "nan"),
        ("FERRY_DEEP_EP_DEADLINE", "90000"),
        ("FERRY_DEEP_EP_DEADLINE", "soon"),
        ("FERRY_DEEP_EP_FIRST_DEADLINE", "0"),
        ("FERRY_DEEP_EP_FIRST_DEADLINE", "nan"),
        ("FERRY_DEEP_EP_FIRST_DEADLINE", "90000"),
    ):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            with pytest.raises(ferry.ArgumentError, match=f"{name} is '?{value}"):
                deep_ep.Buffer(member(), 1 << 20, connect=never)


def test_wrong_configurations():
    for arguments, match in (
        ((-2,), "num_sms is -2"),
        ((20, 0), "num_max_nvl_chunked_send_tokens is 0"),
        ((20, 8, 8), "num_max_nvl_chunked_send_tokens is 8.*num_max_nvl_chunked_recv_tokens, 8"),
        ((20, 4, 8, 9, 9), "num_max_rdma_chunked_send_tokens is 9"),
    ):
        with pytest.raises(ferry.ArgumentError, match=match):
            deep_ep.Config(*arguments)
    for arguments, match in (
        ((2.0,), "num_sms is 2.0"),
        ((20, "1"), "num_max_nvl_chunked_send_tokens is '1'"),
    ):
        with pytest.raises(ferry.ArgumentError, match=match):
            deep_ep.Config(*arguments)
    for bytes_, ranks, match in (("3", 2, "hidden_bytes is '3'"), (128, None, "num_ranks is None")):
        with pytest.raises(ferry.ArgumentError, match=match):
            deep_ep.Config().get_nvl_buffer_size_hint(bytes_, ranks)
    for tokens, experts, match in (("8", 4, "per_rank is '8'"), (8, None, "num_experts is None")):
        with pytest.raises(ferry.ArgumentError, match=match):
            deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, 512, 2, experts)
    with pytest.raises(ferry.PlanError, match="hidden"):
        deep_ep.Config().get_nvl_buffer_size_hint(1 << 30, 2)


def good(tokens=3):
    """Arguments of a dispatch of one rank of two."""
    return {
        "x": torch.zeros(tokens, 64, dtype=torch.bfloat16),
        "topk_idx": torch.zeros(tokens, 2, dtype=torch.int64),
        "topk_weights": torch.zeros(tokens, 2),
        "num_tokens_per_rank": torch.zeros(2, dtype=torch.int32),
        "is_token_in_rank": torch.zeros(tokens, 2, dtype=torch.bool),
        "num_tokens_per_expert": torch.zeros(4, dtype=torch.int32),
    }


def test_wrong_tensors_of_a_dispatch():
    buffer = deep_ep.Buffer(member(), 1 << 20, connect=never)
    # Right ones are remembered, and change nothing.
    with pytest.raises(AssertionError, match="was asked for"):
        buffer.dispatch(**good())
    x, ids = good()["x"], good()["topk_idx"]
    wrong = {
        "x": [None, x.float(), x[0], x.T, x[:, :60].contiguous(), x[:2], (x, None)],
        "topk_idx": [None, ids.int(), ids[:2], ids[0], ids.T.contiguous().T],
        "topk_weights": [None, torch.zeros(3, 2).double(), torch.zeros(3, 3), torch.zeros(2, 2)],
        "num_tokens_per_rank": [None, torch.zeros(2), torch.zeros(3, dtype=torch.int32)],
        "is_token_in_rank": [None, torch.zeros(3, 2), torch.zeros(2, 2, dtype=torch.bool)],
        "num_tokens_per_expert": [None, torch.zeros(4), torch.zeros(3, dtype=torch.int32)],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ferry.TensorError) as raised:
                buffer.dispatch(**good() | {name: value})
            # Fewer rows of x than of all others: the first of these is named.
            assert raised.value.name in (name, *(("is_token_in_rank", "x[0]") if name == "x" else ()))
            assert raised.value.given and raised.value.wanted


def test_as_many_checks_are_remembered_as_there_is_room_for(monkeypatch):
    if ferry._ferry.Reader.of(torch.Tensor) is None:
        pytest.skip("this torch has no exchange API")
    monkeypatch.setattr(runtime, "_MOST_CHECKED", 2)
    buffer, made = deep_ep.Buffer(member(), 1 << 20, connect=never), buffer_checks(monkeypatch)
    for tokens, checks in ((1, 1), (2, 2), (1, 2), (3, 3), (3, 3), (1, 4)):
        with pytest.raises(AssertionError, match="was asked for"):
            buffer.dispatch(**good(tokens))
        assert len(made) == checks
        assert len(buffer.runtime.checked) <= 2


def buffer_checks(monkeypatch):
    """Returns a list to which each check of a dispatch is added."""
    made, check = [], deep_ep.Buffer._check

    def counted(*arguments):
        made.append(arguments)
        return check(*arguments)

    monkeypatch.setattr(deep_ep.Buffer, "_check", counted)
    return made


def test_wrong_arguments_of_a_dispatch():
    buffer = deep_ep.Buffer(member(), 1 << 20, connect=never)
    codes, scales = torch.zeros(3, 256, dtype=torch.float8_e4m3fn), torch.zeros(3, 2)
    for x, name in (
        ((codes,), "x"),
        ((codes.float(), scales), "x[0]"),
        ((codes[:, :64].contiguous(), scales), "x[0]"),
        ((codes.view(torch.uint8), scales), "x[0]"),
        ((codes, scales[:2]), "x[1]"),
        ((codes, scales.double()), "x[1]"),
        ((codes, None), "x[1]"),
        ((codes, torch.zeros(3, 1)), "x[1]"),
        ((codes, torch.zeros(3, 0, dtype=torch.int32)), "x[1]"),
    ):
        with pytest.raises(ferry.TensorError) as raised:
            buffer.dispatch(**good() | {"x": x})
        assert raised.value.name == name
    with pytest.raises(NotImplementedError, match="num_tokens_per_rdma_rank"):
        buffer.dispatch(**good(), num_tokens_per_rdma_rank=torch.zeros(1, dtype=torch.int32))
    for changes, match in (
        ({"expert_alignment": 0}, "expert_alignment is 0"),
        ({"num_worst_tokens": -1}, "num_worst_tokens is -1"),
        ({"num_worst_tokens": 6, "topk_idx": None, "topk_weights": None}, "num_worst_tokens is 6.*topk_idx"),
        ({"config": deep_ep.Config(5)}, r"config\.num_sms is 5"),
        ({"allocate_on_comm_stream": True}, "allocate_on_comm_stream is True, but previous_event is None"),
        ({"handle": (1, 2)}, "handle is given, and topk_idx"),
    ):
        with pytest.raises(ferry.ArgumentError, match=match):
            buffer.dispatch(**good() | changes)
    for handle in ((1, 2), None, torch.zeros(2), (1, 2, 3, 4, 5, 6)):
        with pytest.raises(ferry.TensorError, match="handle"):
            buffer.combine(good()["x"], handle)
        if handle is not None:
            with pytest.raises(ferry.TensorError, match="handle"):
                buffer.dispatch(good()["x"], handle=handle)
    with pytest.raises(ferry.TensorError, match="topk_idx"):
        buffer.get_dispatch_layout(torch.zeros(3, 2, dtype=torch.int32), 4)
    with pytest.raises(ferry.ArgumentError, match="num_experts is 3"):
        buffer.get_dispatch_layout(good()["topk_idx"], 3)
    with pytest.raises(ferry.ArgumentError, match="event is None"):
        deep_ep.EventOverlap().current_stream_wait()


def test_rows_of_other_types_are_refused_with_the_reason():
    buffer = deep_ep.Buffer(member(), 1 << 20, low_latency_mode=True, connect=never)
    half = torch.zeros(3, 256, dtype=torch.float16)
    codes = torch.zeros(3, 256, dtype=torch.float8_e4m3fn)
    for x, name, reason in (
        (half, "x", "convert float16 rows"),
        (codes, "x", "a tuple of FP8 rows and their scales"),
        ((codes, None), "x[1]", "a scale for 128 elements"),
        ((codes, torch.zeros(3, 1)), "x[1]", "a scale for 128 elements"),
        ((codes, torch.zeros(3, 8)), "x[1]", "a scale for 128 elements"),
    ):
        with pytest.raises(ferry.TensorError, match=reason) as raised:
            buffer.dispatch(**good() | {"x": x})
        assert raised.value.name == name
        if not isinstance(x, tuple):
            with pytest.raises(ferry.TensorError, match=reason):
                buffer.low_latency_dispatch(x, torch.zeros(3, 2, dtype=torch.int64), 4, 4)


def test_a_machine_without_a_gpu_is_told_of_the_simulator():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ferry.DeviceError, match=r"connect, .*simulated"):
        deep_ep.Buffer(member(), 1 << 20)


def test_use_fabric_has_the_place_of_version_1():
    settings._said.clear()
    with pytest.warns(UserWarning, match="use_fabric has no effect"):
        buffer = deep_ep.Buffer(member(), 1 << 20, 0, False, 24, True, False, True, True, connect=never)
    assert buffer.explicitly_destroy


def test_sizes_that_no_plan_has_are_refused_before_ranks_meet():
    with pytest.raises(ferry.PlanError, match="top_k"):
        many = {"topk_idx": torch.zeros(3, 40, dtype=torch.int64), "topk_weights": torch.zeros(3, 40)}
        deep_ep.Buffer(member(), 1 << 20, connect=never).dispatch(**good() | many)


def test_wrong_arguments_of_a_combine_leave_the_round_open(world):
    of = world(2)
    tokens = Tokens(60, of, [4, 3])

    def run(rank):
        buffer = of.buffer(rank)
        bias = torch.zeros(tokens.x[rank].shape, dtype=torch.bfloat16, device=of.device)
        # The second time checks may remember what was right the first time.
        for _ in range(2):
            rows, _, weights, _, handle, _ = dispatch(buffer, *tokens.given(rank), tokens.experts)
            refuse_wrong_ones(buffer, rank, rows, weights, handle, bias)
            answers = tokens.answers(rank, rows)
            same(buffer.combine(answers, handle, topk_weights=weights, bias=bias)[0], tokens.sums(rank))
            handle = rig.by_rank(buffer, tokens, rank)[4]
            with pytest.raises(ferry.ArgumentError, match="dispatch of handle had no topk_idx"):
                buffer.combine(rows, handle, topk_weights=weights, bias=bias)
            buffer.combine(rows, handle)
        check_received(tokens, rank, dispatch(buffer, *tokens.given(rank), tokens.experts))

    def refuse_wrong_ones(buffer, rank, rows, weights, handle, bias):
        for changes, name in (
            ({"x": rows[:-1]}, "x"),
            ({"x": rows.float()}, "x"),
            ({"topk_weights": weights[:-1]}, "topk_weights"),
            ({"topk_weights": weights.double()}, "topk_weights"),
            ({"bias": bias[:-1]}, "bias"),
            ({"bias": (bias, bias.float())}, "bias[1]"),
        ):
            with pytest.raises(ferry.TensorError) as raised:
                buffer.combine(**{"x": rows, "handle": handle} | changes)
            assert raised.value.name == name
        for wrong in ((bias,), (bias, bias, bias)):
            with pytest.raises(ferry.ArgumentError, match=f"bias has {len(wrong)} tensors"):
                buffer.combine(rows, handle, topk_weights=weights, bias=wrong)
        with pytest.raises(ferry.ArgumentError, match=r"config\.num_sms is 3"):
            buffer.combine(rows, handle, config=deep_ep.Config(3))
        with pytest.raises(ferry.TensorError, match="tensor x"):
            buffer.dispatch(tokens.given(rank)[0][:-1], handle=handle)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*made again")
        of.run(run)


def test_a_communicator_of_another_rank_is_refused(world):
    of = world(2)
    tokens = Tokens(61, of, [4, 3])
    buffer = deep_ep.Buffer(rig.Member(0, 2), 1 << 20, connect=lambda config, _: of.connect(config, other))
    other = rig.Member(1, 2)
    with pytest.raises(ferry.ArgumentError, match=r"connect's communicator are \(1, 2, "):
        dispatch(buffer, *tokens.given(0), tokens.experts)


def test_a_lost_rank_is_an_error(world):
    of = world(2, patience=0.3)
    tokens = Tokens(62, of, [4, 3])

    def run(rank):
        buffer = of.buffer(rank)
        rows, *_, handle, _ = dispatch(buffer, *tokens.given(rank), tokens.experts)
        buffer.combine(rows, handle)
        if rank == 0:
            with pytest.raises(ferry.PeerTimeout) as raised:
                dispatch(buffer, *tokens.given(rank), tokens.experts)
            assert raised.value.culprit == 1
            with pytest.raises(ferry.PoisonedError):
                dispatch(buffer, *tokens.given(rank), tokens.experts)
            buffer.destroy()

    if of.gpu is not None:
        pytest.skip("the deadline of a GPU is 100 s")
    of.run(run)
