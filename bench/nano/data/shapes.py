"""How the real client shows what it knows: its folder behind a question, and a file that its `read` gave."""

from string import ascii_lowercase, digits

from bench.nano.data.draw import Draw
from bench.nano.data.format import Parts
from bench.nano.data.lines import File
from bench.nano.data.package import Client

FOLDERS = (
    "/home/{}/{}",
    "/tmp/{}-{}/work",
    "/root/{}/{}",
    "/tmp/pytest-of-{}/{}",
    "/opt/{}/{}",
    "/srv/{}/{}",
    "/tmp/tmp{2}",
    "/tmp/{0}-{2}",
    "/tmp/{0}-{1}-{2}",
)


def draw_folder(draw: Draw) -> str:
    """Where a session works."""
    drawn = "".join(draw.random.choices(ascii_lowercase + digits + "_", k=8))  # as temporary folders are named
    return draw.random.choice(FOLDERS).format(draw.word(), draw.word(), drawn)


def add_context(client: Client, asked: Parts, folder: str) -> Parts:
    """The first question as the client sends it."""
    return (*asked, client.context.replace("{folder}", folder))


def show_file(client: Client, file: File, folder: str) -> str:
    """What the client's `read` gives for `file`."""
    lines = "".join(f"{number}: {line.text}\n" for number, line in enumerate(file.lines, 1))
    filled = client.read_result.replace("{folder}", folder).replace("{file}", file.path)
    return filled.replace("{count}", str(len(file.lines))).replace("{lines}", lines)
