"""Tokenizers made here in milliseconds: a byte-level one like Llama 3's, byte-fallback ones like Llama 2's."""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# As Qwen3's: tools, thinking to be switched off, results of calls.
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Answer in <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% if thinking_opened %}<think>\n{% endif %}"
)
EOS_ID = 2
CORPUS = (
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.",
    "Hello, how are you today? I am fine, thank you. 12345 67890 \n\n\tdef main():\n        return 0",
    "ďábelské ódy; смешанный текст; 삼겹살; ภาษาไทย; 日本語; 😀🏳️‍🌈👩‍👩‍👧 naïve café",
)


@cache
def byte_level_json() -> str:
    """A byte-level BPE of 400 ids whose first three are control tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend.to_str()


def byte_level(folder: Path, template: str | None = CHATML, tokenizer_json: str | None = None) -> Path:
    """A model folder's words: tokenizer.json, its config and a chat template."""
    (folder / "tokenizer.json").write_text(tokenizer_json or byte_level_json())
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def edited(**changes: object) -> str:
    """byte_level_json with some of its sections replaced."""
    return json.dumps(json.loads(byte_level_json()) | changes)


def byte_fallback(folder: Path, *, metaspace: bool) -> Path:
    """SentencePiece-like: U+2581 for spaces, <0x..> for what the vocabulary lacks, a start token put in front."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "h", "e", "l", "o", "▁h", "he", "▁he", "ll", "▁hell"]
    merges = [("▁", "h"), ("h", "e"), ("▁h", "e"), ("l", "l"), ("▁he", "ll")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<s>", "</s>", "<unk>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"eos_token_id": [2, 0]}')
    return folder


def word_piece(folder: Path) -> Path:
    """A decoder that looks at neighbours, so there is no table for it."""
    vocab = {"[UNK]": 0, "[CLS]": 1, "hel": 2, "##lo": 3, "world": 4, "!": 5}
    backend = Backend(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("[CLS]", normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    return folder
