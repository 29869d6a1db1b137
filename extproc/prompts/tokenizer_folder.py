"""Read a model's folder as its pods do: the tokenizer, its special tokens and its chat templates.

vLLM's pods load folders with transformers 5. For many classes it rebuilds the tokenizer, which may differ from
tokenizer.json: docs/decisions/0011-tokenizer-folders.md has examples. Only a plain folder is read here, any other by
transformers in a separate process that exits after its answer: in this one, it would cost every picker some 50 MB, and
a malicious folder could exploit it. No code of a folder is ever run.
"""

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from extproc.errors import TokenizerError
from extproc.prompts import harmony_chats
from extproc.prompts.chats_in_code import HARMONY_MODEL_TYPE, only_vllm_renders
from extproc.prompts.mistral_tokenizer import has_mistral_file, why_not_loaded
from extproc.prompts.transformers_program import AS_WRITTEN_IN_VLLM, ENVIRONMENT

logger = logging.getLogger(__name__)

MOST_TEMPLATE_CHARACTERS = 1 << 20  # far above any real one
# The token names of every tokenizer class; templates get the ones that are set as variables.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
PLAIN_CLASSES = frozenset(("PreTrainedTokenizerFast", "TokenizersBackend"))
# transformers 5.19 uses a special class for these model types, whatever class the folder names
MODEL_TYPES_WITH_OWN_CLASS = frozenset(
    ("hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp")
)
# fields of tokenizer_config.json that change the tokenizer even of a plain class
CHANGING_FIELDS = ("split_special_tokens", "fix_mistral_regex", "auto_map")
TRANSFORMERS_FILES = ("tokenizer.json", "tokenizer.model")
ONLY_SENTENCEPIECE = "it has tokenizer.model and no tokenizer.json"
LISTS_OF_TOKENS = ("additional_special_tokens", "extra_special_tokens")
DEADLINE_SECONDS = 180.0  # it takes 1 to 3 s of CPU, possibly on a machine busy with other starts
PROGRAM = "extproc.prompts.transformers_program"


class Loaded(NamedTuple):
    """A folder loaded by transformers."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]  # for chat templates, by variable name


def is_installed() -> bool:
    """Tell whether transformers is installed, without importing it."""
    return importlib.util.find_spec("transformers") is not None


def load_as_transformers(folder: Path, why: str) -> Loaded:
    """Load a folder with transformers; raise TokenizerError naming the folder and the cause. Takes seconds.

    `why` says why the folder needs it, for the error if transformers is not installed.
    """
    if not is_installed():
        raise TokenizerError(
            f"{folder} needs transformers, because {why}: pip install 'kvmesh[models]', or let the pods be asked "
            "(`tokens: render`)"
        )
    return _loaded(_answer(folder), folder)


def _answer(folder: Path) -> bytes:
    # -P: files in the working directory, which may be the folder, must not shadow libraries
    command = [sys.executable, "-P", "-m", PROGRAM, str(folder.absolute()), str(os.getpid())]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, **ENVIRONMENT},
            timeout=DEADLINE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _refused(folder, f"it takes longer than {DEADLINE_SECONDS:.0f} s") from None
    except OSError as error:
        raise _refused(folder, f"its process cannot be started: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise _refused(folder, said[-1] if said else f"its process ended with {done.returncode}")
    return done.stdout


def _loaded(answer: bytes, folder: Path) -> Loaded:
    first, _, backend = answer.partition(b"\n")
    try:
        return Loaded(tokenizers.Tokenizer.from_str(backend.decode()), json.loads(first)["special_tokens"])
    except Exception as error:  # the library raises plain Exception
        raise _refused(folder, f"its answer cannot be read: {error}") from error


def _refused(folder: Path, cause: str) -> TokenizerError:
    return TokenizerError(
        f"transformers cannot load {folder}: {cause}; copy the folder that the pods serve again, or let the pods be "
        "asked (`tokens: render`)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFolder:
    """The contents of a folder that matter for tokens."""

    path: Path
    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]  # for chat templates, by variable name
    templates: Mapping[str, str]  # sources by name
    no_template: str  # the error text for a chat without a template
    model: Mapping[str, Any]  # config.json
    has_given_template: bool  # a given chat template replaces the folder's
    has_harmony_chats: bool = False  # replace the templates, which then only decide `refuses_later_system`


def read_folder(folder: Path, *, chat_template: Path | None = None, as_written: bool = False) -> TokenizerFolder:
    """Read a model's folder; raise TokenizerError naming the unusable file or a missing requirement.

    `chat_template` is a Jinja file that replaces the folder's template. With `as_written`, tokenizer.json is used
    whatever the folder's class is, as by pods with transformers 4. Not for folders that mistral-common reads.
    """
    config, model = _read_json(folder / "tokenizer_config.json"), model_config(folder)
    try:
        sources = chat_templates(config, _template_files(folder))
        why = None if as_written else why_not_plain(config, model)
        if why is None and not _has_only_sentencepiece(folder):
            backend = _read_tokenizer(folder)
            special = special_tokens(config, _read_json(folder / "special_tokens_map.json"))
            _add_tokens(backend, config, special)
        else:
            _check_transformers_can(folder)
            if config.get("auto_map") and model.get("model_type") not in AS_WRITTEN_IN_VLLM:
                logger.warning(
                    "a folder has tokenizer code of its own, which is never run: "
                    "pods with --trust-remote-code may make other tokens",
                    extra={"tokenizer": str(folder)},
                )
            backend, special = load_as_transformers(folder, why or ONLY_SENTENCEPIECE)
            _without_limits(backend)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'} is not what transformers writes ({type(error).__name__}: {error}); "
            "copy it again from the model's folder"
        ) from error
    if chat_template is not None:
        sources = {"default": _read_template(chat_template)}
    no_template = f"{folder} has neither chat_template.jinja nor a chat_template in tokenizer_config.json"
    why_in_code, has_harmony_chats = _chats_in_code(model)
    if why_in_code is not None and not has_harmony_chats:
        sources, no_template = {}, why_in_code
        logger.warning("%s: the pods are asked for the tokens of chats", why_in_code, extra={"tokenizer": str(folder)})
    return TokenizerFolder(
        path=folder,
        backend=backend,
        special_tokens=special,
        templates=sources,
        no_template=no_template,
        model=model,
        has_given_template=chat_template is not None,
        has_harmony_chats=has_harmony_chats,
    )


def model_config(folder: Path) -> dict[str, Any]:
    """Return the folder's config.json, empty without one; raise TokenizerError naming an unusable one."""
    return _read_json(folder / "config.json")


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a folder has a tokenizer file."""
    return any((folder / name).is_file() for name in TRANSFORMERS_FILES) or has_mistral_file(folder)


def why_not_readable(folder: Path) -> str | None:
    """Return which library or file a folder lacks to be read, and the fix, or None if it can be read.

    Raise TokenizerError naming the unusable file.
    """
    if has_mistral_file(folder):
        return why_not_loaded(folder)
    why = why_not_plain(_read_json(folder / "tokenizer_config.json"), model_config(folder))
    if why is None and _has_only_sentencepiece(folder):
        why = ONLY_SENTENCEPIECE
    return None if why is None or is_installed() else f"{why}: pip install 'kvmesh[models]'"


def why_not_plain(config: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """Return why transformers may build a tokenizer that differs from tokenizer.json, or None if it does not.

    `config` is tokenizer_config.json, `model` is config.json.
    """
    name, model_type = config.get("tokenizer_class") or model.get("tokenizer_class"), model.get("model_type")
    if name is None and model_type is None:
        return None
    if name not in PLAIN_CLASSES:
        return f"its tokenizer_class is {name}" if name else f"it has no tokenizer_class, and is of type {model_type}"
    if model_type in MODEL_TYPES_WITH_OWN_CLASS or "model_name" in model:
        return f"its model type is {model_type}"
    listed = {token["content"] for token in (config.get("added_tokens_decoder") or {}).values()}
    changing = [field for field in CHANGING_FIELDS if config.get(field)]
    changing += [field for field in LISTS_OF_TOKENS if not listed.issuperset(_contents(config.get(field)))]
    return f"its tokenizer_config.json has {changing[0]}" if changing else None


def _contents(tokens: Any) -> set[str]:
    """Return the texts of a list of special tokens; `special_tokens` handles the named tokens of an object."""
    listed = tokens if isinstance(tokens, list) else []
    return {token["content"] if isinstance(token, dict) else str(token) for token in listed}


def _check_transformers_can(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TRANSFORMERS_FILES):
        raise _no_tokenizer(folder)
    if not (folder / "config.json").is_file():
        raise TokenizerError(
            f"{folder / 'config.json'} does not exist, and which tokenizer the pods build depends on it: copy it from "
            "the model's folder"
        )


def _has_only_sentencepiece(folder: Path) -> bool:
    return (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file()


def _chats_in_code(model: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return why the folder's templates are ignored (None if not), and whether the harmony library renders."""
    if own := only_vllm_renders(model):
        return f"only vLLM's own code renders chats for {own}", False
    if model.get("model_type") != HARMONY_MODEL_TYPE:
        return None, False
    if harmony_chats.is_installed():
        return "vLLM renders chats of gpt-oss in the harmony format", True
    return "chats of gpt-oss need the harmony library (pip install 'kvmesh[harmony]')", False


def _read_template(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")  # policies may name any path, and reading a device never ends
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_TEMPLATE_CHARACTERS + 1)
        if len(text) > MOST_TEMPLATE_CHARACTERS:
            raise ValueError(f"it is longer than {MOST_TEMPLATE_CHARACTERS} characters")
        return text
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"the chat template {path} cannot be read: {error}; give the file that the pods have as --chat-template"
        ) from error


def _read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Load tokenizer.json without its truncation and padding: vLLM sets both per request."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise _no_tokenizer(folder)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path} cannot be read: {error}; copy it again from the model's folder") from error
    _without_limits(tokenizer)
    return tokenizer


def _no_tokenizer(folder: Path) -> TokenizerError:
    return TokenizerError(
        f"{folder / 'tokenizer.json'} does not exist, nor tokenizer.model: point --tokenizer at the folder of the "
        "model that vLLM serves"
    )


def _without_limits(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.no_truncation()
    tokenizer.no_padding()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}; copy it again from the model's folder") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold a JSON object; copy it again from the model's folder")
    return content


def _template_files(folder: Path) -> dict[str, str]:
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    files |= {"default": folder / "chat_template.jinja"} if (folder / "chat_template.jinja").is_file() else {}
    try:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"a chat template in {folder} cannot be read: {error}") from error


def _add_tokens(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Add the tokens that only tokenizer_config.json has, as transformers does when it loads the folder."""
    tokens = list(added_tokens(config))
    known = {token.content for token in (*tokens, *tokenizer.get_added_tokens_decoder().values())}
    missing = dict.fromkeys(text for text in named.values() if text not in known)
    tokenizer.add_tokens([*tokens, *(tokenizers.AddedToken(text, special=True) for text in missing)])


def special_tokens(config: Mapping[str, Any], legacy: Mapping[str, Any]) -> dict[str, str]:
    """Return a chat template's token variables by name (`bos_token`, …).

    `config` is tokenizer_config.json, `legacy` special_tokens_map.json. `legacy` is used only if the configuration does
    not list the added tokens.
    """
    source = dict(config) if "added_tokens_decoder" in config else {**config, **legacy}
    extra = source.get("extra_special_tokens")
    own = extra if isinstance(extra, dict) else {}
    found: dict[str, str] = {}
    for name, value in (source | own).items():
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and (name.endswith("_token") or name in own):
            found[name] = text
    return {name: found[name] for name in NAMED_TOKENS if name in found} | found


def added_tokens(config: Mapping[str, Any]) -> Iterator[tokenizers.AddedToken]:
    """Yield the tokens that the configuration adds to tokenizer.json's, in the order of their ids."""
    listed = config.get("added_tokens_decoder") or {}
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        flags = {name: bool(token[name]) for name in TOKEN_FLAGS if name in token}
        yield tokenizers.AddedToken(token["content"], **flags)


def chat_templates(config: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, str]:
    """Return template sources by name; any `files` (*.jinja; "default" is chat_template.jinja) replace all others."""
    if files:
        return dict(files)
    template = config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return dict(template) if isinstance(template, dict) else {}
