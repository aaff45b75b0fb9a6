"""The dtype of each number: a contract that follows from a policy, and policies that reject invalid combinations."""

from dataclasses import fields

import pytest
import torch

from fullshard import ConfigError, MixedPrecision, MixedPrecisionPolicy
from fullshard.policy.precision import DtypeContract

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("policy", "stored", "compute", "reduce"),
    [
        (MixedPrecisionPolicy(), FP32, FP32, FP32),
        (MixedPrecisionPolicy(), FP64, FP64, FP64),
        (MixedPrecisionPolicy(param_dtype=BF16), FP32, BF16, BF16),
        (MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32), FP32, BF16, FP32),
        (MixedPrecisionPolicy(reduce_dtype=FP64), FP32, FP32, FP64),
        (MixedPrecisionPolicy(output_dtype=FP16), FP32, FP32, FP32),
    ],
)
def test_unset_dtypes_default_to_stored_or_compute_dtype(policy, stored, compute, reduce):
    assert policy.contract(stored) == DtypeContract(stored=stored, compute=compute, reduce=reduce)


@pytest.mark.parametrize("stored", [torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_integers_and_quantized_weights_are_never_cast(stored):
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    assert policy.contract(stored) == DtypeContract(stored=stored, compute=stored, reduce=stored)


@pytest.mark.parametrize(("compute", "reduce", "itemsize"), [(BF16, FP32, 2), (FP32, BF16, 2), (FP64, FP64, 4)])
def test_contract_itemsize_is_smallest_of_all_dtypes(compute, reduce, itemsize):
    """An offset that is aligned in one buffer of a parameter group is then aligned in all of its buffers."""
    assert DtypeContract(stored=FP32, compute=compute, reduce=reduce).itemsize == itemsize


def test_dtype_contract_str_names_dtypes():
    contract = DtypeContract(stored=FP32, compute=BF16, reduce=FP32)
    assert str(contract) == "stored float32, computed and gathered bfloat16, reduced float32"


@pytest.mark.parametrize("wrong", [torch.int32, torch.bool, torch.float8_e5m2, "bfloat16", 16])
@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (MixedPrecisionPolicy, "param_dtype"),
        (MixedPrecisionPolicy, "reduce_dtype"),
        (MixedPrecisionPolicy, "output_dtype"),
        (MixedPrecision, "param_dtype"),
        (MixedPrecision, "reduce_dtype"),
        (MixedPrecision, "buffer_dtype"),
    ],
)
def test_non_floating_point_dtype_raises_with_argument_name(policy, name, wrong):
    with pytest.raises(ConfigError, match=rf"{policy.__name__}\({name}=.*expected a floating-point torch.dtype"):
        policy(**{name: wrong})


def test_keep_low_precision_grads_raises():
    """The optimizer needs gradients in its parameters' dtype: the argument is refused, not ignored."""
    with pytest.raises(ConfigError, match="keep_low_precision_grads=True is not supported"):
        MixedPrecision(keep_low_precision_grads=True)


ONLY_FSDP1 = {  # the wrapper itself applies these
    "buffer_dtype",
    "keep_low_precision_grads",
    "cast_root_forward_inputs",
    "_module_classes_to_ignore",
}
VALUES = {
    "param_dtype": BF16,
    "reduce_dtype": FP32,
    "cast_forward_inputs": True,
    "gather_wire": "int8",
    "reduce_wire": "bf16",
}


def test_mixed_precision_forwards_every_policy_field():
    """A field that is added to one of the classes fails here until `VALUES` or the sets name it."""
    names = {field.name for field in fields(MixedPrecision)}
    assert names == ONLY_FSDP1 | set(VALUES)
    assert {field.name for field in fields(MixedPrecisionPolicy)} - names == {"output_dtype", "param_dtype_override_fn"}
    assert MixedPrecision(**VALUES).policy() == MixedPrecisionPolicy(**VALUES)
    default = MixedPrecisionPolicy(cast_forward_inputs=False)
    assert all(getattr(default, name) != value for name, value in VALUES.items())


def test_policies_compare_by_value_and_are_frozen():
    assert MixedPrecisionPolicy(param_dtype=BF16) == MixedPrecisionPolicy(BF16)
    with pytest.raises(AttributeError):
        MixedPrecisionPolicy().param_dtype = BF16
