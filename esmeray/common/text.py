"""Numbers in words."""


def counted(number: int, noun: str) -> str:
    """A number and its noun, with the plural ending in braces: ``counted(2, "packed batch{es}")``."""
    endings = {"s": "", "es": "", "ies": "y"} if number == 1 else {"s": "s", "es": "es", "ies": "ies"}
    return f"{number:,} {noun.format(**endings)}"


def duration(seconds: float) -> str:
    """Seconds in short: ``45 s``, ``12:05`` (minutes), ``3:12:05`` (hours), ``2 d 3 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def amount(value: float) -> str:
    """A count in about three digits: ``345``, ``12.3k``, ``1.23M``."""
    if value >= 999_950:
        return f"{value / 1e6:.2f}M"
    return f"{value / 1e3:.1f}k" if value >= 1000 else f"{value:.0f}"
