"""Properties of the pure maths: nothing is lost, nothing overlaps, whatever the shapes and the number of ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zeroshard.config.layout import (
    ALIGNMENT,
    ROOT,
    FlatLayout,
    Range,
    UnitSpec,
    divide_into_flats,
    find_units,
    flat_layout,
    round_up,
)

worlds = st.integers(1, 17)
shapes = st.lists(st.integers(0, 70), max_size=3).map(tuple)
shape_lists = st.lists(shapes, max_size=8)


def layout_of(sizes: list[tuple[int, ...]], world: int) -> FlatLayout:
    return flat_layout([(f"p{number}", shape) for number, shape in enumerate(sizes)], world)


# -- flats and shards -------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 10**15), st.integers(1, 10**6))
def test_rounding_up_gives_the_smallest_multiple_that_is_not_below(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - value < multiple


@settings(deadline=None)
@given(shape_lists, worlds)
def test_every_parameter_lies_inside_its_flat_on_a_boundary_and_over_no_other(
    sizes: list[tuple[int, ...]], world: int
) -> None:
    layout = layout_of(sizes, world)
    assert [slot.shape for slot in layout.slots] == sizes
    assert [slot.name for slot in layout.slots] == [f"p{number}" for number in range(len(sizes))]
    end = 0
    for slot in layout.slots:
        assert slot.numel == math.prod(slot.shape)
        assert slot.start % ALIGNMENT == 0
        assert slot.start >= end
        end = slot.stop
    assert end <= layout.numel
    assert layout.parameters == sum(math.prod(shape) for shape in sizes)


@settings(deadline=None)
@given(shape_lists, worlds)
def test_shards_are_equal_aligned_and_cover_the_flat_exactly_once(sizes: list[tuple[int, ...]], world: int) -> None:
    layout = layout_of(sizes, world)
    ends = [0]
    for rank in range(world):
        shard = layout.shard(rank)
        assert shard.start == ends[-1]
        assert shard.start % ALIGNMENT == 0
        assert shard.numel == layout.shard_numel
        ends.append(shard.stop)
    assert ends[-1] == layout.numel == layout.whole.numel
    assert layout.whole.start == 0


@settings(deadline=None)
@given(shape_lists, worlds)
def test_padding_is_less_than_a_boundary_a_parameter_and_one_a_rank(sizes: list[tuple[int, ...]], world: int) -> None:
    layout = layout_of(sizes, world)
    waste = layout.numel - layout.parameters
    assert waste <= (ALIGNMENT - 1) * len(sizes) + ALIGNMENT * world


@settings(deadline=None)
@given(shape_lists, worlds)
def test_pieces_of_all_ranks_put_every_parameter_together_exactly_once_and_in_order(
    sizes: list[tuple[int, ...]], world: int
) -> None:
    layout = layout_of(sizes, world)
    reached = [0] * len(sizes)
    for rank in range(world):
        shard = layout.shard(rank)
        end = 0
        for piece in layout.pieces(shard):
            slot = layout.slots[piece.slot]
            assert piece.numel > 0
            assert piece.offset >= end
            end = piece.offset + piece.numel
            assert end <= shard.numel
            assert piece.start == reached[piece.slot]
            assert shard.start + piece.offset == slot.start + piece.start
            reached[piece.slot] = piece.stop
    assert reached == [math.prod(shape) for shape in sizes]


@settings(deadline=None)
@given(shape_lists, worlds, st.data())
def test_pieces_of_any_range_are_the_elements_of_that_range(
    sizes: list[tuple[int, ...]], world: int, data: st.DataObject
) -> None:
    layout = layout_of(sizes, world)
    start = data.draw(st.integers(0, layout.numel))
    part = Range(start, data.draw(st.integers(start, layout.numel)))
    expected = sum(max(0, min(slot.stop, part.stop) - max(slot.start, part.start)) for slot in layout.slots)
    assert sum(piece.numel for piece in layout.pieces(part)) == expected
    whole = layout.pieces(layout.whole)
    assert [piece.slot for piece in whole] == [index for index, slot in enumerate(layout.slots) if slot.numel]


@settings(max_examples=40)
@given(shape_lists, worlds)
def test_parameters_and_padding_together_are_everything(sizes: list[tuple[int, ...]], world: int) -> None:
    layout = layout_of(sizes, world)
    spans = [(slot.start, slot.stop) for slot in layout.slots if slot.numel]
    spans += [(gap.start, gap.stop) for gap in layout.padding]
    end = 0
    for start, stop in sorted(spans):
        assert start == end
        assert stop > start
        end = stop
    assert end == layout.numel


def test_a_flat_of_nothing_but_empty_parameters_has_no_elements() -> None:
    layout = layout_of([(0,), (3, 0)], world=3)
    assert layout.numel == 0
    assert layout.padding == ()
    assert all(layout.pieces(layout.shard(rank)) == () for rank in range(3))


def test_where_a_parameter_lies_does_not_depend_on_the_number_of_ranks() -> None:
    starts = {tuple(slot.start for slot in layout_of([(3, 5), (), (0,), (130,)], world).slots) for world in range(1, 9)}
    assert len(starts) == 1


# -- units ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def parameters_by_unit(units: list[UnitSpec]) -> dict[str, set[str]]:
    return {unit.name: {name for name, _ in unit.parameters} for unit in units}


def check_partition(model: nn.Module, units: list[UnitSpec]) -> None:
    """Every parameter is in one unit, under its own name, and the root comes first."""
    assert units[0].name == ROOT
    assert units[0].module is model
    modules = dict(model.named_modules())
    order = list(modules)
    names = [unit.name for unit in units]
    assert len(set(names)) == len(names)
    assert sorted(names, key=order.index) == names
    for unit in units:
        assert modules[unit.name] is unit.module
        assert unit.numel == sum(parameter.numel() for _, parameter in unit.parameters)
    counted = Counter(parameter for unit in units for _, parameter in unit.parameters)
    assert set(counted.values()) <= {1}
    named = dict(model.named_parameters())
    assert {name: p for unit in units for name, p in unit.parameters} == named
    for unit in units[1:]:
        assert unit.parameters
        mine = set(unit.module.parameters())
        assert all(parameter in mine for _, parameter in unit.parameters)


def test_repeated_blocks_are_units_and_the_rest_is_the_root() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "blocks": nn.ModuleList(Block(4) for _ in range(3))})
    units = find_units(model)
    check_partition(model, units)
    assert [unit.name for unit in units] == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert parameters_by_unit(units)[ROOT] == {"embed.weight"}


def test_an_encoder_decoder_has_units_in_both_of_its_containers() -> None:
    model = nn.ModuleDict(
        {
            "encoder": nn.ModuleDict({"block": nn.ModuleList(Block(6) for _ in range(2)), "norm": nn.LayerNorm(6)}),
            "decoder": nn.ModuleDict({"block": nn.ModuleList(Block(3) for _ in range(2)), "norm": nn.LayerNorm(3)}),
            "head": nn.Linear(3, 2),
        }
    )
    units = find_units(model)
    check_partition(model, units)
    assert [unit.name for unit in units] == [
        "",
        "encoder.block.0",
        "encoder.block.1",
        "decoder.block.0",
        "decoder.block.1",
    ]


def test_a_residual_network_has_units_in_each_of_its_four_stages() -> None:
    class Bottleneck(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(channels, channels, 3)
            self.norm = nn.BatchNorm2d(channels)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(x))

    stages = {f"layer{number}": nn.Sequential(*(Bottleneck(4) for _ in range(2))) for number in range(1, 5)}
    model = nn.ModuleDict({"stem": nn.Conv2d(3, 4, 3), **stages, "fc": nn.Linear(4, 2)})
    units = find_units(model)
    check_partition(model, units)
    assert [unit.name for unit in units] == ["", *(f"layer{n}.{m}" for n in range(1, 5) for m in range(2))]
    assert parameters_by_unit(units)[ROOT] == {"stem.weight", "stem.bias", "fc.weight", "fc.bias"}


def test_parameters_tied_across_units_or_with_the_rest_land_in_the_root() -> None:
    blocks = nn.ModuleList(Block(4) for _ in range(3))
    blocks[1].up.weight = blocks[0].up.weight
    head = nn.Linear(4, 4, bias=False)
    head.weight = blocks[2].down.weight
    model = nn.ModuleDict({"blocks": blocks, "head": head})
    units = find_units(model)
    check_partition(model, units)
    root = {id(parameter) for _, parameter in units[0].parameters}
    assert root == {id(blocks[0].up.weight), id(head.weight)}


def test_parameters_tied_inside_one_unit_stay_there_once() -> None:
    blocks = nn.ModuleList(Block(4) for _ in range(2))
    blocks[0].down.weight = blocks[0].up.weight
    model = nn.ModuleDict({"blocks": blocks})
    units = find_units(model)
    check_partition(model, units)
    assert parameters_by_unit(units)["blocks.0"] == {"blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.down.bias"}


def test_one_block_called_many_times_is_one_unit() -> None:
    block = Block(4)
    model = nn.ModuleDict({"blocks": nn.ModuleList([block, block, block]), "last": nn.Linear(4, 1)})
    units = find_units(model)
    check_partition(model, units)
    assert [unit.name for unit in units] == ["", "blocks.0"]


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(3, 2),
        lambda: nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.LayerNorm(2)),
        lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}),
        lambda: nn.ModuleList([Block(2)]),
        lambda: nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(2, 2)),
    ],
)
def test_where_nothing_is_repeated_there_is_only_the_root(build: Callable[[], nn.Module]) -> None:
    model = build()
    units = find_units(model)
    check_partition(model, units)
    assert len(units) == 1


def test_repeated_trifles_are_no_units() -> None:
    model = nn.ModuleDict({"big": nn.Linear(100, 100), "gates": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))})
    assert len(find_units(model)) == 1


def test_lists_inside_a_list_are_looked_into_because_nobody_calls_a_list() -> None:
    model = nn.ModuleDict({"towers": nn.ModuleList(nn.ModuleList(Block(3) for _ in range(2)) for _ in range(2))})
    units = find_units(model)
    check_partition(model, units)
    assert [unit.name for unit in units] == ["", "towers.0.0", "towers.0.1", "towers.1.0", "towers.1.1"]


def test_a_unit_above_the_limit_is_split_at_its_children_and_loose_parameters_go_to_the_root() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.norm = nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x * self.scale)

    model = nn.ModuleDict({"blocks": nn.ModuleList(Wide() for _ in range(2))})
    assert [unit.name for unit in find_units(model)] == ["", "blocks.0", "blocks.1"]
    units = find_units(model, max_unit_bytes=8 * 9 * 4)
    check_partition(model, units)
    split = [f"blocks.{number}.{part}" for number in range(2) for part in ("experts.0", "experts.1", "norm")]
    assert [unit.name for unit in units] == ["", *split]
    assert parameters_by_unit(units)[ROOT] == {"blocks.0.scale", "blocks.1.scale"}


def test_the_limit_counts_bytes_after_a_cast() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(Block(8) for _ in range(2))})
    limit = 2 * 8 * 9 * 2
    assert [unit.name for unit in find_units(model, max_unit_bytes=limit, itemsize=2)] == ["", "blocks.0", "blocks.1"]
    assert len(find_units(model, max_unit_bytes=limit)) == 5


def test_a_unit_that_has_no_children_stays_whole_whatever_the_limit() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(8, 8) for _ in range(2))})
    assert [unit.name for unit in find_units(model, max_unit_bytes=1)] == ["", "blocks.0", "blocks.1"]


def test_a_module_that_reads_its_children_without_calling_them_is_not_split() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8)) for _ in range(2))
    names = [unit.name for unit in find_units(model, max_unit_bytes=1)]
    assert names == ["", "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"]


trees = st.recursive(
    st.sampled_from(["linear", "norm", "relu", "embedding"]),
    lambda inner: st.tuples(st.sampled_from(["list", "sequential", "dict"]), st.lists(inner, max_size=3)),
    max_leaves=10,
)


def build_tree(tree: object, made: list[nn.Module]) -> nn.Module:
    if isinstance(tree, str):
        kinds: dict[str, Callable[[], nn.Module]] = {
            "linear": lambda: nn.Linear(3, 3),
            "norm": lambda: nn.LayerNorm(3),
            "relu": nn.ReLU,
            "embedding": lambda: nn.Embedding(4, 3),
        }
        made.append(kinds[tree]())
        return made[-1]
    assert isinstance(tree, tuple)
    kind, children = tree
    built = [build_tree(child, made) for child in children]
    if kind == "list":
        return nn.ModuleList(built)
    if kind == "sequential":
        return nn.Sequential(*built)
    return nn.ModuleDict({f"c{number}": child for number, child in enumerate(built)})


@settings(max_examples=60, deadline=None)
@given(trees, st.integers(1, 400), st.data())
def test_any_model_is_divided_into_units_without_loss_or_overlap(tree: object, limit: int, data: st.DataObject) -> None:
    made: list[nn.Module] = []
    model = nn.Sequential(build_tree(tree, made))
    linears = [module for module in made if isinstance(module, nn.Linear)]
    if len(linears) > 1 and data.draw(st.booleans(), label="tie"):
        first, second = data.draw(st.permutations(linears))[:2]
        second.weight = first.weight
    for max_unit_bytes in (limit, 1 << 30):
        units = find_units(model, max_unit_bytes=max_unit_bytes)
        check_partition(model, units)
        for unit in units:
            divided = divide_into_flats(unit.parameters, max_unit_bytes)
            assert [entry for members in divided for entry in members] == list(unit.parameters)


# -- units chosen by the user -----------------------------------------------------------------------------------------


def named_blocks() -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList(Block(4) for _ in range(3)), "head": nn.Linear(4, 2)})


def test_units_can_be_chosen_by_name() -> None:
    model = named_blocks()
    units = find_units(model, chosen=["head", "blocks.1"])
    check_partition(model, units)
    assert [unit.name for unit in units] == ["", "blocks.1", "head"]


def test_a_wildcard_in_units_stands_for_one_part_of_a_name() -> None:
    model = named_blocks()
    units = find_units(model, chosen=["blocks.*"])
    check_partition(model, units)
    assert [unit.name for unit in units] == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert [unit.name for unit in find_units(model, chosen=["blocks.*.up"])] == [
        "",
        "blocks.0.up",
        "blocks.1.up",
        "blocks.2.up",
    ]


def test_a_question_mark_in_units_stands_for_one_letter() -> None:
    units = find_units(named_blocks(), chosen=["blocks.?"])
    assert [unit.name for unit in units] == ["", "blocks.0", "blocks.1", "blocks.2"]


def test_units_can_be_chosen_by_class() -> None:
    units = find_units(named_blocks(), chosen=[Block])
    assert [unit.name for unit in units] == ["", "blocks.0", "blocks.1", "blocks.2"]


def test_choosing_a_list_chooses_what_is_in_it() -> None:
    model = named_blocks()
    units = find_units(model, chosen=["blocks"])
    check_partition(model, units)
    assert [unit.name for unit in units] == ["", "blocks.0", "blocks.1", "blocks.2"]


def test_choosing_no_units_leaves_only_the_root() -> None:
    assert [unit.name for unit in find_units(named_blocks(), chosen=[])] == [""]


@pytest.mark.parametrize("choice", ["block", "blocks.7", "*.nothing", nn.Conv2d, "", "Blocks.0"])
def test_a_choice_that_matches_nothing_is_named(choice: str | type[nn.Module]) -> None:
    with pytest.raises(ValueError, match="matches no module") as caught:
        find_units(named_blocks(), chosen=[Block, choice])
    assert repr(choice) in str(caught.value)


@pytest.mark.parametrize("chosen", [["blocks.0", "blocks.0.up"], ["blocks", "blocks.0"], [Block, nn.Linear]])
def test_units_inside_units_are_refused_and_both_are_named(chosen: list[str | type[nn.Module]]) -> None:
    with pytest.raises(ValueError, match="cannot be nested") as caught:
        find_units(named_blocks(), chosen=chosen)
    assert "'blocks" in str(caught.value)


def test_names_that_only_begin_alike_are_not_nested() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "ab": nn.Linear(2, 2)})
    assert [unit.name for unit in find_units(model, chosen=["a", "ab"])] == ["", "a", "ab"]


# -- flats of a unit --------------------------------------------------------------------------------------------------

members = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
        st.booleans(),
    ),
    max_size=10,
)


@settings(deadline=None)
@given(members, st.integers(1, 200), st.sampled_from([None, 2, 4]))
def test_a_units_flats_are_of_one_kind_bounded_and_hold_every_parameter_once(
    kinds: list[tuple[int, torch.dtype, bool]], limit: int, itemsize: int | None
) -> None:
    parameters = [
        (f"p{number}", nn.Parameter(torch.empty(numel, dtype=dtype, device="meta"), requires_grad=trained))
        for number, (numel, dtype, trained) in enumerate(kinds)
    ]
    flats = divide_into_flats(parameters, limit, itemsize)
    assert sorted(name for flat in flats for name, _ in flat) == sorted(name for name, _ in parameters)
    for flat in flats:
        assert flat
        assert len({(p.dtype, p.requires_grad) for _, p in flat}) == 1
        size = sum(-(-p.numel() // ALIGNMENT) * ALIGNMENT * (itemsize or p.element_size()) for _, p in flat)
        assert size <= limit or sum(p.numel() > 0 for _, p in flat) == 1
        numbers = [int(name[1:]) for name, _ in flat]
        assert numbers == sorted(numbers)


def test_flats_are_no_smaller_than_they_have_to_be() -> None:
    parameters = [(f"p{number}", nn.Parameter(torch.zeros(50))) for number in range(6)]
    assert [len(flat) for flat in divide_into_flats(parameters, 512)] == [2, 2, 2]
    assert [len(flat) for flat in divide_into_flats(parameters, 512, itemsize=2)] == [4, 2]
