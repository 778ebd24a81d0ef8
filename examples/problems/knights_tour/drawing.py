"""Draw a knight's tour as an SVG image."""

from __future__ import annotations

from itertools import pairwise

SIDE = 8
SQUARE = 50
MARGIN = 25

Square = tuple[int, int]
"""Column and row, each from 0 to 7: ``a1`` is ``(0, 0)``."""


def centre(square: Square) -> tuple[int, int]:
    """Return the centre of a square in the image; row 1 is at the bottom."""
    column, row = square
    half = SQUARE // 2
    return MARGIN + column * SQUARE + half, MARGIN + (SIDE - 1 - row) * SQUARE + half


def line(begin: Square, end: Square, style: str) -> str:
    """Draw one move."""
    (x1, y1), (x2, y2) = centre(begin), centre(end)
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {style}/>'


def board() -> list[str]:
    """Draw the squares, and their names in the margin."""
    size = 2 * MARGIN + SIDE * SQUARE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}">',
        '<g font-family="sans-serif" font-size="13" text-anchor="middle">',
        f'<rect width="{size}" height="{size}" fill="white"/>',
    ]
    for column in range(SIDE):
        for row in range(SIDE):
            x, y = centre((column, row))
            colour = "#f3e5c8" if (column + row) % 2 else "#c9a77c"
            parts.append(
                f'<rect x="{x - SQUARE // 2}" y="{y - SQUARE // 2}"'
                f' width="{SQUARE}" height="{SQUARE}" fill="{colour}"/>'
            )
    for place in range(SIDE):
        x, y = centre((place, place))
        parts.append(f'<text x="{x}" y="{size - 8}">{"abcdefgh"[place]}</text>')
        parts.append(f'<text x="{MARGIN // 2}" y="{y + 5}">{place + 1}</text>')
    return parts


def draw(tour: list[Square], fault: Square | None, closed: bool) -> str:
    """Draw a tour, and in red the illegal move to ``fault``."""
    parts = board()
    style = 'stroke="#1f4e79" stroke-width="2.5" stroke-linecap="round"'
    moves = list(pairwise(tour))
    if closed:
        moves.append((tour[-1], tour[0]))
    parts.extend(line(begin, end, style) for begin, end in moves)
    if tour and fault is not None:
        wrong = 'stroke="#d00000" stroke-width="4" stroke-dasharray="8 5"'
        parts.append(line(tour[-1], fault, wrong))
    for number, square in enumerate(tour):
        x, y = centre(square)
        colour = "#2e8b57" if number == 0 else "#1f4e79"
        parts.append(f'<circle cx="{x}" cy="{y}" r="{9 if number == 0 else 4}" fill="{colour}"/>')
    return "\n".join([*parts, "</g>", "</svg>", ""])
