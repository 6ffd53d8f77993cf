"""The Tetris that the small model learns by heart, played."""

from pathlib import Path
from typing import Any

import pytest

from tests.web.conftest import OpenPage

pytestmark = pytest.mark.full

FILE = Path(__file__).parents[2] / "bench" / "nano" / "data" / "tetris.html"
COLUMNS, ROWS = 10, 20


@pytest.fixture
def game(open_page: OpenPage) -> Any:
    """The file in a page, freshly begun."""
    page = open_page(width=600, height=560)
    page.set_content(FILE.read_text())
    return page


def test_the_file_can_be_learnt() -> None:
    """Plain, short, complete."""
    data = FILE.read_bytes()
    assert data.isascii() and b"\t" not in data and b"\r" not in data and len(data) < 5_000
    assert data.startswith(b"<!DOCTYPE html>\n") and data.endswith(b"</html>\n")


def test_pieces_fall_by_themselves(game: Any) -> None:
    """A second later the piece is lower."""
    before = game.evaluate("y")
    game.wait_for_function(f"y > {before}")


def test_all_seven_pieces_come(game: Any) -> None:
    """Each bag holds every shape once, of four squares each."""
    names = game.evaluate("start(), bag = [], Array.from({ length: 7 }, () => SHAPES.indexOf(pick())).sort()")
    assert names == list(range(7))
    assert game.evaluate("SHAPES.map(shape => shape.flat().filter(cell => cell).length)") == [4] * 7


def test_keys_move(game: Any) -> None:
    """Left and right by a column, to the walls and no further."""
    steer(game, shape=1)
    game.keyboard.press("ArrowLeft")
    assert game.evaluate("x") == 3
    game.keyboard.press("ArrowRight")
    assert game.evaluate("x") == 4
    for _ in range(COLUMNS):
        game.keyboard.press("ArrowRight")
    assert game.evaluate("x") == COLUMNS - 2


def test_keys_turn(game: Any) -> None:
    """Four turns lead back; at a wall the piece is pushed off it."""
    steer(game, shape=2)
    shapes = []
    for _ in range(4):
        shapes.append(game.evaluate("JSON.stringify(shape)"))
        game.keyboard.press("ArrowUp")
    assert len(set(shapes)) == 4 and game.evaluate("JSON.stringify(shape)") == shapes[0]
    steer(game, shape=0)
    game.keyboard.press("ArrowUp")
    for _ in range(COLUMNS):
        game.keyboard.press("ArrowLeft")
    assert game.evaluate("x") < 0  # an upright bar in the first column
    game.keyboard.press("ArrowUp")
    assert game.evaluate("[x, shape.some(row => row.every(cell => cell))]") == [0, True]


def test_soft_drop_counts(game: Any) -> None:
    """A row and a point for each press."""
    steer(game, shape=1)
    row, score = game.evaluate("[y, score]")
    game.keyboard.press("ArrowDown")
    assert game.evaluate("[y, score]") == [row + 1, score + 1]


@pytest.mark.parametrize(("rows", "points"), [(1, 100), (2, 300), (3, 500), (4, 800)])
def test_full_rows_clear(game: Any, rows: int, points: int) -> None:
    """An upright bar completes the lowest rows; what lay above them comes down."""
    steer(game, shape=0)
    game.evaluate(
        f"for (let j = {ROWS - rows}; j < {ROWS}; j++) for (let i = 0; i < 9; i++) board[j][i] = 2;"
        f"board[{ROWS - rows - 1}][4] = 3; score = 0"
    )
    game.keyboard.press("ArrowUp")
    for _ in range(COLUMNS):
        game.keyboard.press("ArrowRight")
    dropped = game.evaluate(f"{ROWS - 4} - y")
    game.keyboard.press(" ")
    assert game.evaluate("lines") == rows and game.evaluate("score") == points + 2 * dropped
    left = game.evaluate("board.map((row, j) => row.map((cell, i) => cell ? [j, i] : 0)).flat().filter(cell => cell)")
    assert left == sorted([[ROWS - 1, 4], *([ROWS - 1 - row, 9] for row in range(4 - rows))])
    assert f"Lines {rows}" in game.inner_text("#stats")


def test_ten_rows_are_a_level(game: Any) -> None:
    """Which is faster, and counts double."""
    steer(game, shape=0)
    game.evaluate(f"lines = 9; score = 0; y = {ROWS - 2}; for (const i of [0,1,2,7,8,9]) board[{ROWS - 1}][i] = 2")
    game.keyboard.press(" ")
    assert game.evaluate("[lines, level]") == [10, 2]


def test_pause_and_game_over(game: Any) -> None:
    """Paused, nothing moves; where no piece fits any more it is over, and a key begins anew."""
    steer(game, shape=1)
    game.keyboard.press("p")
    before = game.evaluate("[x, y]")
    game.keyboard.press("ArrowLeft")
    game.evaluate("tick()")
    assert game.evaluate("[x, y]") == before
    game.keyboard.press("p")
    for _ in range(2 * ROWS):
        game.keyboard.press(" ")
    assert game.evaluate("over")
    game.keyboard.press("r")
    assert game.evaluate("[over, score, board.flat().some(cell => cell)]") == [False, 0, False]


def test_buttons_do_what_keys_do(game: Any) -> None:
    """For hands without a keyboard, on a phone."""
    steer(game, shape=1)
    game.get_by_role("button", name="Left").click()
    assert game.evaluate("x") == 3
    game.get_by_role("button", name="Drop").click()
    assert game.evaluate(f"board[{ROWS - 1}][3]") == 2


def test_fits_a_phone(game: Any) -> None:
    """Nothing is cut off at the width of a small phone."""
    game.set_viewport_size({"width": 320, "height": 500})
    assert game.evaluate("document.documentElement.scrollWidth") == 320


def steer(game: Any, *, shape: int) -> None:
    """Begin anew with a known piece at the top of an empty board, and no fall by itself."""
    game.evaluate(f"start(); clearTimeout(timer); shape = SHAPES[{shape}]; x = 5 - Math.ceil(shape.length / 2); y = 0")
