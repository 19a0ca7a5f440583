"""Models by name: a catalogue name, a hub id, a folder with safetensors, or a GGUF file."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from agent import digests, hub
from agent.bench.shapes import SHAPES, shape_config
from agent.catalogue import CATALOGUE, Entry, GgufEntry, HubEntry, find
from agent.int8_linear import quantize_linears
from agent.load_options import method_name, read_device_map, read_quantization
from agent.model_convert import converted, quiet
from agent.model_errors import BadModelFile, CannotQuantize, FetchError, UnknownModel
from agent.model_fetch import fetch, require_room
from agent.model_store import converted_folder, gguf_folder, stored
from agent.progress import Progress, Silent
from agent.quantizers import make_config, quantization_of, require_quantizer
from cache.placement import all_devices
from cache.support import require_supported

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
INT8 = "int8"  # 8-bit linear layers, the rest float32: see agent.int8_linear


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from, as found by `resolve`."""

    kind: Literal["catalogue", "hub", "folder", "gguf"]
    name: str  # as reports show it
    entry: Entry | None = None  # catalogue
    repo: str | None = None  # hub, and catalogue entries that live there
    path: Path | None = None  # folder, gguf


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this disk, ready to be loaded."""

    folder: Path  # config, safetensors, tokenizer
    sha256: str  # of the GGUF file it came from; else over the folder (agent.digests.of_folder)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory: in eval mode, without gradients."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    path: Path
    sha256: str
    dtype: torch.dtype  # of activations and cache
    precision: str  # of the linear layers: the dtype's name, int8, or how they are quantised
    device: torch.device  # of the embedding: where ids go in and logits come out
    devices: tuple[torch.device, ...]  # all it computes on

    @property
    def where(self) -> str:
        """Its devices, in words."""
        return ", ".join(str(device) for device in self.devices)

    def for_thread(self) -> LoadedModel:
        """The same model for another thread: a tokenizer's settings change while it encodes, so no
        two threads may share one."""
        return replace(self, tokenizer=copy.deepcopy(self.tokenizer))


def resolve(name_or_path: str) -> ModelSource:
    """What a `--model` value means. Nothing is fetched.

    Catalogue names come first; a folder of the same name is reached as `./name`. Raises
    UnknownModel (with the known names) or BadModelFile.
    """
    if name_or_path.lower() in CATALOGUE:
        entry = find(name_or_path)
        repo = entry.repo if isinstance(entry, HubEntry) else None
        return ModelSource("catalogue", entry.name, entry=entry, repo=repo)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return ModelSource("folder", path.resolve().name, path=_model_folder(path))
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise BadModelFile(
                f"{path} is a file, but not a .gguf one; for safetensors name its folder"
            )
        return ModelSource("gguf", path.stem, path=path.absolute())
    if name_or_path.startswith(("/", ".", "~")) or path.suffix.lower() == ".gguf":
        raise UnknownModel(f"there is no file or folder {name_or_path}")
    if hub.REPOSITORY.fullmatch(name_or_path):
        return ModelSource("hub", name_or_path, repo=name_or_path)
    find(name_or_path)  # raises UnknownModel
    raise UnknownModel(name_or_path)


def pull(source: ModelSource, progress: Progress | None = None) -> ModelFiles:
    """Bring a model onto this disk, in the form in which it loads fast.

    A no-op when it is there already. Raises FetchError (WrongSum and FullDisk among them),
    BadModelFile, or cache.support.UnsupportedModel.
    """
    progress = progress or Silent()
    if isinstance(source.entry, GgufEntry):
        gguf, sha256 = fetch(source.entry, gguf_folder(), progress), source.entry.sha256
    elif source.kind == "gguf" and source.path is not None:
        gguf, sha256 = source.path, digests.of_file(source.path, progress)
    else:
        folder = source.path or _hub_folder(source.repo or source.name, progress)
        _require_servable(folder, source.name)
        return ModelFiles(folder, digests.of_folder(folder, progress))
    return ModelFiles(converted(gguf, sha256, converted_folder(), progress), sha256)


def load(
    name_or_path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    quantize: str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer, fetching and converting it first where needed.

    `dtype`: "auto" (see `choose_precision`), "bfloat16", "float16", "float32" or "int8".
    `device`: "auto" (CUDA where there is one, else the CPU) or what torch takes. `device_map`: how
    accelerate spreads layers over devices, or a file (see agent.load_options), instead of `device`.
    `quantize`: "4bit", "8bit" or a file with a quantization_config; a checkpoint that has one of
    its own is loaded by that. The attention function is left as it is: the cache sets its own.
    Raises what `resolve` and `pull` raise, CannotQuantize, and ValueError for a dtype or device
    that is not there.
    """
    source = resolve(name_or_path)
    where = choose_device(device)
    spread = read_device_map(device_map) if device_map else None
    if isinstance(spread, dict):
        for place in set(spread.values()) - {"disk"}:
            choose_device(f"cuda:{place}" if isinstance(place, int) else place)
    bits = read_quantization(quantize) if quantize else None
    precision = choose_precision(dtype, where, plain=bool(spread or bits))
    if bits is not None:
        require_quantizer(bits, f"--quantize {quantize}", loaded=False)
    files = pull(source, progress)
    own = quantization_of(_config(files.folder, source.name))
    if own is not None:
        if bits is not None:
            raise CannotQuantize(
                f"{source.name} is quantised already ({method_name(own)}); leave --quantize out"
            )
        precision = choose_precision(dtype, where, plain=True)
    kind = torch.float32 if precision == INT8 else DTYPES[precision]
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(files.folder)
            model = AutoModelForCausalLM.from_pretrained(
                files.folder,
                dtype=kind,
                use_safetensors=True,
                device_map=spread or ({"": where} if where.type != "cpu" or bits or own else None),
                quantization_config=make_config(bits, kind) if bits else None,
            )
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise BadModelFile(f"{source.name} in {files.folder} cannot be loaded: {error}") from error
    model.eval().requires_grad_(False)
    if precision == INT8:
        quantize_linears(model)
    if bits or own:
        precision = method_name(bits or own or {})
    devices = all_devices(model)
    return LoadedModel(
        model,
        tokenizer,
        source.name,
        files.folder,
        files.sha256,
        kind,
        precision,
        devices[0],
        devices,
    )


def choose_device(device: str = "auto") -> torch.device:
    """The device meant; "auto" is CUDA where there is one, else the CPU. Raises ValueError."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"device {device!r} cannot be used: {reason}; try cpu") from error
    return chosen


def choose_precision(dtype: str, device: torch.device, *, plain: bool = False) -> str:
    """The precision meant: the name of a dtype, or "int8" (CPU only, and never with `plain`).

    "auto" is what the hardware multiplies: bfloat16 on CUDA from compute capability 8.0 on and on
    CPUs with AMX or AVX512-BF16 (elsewhere it is emulated, several times slower than float32), int8
    on other CPUs with VNNI, else float32. Raises ValueError for an unknown name, or int8 elsewhere.
    """
    if dtype != "auto":
        name = _SHORT.get(dtype, dtype)
        if name not in (*DTYPES, INT8):
            known = ", ".join(["auto", *DTYPES, INT8])
            raise ValueError(f"dtype {dtype!r} is not known; choose from {known}")
        if name == INT8 and device.type != "cpu":
            raise ValueError(f"int8 is for CPUs, not {device}; choose auto or bfloat16")
        if name == INT8 and plain:
            raise ValueError(
                "int8 is a form of its own: not with a device map or quantised weights; choose "
                "auto, bfloat16 or float32 for what is not quantised"
            )
        return name
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if fast else "float32"
    if device.type != "cpu":
        return "float32"
    if _cpu_has("amx_bf16", "avx512_bf16"):
        return "bfloat16"
    return INT8 if _cpu_has("avx512_vnni", "avx_vnni") and not plain else "float32"


def config_of(source: ModelSource) -> PreTrainedConfig:
    """A model's config; no weights are fetched or converted for it.

    Raises FetchError where it can only be had with the weights, and what `pull` raises.
    """
    if isinstance(source.entry, GgufEntry):
        here = stored(source.entry)
        if here is not None and here.converted:
            return _config(here.folder, source.name)
        if source.entry.name in SHAPES:
            return shape_config(source.entry.name)
        raise FetchError(
            f"{source.name} is not here yet: fetch it first, with `agent models pull {source.name}`"
        )
    if source.kind == "gguf" and source.path is not None:
        return _config(source.path.parent, source.name, gguf_file=source.path.name)
    if source.path is not None:
        return _config(source.path, source.name)
    repo = source.repo or source.name
    try:
        hub.require_reachable()
        return _config(hub.config_file(repo).parent, repo)
    except hub.HubUnavailable as error:
        local = hub.local_snapshot(repo)
        if local is not None:
            return _config(local, repo)
        if source.name in SHAPES:
            return shape_config(source.name)
        raise FetchError(
            f"{error}, and {repo} was not fetched before: its config cannot be had"
        ) from error


def _config(folder: Path, name: str, **how: str) -> PreTrainedConfig:
    try:
        with quiet():
            return AutoConfig.from_pretrained(folder, **how)
    except (ValueError, OSError, KeyError) as error:
        raise BadModelFile(f"transformers cannot read the config of {name}: {error}") from error


def _require_servable(folder: Path, name: str) -> None:
    config = _config(folder, name)
    require_supported(config, name)
    if (quantization := quantization_of(config)) is not None:
        require_quantizer(quantization, name, loaded=True)


def _cpu_has(*features: str) -> bool:
    """Whether the CPU has one of these units, by the names of torch.cpu.get_capabilities."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is not None:
        found = ask()
        return any(found.get(name) for name in features)
    older = {  # torch before 2.10
        "amx_bf16": "_is_amx_tile_supported",
        "avx512_bf16": "_is_avx512_bf16_supported",
        "avx512_vnni": "_is_vnni_supported",
    }
    asks = [getattr(torch.cpu, older[name], None) for name in features if name in older]
    return any(ask() for ask in asks if ask is not None)


def _model_folder(path: Path) -> Path:
    if hub.whole(path):
        return path.absolute()
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        raise BadModelFile(f"{path} holds GGUF files: name one of them, such as {ggufs[0]}")
    if not (path / "config.json").is_file():
        raise BadModelFile(f"{path} is not a model folder: it has no config.json")
    raise BadModelFile(
        f"{path} lacks safetensors, or some of those that its index names. Pickled weights (.bin, "
        ".pt) are not read, since they can run code: convert them to safetensors"
    )


def _hub_folder(repo: str, progress: Progress) -> Path:
    """The local folder of a hub repository; its config is judged before its weights are fetched."""
    try:
        hub.require_reachable()
        _require_servable(hub.config_file(repo).parent, repo)
        need = hub.snapshot_bytes(repo)
        if need:
            require_room(repo, hub.store(), need)
            progress.say(f"fetching {repo} from the hub ({need / 1e9:.1f} GB)")
        folder = hub.snapshot(repo)
    except hub.HubUnavailable as error:
        local = hub.local_snapshot(repo)
        if local is None:
            offline = ", ".join(n for n, e in CATALOGUE.items() if isinstance(e, GgufEntry))
            raise FetchError(
                f"{error}, and {repo} was not fetched before. Without the hub there are {offline}, "
                "or a folder or GGUF file of your own"
            ) from error
        progress.say(f"{error}: taking {repo} as it was fetched before")
        return local
    if not hub.whole(folder):
        raise BadModelFile(
            f"{repo} has no safetensors on the hub; choose another form of the model"
        )
    return folder
