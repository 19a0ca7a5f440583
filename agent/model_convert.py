"""Turns a GGUF file into a folder of safetensors, once, so that later loads take seconds.

The weights are unpacked to bfloat16 (a GGUF file's 4-bit values have far fewer digits), the
tokenizer and its chat template are taken over, and the folder is like one from the hub.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from agent.gguf_header import read_header
from agent.model_errors import BadModelFile
from agent.model_fetch import require_room
from agent.model_store import converted_name
from agent.progress import Progress, Silent
from cache.support import require_supported
from environments.paths import locked

_FORMAT = 1  # raise it when a conversion would come out different
_RECORD = "conversion.json"
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


def converted(gguf: Path, sha256: str, root: Path, progress: Progress | None = None) -> Path:
    """The folder in `root` with the safetensors form of `gguf`, made now if it is not there.

    It is named after the file and its sum, so a changed file is converted anew. Raises
    BadModelFile, cache.support.UnsupportedModel (before anything is written) or FullDisk.
    """
    progress = progress or Silent()
    folder = root / converted_name(gguf, sha256)
    if _current(folder):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    waiting = f"another process is converting {gguf.name}; waiting for it"
    with locked(root / f".{folder.name}.lock", lambda: progress.say(waiting)):
        if _current(folder):
            return folder
        fresh = root / f".{folder.name}.partial"
        if fresh.exists():
            shutil.rmtree(fresh)  # of a process that was killed
        try:
            _convert(gguf, sha256, fresh, progress)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        if folder.exists():
            shutil.rmtree(folder)  # of an older format
        fresh.replace(folder)
    return folder


def load_gguf_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """The tokenizer inside a GGUF file, splitting text as the model was trained to."""
    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if read_header(gguf).metadata.get("tokenizer.ggml.pre") == "smollm":
        # transformers takes the GPT-2 rule for all byte-level vocabularies. SmolLM cuts digits out
        # first, which differs where spaces stand before a digit, as in indented numbers.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return tokenizer


def load_gguf_model(gguf: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model inside a GGUF file with its weights unpacked to `dtype`, on the CPU."""
    options = {}
    if hasattr(transformers, "GgufConfig"):  # newer releases keep the weights packed unless told
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # Its bar for unpacking is not one that transformers' switch turns off.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        return AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=dtype, **options
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back transformers' bars and warnings, and put its settings back afterwards."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _convert(gguf: Path, sha256: str, fresh: Path, progress: Progress) -> None:
    need = _elements(gguf) * torch.bfloat16.itemsize
    try:
        with quiet():
            config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ValueError, KeyError) as error:  # an architecture that transformers does not read
        raise BadModelFile(f"transformers cannot read {gguf}: {error}") from error
    require_supported(config, gguf.name)
    require_room(f"the converted form of {gguf.name}", fresh.parent, need)
    progress.say(f"converting {gguf.name} to safetensors (once)")
    progress.begin(f"converting {gguf.name}", need)
    fresh.mkdir()
    load_gguf_tokenizer(gguf).save_pretrained(fresh)
    model = load_gguf_model(gguf, torch.bfloat16)
    _save(model, fresh)
    progress.at(need)
    record = {"format": _FORMAT, "source": gguf.name, "sha256": sha256}
    record |= {"transformers": transformers.__version__, "torch": torch.__version__}
    (fresh / _RECORD).write_text(json.dumps(record, indent=2) + "\n")


def _save(model: PreTrainedModel, folder: Path) -> None:
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain now
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    weights = model.state_dict()
    seen: dict[int, str] = {}
    for name, tensor in list(weights.items()):
        if seen.setdefault(tensor.data_ptr(), name) != name:
            del weights[name]  # tied: from_pretrained ties it again by the config
        else:
            weights[name] = tensor.contiguous()
    target = folder / "model.safetensors"
    save_file(weights, target, metadata={"format": "pt"})
    target.chmod((folder / "config.json").stat().st_mode)  # it is made readable for its owner only
    with target.open("rb") as handle:
        os.fsync(handle.fileno())


def _current(folder: Path) -> bool:
    try:
        return json.loads((folder / _RECORD).read_text())["format"] == _FORMAT
    except (OSError, ValueError, KeyError):
        return False


def _elements(gguf: Path) -> int:
    """How many weights the file holds. Raises BadModelFile if it cannot be used."""
    parts = _SPLIT.search(gguf.name)
    if parts and int(parts.group(1)) > 1:
        raise BadModelFile(
            f"{gguf} is one of {int(parts.group(1))} parts: join them with "
            "`llama-gguf-split --merge` and give the joined file"
        )
    return read_header(gguf).elements
