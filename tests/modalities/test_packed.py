"""Several tensors packed into one: what goes in comes out."""

import pytest
import torch

from fedaudit import BadInput
from fedaudit.modalities import Packing, Part
from fedaudit.modalities.packed import draw_parts, several

X, Y, Z = torch.randn(6, 2, 3), torch.randn(6, 4), torch.randn(6)


@pytest.mark.parametrize("given", [(X, Y, Z), {"b": X, "a": Y, "c": Z}])
def test_what_is_packed_is_unpacked(given):
    packing = Packing.of(given, "input")
    assert packing.size == 2 * 3 + 4 + 1
    again = packing.unpack(packing.pack(given, "input"))
    assert type(again) is type(given)
    wanted = given if isinstance(given, tuple) else [given[name] for name in sorted(given)]
    found = again if isinstance(again, tuple) else list(again.values())
    assert all(torch.equal(one, other) and one.is_contiguous() for one, other in zip(found, wanted, strict=True))


def test_names_stand_in_their_order_after_positions_whatever_the_order_of_a_call():
    first, packed = Packing.of_call((X,), {"z": Z, "y": Y}, "input")
    second, again = Packing.of_call((X,), {"y": Y, "z": Z, "mask": None}, "input")
    assert [part.name for part in first.parts] == ["0", "y", "z"]
    assert first == second
    assert torch.equal(packed, again)
    args, kwargs = first.arguments(packed)
    assert torch.equal(args[0], X)
    assert list(kwargs) == ["y", "z"]


def test_whole_numbers_come_back_as_such_and_alone():
    packing = Packing((Part("", (), whole=True),))
    classes = torch.arange(6)
    assert packing.pack(classes, "targets").shape == (6, 1)
    assert torch.equal(packing.unpack(packing.pack(classes, "targets")), classes)
    assert packing.unpack(packing.pack(classes, "targets")).dtype == torch.int64
    with pytest.raises(BadInput, match="16,777,216 or more"):
        packing.pack(classes + 2**24, "targets")


def test_channels_and_single_numbers_are_measured_by_themselves():
    packing = Packing((Part("0", (2, 3)), Part("1", (4,)), Part("2", ())))
    assert packing.groups().tolist() == [0, 0, 0, 1, 1, 1, 2, 3, 4, 5, 6]
    assert packing.names()[:4] == ("[0] 0,0", "[0] 0,1", "[0] 0,2", "[0] 1,0")


def test_a_list_of_examples_is_no_list_of_parts():
    assert not several([torch.zeros(3)] * 6, 6)
    assert several([torch.zeros(6, 3)] * 2, 6)
    assert several({"a": torch.zeros(6)}, 6)
    assert not several(torch.zeros(6, 3), 6)


def test_a_drawing_has_the_true_example_s_scale():
    packing = Packing((Part("0", (1, 4, 4)), Part("1", (2,))))
    true = torch.cat([torch.linspace(0, 1, 16), torch.tensor([1.0, -2.0])])
    drawn = draw_parts(true, true, packing)
    assert drawn.shape[0] == 1
    assert (float(drawn.min()), float(drawn.max())) == (0, 1)
    twice = draw_parts(2 * true, true, packing)
    assert float((twice == 1).sum()) > float((drawn == 1).sum())  # beyond the scale it is cut
