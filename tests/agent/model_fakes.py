"""A hub, wheels and a GGUF file for tests: small, but served, packed and read by the real thing."""

from __future__ import annotations

import hashlib
import http.server
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agent.catalogue import GgufEntry, HubFile, Piece
from agent.model_convert import load_gguf_tokenizer


class Told:
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.marks: list[int] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def begin(self, what: str, total: int) -> None: ...

    def at(self, done: int) -> None:
        self.marks.append(done)


@dataclass
class FakeHub:
    """A web server that gives one file at every address, with ranges."""

    data: bytes
    stop_after: int | None = None  # bytes of one answer, then the connection breaks
    stall_after: int | None = None  # bytes of one answer, then silence
    hold: threading.Event | None = None  # waited for before the bytes of an answer
    url: str = ""
    ranges: list[str | None] = field(default_factory=list)  # of each GET
    sent: int = 0  # bytes in all

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def do_HEAD(self) -> None:
                self.send_response(200)
                self.end_headers()

            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                hub.ranges.append(wanted)
                start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
                rest = hub.data[start:]
                self.send_response(206 if wanted else 200)
                self.send_header("Content-Length", str(len(rest)))
                self.end_headers()
                if hub.hold is not None:
                    hub.hold.wait(30)
                stop = hub.stop_after if hub.stop_after is not None else hub.stall_after
                part = rest if stop is None else rest[:stop]
                self.wfile.write(part)
                self.wfile.flush()
                hub.sent += len(part)
                if hub.stall_after is not None and len(part) < len(rest):
                    time.sleep(60)
                self.close_connection = True

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


def entry_for(data: bytes, pieces: int = 3, sha256: str | None = None) -> GgufEntry:
    """A catalogue entry whose file is `data`, in that many wheels."""
    return GgufEntry(
        name="tiny",
        note="",
        file="tiny.gguf",
        size=len(data),
        sha256=sha256 or hashlib.sha256(data).hexdigest(),
        hub=HubFile("owner/tiny", "tiny.gguf"),
        wheels=tuple(
            Piece(f"nexus-test-tiny-part{n}==1.0", f"/data/part{n:02d}.bin")
            for n in range(1, pieces + 1)
        ),
        parameters="0",
    )


def write_wheels(folder: Path, data: bytes, pieces: int = 3) -> list[Path]:
    """Wheels that carry `data` in parts. Importing one of them would fail the test."""
    folder.mkdir(exist_ok=True)
    step = -(-len(data) // pieces)
    wheels = []
    for number in range(1, pieces + 1):
        name = f"nexus_test_tiny_part{number}"
        info = f"{name}-1.0.dist-info"
        wheel = folder / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{name}/__init__.py", "raise SystemExit('imported')")
            part = data[(number - 1) * step : number * step]
            archive.writestr(f"{name}/data/part{number:02d}.bin", part)
            archive.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n",
            )
            archive.writestr(
                f"{info}/WHEEL",
                "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            archive.writestr(f"{info}/RECORD", "")
        wheels.append(wheel)
    return wheels


def write_tiny_gguf(path: Path, *, architecture: str = "llama", tied: bool = False) -> Path:
    """A random model of one layer with a byte-level vocabulary and a chat template, as GGUF."""
    rng = np.random.default_rng(7)
    hidden, heads, kv_heads, inner = 16, 4, 2, 24
    tokens = [chr(c) for c in _byte_letters()] + ["<|im_start|>", "<|im_end|>", "ab"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if t.startswith("<|") else normal for t in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(len(tokens) - 3)
    writer.add_eos_token_id(len(tokens) - 2)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    shapes = {
        "token_embd": (len(tokens), hidden),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden // heads * kv_heads, hidden),
        "blk.0.attn_v": (hidden // heads * kv_heads, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "output_norm": (hidden,),
    }
    if not tied:
        shapes["output"] = (len(tokens), hidden)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_llama(folder: Path, shape: Mapping[str, int], **saving: Any) -> Path:
    """A folder as from the hub: a random Llama with a tokenizer of bytes."""
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder, **saving)
    load_gguf_tokenizer(write_tiny_gguf(folder.with_suffix(".gguf"))).save_pretrained(folder)
    return folder


def _byte_letters() -> list[int]:
    """The letters by which byte-level vocabularies write the 256 bytes (GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return plain + [256 + n for n in range(256 - len(plain))]
