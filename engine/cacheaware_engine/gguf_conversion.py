"""A GGUF file becomes an ordinary Hugging Face folder: configuration, safetensors in fp32, tokenizer.

Quantised weights are written out as the numbers they stand for. `model_source.py` decides where, once, under a lock.
"""

from __future__ import annotations

import hashlib
from contextlib import redirect_stderr
from pathlib import Path
from typing import Final

from cacheaware_engine.errors import ModelUnreadable, ModelUnsupported
from cacheaware_engine.progress import Progress, ProgressBars

_FORMAT: Final = b"1"  # of what is written; another number makes older results be converted again
_MAGIC: Final = b"GGUF"


def fingerprint(gguf: Path) -> str:
    """Identifies the file's contents and the format of the conversion, whatever the file's name and date."""
    digest = hashlib.blake2b(_FORMAT)
    with gguf.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ModelUnreadable(f"{gguf} is not a GGUF file")
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def convert_gguf(gguf: Path, folder: Path, on_progress: Progress) -> None:
    """Write the model of `gguf` into the empty folder `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    what = f"Unpacking {gguf.name} ({gguf.stat().st_size / 1e6:,.0f} MB), once"
    on_progress(what, 0.0)
    where, name = str(gguf.parent), gguf.name
    with redirect_stderr(ProgressBars("quantizing", what, on_progress)):
        try:
            tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                where,
                gguf_file=name,
                dtype=torch.float32,
                local_files_only=True,
                quantization_config=GgufConfig(gguf_file=name, dequantize=True),
            )
        except (ValueError, NotImplementedError) as error:
            if "not supported" in str(error) or isinstance(error, NotImplementedError):
                raise ModelUnsupported(f"{gguf.name} cannot be converted: {error}") from error
            raise ModelUnreadable(f"{gguf} cannot be read: {error}") from error
        except (OSError, KeyError, IndexError, TypeError) as error:
            raise ModelUnreadable(f"{gguf} cannot be read: {error!r}") from error
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # the numbers are plain now
        on_progress(f"Writing {gguf.name} as safetensors", None)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
