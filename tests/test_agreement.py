"""What ranks decide from the same messages: one word for all, or one error for all."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.errors import BuildError, DeadlineError, TileMoEError, UnsupportedLayerError
from ds_tilemoe.layers.agreement import (
    DEVICE,
    DISABLED,
    EXCLUDED,
    Message,
    Offer,
    agree,
    collective,
)

SHAPE = LayerShape("mlp", 8, 2, 64, 96, 64, torch.float32)
OTHER = dataclasses.replace(SHAPE, ffn=128)
PROTOCOL = (("layout", "auto"), ("the version of torch", "2.13"))


def message(*outcomes, **fields):
    offers = tuple(Offer(f"layer{i}", outcome) for i, outcome in enumerate(outcomes or (SHAPE,)))
    return Message(**{"offers": offers, "protocol": PROTOCOL, **fields})


def test_unanimous():
    assert agree([message(SHAPE, OTHER)] * 3) == [SHAPE, OTHER]


def test_one_reason_keeps_the_layer_on_all_ranks():
    messages = [message(SHAPE, SHAPE), message(SHAPE, "it has hooks"), message(SHAPE, SHAPE)]
    assert agree(messages) == [SHAPE, "rank 1: it has hooks"]


def test_a_common_reason_names_no_rank():
    assert agree([message("it uses Tutel")] * 2) == ["it uses Tutel"]


def test_the_first_rank_with_a_reason_is_named():
    assert agree([message(), message("a"), message("b")]) == ["rank 1: a"]


def test_shapes_must_be_equal():
    (reason,) = agree([message(SHAPE), message(SHAPE), message(OTHER)])
    assert reason == "shapes differ: ffn is 96 on rank 0, 128 on rank 2"
    other = dataclasses.replace(OTHER, topk=1)
    (reason,) = agree([message(SHAPE), message(other)])
    ffn = "ffn is 96 on rank 0, 128 on rank 1"
    assert reason == f"shapes differ: topk is 2 on rank 0, 1 on rank 1; {ffn}"


def test_protocol_must_be_equal():
    other = message(protocol=(("layout", "aligned"), PROTOCOL[1]))
    assert agree([message(), other]) == ["layout differs: 'auto' on rank 0, 'aligned' on rank 1"]
    other = message(protocol=(PROTOCOL[0], ("the version of torch", "2.12")))
    (reason,) = agree([message(), other])
    assert "the version of torch differs: '2.13' on rank 0, '2.12' on rank 1" in reason


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_is_what_it_stands_for(device):
    def settings(**given):
        names = ("backend", "layout", "tile_m", "dispatch", "transport", "max_tokens_per_rank")
        values = {**dict.fromkeys(names, "auto"), **given, DEVICE: device}
        return message(protocol=tuple(values.items()))

    same = {"backend": device, "layout": "compact", "transport": "mapped", "dispatch": "fused"}
    for given in (same, {"tile_m": {"cpu": 16, "cuda": 128}[device]}):
        assert agree([settings(), settings(**given)]) == [SHAPE]
        assert agree([settings(**given), settings()]) == [SHAPE]
    for name, other in (
        ("backend", {"cpu": "cuda", "cuda": "cpu"}[device]),
        ("layout", "aligned"),
        ("tile_m", 64),
        ("transport", "nvshmem"),
        ("max_tokens_per_rank", 1024),
    ):
        (reason,) = agree([settings(), settings(**{name: other})])
        assert reason == f"{name} differs: 'auto' on rank 0, {other!r} on rank 1"
    fused, nccl = settings(dispatch="fused"), settings(dispatch="nccl")
    assert agree([fused, nccl]) == ["dispatch differs: 'fused' on rank 0, 'nccl' on rank 1"]
    by_nccl = dataclasses.replace(
        nccl, offers=(Offer("layer0", dataclasses.replace(SHAPE, dispatch="nccl")),)
    )
    assert "shapes differ" in agree([settings(), by_nccl])[0]


def test_one_strict_rank_makes_all_raise():
    with pytest.raises(UnsupportedLayerError, match="layer1: rank 0: no"):
        agree([message(SHAPE, "no"), message(SHAPE, SHAPE, strict=True)])
    assert agree([message(strict=True)] * 2) == [SHAPE]


@pytest.mark.parametrize(
    ("field", "values", "wanted"),
    [
        ("grad", (False, False, True), "different grad modes: disabled on rank 0, enabled on rank"),
        ("grad", (False, False, None), "different calls: a forward on rank 0, apply.. on rank 2"),
        ("dtype", ("bf16", "fp32", "bf16"), "different dtypes: bf16 on rank 0, fp32 on rank 1"),
        ("offers", ((), (Offer("a", SHAPE),), ()), "swap or run different layers"),
    ],
)
def test_what_ranks_may_not_differ_in(field, values, wanted):
    messages = [dataclasses.replace(message(), **{field: value}) for value in values]
    with pytest.raises(TileMoEError, match=wanted) as caught:
        agree(messages)
    assert "fix: " in str(caught.value)


@pytest.mark.parametrize("wish", [EXCLUDED, DISABLED])
def test_what_all_ranks_wish_is_no_matter_of_strict(wish):
    assert agree([message(SHAPE, wish, strict=True)] * 2) == [SHAPE, wish]
    with pytest.raises(UnsupportedLayerError, match=f"layer1: rank 1: {wish}"):
        agree([message(SHAPE, SHAPE, strict=True), message(SHAPE, wish, strict=True)])


def test_ranks_of_the_world_are_named():
    messages = [message(rank=2), message("it has hooks", rank=3)]
    assert agree(messages) == ["rank 3: it has hooks"]
    messages = [message(rank=2), message(OTHER, rank=3)]
    assert agree(messages) == ["shapes differ: ffn is 96 on rank 2, 128 on rank 3"]


def test_a_reason_of_the_layer_goes_before_settings_that_differ():
    other = message(EXCLUDED, protocol=(("layout", "aligned"), PROTOCOL[1]))
    assert agree([message(), other]) == [f"rank 1: {EXCLUDED}"]


def test_a_fault_of_one_rank_is_raised_by_all():
    with pytest.raises(BuildError, match="rank 1: no compiler"):
        agree([message(), message(fault="no compiler"), message()])


SAID = ("[../gloo/tcp/pair.cc:548] Connection closed", "Application timeout caused pair closure")


@pytest.mark.parametrize("text", SAID)
def test_what_a_process_group_says_when_it_has_failed_names_the_layer(text: str) -> None:
    named = r"layer moe: a collective of the ranks.*start the job"
    with pytest.raises(DeadlineError, match=named), collective("moe", "the ranks", None):
        raise RuntimeError(text)
    own = RuntimeError("an expert's own")
    with pytest.raises(RuntimeError, match=str(own)), collective("moe", "the ranks", None):
        raise own
