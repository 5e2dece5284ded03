"""Names of kernels in few words: a C++ template without its arguments, but with what it applies."""

from __future__ import annotations

import re

_APPLIED = re.compile(
    r"(\w*Functor\w*|\w+_kernel_(?:impl|cuda)\w*|\w+OpImpl|\w+_functor\w*|\w*Ops?(?=<))", re.IGNORECASE
)
_KEPT_SPACES = 2  # namespaces that stay before a name


def short(name: str) -> str:
    """`void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>, ..` as
    `native::vectorized_elementwise_kernel (FillFunctor)`; other names as they are."""
    text = name.removeprefix("void ").removeprefix("static ")
    if text.startswith(("triton_", "autograd::engine", "##", "Torch-Compiled", "Mem")):
        return text.replace("autograd::engine::evaluate_function: ", "")
    cut = re.search(r"<|\((?!anonymous)", text)
    if cut is None:
        return text
    base = text[: cut.start()].replace("(anonymous namespace)::", "")
    if not base:
        return text
    base = "::".join(base.split("::")[-_KEPT_SPACES:])
    applied = next(
        (a for a in _APPLIED.findall(text[cut.start() :]) if a not in base and "gpu_kernel" not in a), ""
    )
    return f"{base} ({applied})" if applied else base
