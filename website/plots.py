"""Line plots as SVG, in the colors of the page."""

import html

import numpy as np

WIDTH, HEIGHT = 720, 220
LEFT, RIGHT, TOP, BOTTOM = 76, 12, 12, 40
"""Margins around the axes, in pixels."""


def line_plot(title: str, x: np.ndarray, y: np.ndarray, x_title: str) -> str:
    """Return a plot of y over x, float[N] each. Each axis is labelled with its smallest and its largest value."""
    low, high = min(0.0, float(y.min())), float(y.max())
    first, last = float(x[0]), max(float(x[-1]), float(x[0]) + 1e-9)
    right = LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT)
    down = TOP + (high - y) / ((high - low) or 1.0) * (HEIGHT - TOP - BOTTOM)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(right.tolist(), down.tolist(), strict=True))
    bottom = HEIGHT - BOTTOM
    labels = [
        text(LEFT - 8, TOP + 5, f"{high:.4g}", "end"),
        text(LEFT - 8, bottom + 5, f"{low:.4g}", "end"),
        text(LEFT, bottom + 18, f"{first:.4g}", "middle"),
        text(WIDTH - RIGHT, bottom + 18, f"{last:.4g}", "end"),
        text((LEFT + WIDTH - RIGHT) / 2, bottom + 34, x_title, "middle"),
    ]
    return (
        f'<figure class="plot"><figcaption>{html.escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f'<path class="axes" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>'
        f'<polyline class="line" points="{points}"/>{"".join(labels)}</svg></figure>'
    )


def text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(words)}</text>'
