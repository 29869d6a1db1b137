"""The folders that other libraries than transformers read, or whose chats another one renders: Mistral's, gpt-oss's."""

import json
import shutil
from pathlib import Path

from tests.vllm.gpt_oss_folder import make_folder
from tests.vllm.mistral_folders import MISTRAL_FOLDERS, make_folders

TINY_MODEL = Path(__file__).parents[2] / "podsim" / "tiny_model"
GPT_OSS = ("gpt_oss", "gpt_oss_of_another_vocabulary")  # the library, not the folder, says what chats are
LIBRARIES = dict.fromkeys(MISTRAL_FOLDERS, "mistral-common") | dict.fromkeys(GPT_OSS, "oss-harmony")


def library_folders(parent: Path) -> dict[str, Path]:
    """Write all folders and return them by name; raise FolderUnavailableError where gpt-oss's vocabulary is not had."""
    made = make_folders(parent)
    made[GPT_OSS[0]] = make_folder(parent / GPT_OSS[0])
    made[GPT_OSS[1]] = other = parent / GPT_OSS[1]
    shutil.copytree(TINY_MODEL, other)
    (other / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}))
    return made
