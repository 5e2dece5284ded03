"""Colours by what they mean, one for a light page and one for a dark one.

The five levers are told apart by hue (checked for the common colour blindnesses: they also differ in
lightness), what is not Fuseline's own stays grey or muted, and no colour carries a meaning that is not
written beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

# role: (light, dark)
COLOURS: Mapping[str, tuple[str, str]] = {
    "page": ("#fcfcfa", "#101317"),
    "surface": ("#ffffff", "#171b21"),
    "ink": ("#1a1e24", "#e8ebef"),
    "muted": ("#59616d", "#a0a9b5"),
    "hairline": ("#e3e5e8", "#2b313a"),
    "grid": ("#e9ebed", "#262c34"),
    "accent": ("#2563a8", "#7db4f0"),
    "good": ("#1d7a4f", "#63c394"),
    "bad": ("#b3412e", "#f0907c"),
    "baseline": ("#8b929c", "#7d8692"),
    "fuse": ("#2f6db3", "#5f9be0"),
    "tensor": ("#cf7f1d", "#dc9c45"),
    "overhead": ("#2b8f7b", "#4fb09c"),
    "quantize": ("#7a56ab", "#b394e0"),
    "kernels": ("#b5386a", "#dc7099"),
    "other": ("#6c7683", "#98a2af"),
}

LEVERS: Mapping[str, tuple[str, str]] = {
    "none": ("baseline", "plain PyTorch"),
    "fuse": ("fuse", "fuse"),
    "tensor cores": ("tensor", "tensor cores"),
    "overhead": ("overhead", "less overhead"),
    "quantize": ("quantize", "quantize"),
    "custom kernels": ("kernels", "custom kernels"),
}
"""A ladder's lever to its colour and its name on the page."""

PEERS: Mapping[str, str] = {
    "fuseline": "kernels",
    "pick": "kernels",
    "eager": "baseline",
    "aten": "baseline",
    "naive": "baseline",
    "python": "baseline",
    "cudagraphs": "tensor",
    "inductor": "fuse",
    "reduce-overhead": "overhead",
    "max-autotune-no-cudagraphs": "quantize",
    "max-autotune": "kernels",
    "quack": "tensor",
    "liger": "quantize",
    "copy": "muted",
}
"""A peer or a back end to its colour."""


def lever_role(lever: str) -> str:
    return LEVERS.get(lever, ("other", ""))[0]


def lever_label(lever: str) -> str:
    return LEVERS.get(lever, ("", lever or "no lever"))[1]


def peer_role(peer: str) -> str:
    return PEERS.get(peer, "other")


def css_variables(theme: int) -> str:
    """`--ink: #1a1e24; ...` for theme 0 (light) or 1 (dark)."""
    return " ".join(f"--{role}: {pair[theme]};" for role, pair in COLOURS.items())


def css_classes() -> str:
    """`.f-ink{fill:var(--ink)}` and `.s-ink{stroke:...}`: presentation attributes cannot hold variables."""
    return " ".join(f".f-{role}{{fill:var(--{role})}} .s-{role}{{stroke:var(--{role})}}" for role in COLOURS)
