# SPDX-License-Identifier: Apache-2.0
"""The columnwise plane of 16x16 blocks is made from the rowwise one; no other plane is derived."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from te_nvfp4.quantizer import NVFP4Quantizer
from te_proto.errors import UsageError
from te_proto.testing import hostile

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_proto import QuantizedStorage

    Same = Callable[[QuantizedStorage, QuantizedStorage], None]
    Known = Callable[[Any], dict[str, Any]]

PLANES = {
    "rowwise": ["rowwise_data", "rowwise_scale_inv", "amax_rowwise"],
    "columnwise": ["columnwise_data", "columnwise_scale_inv", "amax_columnwise"],
}
TWO_D = {"with_2d_quantization": True}
BF16 = torch.ones(32, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", [(64, 96), (2, 32, 64), (4, 8, 48)], ids=str)
@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
@pytest.mark.parametrize("in_place", [False, True], ids=["with_usage", "update_usage"])
def test_2d_column_plane_is_derived_from_the_rows(
    shape: tuple[int, ...], swizzled: bool, in_place: bool, assert_same_planes: Same
) -> None:
    x = hostile(shape)
    both = NVFP4Quantizer(optimize_for_gemm=swizzled, **TWO_D)
    q = both.with_usage(columnwise=False).quantize(x)
    row = q.rowwise_data
    if in_place:
        q.update_usage(columnwise=True)
    else:
        q = q.with_usage(columnwise=True)
    assert q.rowwise_data is row
    assert q.quantizer == both
    assert_same_planes(q, both.quantize(x))
    assert len({t.data_ptr() for t in q.inner_tensors().values()}) == 6


@pytest.mark.parametrize(
    ("held", "asked", "fields"),
    [
        pytest.param("rowwise", {"columnwise": True}, {}, id="1d"),
        pytest.param("columnwise", {"rowwise": True}, TWO_D, id="rows-of-2d"),
        pytest.param("rowwise", {"columnwise": True, "rowwise": False}, TWO_D, id="columns-alone"),
        pytest.param(
            "rowwise",
            {"columnwise": True},
            {**TWO_D, "with_rht": True, "with_post_rht_amax": True},
            id="2d-transformed",
        ),
    ],
)
def test_missing_plane_that_cannot_be_derived_is_named(
    held: str, asked: dict[str, bool], fields: dict[str, bool], known: Known
) -> None:
    missing = "columnwise" if held == "rowwise" else "rowwise"
    q = NVFP4Quantizer(**fields, **{missing: False}).quantize(BF16)
    before = known(q)
    for change in (q.with_usage, q.update_usage):
        with pytest.raises(UsageError) as raised:
            change(**asked)
        assert str(raised.value) == (
            f"nvfp4: the tensor does not hold {', '.join(PLANES[missing])} and they cannot be "
            f"derived from {', '.join(PLANES[held])}; quantize the high-precision tensor with "
            "that usage"
        )
    assert known(q) == before
