"""Wrap policies: which submodules become units."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fullshard.errors import ConfigError
from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    or_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
    wrapped_modules,
)


class Block(nn.Module):
    """A branch of a random tree, with a few parameters."""

    def __init__(self, width: int, children: list[nn.Module]):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.inner = nn.ModuleList(children)

    def forward(self, x):
        for child in self.inner:
            x = child(x)
        return x


class Chain(nn.Sequential):
    """A branch without parameters."""


class Leaf(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return x


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module, **kwargs: object):
        super().__init__()
        self.module = module
        self.kwargs = kwargs


CLASSES = (Block, Chain, Leaf, nn.ReLU)
leaves = st.builds(Leaf, st.integers(0, 20)) | st.builds(nn.ReLU)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.builds(Block, st.integers(0, 20), st.lists(inner, max_size=3))
        | st.lists(inner, max_size=3).map(lambda children: Chain(*children))
    ),
    max_leaves=10,
)
roots = st.lists(trees, min_size=1, max_size=3).map(lambda children: Block(5, children))
sizes = st.integers(0, 40)


def shared_somewhere(root: nn.Module, data: st.DataObject) -> nn.Module:
    """Insert one shared module and one shared parameter into randomly drawn blocks of `root`."""
    blocks = [module for module in root.modules() if isinstance(module, Block)]
    places = [module for module in blocks if data.draw(st.booleans())]
    twice, tied = Leaf(7), Leaf(3)
    for place in places:
        place.inner.append(twice)
        place.tied = tied.weight
    return root


def policies(min_num_params: int) -> list:
    return [
        ModuleWrapPolicy({Block, Leaf}),
        CustomPolicy(lambda module: isinstance(module, Leaf) and {"forward_prefetch": True}),
        always_wrap_policy,
        partial(transformer_auto_wrap_policy, transformer_layer_cls={Chain}),
        partial(size_based_auto_wrap_policy, min_num_params=min_num_params),
        partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.ReLU)),
        partial(or_policy, policies=[ModuleWrapPolicy({Leaf}), always_wrap_policy]),
    ]


def drawn_below(root: nn.Module, data: st.DataObject) -> list[nn.Module]:
    below = list(root.modules())[1:]
    return data.draw(st.lists(st.sampled_from(below), max_size=2)) if below else []


def closure(modules) -> set[nn.Module]:
    return {inner for module in modules for inner in module.modules()}


@given(roots, sizes, st.data())
@settings(deadline=None)
def test_policies_yield_children_first_and_skip_ignored_modules(root, size, data):
    shared_somewhere(root, data)
    ignored = drawn_below(root, data)
    before = [(name, id(module)) for name, module in root.named_modules(remove_duplicate=False)]
    for policy in policies(size):
        units = wrapped_modules(root, policy, ignored_modules=ignored)
        found = list(units)
        assert not closure(ignored) & set(found)
        assert root not in units and set(found) <= set(root.modules())
        for index, unit in enumerate(found):
            assert not closure([unit]) & set(found[index + 1 :])  # modules inside a unit precede it
    assert before == [(name, id(module)) for name, module in root.named_modules(remove_duplicate=False)]


@given(roots, st.sets(st.sampled_from(CLASSES), min_size=1), st.data())
@settings(deadline=None)
def test_class_policies_select_exactly_instances_of_classes(root, classes, data):
    shared_somewhere(root, data)
    ignored = drawn_below(root, data)
    expected = {module for module in root.modules() if isinstance(module, tuple(classes))} - {root} - closure(ignored)
    for policy in (
        ModuleWrapPolicy(classes),
        partial(transformer_auto_wrap_policy, transformer_layer_cls=classes),
        partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, tuple(classes))),
        CustomPolicy(lambda module: isinstance(module, tuple(classes))),
        partial(or_policy, policies=[ModuleWrapPolicy({cls}) for cls in classes]),
    ):
        assert set(wrapped_modules(root, policy, ignored_modules=ignored)) == expected


@given(roots, sizes, st.data())
@settings(deadline=None)
def test_size_policy_bounds_unit_and_remainder_sizes(root, size, data):
    shared_somewhere(root, data)
    ignored = drawn_below(root, data)
    held = {param for module in ignored for param in module.parameters()}
    policy = partial(size_based_auto_wrap_policy, min_num_params=size)
    units = wrapped_modules(root, policy, ignored_modules=ignored)
    for unit in units:
        own = set(unit.parameters()) - held
        assert sum(param.numel() for param in own) >= size
        held |= own
    for module in closure(root.children()) - closure(ignored) - set(units):
        if not isinstance(module, nn.ModuleList):
            assert sum(param.numel() for param in set(module.parameters()) - held) < max(size, 1)


@given(roots)
@settings(deadline=None)
def test_always_wrap_policy_selects_all_modules_with_forward(root):
    expected = {module for module in root.modules() if not isinstance(module, nn.ModuleList)} - {root}
    assert set(wrapped_modules(root, always_wrap_policy)) == expected


def test_size_policy_does_not_split_attention_or_wrap_containers():
    root = nn.Sequential(nn.MultiheadAttention(8, 2), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]))
    policy = partial(size_based_auto_wrap_policy, min_num_params=60)
    assert set(wrapped_modules(root, policy)) == set(root[1])
    assert set(wrapped_modules(root, partial(policy, force_leaf_modules=set()))) == {
        root[0].out_proj,
        root[0],
        *root[1],
    }
    assert set(wrapped_modules(root, partial(policy, exclude_wrap_modules={nn.Linear}, min_num_params=300))) == set()


def test_size_policy_counts_only_parameters_outside_inner_units():
    others_small = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(3, 3, bias=False))
    others_large = nn.Sequential(
        nn.Linear(10, 10, bias=False), nn.Linear(7, 7, bias=False), nn.Linear(7, 8, bias=False)
    )
    root = nn.Sequential(others_small, others_large)
    units = wrapped_modules(root, partial(size_based_auto_wrap_policy, min_num_params=100))
    assert list(units) == [others_small[0], others_large[0], others_large]


def test_size_policy_defaults_match_torch():
    assert default_auto_wrap_policy is size_based_auto_wrap_policy
    assert size_based_auto_wrap_policy.FORCE_LEAF_MODULES == {nn.MultiheadAttention}
    assert size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES == {nn.ModuleList, nn.ModuleDict}
    assert size_based_auto_wrap_policy(nn.Linear(1, 1), False, 100_000_000)
    assert not size_based_auto_wrap_policy(nn.Linear(1, 1), False, 99_999_999)


def test_size_policy_excludes_ignored_parameters():
    root = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    policy = partial(size_based_auto_wrap_policy, min_num_params=100)
    assert list(wrapped_modules(root, policy, ignored_params=[root[0].weight])) == [root[1]]


def test_module_used_twice_is_one_unit_and_visited_once():
    shared, requested = Leaf(4), []
    root = Block(1, [Chain(shared), Chain(shared)])
    policy = CustomPolicy(lambda module: requested.append(module) or isinstance(module, Leaf))
    assert list(wrapped_modules(root, policy)) == [shared]
    assert requested.count(shared) == 1


def test_custom_policy_returns_arguments_per_module():
    root = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3))
    answers = {root[0]: {"strategy": "zero2"}, root[1]: {}, root[2]: True}
    units = wrapped_modules(root, CustomPolicy(answers.__getitem__))
    assert units == {root[0]: {"strategy": "zero2"}, root[2]: {}}
    units[root[0]]["strategy"] = "ddp"
    assert answers[root[0]] == {"strategy": "zero2"}  # the user's dictionary is unchanged


def test_separate_classes_are_units_under_any_policy():
    root = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.MultiheadAttention(2, 1))
    separate = {nn.modules.batchnorm._BatchNorm: {"mixed_precision": None}}
    small, large = (partial(size_based_auto_wrap_policy, min_num_params=size) for size in (1, 1000))
    assert wrapped_modules(root, large, separate=separate) == {root[0][1]: {"mixed_precision": None}}
    assert list(wrapped_modules(root, small, separate=separate)) == [root[0][0], root[0][1]]
    both = wrapped_modules(root, CustomPolicy(lambda _: {"forward_prefetch": True}), separate=separate)
    assert both[root[0][1]] == {"forward_prefetch": True, "mixed_precision": None}


def test_parameter_lists_stay_in_parent_unit():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(3)])

        def forward(self, x):
            return x * self.scales[0]

    root = nn.Sequential(Holder())
    assert list(wrapped_modules(root, always_wrap_policy)) == [root[0]]


def test_container_without_forward_raises_as_unit_with_parameters():
    root = nn.Sequential(Block(3, [Leaf(5), Leaf(6)]))
    with pytest.raises(
        ConfigError, match=r"selects 0\.inner, a ModuleList, which has no forward, so its 11 parameters"
    ):
        wrapped_modules(root, ModuleWrapPolicy({nn.ModuleList}))
    assert list(wrapped_modules(root, ModuleWrapPolicy({nn.ModuleList, Leaf}))) == list(root[0].inner)


@pytest.mark.parametrize(
    ("policy", "stated"),
    [
        ({nn.Linear}, "is not a wrap policy.*ModuleWrapPolicy"),
        (ModuleWrapPolicy, "is not a wrap policy"),
        (None, "is not a wrap policy"),
        (transformer_auto_wrap_policy, "missing a required argument: 'transformer_layer_cls'.*functools.partial"),
        (lambda module: True, "cannot be called with module, recurse and nonwrapped_numel"),
        (partial(transformer_auto_wrap_policy, transformer_layer_cls=nn.Linear), "Pass a set of module classes"),
        (CustomPolicy(lambda module: "yes"), "returned 'yes' for a Linear"),
    ],
)
def test_invalid_policies_raise_with_remedy(policy, stated):
    with pytest.raises(ConfigError, match=stated):
        wrapped_modules(nn.Sequential(nn.Linear(2, 2)), policy)


@pytest.mark.parametrize("classes", [nn.Linear, "Linear", ["Linear"], 3])
def test_module_wrap_policy_rejects_non_classes(classes):
    with pytest.raises(ConfigError, match="Pass a set of module classes"):
        ModuleWrapPolicy(classes)


def test_policy_repr_names_class_or_function():
    assert repr(ModuleWrapPolicy([Block])) == "ModuleWrapPolicy({Block})"
    assert repr(CustomPolicy(closure)) == "CustomPolicy(closure)"


# ------------------------------------------------------------------------------------------------------------- manually


def test_wrap_does_nothing_outside_of_enable_wrap():
    layer = nn.Linear(2, 2)
    assert wrap(layer, anything=1) is layer


def test_wrap_merges_arguments_and_nested_enable_wrap_restores_outer():
    with enable_wrap(wrapper_cls=Wrapped, a=1, b=2):
        outer = wrap(nn.Linear(2, 2), b=3)
        with pytest.raises(KeyError), enable_wrap(wrapper_cls=Wrapped, c=4):
            assert wrap(nn.Linear(2, 2)).kwargs == {"c": 4}
            raise KeyError
        after = wrap(nn.Linear(2, 2))
    assert (outer.kwargs, after.kwargs) == ({"a": 1, "b": 3}, {"a": 1, "b": 2})
    assert isinstance(outer, Wrapped) and isinstance(outer.module, nn.Linear)
    test_wrap_does_nothing_outside_of_enable_wrap()


def test_wrapper_cls_may_be_function_that_wraps_in_place():
    marked = []
    layer = nn.Linear(2, 2)
    with enable_wrap(wrapper_cls=lambda module, **kwargs: marked.append(kwargs) or module, strategy="zero2"):
        assert wrap(layer) is layer
    assert marked == [{"strategy": "zero2"}]


def test_enable_wrap_rejects_non_callable_wrapper_cls():
    with pytest.raises(ConfigError, match="wrapper_cls is 'fsdp'"), enable_wrap(wrapper_cls="fsdp"):
        pass
