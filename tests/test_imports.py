"""The import law: an address in the tree says what a module may touch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import asyncllm

ROOT = Path(asyncllm.__file__).parent

# What each floor may import of ours. Everyone may import types, errors and config, which import next to nothing.
EVERYONE = {"types", "errors", "config"}
LAW = {
    "types": {"errors"}, "errors": set(), "config": set(), "clock": set(), "machine": set(),
    "logs": set(), "supervise": set(), "flags": {"server.settings"}, "hub": {"smollm2"}, "smollm2": set(),
    "wire": set(), "client": {"wire"}, "text": set(),
    "server": {"clock", "llm", "pace", "stream", "text", "wire"}, "offline": {"llm", "stream", "submission", "text"},
    "llm": {"bridge", "mailbox", "registry", "stream", "submission", "text"}, "submission": {"text"},
    "registry": {"admission", "bridge", "mailbox", "pace", "totals"}, "admission": {"bridge"},
    "stream": {"mailbox", "pace", "registry"},
    "mailbox": {"bridge", "pace", "text"}, "pace": set(), "totals": {"pace"}, "bridge": set(),
    "engine": {"bridge", "clock"}, "runner": {"device", "attention", "models", "engine.batch"},
    "device": set(), "attention": {"device"}, "models": {"attention.base"},
}  # fmt: skip
TORCH_FLOORS = {"runner", "device", "attention", "models"}
SEES_ALL = {"build", "cli", "__init__", "__main__"}
HOMES = {"torch": TORCH_FLOORS, "aiohttp": {"server", "client"}, "flashinfer": TORCH_FLOORS, "triton": TORCH_FLOORS}
LOOP_FLOORS = ("asyncllm.wire", "asyncllm.text", "asyncllm.server", "asyncllm.llm", "asyncllm.client")


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def floor_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Dotted names, ours as `.floor.module`, wherever in the file they stand."""
    package = ["asyncllm", *path.relative_to(ROOT).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_what_its_floor_may(path: Path) -> None:
    floor = floor_of(path)
    names = imports(path)
    for package, homes in HOMES.items():
        if floor not in homes:
            assert not {n for n in names if n.split(".")[0] == package}, f"{floor} may not import {package}"
    if floor in SEES_ALL:
        return
    allowed = {floor} | LAW[floor] | (EVERYONE if floor not in EVERYONE else set())
    for name in names:
        parts = name.split(".")
        if parts[0] == "asyncllm" and len(parts) > 1:
            ours = parts[1:]
            permitted = ours[0] in allowed or ".".join(ours[:2]) in allowed
            assert permitted or ours == ["__version__"] or name in {f"asyncllm.{a.split('.')[0]}" for a in allowed}, (
                f"{path.relative_to(ROOT)} may not import {name}"
            )


def test_transformers_is_never_imported_at_module_level() -> None:
    """It takes 10 s and pulls torch; a function may, as a last resort for a tokenizer without a fast form."""
    for path in modules():
        top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        named = {alias.name for node in top for alias in node.names} | {getattr(node, "module", None) for node in top}
        assert "transformers" not in named, path


def test_the_environment_is_read_at_the_edges_alone() -> None:
    readers = {floor_of(path) for path in modules() if "os.environ" in path.read_text()}
    assert readers <= {"cli", "hub"}  # hub: where the user's cache is


def test_the_loop_floors_load_neither_torch_nor_transformers() -> None:
    program = f"import sys\nfor name in {LOOP_FLOORS!r}: __import__(name)\n"
    program += "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
