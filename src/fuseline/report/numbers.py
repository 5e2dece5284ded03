"""Numbers as a reader wants them: few digits, units, thin spaces, intervals in brackets."""

from __future__ import annotations

import math

THIN = "\u202f"  # narrow no-break space: between groups of three digits, and before a unit
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def plain(value: float, digits: int = 3) -> str:
    """`value` to `digits` significant digits: 1 234, 36.3, 0.0512, 3.2 × 10⁻⁶; whole digits are never cut."""
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -3 or magnitude >= 9:
        return _scientific(value, digits)
    return _grouped(value, max(0, digits - 1 - magnitude))


def whole(value: float) -> str:
    """A count, to its last digit: 16 384."""
    return _grouped(value, 0)


def tick(value: float) -> str:
    """A round number on an axis, without idle zeros: 10, 2.5, 0.001, 10⁻⁶."""
    if value == 0:
        return "0"
    power = math.log10(abs(value))
    if abs(power - round(power)) < 1e-9 and not -3 <= round(power) <= 5:
        return f"10{str(round(power)).translate(_SUPERSCRIPT)}"
    if power < -3 or power >= 9:
        return _scientific(value, 1)
    text = plain(value, max(3, math.floor(power) + 1))
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent_tick(share: float) -> str:
    return f"{tick(100 * share)}%"


def ratio_tick(value: float) -> str:
    return f"{tick(value)}x"


def with_interval(value: float, low: float | None, high: float | None) -> tuple[str, str]:
    """(value, "[low, high]") with the same number of decimals: enough to see the interval's width, within
    three and four significant digits of the value. The second is "" where there is no interval."""
    if low is None or high is None:
        return plain(value), ""
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e9):
        return _scientific(value, 3), f"[{_scientific(low, 3)}, {_scientific(high, 3)}]"
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    half_width = (high - low) / 2
    wanted = -math.floor(math.log10(half_width)) if half_width > 0 else 0
    decimals = max(0, min(max(wanted, 2 - magnitude), 3 - magnitude))
    return _grouped(value, decimals), f"[{_grouped(low, decimals)}, {_grouped(high, decimals)}]"


def percent(share: float) -> str:
    """A share in 0..1 as percent, to a tenth, and to a hundredth below 10%."""
    return f"{_grouped(100 * share, 1 if abs(share) >= 0.1 else 2)}%"


def error(value: float) -> str:
    """A relative error: two digits and the power of ten, which is what matters of it."""
    return _scientific(value, 2)


def ratio(value: float, low: float | None = None, high: float | None = None) -> str:
    """`1.84x [1.82, 1.86]`."""
    text, interval = with_interval(value, low, high)
    return f"{text}x {interval}".rstrip()


def span(low: float, high: float) -> str:
    """One count, or `a to b` where they differ."""
    first, second = whole(low), whole(high)
    return first if first == second else f"{first} to {second}"


def _grouped(value: float, decimals: int) -> str:
    # Four digits read well without a gap.
    text = f"{value:,.{decimals}f}" if abs(value) >= 1e4 else f"{value:.{decimals}f}"
    # Minus zero is nobody's figure.
    text = text.removeprefix("-") if float(text.replace(",", "")) == 0 else text
    return text.replace(",", THIN)


def _scientific(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}{THIN}×{THIN}10{str(int(exponent)).translate(_SUPERSCRIPT)}"
