"""Read a model's folder as the model's pods do: the tokenizer, its special tokens and its chat templates.

vLLM's pods load folders with transformers 5. Of most classes it builds the tokenizer anew, which may differ from
tokenizer.json; only a plain folder is read here, any other by transformers itself (`prompts.transformers_process`).
No code of a folder is ever run.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from extproc.errors import TokenizerError
from extproc.prompts import harmony_chats
from extproc.prompts.chats_in_code import HARMONY_MODEL_TYPE, only_vllm_renders
from extproc.prompts.mistral_tokenizer import has_mistral_file, why_not_loaded
from extproc.prompts.transformers_process import is_installed, load_as_transformers
from extproc.prompts.transformers_program import AS_WRITTEN_IN_VLLM

logger = logging.getLogger(__name__)

MOST_TEMPLATE_CHARACTERS = 1 << 20  # far above any real one
# The token names that every tokenizer class has; templates see those that are set as variables.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
PLAIN_CLASSES = frozenset(("PreTrainedTokenizerFast", "TokenizersBackend"))
# transformers 5.19 takes a class of its own for these model types, whatever class the folder names
MODEL_TYPES_WITH_OWN_CLASS = frozenset(
    ("hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp")
)
# in tokenizer_config.json: where they are set, they change the tokenizer of a plain class, too
CHANGING_FIELDS = ("split_special_tokens", "fix_mistral_regex", "auto_map")
TRANSFORMERS_FILES = ("tokenizer.json", "tokenizer.model")
ONLY_SENTENCEPIECE = "it has tokenizer.model and no tokenizer.json"
LISTS_OF_TOKENS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFolder:
    """What a folder says."""

    path: Path
    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]  # what a chat template sees, by variable name
    templates: Mapping[str, str]  # sources by name
    no_template: str  # what to say to a chat when there is no template for it
    model: Mapping[str, Any]  # config.json
    has_given_template: bool  # in place of its own
    has_harmony_chats: bool = False  # in place of the templates, which then only say where system messages may stand


def read_folder(folder: Path, *, chat_template: Path | None = None, as_written: bool = False) -> TokenizerFolder:
    """Read a model's folder; raise TokenizerError naming the file that is unusable, or what the folder needs.

    `chat_template` is a Jinja file in place of the folder's own. With `as_written`, tokenizer.json counts whatever the
    folder's class is: so read pods with transformers 4. Folders that mistral-common reads are not for here.
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
    """Return the folder's config.json, nothing where it has none; raise TokenizerError naming an unusable one."""
    return _read_json(folder / "config.json")


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a folder has a file that a tokenizer can be made of."""
    return any((folder / name).is_file() for name in TRANSFORMERS_FILES) or has_mistral_file(folder)


def why_not_readable(folder: Path) -> str | None:
    """Return why a folder cannot be read with what is installed and in it, and what to do; None where it can.

    Raise TokenizerError naming the file that is unusable.
    """
    if has_mistral_file(folder):
        return why_not_loaded(folder)
    why = why_not_plain(_read_json(folder / "tokenizer_config.json"), model_config(folder))
    if why is None and _has_only_sentencepiece(folder):
        why = ONLY_SENTENCEPIECE
    return None if why is None or is_installed() else f"{why}: pip install 'kvmesh[models]'"


def why_not_plain(config: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """Return why transformers may make something else of a folder than its tokenizer.json says, None if it does not.

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
    """Return the texts of a list of special tokens; those of an object have names, which `special_tokens` knows."""
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
    """Return why no template of the folder counts, None where one does, and whether the harmony library renders."""
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
            raise ValueError("it is no file")  # policies may name any path, and a device is read for ever
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
    """Load tokenizer.json. Its own truncation and padding do not count: vLLM sets both per request."""
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
    """Return a JSON object from a file, or nothing when there is no such file."""
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
    """Add what tokenizer_config.json knows beyond tokenizer.json, as transformers does when it loads the folder."""
    tokens = list(added_tokens(config))
    known = {token.content for token in (*tokens, *tokenizer.get_added_tokens_decoder().values())}
    missing = dict.fromkeys(text for text in named.values() if text not in known)
    tokenizer.add_tokens([*tokens, *(tokenizers.AddedToken(text, special=True) for text in missing)])


def special_tokens(config: Mapping[str, Any], legacy: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that a chat template sees, by variable name (`bos_token`, …).

    `config` is tokenizer_config.json, `legacy` special_tokens_map.json, which counts only for folders that do not list
    their added tokens in the configuration.
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
    """Return template sources by name; `files` (from *.jinja, "default" being chat_template.jinja) win altogether."""
    if files:
        return dict(files)
    template = config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return dict(template) if isinstance(template, dict) else {}
