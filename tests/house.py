"""The house rules on sources: which layer may import which, third-party packages in one place, sizes, docstrings."""

import ast
import sys
from collections.abc import Iterator

FILE_LINES = 500
KERNEL_LINES = 700
FUNCTION_LINES = 60

GROUND = {"types", "config", "errors"}
# A layer may import itself and these. `reference` and the other engines are leaves: only the top knows them.
LAYERS: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "config": {"errors", "types"},
    "observe": GROUND,
    "checkpoint": GROUND | {"observe"},
    "reference": GROUND | {"observe", "checkpoint"},
    "cuda": GROUND | {"observe", "checkpoint"},
    "engine_scripted": GROUND | {"observe"},
    "recipe": GROUND | {"observe", "checkpoint"},
    "kv": GROUND | {"observe", "checkpoint"},
    "sched": GROUND | {"observe", "kv"},
    "web": set(),
    "api": GROUND | {"observe", "recipe", "web"},
    "welcome": {"config"},
    "trial": GROUND | {"welcome"},
    "repro": GROUND,
}
# Commands and `node` build the parts and may import everything.
TOP = {"node", "serve", "golden", "replay", "doctor", "__main__", "nano"}

# Each third-party package and the files (or folders, with a slash at the end) that may import it.
PACKAGES: dict[str, tuple[str, ...]] = {
    "msgspec": ("",),
    "numpy": ("",),
    "ml_dtypes": ("",),
    "aiohttp": ("api/",),
    "deepseek_recipe": ("recipe/",),
    "llguidance": ("recipe/",),
    "cv2": ("recipe/images.py",),
    "tokenizers": ("recipe/", "checkpoint/token_map.py", "checkpoint/vocabulary_cut.py"),
    "safetensors": ("checkpoint/",),
    "huggingface_hub": ("checkpoint/fetch.py",),
    "threadpoolctl": ("node/threads.py",),
    "uvloop": ("node/",),
    "prometheus_client": ("observe/metrics.py", "observe/aliases.py", "observe/fleet.py", "observe/histogram.py"),
    "opentelemetry": ("observe/traces.py",),
    "redis": ("kv/directory/redis_board.py", "kv/directory/redis_client.py"),
    "xxhash": ("kv/point.py",),
    "pyverbs": ("kv/transport/verbs.py",),
    "cupy": ("cuda/",),
    "cuda": ("cuda/",),
}
# The one place that imports by name at run time.
LATE_IMPORTS = "__main__.py"


def check_source(name: str, source: str) -> list[str]:
    """The faults of one file; `name` is its path from the root, `dsuf/...`."""
    tree = ast.parse(source)
    inner = name.removeprefix("dsuf/")
    faults = [*_check_imports(inner, tree), *_check_docstrings(tree)]
    lines = len(source.splitlines())
    if lines > FILE_LINES:
        faults.append(f"{lines} lines, at most {FILE_LINES}")
    faults += [
        f"{f} has {n} lines, at most {FUNCTION_LINES}" for f, n in measure_functions(source) if n > FUNCTION_LINES
    ]
    return [f"{name}: {fault}" for fault in faults]


def measure_functions(source: str) -> Iterator[tuple[str, int]]:
    """Name and length in lines of every function and method, from `def` to its last line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def _check_imports(inner: str, tree: ast.Module) -> Iterator[str]:
    """Directions, single places, and imports that are not at the top of the file."""
    layer = inner.split("/")[0].removesuffix(".py")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = [child for child in ast.walk(node) if isinstance(child, ast.Import | ast.ImportFrom)]
            yield from (f"line {child.lineno}: import inside a function" for child in inside)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield f"line {node.lineno}: relative import, write the full name"
        elif (
            isinstance(node, ast.Call) and inner != LATE_IMPORTS and _name_call(node) in {"import_module", "__import__"}
        ):
            yield f"line {node.lineno}: late import by name, only {LATE_IMPORTS} does that"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for module in _name_modules(node):
                yield from _check_edge(inner, layer, module, node.lineno)


def _name_call(node: ast.Call) -> str:
    """The last name of what is called: `import_module` of `importlib.import_module(...)`."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _name_modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules that an import statement names; `from dsuf import x` names `dsuf.x`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.module == "dsuf":
        return [f"dsuf.{alias.name}" for alias in node.names]
    return [node.module or ""]


def _check_edge(inner: str, layer: str, module: str, line: int) -> Iterator[str]:
    """One import: of a layer of ours, of the standard library, or of a package."""
    head, *rest = module.split(".")
    if head == "dsuf":
        target = rest[0] if rest else ""
        free = layer in TOP | {"__init__"} or target in {"__version__", "", layer}
        if not free and target not in LAYERS.get(layer, set()):
            yield f"line {line}: {layer} may not import dsuf.{target}"
    elif head not in sys.stdlib_module_names and not inner.startswith(PACKAGES.get(head, ())):
        yield f"line {line}: {inner} may not import {head}"


def _check_docstrings(tree: ast.Module) -> Iterator[str]:
    """Modules, public classes and their public functions say what they are."""
    if ast.get_docstring(tree) is None:
        yield "no module docstring"
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        members = node.body if isinstance(node, ast.ClassDef) else []
        for member in (node, *members):
            if isinstance(member, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = member.name if member is node else f"{node.name}.{member.name}"
                if not member.name.startswith("_") and ast.get_docstring(member) is None:
                    yield f"{name} has no docstring"
