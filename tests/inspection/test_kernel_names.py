"""Kernel names as people write them."""

from __future__ import annotations

import pytest

from fuseline.inspection.kernel_names import demangle, family, readable


@pytest.mark.parametrize(
    "mangled, name",
    [
        (
            "_ZN8fuseline18norm_backward_heldINS_8HeldKindIf13__nv_bfloat16Li2ELi1ELi384ELi3ELb1ELb0ELb0EEEEEv"
            "NS_12NormBackwardE",
            "norm_backward_held<HeldKind<fp32, bf16, 2, 1, 384, 3, true, false, false>>",
        ),
        (
            "_ZN8fuseline22softmax_forward_packedI6__halfLi2EEEvNS_14SoftmaxForwardE",
            "softmax_forward_packed<fp16, 2>",
        ),
        ("_ZN8fuseline5plainEPf", "plain"),
        (
            "_ZN8fuseline20softmax_backward_fewI13__nv_bfloat16Li2ELNS_4MeetE3EEEvNS_11FewBackwardE",
            "softmax_backward_few<bf16, 2, Meet=3>",
        ),
        ("_ZN12_GLOBAL__N_13tabIfLi3EEEvPKT_", "tab<fp32, 3>"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
    ],
)
def test_readable(mangled: str, name: str) -> None:
    assert readable(mangled) == name


def test_family_is_the_template() -> None:
    assert family("softmax_forward_packed<fp16, 2>") == "softmax_forward_packed"
    assert family("plain") == "plain"


def test_what_is_not_mangled_stays() -> None:
    assert demangle("_Znonsense") == "_Znonsense"
